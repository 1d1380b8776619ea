"""Servers as the engine of a rank of --rollout-ranks: what has arrived of a completion is never lost."""

import asyncio
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from server_double import EOS, TOKENS_IN, Double, called, sample, tiny_model
from slow import slow_except
from test_servers import PROMPTS, arguments

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Completion, Request, request_seed
from megatron_grpo.rollout.servers import pool as pools
from megatron_grpo.rollout.servers.server import Streamed
from megatron_grpo.rollout.servers.stream import ServerStream
from megatron_grpo.rollout.vllm.server import VllmServer
from megatron_grpo.rollout.weight_sync.nccl import world_size
from megatron_grpo.rollout.weight_sync.transfer import CheckpointTransfer
from megatron_grpo.rollout.working_set import WorkingSet
from megatron_grpo.utils.errors import EngineLost, GrpoError
from megatron_grpo.utils.http_client import Fault

LONGEST = 8
SAMPLING = Sampling(LONGEST, temperature=1.0, stop_token_ids=(EOS,), log_probs=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pools, "WATCH_INTERVAL", 0.1)
    monkeypatch.setattr(pools, "JOIN_INTERVAL", 0.1)
    monkeypatch.setattr(pools, "_pause", lambda retry: 0.05 * 2**retry)


@pytest.fixture
def doubles():
    made = [Double(), Double()]
    yield made
    for double in made:
        if double.fault != "die":
            double.stop()


@pytest.fixture
def engine(doubles, tmp_path):
    servers = [VllmServer(double.url, arguments()) for double in doubles]
    made = ServerStream(servers, CheckpointTransfer(str(tmp_path), keep=True), 10.0, 8)
    assert not made.has_weights
    made.update_weights(iter(tiny_model(1).state_dict().items()), 1)
    yield made
    made.close()


def requests(count=6):
    return [Request(number, PROMPTS[number % 2], SAMPLING, seed=request_seed(5, number)) for number in range(count)]


def finish(engine, count):
    found, deadline = [], time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += engine.poll()
    return sorted(found, key=lambda completion: completion.id)


def expected(request, seed=1, begun=()):
    """What a model with the weights of ``seed`` samples for a request, alone."""
    body = {"max_tokens": LONGEST - len(begun), "temperature": 1.0}
    request_seed_now = request_seed(request.seed, request.id, len(begun)) if begun else request.seed
    return sample(tiny_model(seed), [*request.prompt_ids, *begun], body, request_seed_now, [EOS])


@torch.no_grad()
def log_probs_of(request, ids, seed):
    """The log-probabilities of given tokens under the weights of ``seed``."""
    logits = tiny_model(seed)(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, len(request.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def check_versions(completion):
    """Check that each token has the log-probability of the weights that its version names."""
    request, ids, versions = requests()[completion.id], completion.token_ids, list(completion.weight_versions)
    log_probs = [log_probs_of(request, ids, version)[i] for i, version in enumerate(versions)]
    assert torch.allclose(torch.tensor(completion.log_probs), torch.stack(log_probs), atol=1e-5)


def test_streamed_completions_are_the_models_own(engine, doubles):
    engine.submit(requests())
    for completion, request in zip(finish(engine, 6), requests(), strict=True):
        ids, log_probs, reason = expected(request)
        assert (completion.token_ids, completion.finish_reason) == (ids, reason)
        assert completion.log_probs == log_probs and set(completion.weight_versions) == {1}
    asked = [body for double in doubles for path, body in double.calls if path == "/v1/completions"]
    assert len({body["cache_salt"] for body in asked}) == 1 and len(asked) == 6


def test_drafts_are_counted_at_every_probe(engine, doubles):
    assert engine.drafts is None
    for number, double in enumerate(doubles):
        double.drafts = [100 * number, 0, 0]  # of earlier runs
    while any(server.drafts is None for server in engine._pool.servers):
        engine.poll()
    engine.submit(requests())
    tokens = sum(len(completion.token_ids) for completion in finish(engine, 6))
    deadline = time.monotonic() + 60
    while engine.drafts.tolist() != [tokens, 2 * tokens, tokens]:
        assert time.monotonic() < deadline
        engine.poll()


def stalled(engine, doubles, after, asked=None):
    """Submit six requests, and wait until the servers have sent ``after`` tokens of each; return the finished ones."""
    for double in doubles:
        double.stall = after
    engine.submit(asked or requests())
    deadline = time.monotonic() + 60
    finished = []
    while sum(len(c.token_ids) for c in engine.unfinished()) < after * (6 - len(finished)):
        assert time.monotonic() < deadline
        finished += engine.poll()
    return finished


def test_interrupted_completions_go_on_under_new_weights(engine, doubles):
    finished = stalled(engine, doubles, 2)
    begun = engine.interrupt()
    assert begun and not engine.poll() and not engine.unfinished()
    assert {(c.finish_reason, len(c.token_ids)) for c in begun} == {("abort", 2)}
    for double in doubles:
        double.stall = None
    engine.update_weights(iter(tiny_model(2).state_dict().items()), 2)
    engine.submit(
        Request(c.id, PROMPTS[c.id % 2], SAMPLING, c, seed=request_seed(5, c.id, len(c.token_ids))) for c in begun
    )
    whole = {c.id: c for c in finish(engine, len(begun))}
    assert whole.keys() | {c.id for c in finished} == set(range(6))
    for before in begun:
        completion, request = whole[before.id], requests()[before.id]
        assert completion.token_ids[:2] == before.token_ids == expected(request)[0][:2]
        assert list(completion.weight_versions) == [1, 1, *[2] * (len(completion.token_ids) - 2)]
        assert len(completion.log_probs) == len(completion.token_ids) <= LONGEST
        after = log_probs_of(request, completion.token_ids, 2)[2:]
        assert torch.allclose(torch.tensor(completion.log_probs[2:]), after, atol=1e-5)
    salts = {body["cache_salt"] for double in doubles for path, body in double.calls if path == "/v1/completions"}
    assert len(salts) == 2  # keys and values of version 1 are not reused under version 2


@pytest.fixture
def recording(doubles):
    """Servers of vLLM 0.32 with --enable-scale-out, which record the weights of each token."""
    for double in doubles:
        double.config["scale_out"] = True
    return doubles


@pytest.fixture
def keeping(doubles, tmp_path):
    """An engine of --weight-update keep."""
    servers = [VllmServer(double.url, arguments(weight_update="keep")) for double in doubles]
    made = ServerStream(servers, CheckpointTransfer(str(tmp_path), keep=True), 10.0, 8, keeps=True)
    made.update_weights(iter(tiny_model(1).state_dict().items()), 1)
    yield made
    made.close()


def test_kept_completions_go_on_under_new_weights(keeping, doubles):
    """Their requests wait at the servers meanwhile; the tokens before and after are of their own versions."""
    finished = stalled(keeping, doubles, 2)
    before = [len(double.calls) for double in doubles]
    keeping.update_weights(iter(tiny_model(2).state_dict().items()), 2)
    order = "/pause /collective_rpc /update_weight_version /resume".split()
    for double, begin in zip(doubles, before, strict=True):
        assert [path for path, _ in double.calls[begin:] if path in (*order, "/reset_prefix_cache")] == order
        double.stall = None
    whole = finished + finish(keeping, 6 - len(finished))
    kept = [completion for completion in whole if 2 in completion.weight_versions]
    assert sorted(completion.id for completion in whole) == list(range(6)) and len(kept) > 2
    for completion in kept:
        request, ids = requests()[completion.id], completion.token_ids
        assert list(completion.weight_versions) == [1, 1, *[2] * (len(ids) - 2)]
        by_version = [log_probs_of(request, ids, 1)[:2], log_probs_of(request, ids, 2)[2:]]
        assert torch.allclose(torch.tensor(completion.log_probs), torch.cat(by_version), atol=1e-5)
    assert sum(called(double, "/v1/completions") for double in doubles) == 6  # none has begun again


def test_tokens_on_their_way_at_a_pause_are_of_the_weights_that_sampled_them(recording, keeping):
    """They arrive after the load; the servers' record tells."""
    for double in recording:
        double.on_the_way = 2
    finished = stalled(keeping, recording, 2)
    keeping.update_weights(iter(tiny_model(2).state_dict().items()), 2)
    for double in recording:
        double.stall = None
    whole = finished + finish(keeping, 6 - len(finished))
    versions = [list(completion.weight_versions) for completion in whole if len(completion.token_ids) > 4]
    assert versions and all(of_one[:4] == [1] * 4 and set(of_one[4:]) == {2} for of_one in versions)
    for completion in whole:
        check_versions(completion)
    assert sum(called(double, TOKENS_IN) for double in recording) == 6


def test_tokens_of_weights_that_are_not_the_runs_are_dropped(recording, keeping, monkeypatch):
    """As of a server that has restarted, before a probe finds that."""
    until(keeping, lambda: not keeping._pool._probes)
    monkeypatch.setattr(pools, "WATCH_INTERVAL", 1000.0)
    for server in keeping._pool.servers:
        server.next_probe = time.monotonic() + 1000
    recording[0].restart()
    keeping.submit(requests())
    for completion in finish(keeping, 6):
        assert completion.token_ids == expected(requests()[completion.id])[0]
        check_first_version([completion])
    assert called(recording[0], TOKENS_IN)


def test_a_server_that_does_not_load_the_weights_stays_paused_until_it_joins(keeping, doubles, monkeypatch):
    """Its completions go on elsewhere."""
    finished = stalled(keeping, doubles, 2)

    async def fail(directory, timeout):
        raise Fault("no room")

    with monkeypatch.context() as failing:
        failing.setattr(keeping._pool.servers[0], "load_weights", fail)
        keeping.update_weights(iter(tiny_model(2).state_dict().items()), 2)
    assert [double.paused for double in doubles] == [True, False]
    doubles[1].stall = None
    assert len(finished + finish(keeping, 6 - len(finished))) == 6
    joined(keeping, doubles[0], 2)
    assert not doubles[0].paused


def test_nothing_counts_that_a_half_loaded_server_samples(keeping, doubles, monkeypatch):
    """Its streams end when the load has failed, and not when the other server has loaded."""
    finished = stalled(keeping, doubles, 2)
    servers = keeping._pool.servers
    load = servers[1].load_weights

    async def fail(directory, timeout):
        doubles[0].model, doubles[0].stall = tiny_model(77), None
        raise Fault("it has read half of the files")

    async def wait_and_load(directory, timeout):
        deadline = time.monotonic() + 60
        while not servers[0].exclusion_reason:
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
        await load(directory, timeout)

    monkeypatch.setattr(servers[0], "load_weights", fail)
    monkeypatch.setattr(servers[1], "load_weights", wait_and_load)
    keeping.update_weights(iter(tiny_model(2).state_dict().items()), 2)
    doubles[1].stall = None
    for completion in finished + finish(keeping, 6 - len(finished)):
        check_versions(completion)


def test_a_server_that_a_killed_run_has_paused(doubles, tmp_path):
    doubles[0].paused = True
    servers = [VllmServer(double.url, arguments()) for double in doubles]
    ServerStream(servers, CheckpointTransfer(str(tmp_path)), 10.0, 8).close()
    assert [called(double, "/resume") for double in doubles] == [1, 0] and not doubles[0].paused


def test_a_server_that_restarts_while_requests_wait(keeping, doubles):
    """The next update finds it: it has lost its weights, and its requests go on elsewhere."""
    finished = stalled(keeping, doubles, 2)
    doubles[0].fault = "die"  # its streams end
    time.sleep(0.1)
    doubles[0].fault = ""
    doubles[0].restart()
    keeping.update_weights(iter(tiny_model(2).state_dict().items()), 2)
    for double in doubles:
        double.stall = None
    found = finished + finish(keeping, 6 - len(finished))
    assert sorted(completion.id for completion in found) == list(range(6))
    for completion in found:
        check_versions(completion)


def test_a_turn_after_an_environments_end_token(engine, doubles):
    """Only a sampled token ends a completion."""
    begun = Completion(0, [7, EOS], [-1.0] * 2, "stop", [1] * 2).with_environment_tokens([5, EOS])
    engine.submit([Request(0, PROMPTS[0], SAMPLING, begun, seed=8)])
    (completion,) = finish(engine, 1)
    body = {"max_tokens": LONGEST - 2, "temperature": 1.0}
    ids, _, reason = sample(tiny_model(1), [*PROMPTS[0], *begun.token_ids], body, 8, [EOS])
    assert (completion.token_ids, completion.finish_reason) == ([*begun.token_ids, *ids], reason)
    assert completion.response_mask == [1, 1, 0, 0, *[1] * len(ids)]


def test_what_a_dead_server_has_sent_goes_on_elsewhere(engine, doubles):
    """The dead server comes back, and receives the next weights."""
    finished = stalled(engine, doubles, 3)
    cut = {c.id: c.token_ids for c in engine.unfinished()}
    doubles[0].fault = "die"
    doubles[1].stall = None
    whole = {c.id: c for c in [*finished, *finish(engine, 6 - len(finished))]}
    went_on = 0
    for number, request in enumerate(requests()):
        completion, before = whole[number], cut.get(number, [])
        assert completion.token_ids[: len(before)] == before
        assert set(completion.weight_versions) == {1}
        wanted = log_probs_of(request, completion.token_ids, 1)
        assert torch.allclose(torch.tensor(completion.log_probs), wanted, atol=1e-5)
        alone = expected(request)[0]
        went_on += completion.token_ids != alone
        if before and completion.token_ids != alone:  # a continued one has a seed of its own
            assert completion.token_ids == [*before, *expected(request, begun=before)[0]]
    assert went_on
    doubles[0].fault, doubles[0].stall = "", None
    doubles[0].restart()
    engine.update_weights(iter(tiny_model(2).state_dict().items()), 2)
    sent = len(doubles[0].calls)
    engine.submit(requests())
    for completion, request in zip(finish(engine, 6), requests(), strict=True):
        assert completion.token_ids == expected(request, 2)[0] and set(completion.weight_versions) == {2}
    assert any(path == "/v1/completions" for path, _ in doubles[0].calls[sent:])


def joined(engine, double, loads):
    """Poll until a server has read weights ``loads`` times and serves; return what finished meanwhile."""
    finished, deadline = [], time.monotonic() + 60
    while len(double.reloads) < loads or len(engine._pool.serving()) < 2:
        assert time.monotonic() < deadline
        finished += engine.poll()
    return finished


@pytest.mark.parametrize("times", slow_except([2], [2, 20]))
def test_a_server_dies_and_another_joins_with_the_newest_weights(times, engine, doubles, tmp_path):
    """The other generates meanwhile, and receives nothing again. Every completion is right for its versions."""
    version = 1
    for number in range(times):
        dead, other = doubles[number % 2], doubles[1 - number % 2]
        loads = len(other.reloads), len(dead.reloads)
        finished = stalled(engine, doubles, 3)
        dead.fault = "die"
        for double in doubles:
            double.stall = None
        finished += finish(engine, 6 - len(finished))
        dead.restart()  # another process with weights of its own, at the same address
        dead.fault = ""
        engine.submit(requests())
        finished += joined(engine, dead, loads[1] + 1)
        assert (len(other.reloads), len(dead.reloads)) == (loads[0], loads[1] + 1)
        finished += finish(engine, 12 - len(finished))
        before = len(dead.calls)
        engine._pool._homes.clear()  # as for other sessions and prompts
        engine.submit(requests())
        finished += finish(engine, 6)
        assert any(path == "/v1/completions" for path, _ in dead.calls[before:])
        assert sorted(completion.id for completion in finished) == sorted(list(range(6)) * 3)
        for completion in finished:
            wanted = log_probs_of(requests()[completion.id], completion.token_ids, version)
            assert torch.allclose(torch.tensor(completion.log_probs), wanted, atol=1e-5)
            assert set(completion.weight_versions) == {version}
        if number % 3 == 1:
            version += 1
            engine.update_weights(iter(tiny_model(version).state_dict().items()), version)
    assert [path.name for path in next(tmp_path.iterdir()).iterdir()] == ["model-00000.safetensors"]
    engine._transfer.close()  # as `close` does
    assert not list(tmp_path.iterdir())


def test_a_server_that_joins_during_an_update_has_the_new_weights(engine, doubles, monkeypatch):
    async def never(pool, server, version, load):
        await asyncio.sleep(600)

    monkeypatch.setattr(pools.ServerPool, "_join", never)
    doubles[0].fault = "die"
    engine.submit(requests())
    finish(engine, 6)
    doubles[0].restart()
    doubles[0].fault = ""
    deadline = time.monotonic() + 60
    while not engine._pool._joining:
        assert time.monotonic() < deadline
        engine.poll()
    engine.update_weights(iter(tiny_model(2).state_dict().items()), 2)
    assert len(engine._pool.serving()) == 2
    engine.submit(requests())
    for completion, request in zip(finish(engine, 6), requests(), strict=True):
        assert completion.token_ids == expected(request, 2)[0] and set(completion.weight_versions) == {2}


@pytest.mark.parametrize("when", ["before the first weights", "while they load"])
def test_servers_that_all_die_at_an_update_join_after_it(when, doubles, tmp_path):
    """They have as long to come back as those that die in a rollout."""
    servers = [VllmServer(double.url, arguments()) for double in doubles]
    engine = ServerStream(servers, CheckpointTransfer(str(tmp_path), keep=True), 10.0, 8)
    if when == "while they load":
        engine.update_weights(iter(tiny_model(1).state_dict().items()), 1)

    def dying():
        for double in doubles:
            double.fault = "die"
        yield from tiny_model(2).state_dict().items()

    if when == "before the first weights":
        list(dying())
        until(engine, lambda: not engine._pool.serving())
    engine.update_weights(dying(), 2)
    assert not engine._pool.serving()
    engine.submit(requests())
    for double in doubles:
        double.restart()
        double.fault = ""
    for completion, request in zip(finish(engine, 6), requests(), strict=True):
        assert completion.token_ids == expected(request, 2)[0] and set(completion.weight_versions) == {2}
    engine.close()


def test_a_server_that_cannot_serve_does_not_join(engine, doubles, capsys):
    doubles[0].fault = "die"
    engine.submit(requests())
    finish(engine, 6)
    doubles[0].restart()
    doubles[0].config["max_model_len"] = 4
    doubles[0].fault = ""
    deadline, said = time.monotonic() + 60, ""
    while "cannot join" not in said:
        said += capsys.readouterr().out
        assert time.monotonic() < deadline
        engine.poll()
    assert engine._pool.servers[0].version is None and len(engine._pool.serving()) == 1


def test_without_a_server_the_run_ends(engine, doubles):
    engine._pool.timeout = 0.5
    for double in doubles:
        double.fault = "die"
    engine.submit(requests())
    with pytest.raises(EngineLost, match="no server is left to generate"):
        finish(engine, 6)


@pytest.mark.parametrize("word", ["a", "abcdef"])
def test_a_stop_word_can_begin_before_a_continuation(word, engine, doubles):
    """Servers see none across the begin of their tokens: as many as have its bytes, and four, are sampled again."""
    asked = [replace(request, sampling=replace(SAMPLING, stop=(word,))) for request in requests()]
    finished = {c.id for c in stalled(engine, doubles, 6, asked)}
    begun = {c.id: c for c in engine.interrupt()}
    before = [len(double.calls) for double in doubles]
    for double in doubles:
        double.stall = None
    engine.submit([replace(request, begun=begun[request.id]) for request in asked if request.id in begun])
    found = finish(engine, 6 - len(finished))
    bodies = [b for d, n in zip(doubles, before, strict=True) for p, b in d.calls[n:] if p == "/v1/completions"]
    kept = max(0, 6 - len(word) - 4)
    expected_prompts = [[*asked[n].prompt_ids, *c.token_ids[:kept]] for n, c in begun.items()]
    assert sorted(body["prompt"] for body in bodies) == sorted(expected_prompts) and bodies
    assert {body["max_tokens"] for body in bodies} == {LONGEST - kept}
    assert all(c.token_ids[:kept] == begun[c.id].token_ids[:kept] for c in found)


def test_turns_wait_while_no_server_is_left(engine, doubles):
    """The engine has what the servers in use have; while none is, what they had. All turns would pass at once."""
    for double in doubles:
        double.caches, double.stall = [(True, 30)], 2
    until(engine, lambda: engine.cache_tokens == 60)
    assert (engine.engines, engine.places) == (2, 16)
    costs = SimpleNamespace(turn=lambda tokens, history, running: 1 / running, history=lambda tokens: 1e9)
    made = WorkingSet(engine, costs)
    made.submit(requests(40))
    found = until(made, lambda: all(double.stalled.is_set() for double in doubles))
    for left, double in ((1, doubles[0]), (0, doubles[1])):
        double.fault = "die"
        found += until(made, lambda left=left: len(engine._pool.serving()) == left)
        assert engine.cache_tokens == (30 if left else 60)
        assert (engine.engines, engine.places) == ((1, 8) if left else (2, 16))
    found += made.poll()
    assert len(engine.unfinished()) <= 0.9 * 60 / 3  # prompts of three tokens
    for double in doubles:
        double.restart()
        double.fault, double.stall = "", None
    finish(made, 40 - len(found))


def until(engine, holds):
    """Poll until a condition holds; return what finished meanwhile."""
    finished, deadline = [], time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        finished += engine.poll()
    return finished


def check_first_version(completions):
    for completion in completions:
        wanted = log_probs_of(requests()[completion.id], completion.token_ids, 1)
        assert torch.allclose(torch.tensor(completion.log_probs), wanted, atol=1e-5)
        assert set(completion.weight_versions) == {1}


def asked(double, path):
    return sum(path == called for called, _ in double.calls)


def test_a_server_that_restarted_unseen_samples_nothing(engine, doubles):
    """Requests wait for a probe after a time without polls."""
    answers = threading.Event()
    doubles[0].restart()
    doubles[0].instead = lambda path: answers.wait(60) and None if path == "/metrics" else None
    engine._pool._last_poll_end -= 60  # a minute without polls
    for server in engine._pool.servers:
        server.confirmed = 0.0
    probes = asked(doubles[0], "/metrics")
    engine.submit(requests())
    finished = until(engine, lambda: asked(doubles[0], "/metrics") > probes)
    for _ in range(5):
        finished += engine.poll()
    assert not finished and asked(doubles[0], "/v1/completions") == 0
    answers.set()
    check_first_version(finish(engine, 6))


def test_tokens_of_a_new_process_are_dropped(engine, doubles, monkeypatch):
    """A probe finds a restart after streams have begun; those begin again."""
    until(engine, lambda: not engine._pool._probes)
    monkeypatch.setattr(pools, "WATCH_INTERVAL", 1000.0)
    for server in engine._pool.servers:
        server.next_probe = time.monotonic() + 1000
    doubles[0].restart()
    finished = stalled(engine, doubles, 3)
    assert asked(doubles[0], "/v1/completions") and engine.unfinished()
    engine._pool.servers[0].next_probe = 0.0
    finished += until(engine, lambda: engine._pool.servers[0].exclusion_reason)
    for double in doubles:
        double.stall = None
    check_first_version(finished + finish(engine, 6 - len(finished)))


def test_servers_join_while_nothing_runs(engine, doubles):
    doubles[0].fault = "die"
    engine.submit(requests())
    until(engine, lambda: engine._pool.servers[0].exclusion_reason and engine._pool.is_idle)
    doubles[0].restart()
    doubles[0].fault = ""
    deadline = time.monotonic() + 60
    while len(engine._pool.serving()) < 2:
        assert time.monotonic() < deadline
        engine.watch()


ODD = {
    "/v1/models": {"object": "list", "data": []},
    "/server_info": {"vllm_config": "none"},
    "/metrics": {},
    "/weight_info": ["none"],
    "/reset_prefix_cache": {},
}


@pytest.mark.parametrize("path", ODD)
def test_others_that_answer_at_a_servers_address_do_not_end_the_run(path, engine, doubles):
    """While a server restarts, a gateway without a backend answers, or another program."""
    odd = {path: ODD[path]}
    if path in ("/metrics", "/weight_info"):  # of a server that serves
        doubles[0].instead = odd.get
        engine.submit(requests())
        check_first_version(finish(engine, 6))
        doubles[0].instead = lambda path: None
    doubles[0].restart()
    until(engine, lambda: engine._pool.servers[0].exclusion_reason)
    doubles[0].instead, before = odd.get, asked(doubles[0], "/metrics")
    until(engine, lambda: asked(doubles[0], "/metrics") >= before + 2)
    engine.submit(requests())
    check_first_version(finish(engine, 6))
    assert len(engine._pool.serving()) == 1 and path in engine._pool.servers[0].exclusion_reason
    doubles[0].instead = lambda path: None
    until(engine, lambda: len(engine._pool.serving()) == 2)


def test_an_odd_stream_is_a_fault(doubles):
    doubles[0].instead = {"/v1/completions": {"choices": [{}]}}.get

    async def stream():
        server = VllmServer(doubles[0].url, arguments())
        server.version = 1
        try:
            await server.stream(Streamed(requests()[0]), 1)
        finally:
            await server.close()

    with pytest.raises(Fault, match=r"^/v1/completions answered .*choices.*, not as an inference server does") as found:
        asyncio.run(stream())
    assert found.value.retryable


def test_an_odd_answer_at_the_start_is_named(doubles):
    doubles[0].instead = {"/v1/models": {"data": []}}.get
    pool = pools.ServerPool([VllmServer(doubles[0].url, arguments())], 0.1, 8)
    with pytest.raises(GrpoError, match=r"/v1/models answered \{'data': \[\]\}, not as an inference server does"):
        pool.check()
    pool.close()


@pytest.mark.parametrize("answer", ["<html>Bad gateway</html>", {"size": 2}])
def test_an_odd_number_of_workers_is_shown(doubles, answer):
    doubles[0].instead = {"/get_world_size": answer}.get

    async def ask():
        server = VllmServer(doubles[0].url, arguments())
        try:
            await world_size(server, 5.0)
        finally:
            await server.close()

    with pytest.raises(Fault, match=f"^/get_world_size answered {re.escape(str(answer))}, not as an inference server"):
        asyncio.run(ask())


def test_servers_that_restart_one_after_the_other(engine, doubles):
    """The second restarts while the first loads the weights: requests wait for one of them."""
    loads = threading.Event()
    engine.submit(requests())
    finished = finish(engine, 6)
    doubles[0].instead = lambda path: loads.wait(60) and None if path == "/reset_prefix_cache" else None
    doubles[0].restart()
    until(engine, lambda: asked(doubles[0], "/reset_prefix_cache") == 2)
    doubles[1].restart()
    until(engine, lambda: not engine._pool.serving())
    engine.submit(requests())
    for _ in range(5):
        assert not engine.poll()
    loads.set()
    check_first_version(finished + finish(engine, 6))
    until(engine, lambda: len(engine._pool.serving()) == 2)


def test_a_request_that_no_server_takes_ends_the_run(engine, doubles):
    """Servers join again after each failure: a request has a number of attempts."""
    for double in doubles:
        double.fault = "other token"
    engine.submit(requests())
    with pytest.raises(EngineLost, match=r"a request failed 9 times"):
        until(engine, lambda: False)
