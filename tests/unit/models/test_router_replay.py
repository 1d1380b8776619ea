"""Routing replay: against a model whose routers are forced by hand, in every layout, and from what vLLM returns."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay
from router_replay_worker import EXPERTS, FULL, MODEL, MOE, TOPK, halves, made_up, move_routers, prepare, routers
from slow import slow_except

import pretrain_grpo
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.models import forward
from megatron_grpo.models.router import Router
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel import initialize
from megatron_grpo.rewards.pool import GroupMember
from megatron_grpo.rollout.collect import collect_rollout, to_batch
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.vllm import colocate as vllm_colocate
from megatron_grpo.utils.errors import GrpoError

PADDED = ["--micro-batch-size", "2", "--moe-token-dispatcher-type", "allgather"]  # it wants packs of one length


def start(mode: str, *flags: str):
    """(arguments, trainer) of the toy model."""
    args = made_up.parse([*MODEL, *PADDED, "--router-replay-mode", mode, *flags], 1)
    if not parallel_state.is_initialized():
        initialize.initialize_distributed(args)
    return args, made_up.trainer(args)


def probabilities(router, hidden, known: np.ndarray) -> torch.Tensor:
    """[tokens, experts] by hand: a softmax over the logits of the known experts, or of the top k where they are -1."""
    logits = hidden[:, 0] @ router.weight.T
    known = torch.from_numpy(known).long()
    chosen = torch.where(known < 0, logits.topk(TOPK).indices, known)
    return torch.zeros_like(logits).scatter(1, chosen, logits.gather(1, chosen).softmax(-1))


def known_of(args, batch, completions, layer: int) -> list[np.ndarray]:
    """What each micro-batch of an update knows of a layer's experts, [tokens, topk]: -1 on padding."""
    packs = forward.micro_batches(args, replace(batch, routed_experts=None), completions)
    assert any(pack.padding.any() for pack in packs)
    rows = np.concatenate([batch.routed_experts[:, layer], np.full((1, TOPK), -1, np.int16)])
    return [rows[pack.source] for pack in packs]


@pytest.mark.slow
def test_what_is_recorded_is_what_was_chosen(one_rank):
    args, trainer = start("R2")
    seen = {number: [] for number, _ in routers(trainer)}
    for number, router in routers(trainer):
        router.register_forward_hook(lambda module, inputs, output, seen=seen[number]: seen.append(output[1]))
    batch = prepare(args, trainer)
    assert list(seen) == [1, 3, 4] and batch.routed_experts.shape == (len(batch.tokens), 3, TOPK)
    packs = forward.micro_batches(args, batch, np.arange(batch.num_completions))
    for layer, maps in enumerate(seen.values()):
        for pack, chosen in zip(packs, maps[: len(packs)], strict=True):  # a second pass follows, of a share
            want = [row.nonzero()[:, 0].tolist() for row in chosen[torch.from_numpy(~pack.padding)]]
            got = batch.routed_experts[pack.source[~pack.padding], layer]
            assert np.sort(got, 1).tolist() == want
    assert len(np.unique(batch.routed_experts)) == EXPERTS


RECOMPUTE = {"kept": "", "recomputed MoE": MOE, "recomputed": FULL}
REPLAYS = [(recompute, mode) for recompute in RECOMPUTE for mode in ("R2", "R3")]


@pytest.mark.parametrize(("recompute", "mode"), slow_except([("recomputed", "R3")], REPLAYS))
def test_an_update_is_that_of_forced_routers(one_rank, mode, recompute):
    args, trainer = start(mode, *RECOMPUTE[recompute].split())
    batch = prepare(args, trainer)
    assert (batch.routed_experts < 0).any() == (mode == "R3")
    moved = [router.weight.detach().clone() for _, router in routers(trainer)]
    row = pretrain_grpo.update(args, trainer, batch, halves(batch)[0])
    for (_, router), before in zip(routers(trainer), moved, strict=True):
        assert not torch.equal(router.weight, before)
        replay = router.router_replay
        assert not replay.replay_backward_list and replay.target_topk_idx is replay.router_replay_action is None
    assert not RouterReplay.global_router_replay_instances

    free_args, free = start("disabled")
    move_routers(free)
    own = replace(batch, routed_experts=None)
    freely = pretrain_grpo.update(free_args, free, own, halves(batch)[0])
    assert freely["grad_norm"] != pytest.approx(row["grad_norm"], rel=1e-3)

    forced_args, forced = start("disabled")
    move_routers(forced)
    different = []

    def force(module, inputs, output, micro_batches):
        probs = probabilities(module, inputs[0], next(micro_batches))
        different.append(((probs > 0) != output[1]).any(1).float().mean())
        return probs, probs > 0

    for layer, (_, router) in enumerate(routers(forced)):
        known = iter(known_of(args, batch, halves(batch)[0], layer))
        router.register_forward_hook(partial(force, micro_batches=known))
    want = pretrain_grpo.update(forced_args, forced, own, halves(batch)[0])
    assert np.mean(different) > 0.2
    for key in ("loss", "grad_norm", "kl", "entropy", "ratio/max"):
        assert row[key] == pytest.approx(want[key], rel=1e-5), key


def log_probs(args, trainer, batch) -> np.ndarray:
    return forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, batch)


@pytest.mark.slow
def test_a_pass_without_recorded_experts_routes_by_itself(one_rank):
    """As the reference does."""
    args, trainer = start("R3")
    batch = prepare(args, trainer)
    own = replace(batch, routed_experts=None)
    values = log_probs(args, trainer, own)
    free_args, free = start("disabled")
    move_routers(free)
    np.testing.assert_allclose(values, log_probs(free_args, free, own), rtol=1e-6)
    replayed = log_probs(args, trainer, batch)
    assert np.nanmax(np.abs(replayed - values)) > 1e-3


@pytest.mark.slow
def test_multi_token_prediction_routes_by_itself(one_rank, monkeypatch):
    monkeypatch.setattr(made_up, "fill", lambda model, args: None)  # the family's files have none
    args, trainer = start("R2", "--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.1")
    batch = prepare(args, trainer)
    assert batch.routed_experts.shape[1] == 3
    own = []

    def watch(module, inputs, output):
        unknown = np.full((len(output[1]), TOPK), -1)
        own.append(torch.equal(output[1], probabilities(module, inputs[0], unknown) > 0))

    (router,) = (part for part in trainer.model[0].module.mtp.modules() if isinstance(part, Router))
    router.register_forward_hook(watch)
    monkeypatch.setattr(trainer.flops, "of_update", lambda *of_update: {})  # by the family's table, too
    pretrain_grpo.update(args, trainer, batch, halves(batch)[0])
    assert own and all(own)


# ---- from vLLM


class VllmDouble:
    """vLLM's engine as its ``step`` looks from outside: every request ends with the tokens 1 2 3, and its experts are
    (token, token + layer + 1) modulo their number, for all layers, dense ones too, and all tokens but the last.
    """

    def __init__(self, layers: int, told: bool, missing: int):
        self.layers, self.told, self.missing, self.waiting = layers, told, missing, []
        self.llm_engine = self
        self.vllm_config = SimpleNamespace(
            use_v2_model_runner=True,
            compilation_config=SimpleNamespace(static_forward_context={}),
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            model_config=SimpleNamespace(enforce_eager=True),
        )

    def add_request(self, request_id, prompt, params, lora_request):
        self.waiting.append((request_id, prompt["prompt_token_ids"]))

    def reset_prefix_cache(self):
        return True

    def step(self):
        from vllm.outputs import CompletionOutput, RequestOutput

        name, prompt = self.waiting.pop()
        routed = np.array([*prompt, 1, 2])[:, None, None] + np.zeros((1, self.layers, TOPK), np.int64)
        routed[:, :, 1] += np.arange(self.layers) + 1
        experts = (routed % EXPERTS if self.told else 0 * routed).astype(np.uint8)[self.missing :]
        sample = CompletionOutput(0, "", [1, 2, 3], None, None, routed_experts=experts, finish_reason="length")
        return [RequestOutput(name, None, prompt, None, [sample], finished=True)]


@pytest.fixture
def vllm_double(one_rank, monkeypatch):
    """``vllm_double(told, missing)``: the engine class around the double; ``told`` says whether it knows its experts,
    ``missing`` of how many tokens it returns none.
    """
    args, _ = start("R3")

    def engine(told: bool = True, missing: int = 0):
        monkeypatch.setattr(vllm_colocate, "_build", lambda args, directory: VllmDouble(args.num_layers, told, missing))
        monkeypatch.setattr(vllm_colocate.scheduler, "collect_log_probs", lambda engine: None)  # it has no scheduler
        return vllm_colocate.VllmColocate(args, {})

    return engine


def collect(engine, routed_experts=True):
    prompts = [Prompt(id=i, ids=ids, row={}, source="made up") for i, ids in enumerate([[4, 5], [6, 7, 8]])]
    plan = RolloutPlan(prompts, 1, Sampling(max_tokens=3, routed_experts=routed_experts), 0)
    return collect_rollout(engine, plan, None, None, Timers())[0]


@pytest.mark.vllm
def test_the_engines_experts_reach_the_batch(vllm_double):
    batch = collect(vllm_double())
    assert batch.tokens.tolist() == [4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3]
    last = batch.cu_seqlens[1:] - 1
    assert (batch.routed_experts[last] == -1).all()
    routed = np.setdiff1d(np.arange(len(batch.tokens)), last)
    layers = (0, 2, 3)  # layer 1 is dense
    want = [[[t % EXPERTS, (t + n + 1) % EXPERTS] for n in layers] for t in batch.tokens[routed].tolist()]
    assert batch.routed_experts[routed].tolist() == want


@pytest.mark.vllm
def test_an_engine_that_does_not_tell(vllm_double, monkeypatch):
    with pytest.raises(GrpoError, match="does not report its choice of experts with the kernels"):
        collect(vllm_double(told=False))


@pytest.mark.vllm
def test_an_engine_that_returns_the_experts_of_too_few_tokens(vllm_double):
    with pytest.raises(GrpoError, match=rf"returned experts of the shape \[4, 4, {TOPK}\] for 5 routed tokens"):
        collect(vllm_double(missing=1))


@pytest.mark.vllm
def test_an_evaluation_reads_no_experts(vllm_double):
    assert collect(vllm_double(missing=1), routed_experts=False).routed_experts is None


def test_a_layer_that_does_not_tell_beside_one_that_does():
    """With one expert of each token a zero can be a choice; of all completions' it is none."""
    prompts = [Prompt(id=0, ids=[4, 5], row={}, source="made up")]
    members = {number: GroupMember(0, number, 2) for number in range(2)}

    def batch(*experts):
        made = [np.array(of_one, np.int16)[..., None] for of_one in experts]
        completions = [Completion(n, [1, 2], None, "length", [0, 0], of_one) for n, of_one in enumerate(made)]
        return to_batch(prompts, completions, members, [0], num_kept=0)

    assert batch([[0, 3], [0, 0], [0, 1]], [[2, 0], [0, 0], [-1, -1]]).routed_experts.shape == (8, 2, 1)
    with pytest.raises(GrpoError, match="does not report its choice of experts with the kernels"):
        batch([[0, 3], [0, 0], [0, 1]], [[0, 0], [0, 2], [-1, -1]])


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM on a CPU")
def test_vllm_on_a_cpu_is_refused():
    args = SimpleNamespace(kv_channels=32, router_replay_mode="R3", exact_log_probs=False, max_prompt_length=8)
    with pytest.raises(GrpoError, match=r"--router-replay-mode R3: vLLM on a CPU .* give R2, or use a GPU"):
        vllm_colocate._build(args, "")
