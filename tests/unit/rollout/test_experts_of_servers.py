"""--router-replay-mode R3 with servers: the experts are transformers', and what else a server says is refused."""

from dataclasses import replace

import numpy as np
import pytest
from server_double import EOS, EXPERTS, TOKENS_IN, TOPK, called, routed_experts, tiny_mixture
from test_server_stream import finish as finish_streams
from test_server_stream import stalled
from test_servers import REQUESTS as ALL
from test_servers import arguments, finish, make_pool, quick, start, synced_pool  # noqa: F401

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Completion, Request, request_seed
from megatron_grpo.rollout.servers.stream import ServerStream
from megatron_grpo.rollout.vllm.server import VllmServer
from megatron_grpo.rollout.weight_sync.transfer import CheckpointTransfer
from megatron_grpo.utils.errors import EngineLost, GrpoError

PLAIN = ALL[:6]  # as of an evaluation
REQUESTS = [replace(r, sampling=replace(r.sampling, routed_experts=True)) for r in PLAIN]
R3 = {"router_replay_mode": "R3", "num_experts": EXPERTS, "moe_router_topk": TOPK, "moe_layer_freq": [0, 1]}
VLLM = {"device": "cuda", "routed_experts": True}
SERVERS = {
    "vLLM 0.32": ("vllm", VLLM),
    "vLLM 0.26": ("vllm", VLLM | {"old": True}),
    "SGLang": ("sglang", {"enable_return_routed_experts": True}),
}


@pytest.fixture
def weights():
    return dict(tiny_mixture(0).state_dict())


def expected(prompt, completion) -> np.ndarray:
    """Of the one layer that has experts, as `Completion.routed_experts`."""
    return routed_experts(tiny_mixture(0), [*prompt, *completion.token_ids])[:, 1:]


@pytest.mark.parametrize("server", SERVERS)
def test_experts_are_the_models_own(start, weights, tmp_path, server):
    """Of the prompt and of all sampled tokens but the last, of the weights that were sent."""
    kind, config = SERVERS[server]
    double = start(kind, make_model=lambda: tiny_mixture(99), **config)
    pool = synced_pool([double], weights, tmp_path, kind=kind, **R3)
    chosen = set()
    for completion, request in zip(finish(pool, REQUESTS), REQUESTS, strict=True):
        want = expected(request.prompt_ids, completion)
        assert want.shape == (len(request.prompt_ids) + len(completion.token_ids) - 1, 1, TOPK)
        assert completion.routed_experts.dtype == np.int16
        np.testing.assert_array_equal(completion.routed_experts, want)
        chosen |= set(want.ravel().tolist())
    assert chosen == set(range(EXPERTS))
    pool.close()


@pytest.mark.parametrize("server", SERVERS)
def test_requests_without_experts(start, weights, tmp_path, server):
    """vLLM's answers have them nevertheless; SGLang returns a group in one answer."""
    kind, config = SERVERS[server]
    double = start(kind, make_model=lambda: tiny_mixture(99), **config)
    pool = synced_pool([double], weights, tmp_path, kind=kind, **R3)
    assert all(completion.routed_experts is None for completion in finish(pool, PLAIN))
    assert not any("return_routed_experts" in body for path, body in double.calls if path == "/generate")
    assert called(double, "/generate|/v1/completions") == 2
    pool.close()


@pytest.mark.parametrize(
    ("kind", "config", "changes", "message"),
    [
        ("vllm", {"routed_experts": False}, {}, "start it with --enable-return-routed-experts"),
        ("vllm", {"routed_experts": False, "old": True}, {}, "start it with --enable-return-routed-experts"),
        ("vllm", {"drafts": "ngram"}, {}, r"it drafts \(ngram\), .*: start it without, or give R2"),
        ("vllm", {}, {"rollout_ranks": 1}, "its streams have no experts: start it .* with --enable-scale-out"),
        ("sglang", {}, {}, "start it with --enable-return-routed-experts"),
        (
            "sglang",
            {"enable_return_routed_experts": True, "speculative_algorithm": "EAGLE"},
            {},
            r"it drafts \(EAGLE\), .*: start it without, or give R2",
        ),
    ],
)
def test_a_server_that_returns_no_experts_is_refused_at_the_start(start, kind, config, changes, message):
    double = start(kind, make_model=tiny_mixture, **({**VLLM, **config} if kind == "vllm" else config))
    pool = make_pool([double], kind=kind, **R3, **changes)
    with pytest.raises(GrpoError, match=f"{double.url}: .*{message}"):
        pool.check()
    pool.close()


WRONG = {
    "a layer less": r"returned experts of the shape \[\d+(, 1, 2)?\] for \d+ routed tokens, 2 layers and 2 experts",
    "a token less": r"returned experts of the shape \[\d+(, 2, 2)?\] for \d+ routed tokens, 2 layers and 2 experts",
    "redundant experts": "the engine reports the expert 4, and the trainer's layers have 4",
    "kernels do not tell": "does not report its choice of experts with the kernels that it uses here: give R2",
}


@pytest.mark.parametrize("server", ["vLLM 0.32", "SGLang"])
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_experts_are_never_trained_on(start, weights, tmp_path, server, fault):
    kind, config = SERVERS[server]
    double = start(kind, make_model=lambda: tiny_mixture(99), **config)
    pool = synced_pool([double], weights, tmp_path, kind=kind, **R3)
    double.fault = fault
    with pytest.raises(EngineLost, match=f"no server is left to generate .*{WRONG[fault]}"):
        finish(pool, REQUESTS[:1])
    pool.close()


def test_a_server_without_experts_in_its_answer(start, weights, tmp_path):
    """As an engine that restarted without the flag, behind a gateway."""
    double = start(make_model=lambda: tiny_mixture(99), **VLLM)
    pool = synced_pool([double], weights, tmp_path, **R3)
    double.config["routed_experts"] = False
    with pytest.raises(EngineLost, match="its answer has no routed_experts: start it with --enable-return-routed-exp"):
        finish(pool, REQUESTS[:1])
    pool.close()


def test_experts_of_older_weights_are_not_replayed():
    """A run that is resumed at new weights: those of the prompt and of the tokens that it had are unknown."""
    experts = np.arange(12, dtype=np.int16).reshape(6, 1, TOPK)  # of two tokens of the prompt, and of five but the last
    for version, known in ((4, 6), (5, 2)):
        begun = Completion(0, [7, 8, 9], [-1.0] * 3, "abort", [4] * 3)
        whole = Completion(0, [5, 6], [-1.0] * 2, "length", [version] * 2, experts).after(begun)
        np.testing.assert_array_equal(whole.routed_experts[6 - known :], experts[6 - known :])
        assert (whole.routed_experts[: 6 - known] == -1).all()


# ---- streams


LONGEST = 8
SAMPLING = Sampling(LONGEST, temperature=1.0, stop_token_ids=(EOS,), log_probs=True, routed_experts=True)


@pytest.mark.parametrize("old", [False, True])
def test_streams_end_with_the_experts_of_all_tokens(start, weights, tmp_path, old):
    """Also of those that a server sampled which has died since: the other computes them again."""
    config = VLLM | ({"old": True} if old else {"scale_out": True})
    doubles = [start(make_model=lambda: tiny_mixture(99), **config) for _ in range(2)]
    servers = [VllmServer(double.url, arguments(rollout_ranks=1, **R3)) for double in doubles]
    engine = ServerStream(servers, CheckpointTransfer(str(tmp_path), keep=True), 10.0, 8)
    engine.update_weights(iter(weights.items()), 1)
    requests = [Request(i, ALL[i].prompt_ids, SAMPLING, seed=request_seed(5, i)) for i in range(6)]
    found = stalled(engine, doubles, 2, requests)
    doubles[0].stop()
    doubles[1].stall = None
    found += finish_streams(engine, 6 - len(found))
    engine.close()
    for completion in found:
        want = expected(requests[completion.id].prompt_ids, completion)
        np.testing.assert_array_equal(completion.routed_experts, want)
        assert len(completion.log_probs) == len(completion.token_ids)
    begun = [body for path, body in doubles[1].calls if path == TOKENS_IN and len(body["token_ids"]) > 3]
    assert len(begun) > 0  # with the tokens of the one that has died
    assert all(called(double, "/v1/completions") == 0 for double in doubles)
