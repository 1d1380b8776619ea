"""--check-weight-sync without an engine: what is refused, what is said, and servers asked before and after."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.models import forward
from megatron_grpo.rollout.servers.engine import ServerEngine
from megatron_grpo.rollout.servers.server import Server, Status
from megatron_grpo.rollout.weight_sync import weight_check
from megatron_grpo.utils.errors import GrpoError

WEIGHTS = {"a.weight": torch.arange(4.0), "b.weight": torch.ones(2)}


class MemoryServer(Server):
    """Keeps weights in a dictionary, and tells their sums."""

    key_flag = "none"

    def __init__(self, url: str, tells: bool = True):
        self.url, self.tells, self.held = url, tells, {}

    async def check(self):
        pass

    async def status(self, timeout):
        return Status("1", None)

    async def generate(self, requests, seed):
        raise AssertionError

    async def load_weights(self, directory, timeout):
        raise AssertionError

    async def finish_update(self, version):
        pass

    async def checksums(self):
        return {f"tp0:{name}": str(tensor.sum()) for name, tensor in self.held.items()} if self.tells else None


class Transfer:
    """Brings weights to the servers, of which one loses ``lost`` on the first way."""

    def __init__(self, lost: str | None = None):
        self.lost, self.sent = lost, 0

    def send(self, weights, version, servers):
        tensors = dict(weights)
        self.sent += 1

        async def give(server):
            server.held |= tensors

        servers.update_servers(version, give)
        if self.sent == 1 and self.lost:
            servers.servers[1].held[self.lost] = torch.zeros(4)


def server_engine(transfer, tells=True):
    engine = ServerEngine([MemoryServer("http://a:1"), MemoryServer("http://b:2", tells)], transfer, 5.0, 4)
    engine.update_weights(iter(WEIGHTS.items()), 7)
    return engine


def test_servers_with_what_was_sent_pass(one_process):
    transfer = Transfer()
    weight_check.compare_tensors(server_engine(transfer), iter(WEIGHTS.items()), 7)
    assert transfer.sent == 2


def test_a_tensor_that_a_server_lost_is_named(one_process):
    engine = server_engine(Transfer(lost="a.weight"))
    with pytest.raises(GrpoError, match=r"weights of update 7: on rank 0 tp0:a.weight of http://b:2: it changes") as e:
        weight_check.compare_tensors(engine, iter(WEIGHTS.items()), 7)
    assert "b.weight" not in str(e.value)


def test_servers_that_do_not_tell_are_not_sent_twice(one_process):
    transfer = Transfer()
    weight_check.compare_tensors(server_engine(transfer, tells=False), iter(WEIGHTS.items()), 7)
    assert transfer.sent == 1


@pytest.mark.parametrize("differing, wanted", [(1, "one: 2 of"), (5, "and 2 more tensors")])
def test_what_an_engine_says_is_passed_on(one_process, differing, wanted):
    lines = [f"{name}: 2 of its elements differ" for name in ("one", "two", "three", "four", "five")[:differing]]
    with pytest.raises(GrpoError, match=wanted):
        weight_check.compare_tensors(SimpleNamespace(compare_weights=lambda weights: lines), iter(()), 3)


def test_the_probe_is_sampled_without_what_its_rows_set(monkeypatch):
    monkeypatch.setattr(weight_check.parallel_state, "get_data_parallel_world_size", lambda: 1)
    args = SimpleNamespace(
        pipeline_model_parallel_size=1, max_completion_length=99, temperature=0.7, router_replay_mode="R3"
    )
    prompt = Prompt(3, [5], {}, "made up", {"structured_outputs": "{}", "max_tokens": 1})
    plan = weight_check.probe_plan(args, [prompt], 2)
    prompts, sampling = plan.prompts, plan.sampling
    assert len(prompts) == 2 * weight_check.PROMPTS_PER_REPLICA
    assert all(p.sampling(sampling) is sampling and p.id == 3 for p in prompts)
    assert sampling.log_probs and sampling.routed_experts


def probe_batch():
    """Four completions of two tokens by two replicas, each token with log-probability -1."""
    return RolloutBatch.from_completions(
        [[5]] * 4, [[6, 7]] * 4, [[-1.0, -1.0]] * 4, 0, range(4), range(4), range(4), [FinishReason.LENGTH] * 4
    )


@pytest.mark.parametrize("bf16, off, passes", [(False, 5e-4, True), (False, 2e-3, False), (True, 0.1, True)])
def test_the_replica_that_says_other_things_is_told(bf16, off, passes, monkeypatch):
    """Replica 1 made completions 1 and 3; its tokens lie 4, 5 and 10, 11 behind one of prompt each."""

    def log_probs(args, model, forward_step, batch):
        assert args.micro_batch_size == 1 and not args.share_prompts
        assert not args.share_prompts  # no rank has the probe's `prefix_hashes`
        values = np.full(12, np.nan, np.float32)
        values[batch.response_mask == 1] = -1
        values[[4, 5, 10, 11]] -= off
        return values

    args = SimpleNamespace(
        bf16=bf16,
        fp16=False,
        vllm_dtype=None,
        vllm_quantization=None,
        fp8_format=None,
        mismatch_limit=None,
        micro_batch_size=512,
        max_tokens_per_microbatch=64,
        share_prompts=True,
    )
    monkeypatch.setattr(forward, "log_probs", log_probs)
    if passes:
        weight_check.compare_log_probs(args, [], None, probe_batch(), 2)
        return
    with pytest.raises(GrpoError, match=r"engine replica 1 has other log-probabilities than the trainer: 0\.002 nats"):
        weight_check.compare_log_probs(args, [], None, probe_batch(), 2)
    assert args.micro_batch_size == 512


def test_nan_is_no_match(monkeypatch):
    args = SimpleNamespace(
        bf16=True,
        fp16=False,
        vllm_dtype=None,
        vllm_quantization=None,
        fp8_format=None,
        mismatch_limit=None,
        micro_batch_size=1,
        max_tokens_per_microbatch=None,
    )
    monkeypatch.setattr(forward, "log_probs", lambda *_: np.full(12, np.nan, np.float32))
    with pytest.raises(GrpoError, match="nan nats"):
        weight_check.compare_log_probs(args, [], None, probe_batch(), 1)
