"""Engines over HTTP against doubles of their servers (server_double.py): what comes back, and what faults do."""

import asyncio
import io
import re
import threading
import time
from argparse import Namespace
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from server_double import EOS, HIDDEN, LAYERS, VOCABULARY, Double, called, sample, tiny_model
from slow import slow_except
from torch.multiprocessing import reductions
from vision_models import picture

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.episodes import Episodes
from megatron_grpo.rollout.servers import jobs
from megatron_grpo.rollout.servers import pool as servers
from megatron_grpo.rollout.servers.engine import ServerEngine
from megatron_grpo.rollout.servers.pool import ServerPool
from megatron_grpo.rollout.servers.server import Server
from megatron_grpo.rollout.sglang import ipc as sglang_ipc
from megatron_grpo.rollout.sglang import nccl as sglang_nccl
from megatron_grpo.rollout.sglang.nccl import SglangNcclTransfer
from megatron_grpo.rollout.sglang.server import SglangServer, build_sglang_servers
from megatron_grpo.rollout.vllm.server import VllmServer, build_vllm_servers
from megatron_grpo.rollout.weight_sync import nccl as weight_transfer_nccl
from megatron_grpo.rollout.weight_sync.transfer import CheckpointTransfer
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import EngineLost, GrpoError
from megatron_grpo.utils.http_client import Fault
from megatron_grpo.vision.images import RowImages

SAMPLING = Sampling(max_tokens=4, stop_token_ids=(EOS,), log_probs=True)
PROMPTS = [[2 + i, 3, 5 + i] for i in range(6)]
GENERATIONS = 3
REQUESTS = [Request(p * GENERATIONS + g, PROMPTS[p], SAMPLING) for p in range(len(PROMPTS)) for g in range(GENERATIONS)]


def arguments(**changes) -> Namespace:
    args = replaced(
        parse_args([]),
        vllm_server_timeout=5.0,
        vllm_max_num_seqs=256,
        max_prompt_length=8,
        max_completion_length=8,
        num_layers=LAYERS,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        model_family="qwen3",
        untie_embeddings_and_output_weights=True,
        weight_sync_method="checkpoint",
    )
    return replaced(args, **changes)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(servers, "WATCH_INTERVAL", 0.1)
    monkeypatch.setattr(servers, "PROBE_TIMEOUT", 2.0)
    monkeypatch.setattr(servers, "_pause", lambda retry: 0.05 * 2**retry)


@pytest.fixture
def start():
    """Starts doubles, and ends them."""
    doubles = []

    def start_one(*args, **kwargs) -> Double:
        doubles.append(Double(*args, **kwargs))
        return doubles[-1]

    yield start_one
    for double in doubles:
        if double.fault != "die":
            double.stop()


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return dict(tiny_model(0).state_dict())


def make_pool(doubles, kind="vllm", timeout=10.0, max_in_flight=8, **changes) -> ServerPool:
    server = {"vllm": VllmServer, "sglang": SglangServer}[kind]
    return ServerPool([server(d.url, arguments(**changes)) for d in doubles], timeout, max_in_flight)


def synced_pool(doubles, weights, directory, version=7, **kwargs) -> ServerPool:
    pool = make_pool(doubles, **kwargs)
    pool.check()
    assert not pool.refresh()
    CheckpointTransfer(str(directory)).send(iter(weights.items()), version, pool)
    assert pool.refresh()
    return pool


def versions(completions) -> set[int]:
    return {version for completion in completions for version in completion.weight_versions}


def finish(pool, requests=REQUESTS, seconds=120.0) -> list:
    """All completions of the requests, in the order of their ids: each once, or the test fails."""
    pool.submit(requests, seed=3)
    return wait_for(pool, requests, seconds)


def wait_for(pool, requests=REQUESTS, seconds=120.0, completions=()) -> list:
    completions, deadline = list(completions), time.monotonic() + seconds
    while len(completions) < len(requests):
        assert time.monotonic() < deadline, f"{len(completions)} of {len(requests)} after {seconds} s"
        completions += pool.poll()
    assert not pool.poll()
    assert sorted(c.id for c in completions) == [request.id for request in requests]
    return sorted(completions, key=lambda c: c.id)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_completions_are_the_models_own(start, weights, tmp_path, kind):
    """Ids and log-probabilities are those of a model with the weights that were sent, not those of the start."""
    double = start(kind)
    pool = synced_pool([double], weights, tmp_path, kind=kind)
    completions = finish(pool)
    model = tiny_model(0)
    ended = set()
    for completion, request in zip(completions, REQUESTS, strict=True):
        assert set(completion.weight_versions) == {7}
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids).logits[0, 2:-1], -1)
        expected = log_p.gather(1, ids[0, 3:, None])[:, 0]
        assert torch.tensor(completion.log_probs).allclose(expected, atol=1e-5)
        assert (completion.token_ids[-1] == EOS) == (completion.finish_reason == "stop")
        ended.add(completion.finish_reason)
    assert ended == {"stop", "length"}
    groups = [
        tuple(map(tuple, (c.token_ids for c in completions[i : i + GENERATIONS]))) for i in range(0, len(REQUESTS), 3)
    ]
    assert all(len(set(group)) > 1 for group in groups)
    assert finish(pool) == completions  # the seed is the same
    greedy = [replace(request, sampling=replace(SAMPLING, temperature=0.0, log_probs=False)) for request in REQUESTS]
    for completion, request in zip(finish(pool, greedy), greedy, strict=True):
        assert completion.log_probs is None
        assert (
            completion.token_ids
            == sample(model, list(request.prompt_ids), {"max_tokens": 4, "temperature": 0}, 0, [EOS])[0]
        )
    pool.close()


def test_a_rows_own_sampling_reaches_the_server(start, weights, tmp_path):
    """Requests of one prompt travel together only if they are sampled alike."""
    double = start()
    pool = synced_pool([double], weights, tmp_path)
    first = REQUESTS[0]
    own = [{}, {"max_tokens": 2}, {"structured_outputs": '{"regex": "[0-9]+"}', "log_probs": False}]
    requests = [replace(first, id=i, sampling=replace(SAMPLING, **fields)) for i, fields in enumerate(own)]
    short = finish(pool, requests)[1]
    bodies = [body for path, body in double.calls if path == "/v1/completions"]
    assert len(bodies) == 3 and len(short.token_ids) <= 2
    sent = {body["max_tokens"]: body["structured_outputs"] for body in bodies if body["logprobs"] is not None}
    assert sent == {SAMPLING.max_tokens: None, 2: None}
    (constrained,) = (body for body in bodies if body["logprobs"] is None)
    assert constrained["structured_outputs"] == {"regex": "[0-9]+"}
    pool.close()


def test_a_row_with_stop_words_is_not_sent_to_a_server_that_drafts(start, weights, tmp_path):
    """Without stop words the server serves."""
    double = start(drafts="ngram")
    pool = synced_pool([double], weights, tmp_path)
    assert len(finish(pool, REQUESTS[:1])) == 1
    with pytest.raises(GrpoError, match=r"it drafts \(ngram\), and vLLM keeps tokens of a draft behind a stop word"):
        finish(pool, [replace(REQUESTS[1], sampling=replace(SAMPLING, stop=(".",)))])
    assert called(double, "/v1/completions") == 1
    pool.close()


def test_a_server_returns_the_kept_tokens(start, weights, tmp_path):
    double = start()
    pool = synced_pool([double], weights, tmp_path, top_k=5, temperature=0.6)
    sampling = replace(SAMPLING, temperature=0.6, top_k=5, kept_token_ids=True)
    completions = finish(pool, [replace(request, sampling=sampling) for request in REQUESTS])
    model = tiny_model(0)
    for completion, request in zip(completions, REQUESTS, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, 2:-1] / 0.6
        assert completion.kept_token_ids[:, 0].tolist() == completion.token_ids
        assert [set(kept) for kept in completion.kept_token_ids.tolist()] == [
            set(likeliest) for likeliest in logits.topk(5).indices.tolist()
        ]
        expected = logits.gather(1, ids[0, 3:, None])[:, 0] - logits.topk(5).values.logsumexp(-1)
        assert torch.tensor(completion.log_probs).allclose(expected, atol=1e-5)
    pool.close()


@pytest.mark.parametrize("kind", ["environment", "agent"])
def test_further_turns_go_where_the_earlier_ones_were(start, weights, tmp_path, kind):
    """An environment's request has all turns in ``begun``, an agent's in its prompt; then only the session is alike."""
    doubles = start(), start()
    pool = synced_pool(doubles, weights, tmp_path)
    first = finish(pool, [Request(i, PROMPTS[i], SAMPLING) for i in range(6)])
    for done in sorted(first, key=lambda done: -done.id):
        if kind == "environment":
            request = Request(done.id, PROMPTS[done.id], replace(SAMPLING, max_tokens=8), begun=done)
        else:
            request = Request(100 + done.id, [*PROMPTS[done.id], *done.token_ids, 4], SAMPLING, session=done.id)
        finish(pool, [request])  # one after the other: both servers are idle
    pool.close()

    def prompts(double):
        return [tuple(body["prompt"]) for path, body in double.calls if path == "/v1/completions"]

    for double in doubles:
        begun = [prompt[:3] for prompt in prompts(double) if len(prompt) == 3]
        assert {prompt[:3] for prompt in prompts(double)} == set(begun) and 0 < len(begun) < 6
    assert sum(len(prompts(double)) for double in doubles) == 12


def job_of(*requests: Request) -> jobs.Job:
    return jobs.Job(list(requests), seed=0)


def test_a_server_with_far_more_work_is_no_home(start, monkeypatch):
    pool = make_pool([start(), start(), start()])
    one, two, three = pool.servers

    def home(request, *ready):
        return pool._homes.find(job_of(request), ready or pool.servers)

    turn = Request(0, [5, 6], SAMPLING)
    one.in_flight, two.in_flight, three.in_flight = 0, 4, 4
    assert home(turn) is one
    one.in_flight = 4 + jobs.NEAR
    assert home(Request(1, [5, 6], SAMPLING)) is one  # the prompt is the same; at most NEAR more than the least
    assert home(Request(2, [5, 7], SAMPLING)) is two
    one.in_flight += 1
    assert home(turn) is one  # at most NEAR more than 5/4 of the least
    assert home(Request(3, [5, 6], SAMPLING)) is two
    one.in_flight += 1
    assert home(turn) is two
    one.in_flight = 0
    assert home(turn) is two  # that has computed the newest turn
    assert home(turn, one, three) is one  # as the other has no room, or is excluded
    monkeypatch.setattr(jobs, "HOMES", 3)
    one.in_flight = two.in_flight = three.in_flight = 0
    two.in_flight = 1
    assert home(Request(9, [1], SAMPLING, session=2)) is two  # session 2 went there
    for i in range(10, 20):
        home(Request(i, [i], SAMPLING))
    assert len(pool._homes) == 3
    pool.end_rollout()
    assert not pool._homes
    pool.close()


def dispatched(pool) -> dict[int, Server]:
    """Dispatch what is queued, without sending it; return the server of each running request."""
    pool._dispatch()
    return {request.id: server for job, server in pool._running.values() for request in job.requests}


def idle_pool(doubles, **kwargs) -> ServerPool:
    """A pool whose servers have weights and are not probed."""
    pool = make_pool(doubles, **kwargs)
    for server in pool.servers:
        server.version = 0
    return pool


def test_no_server_is_idle_for_the_sake_of_a_prompt(start):
    """Completions that come one by one, as those of a stream do."""
    pool = idle_pool([start() for _ in range(4)])
    for i in range(4):
        pool.submit([Request(i, PROMPTS[0], SAMPLING)], seed=3)
    assert len({id(server) for server in dispatched(pool).values()}) == 4
    pool.close()


def test_prompts_with_other_images_are_others():
    def prompt(*pictures):
        images = RowImages(pictures, ((1, 2, 2),), ((6,),), 6, 2, 7)
        return job_of(Request(0, [2, 6, 3], SAMPLING, images=images)).prompt

    one, other = picture(28, 28), picture(28, 28, seed=1)
    assert prompt(one) == prompt(one)
    assert prompt(one) != prompt(other)


def test_samples_of_programs_do_not_depend_on_what_comes_together(start, weights, tmp_path):
    """The environments of a group answer when they can: each of its first turns is sampled as alone."""
    pool = synced_pool([start()], weights, tmp_path)
    requests = [Request(n, PROMPTS[0], SAMPLING, session=n) for n in range(4)]
    together = finish(pool, requests)
    alone = [completion for request in requests for completion in finish(pool, [request])]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) > 1


def test_first_turns_of_environments_name_their_episode():
    requests = [Request(n, [1, 2], SAMPLING, row={"number": n}) for n in (4, 5)]
    with mock.patch.object(Episodes, "_begin") as begin:
        Episodes(mock.Mock(), None, None, None, None, Namespace()).submit(requests)
    assert [call.args[0].session for call in begin.call_args_list] == [4, 5]


def finished(pool, number: int) -> None:
    """Let a running request be at its end."""
    (task,) = (task for task, (job, _) in pool._running.items() if job.requests[0].id == number)
    pool._cancel(task, pool._running[task][1])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers_say_how_many_tokens_they_keep(start, kind):
    """Those of all engines of all servers in use; SGLang's double has 4,096."""
    one, two = start(kind), start(kind)
    one.caches, two.caches = [(True, 3096), (True, 1000)], [(True, 4096)]
    pool = make_pool([one, two], kind)
    assert pool.cache_tokens is None
    pool.check()
    assert pool.cache_tokens == 2 * 4096
    pool._exclude(pool.servers[0], "it has restarted")
    assert pool.cache_tokens == 4096
    two.caches = [(False, 4096)]
    if kind == "vllm":
        pool.refresh()
        assert pool.servers[1].cache_tokens is None and pool.cache_tokens is None
    pool.close()


def test_an_excluded_server_is_no_home_when_it_is_back(start):
    pool = idle_pool([start(), start()])
    one, two = pool.servers
    turn = Request(0, PROMPTS[0], SAMPLING)
    assert pool._homes.find(job_of(turn), pool.servers) is one
    pool._exclude(one, "it has restarted")
    one.exclusion_reason, one.in_flight = None, 1
    assert pool._homes.find(job_of(turn), pool.servers) is two
    pool.close()


def test_a_turn_whose_server_is_full_lets_others_pass(start, monkeypatch):
    monkeypatch.setattr(jobs, "PASSES", 2)
    pool = idle_pool([start(), start()], max_in_flight=2)
    pool.submit([Request(i, PROMPTS[i], SAMPLING) for i in range(4)], seed=3)
    running = dispatched(pool)
    home, other = running[0], running[1]
    assert (running[2], running[3]) == (home, other)
    finished(pool, 0)
    pool.submit([Request(4, PROMPTS[4], SAMPLING)], seed=3)
    assert dispatched(pool)[4] is home  # full again
    for i, passing in enumerate((10, 20)):  # new sessions, to the other server, before the turn
        pool.submit([Request(0, [*PROMPTS[0], 4], SAMPLING)] if not i else [], seed=3)
        pool.submit([Request(passing, [passing], SAMPLING)], seed=3)
        finished(pool, (1, 3)[i])
        assert dispatched(pool)[passing] is other
        assert 0 not in dispatched(pool)
    pool.submit([Request(30, [30], SAMPLING)], seed=3)
    finished(pool, 10)
    assert dispatched(pool)[0] is other  # enough have passed it
    assert 30 not in dispatched(pool)
    pool.close()


def test_a_turn_whose_server_is_full_waits_for_no_other_work(start):
    """With nothing else to do, the other server computes the turn anew."""
    pool = idle_pool([start(), start()], max_in_flight=1)
    pool.submit([Request(0, PROMPTS[0], SAMPLING), Request(1, PROMPTS[1], SAMPLING)], seed=3)
    running = dispatched(pool)
    finished(pool, 0)
    pool.submit([Request(2, PROMPTS[2], SAMPLING)], seed=3)
    assert dispatched(pool)[2] is running[0]
    pool.submit([Request(0, [*PROMPTS[0], 4], SAMPLING)], seed=3)
    finished(pool, 1)
    assert dispatched(pool)[0] is running[1]
    pool.close()


def test_requests_are_spread_and_bounded(start, weights, tmp_path):
    doubles = [start(), start()]
    pool = synced_pool(doubles, weights, tmp_path, max_in_flight=6)
    finish(pool)
    assert all(called(double, "/v1/completions") >= 2 for double in doubles)
    assert all(double.most_running <= 2 for double in doubles)  # two requests of three completions
    assert not list(tmp_path.iterdir())  # the files are gone
    pool.close()


FAULTS = ["die", "die generating", "500 generating", "hang", "duplicate", "too few", "other prompt", "cut"]
FAULTS += ["other token", "other end", "abort"]


@pytest.mark.parametrize("fault", slow_except(["die", "too few"], FAULTS))
def test_a_failing_servers_requests_go_to_the_other(start, weights, tmp_path, capsys, fault):
    """Every completion comes once, and is what it would have been."""
    good, bad = start(), start()
    pool = synced_pool([good, bad], weights, tmp_path)
    expected = finish(pool)
    bad.fault = fault if fault != "die" else ""
    pool.submit(REQUESTS, seed=3)
    first = pool.poll()
    if fault == "die":  # with requests under way
        bad.stop()
    assert wait_for(pool, completions=first) == expected
    if fault in ("die", "die generating", "500 generating", "abort"):  # may pass, so it is tried again
        assert pool.servers[1].exclusion_reason or called(bad, "/v1/completions") >= 2
    else:
        assert pool.servers[1].exclusion_reason is not None
        assert capsys.readouterr().out.count(f"server {bad.url} is excluded until the next weight sync: ") == 1
    pool.end_rollout()
    bad.fault = bad.fault if fault == "die" else ""
    pool.close()


@pytest.mark.parametrize(
    ("ids", "reason", "message"),
    [
        ([5, EOS], "abort", "with the reason 'abort'"),
        ([], "stop", "of 0 tokens"),
        ([5, VOCABULARY], "stop", "outside the vocabulary"),
        ([5, 5], "length", "cut a completion at 2 of 4 tokens"),
        ([5, EOS + 1], "stop", "none of the end tokens"),
    ],
)
def test_ends_that_contradict_the_sampling_are_faults(ids, reason, message):
    """One that the server did not finish can be tried again."""
    server = VllmServer("http://127.0.0.1:9", arguments())
    server.check_end(REQUESTS[0], [5, EOS], "stop", VOCABULARY)
    server.check_end(REQUESTS[0], [5] * SAMPLING.max_tokens, "length", VOCABULARY)
    with pytest.raises(Fault, match=message) as found:
        server.check_end(REQUESTS[0], ids, reason, VOCABULARY)
    assert found.value.retryable == (reason == "abort" or not ids)


def test_with_none_left_the_run_ends(start, weights, tmp_path):
    doubles = [start(), start()]
    pool = synced_pool(doubles, weights, tmp_path)
    for double in doubles:
        double.stop()
    with pytest.raises(
        EngineLost, match=r"no server is left to generate \(http://.*; http://.*\): start the servers again"
    ):
        finish(pool)
    with pytest.raises(EngineLost, match="no server is left"):
        pool.refresh()
    pool.close()


def test_a_request_that_always_fails_ends_the_run(start, weights, tmp_path):
    double = start()
    pool = synced_pool([double], weights, tmp_path)
    double.fault = "500 generating"
    with pytest.raises(EngineLost, match=r"failed 5 times, the last time at http://.*out of memory"):
        finish(pool)
    pool.close()


def test_drafts_of_a_rollout_are_counted(start, weights, tmp_path, one_process):
    """Over all servers, from the start of the rollout to its end; another process of a server counts from 0."""
    doubles = [start(), start()]
    doubles[0].drafts, doubles[1].drafts = [5, 9, 1], [0, 0, 0]
    engine = ServerEngine([VllmServer(d.url, arguments()) for d in doubles], CheckpointTransfer(str(tmp_path)), 10.0, 4)
    counts = []
    for version in range(3):
        engine.update_weights(iter(weights.items()), version)
        with engine.rollout(version):
            tokens = sum(len(completion.token_ids) for completion in generate(engine, REQUESTS))
        counts.append(engine.drafts.tolist())
        assert counts[-1] == [tokens, 2 * tokens, tokens]
        doubles[0].restart()
        engine.wake_weights()
    assert len(doubles) == 2 and all(double.generated for double in doubles)
    engine.close()


def test_servers_without_drafts_have_no_counts(start, weights, tmp_path, one_process):
    engine = ServerEngine([VllmServer(start().url, arguments())], CheckpointTransfer(str(tmp_path)), 10.0, 8)
    engine.update_weights(iter(weights.items()), 0)
    with engine.rollout(0):
        assert list(generate(engine, REQUESTS))
    assert engine.drafts is None
    engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_restarted_server_gets_weights_before_it_serves(start, weights, tmp_path, kind):
    good, restarted = start(kind), start(kind)
    pool = synced_pool([good, restarted], weights, tmp_path, kind=kind)
    restarted.restart()
    assert not pool.refresh()
    path, before = {"vllm": "/v1/completions", "sglang": "/generate"}[kind], len(restarted.calls)
    assert versions(finish(pool)) == {7}
    assert path not in [asked for asked, _ in restarted.calls[before:]]
    CheckpointTransfer(str(tmp_path)).send(iter(weights.items()), 8, pool)
    assert pool.refresh()
    assert versions(finish(pool)) == {8}
    assert path in [asked for asked, _ in restarted.calls[before:]]
    pool.close()


def test_a_short_absence_between_rollouts_is_forgiven(start, weights, tmp_path):
    double = start()
    pool = synced_pool([double], weights, tmp_path)
    double.fault, calls = "die", len(double.calls)

    def watch() -> None:
        while len(double.calls) < calls + 2:  # the second shows that the first was in vain
            time.sleep(0.01)
        double.fault = ""

    threading.Thread(target=watch, daemon=True).start()
    assert pool.refresh()
    pool.close()


@pytest.mark.parametrize("old", slow_except([False], [False, True]))
def test_a_restart_in_a_rollout_is_noticed(start, weights, tmp_path, monkeypatch, old):
    """Both by the version of the weights, and (vLLM 0.26 has none) by the time of the start."""
    monkeypatch.setattr(servers, "RETRIES", 1000)
    good, restarted = start(old=old), start(old=old)
    pool = synced_pool([good, restarted], weights, tmp_path)
    expected = finish(pool)
    restarted.fault, before, completions = "die", called(restarted, "/v1/completions"), []
    pool.submit(REQUESTS, seed=3)
    # A request that is still on its way would be answered by the new process.
    while called(restarted, "/v1/completions") == before or pool.servers[1].in_flight or pool.servers[1].failures < 2:
        completions += pool.poll()
    restarted.restart()
    restarted.fault = ""
    assert wait_for(pool, completions=completions) == expected
    deadline = time.monotonic() + 60
    while not pool.servers[1].exclusion_reason and time.monotonic() < deadline:
        pool.poll()
    assert "has restarted" in pool.servers[1].exclusion_reason
    pool.close()


def test_a_server_that_does_not_take_the_weights_is_given_up(start, weights, tmp_path):
    good, bad = start(), start()
    pool = synced_pool([good, bad], weights, tmp_path)
    bad.model = tiny_model(1).half()
    bad.model.lm_head = torch.nn.Linear(8, 8)
    CheckpointTransfer(str(tmp_path)).send(iter(weights.items()), 8, pool)
    assert pool.servers[1].exclusion_reason.startswith("it did not load the weights: /collective_rpc answered 400: ")
    assert versions(finish(pool)) == {8}
    assert not list(tmp_path.iterdir())
    pool.close()


REFUSED = {
    "401": (
        {"key": "right"},
        {"vllm_server_api_key": "wrong"},
        "the server refuses the API key: give the key of the server",
    ),
    "development mode": ({"dev_mode": False}, {}, "start it with VLLM_SERVER_DEV_MODE=1"),
    "layers": ({"layers": 3}, {}, "its model has 4 layers, the trainer's has 2"),
    "vocabulary": ({"tokens": 17}, {}, "its model has 17 vocabulary tokens, the trainer's has 16"),
    "length": ({"max_model_len": 15}, {}, "its --max-model-len is 15, .* are 16"),
    "dtype": ({"dtype": "torch.bfloat16"}, {}, "its dtype is torch.bfloat16, the trainer's float32"),
    "quantized": ({"quantization": "fp8"}, {}, r"its model is quantized \(fp8\).*on a directory in bf16"),
    "raw": (
        {"logprobs_mode": "raw_logprobs"},
        {"temperature": 0.5},
        "start it with --logprobs-mode processed_logprobs",
    ),
    "kept": (
        {"logprobs_mode": "raw_logprobs"},
        {"top_k": 5, "vllm_mode": "server"},
        "start it with --logprobs-mode processed_logprobs",
    ),
    "too few": ({}, {"top_k": 21, "vllm_mode": "server", "vocab_size": 99}, "start it with --max-logprobs 21"),
    "logits": ({"logprobs_mode": "processed_logits"}, {}, "start it with --logprobs-mode raw_logprobs"),
    "chunks": ({"chunked": True}, {}, "--no-enable-chunked-prefill"),
    "experts": ({}, {"num_experts": 4}, "cannot reload experts"),
    "tied": ({}, {"untie_embeddings_and_output_weights": False}, "keeps the old output layer"),
    "states": ({}, {"experimental_attention_variant": "gated_delta_net"}, "--mamba-ssm-cache-dtype float32"),
    "states of Mamba": ({}, {"hybrid_layer_pattern": "M*"}, "--mamba-ssm-cache-dtype float32"),
    "convolutions": (
        {"dtype": "torch.bfloat16", "states": "float32"},
        {"hybrid_layer_pattern": "M*", "bf16": True},
        "keeps the old convolutions of Mamba-2",
    ),
    "latent": ({}, {"multi_latent_attention": True}, "VLLM_MLA_DISABLE=1"),
    "drafts and words": ({"drafts": "ngram"}, {"stop_words": ["."]}, r"it drafts \(ngram\), .* leave --stop-words out"),
    "drafts and programs": ({"drafts": "ngram"}, {"agent": "a:b"}, r"it drafts \(ngram\), .*: start it without"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_serve_is_refused_at_the_start(start, name):
    config, changes, message = REFUSED[name]
    double = start(**config)
    pool = make_pool([double], **changes)
    with pytest.raises(GrpoError, match=f"{double.url}: .*{message}") as refusal:
        pool.check()
    assert "wrong" not in str(refusal.value) and "\n" not in str(refusal.value)
    pool.close()


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"context_length": 15}, {}, "its context_length is 15, .* are 16"),
        ({"quantization": "modelopt_fp4"}, {}, r"its model is quantized \(modelopt_fp4\)"),
        ({}, {"sleep_level": 2}, "it cannot release its memory: start it with --enable-memory-saver"),
        ({"enable_memory_saver": True}, {"sleep_level": 1}, "start it with --enable-weights-cpu-backup"),
        ({"skip_tokenizer_init": True}, {"stop_words": ["."]}, "start it without --skip-tokenizer-init"),
    ],
)
def test_an_sglang_server_that_cannot_serve_is_refused(start, config, changes, message):
    pool = make_pool([start("sglang", **config)], kind="sglang", **changes)
    with pytest.raises(GrpoError, match=message):
        pool.check()
    pool.close()


def test_raw_log_probs_will_do_at_temperature_1(start):
    pool = make_pool([start(logprobs_mode="raw_logprobs")])
    pool.check()
    pool.close()


def test_a_server_that_is_not_there_ends_the_wait_with_the_cure(start):
    double = start()
    double.fault = "die"
    pool = make_pool([double], timeout=0.1)
    with pytest.raises(
        GrpoError, match=rf"^server {double.url} is not there after 0\.1 s \(.*\): start it, or correct"
    ):
        pool.check()
    pool.close()


@pytest.mark.slow
def test_servers_may_still_be_starting(start, monkeypatch):
    double, said = start(), []
    double.fault = "die"

    def note(line: str) -> None:
        said.append(line)
        double.fault = ""  # there as soon as the wait for it was told

    monkeypatch.setattr(servers, "log", note)
    pool = make_pool([double])
    pool.check()
    assert len(said) == 1 and said[0].startswith(f"waiting up to 10 s for server {double.url}: ")
    pool.close()


def test_aborted_requests_do_not_come_back(start, weights, tmp_path):
    pool = synced_pool([start()], weights, tmp_path)
    pool.submit(REQUESTS, seed=3)
    pool.abort(range(1, len(REQUESTS)))  # of the first three, which travel together, one is wanted
    assert [c.id for c in wait_for(pool, REQUESTS[:1])] == [0]
    pool.close()


def test_weights_travel_in_bounded_pieces(tmp_path, weights, monkeypatch):
    """Files of the given size at most, and one tensor more; those of a killed run are removed."""
    from megatron_grpo.rollout.weight_sync import transfer as weight_transfer

    monkeypatch.setattr(weight_transfer, "FILE_BYTES", 10_000)
    dead = CheckpointTransfer(str(tmp_path))._directory.path.with_name(
        CheckpointTransfer(str(tmp_path))._directory.path.name.rpartition("-")[0] + "-4194999"
    )
    dead.mkdir()
    seen = []

    class Servers:
        def update_servers(self, version, give):
            seen.extend(sorted(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")))
            assert not dead.exists()

    CheckpointTransfer(str(tmp_path)).send(iter(weights.items()), 1, Servers())
    largest = max(tensor.nbytes for tensor in weights.values())
    assert len(seen) > 3 and seen[-1] < 10_000 + largest + 2_000
    assert sum(seen) >= sum(tensor.nbytes for tensor in weights.values())
    assert not list(tmp_path.iterdir())


def test_rank_0_ends_the_stream_after_an_error_too(start, tmp_path, weights, one_process):
    """Other ranks wait in it for rank 0: at a full disk, and when no server takes the weights."""
    directory, left = str(tmp_path / "absent" / "directory"), iter(weights.items())
    double = start()
    args = arguments(vllm_server_base_url=[double.url], weight_sync_dir=directory, vllm_mode="server")
    engine = build_vllm_servers(args)
    with pytest.raises(GrpoError, match=r"--weight-sync-dir .* cannot be written: .*; make room there, or choose"):
        engine.update_weights(left, 1)
    assert next(left, None) is None
    left = iter(weights.items())
    engine = build_vllm_servers(replaced(args, weight_sync_dir=str(tmp_path)))
    double.fault = "die"
    with pytest.raises(EngineLost, match="no server is left"):
        engine.update_weights(left, 1)
    assert next(left, None) is None
    engine.close()


def test_sglang_servers_take_broadcasts(start, weights, one_process, monkeypatch):
    """Of a run, of the next one with the same servers, and of one in which a server fails and comes back."""
    monkeypatch.setattr(sglang_nccl, "BUCKET_BYTES", 4000)
    doubles = [start("sglang"), start("sglang")]
    for version in (3, 4):  # two runs, one after the other: the servers still have the first one's group
        pool, transfer = make_pool(doubles, kind="sglang"), SglangNcclTransfer("gloo")
        pool.check()
        assert not pool.refresh()
        transfer.send(iter(weights.items()), version, pool)
        assert pool.refresh()
        assert versions(finish(pool)) == {version}
        for double in doubles:
            assert called(double, "/update_weights_from_distributed") > 2
            assert_same(double.model, weights)
        if version == 3:
            dist.destroy_process_group(transfer._group)  # the process ended
            pool.close()
    joined, doubles[1].fault = called(doubles[0], "/init_weights_update_group"), "400 received"
    newer = {name: tensor + 1 for name, tensor in weights.items()}
    transfer.send(iter(newer.items()), 5, pool)
    assert "no room" in pool.servers[1].exclusion_reason
    assert called(doubles[0], "/init_weights_update_group") == joined + 1
    assert_same(doubles[0].model, newer)
    doubles[1].fault = ""
    doubles[1].restart()
    assert not pool.refresh()
    transfer.send(iter(weights.items()), 6, pool)
    assert [server.version for server in pool.servers] == [6, 6]
    assert_same(doubles[1].model, weights)
    pool.close()


def assert_same(model, weights) -> None:
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_vllm_servers_are_asked_in_order_while_rank_0_sends(start):
    """And one that ends badly when all is sent is done without."""
    doubles = [start(), start()]
    pool, sent = make_pool(doubles), []
    pool.check()
    assert not pool.refresh()
    doubles[1].fault = "400 /finish_weight_update"

    def broadcast() -> None:
        deadline = time.monotonic() + 60
        while not all(called(double, "/update_weights") for double in doubles):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sent.append(all(called(double, "/finish_weight_update") == 0 for double in doubles))

    weight_transfer_nccl._update(pool, 5, {"names": []}, broadcast)
    assert sent == [True]
    assert [server.version for server in pool.servers] == [5, None] and "no room" in pool.servers[1].exclusion_reason
    expected = "/start_weight_update /update_weights /finish_weight_update /reset_prefix_cache /update_weight_version"
    assert [path for path, _ in doubles[0].calls if path in expected] == expected.split()
    pool.close()


def test_sglang_servers_tell_which_tensor_changes(start, weights, one_process):
    """One that a server loses on the way: not when it cannot tell."""
    double, other = start("sglang", checker=True), start("sglang")
    engine = build_sglang_servers(arguments(sglang_server_base_url=[double.url], weight_sync_method="ipc"))
    engine.wake_weights()
    engine.update_weights(iter(weights.items()), 1)
    assert engine.compare_weights(iter(weights.items())) == []
    double.model.get_parameter("model.norm.weight").data[3] = 7
    (line,) = engine.compare_weights(iter(weights.items()))
    assert line.startswith(f"model.norm.weight of rank 0 of {double.url}: it changes")
    engine.close()
    engine = build_sglang_servers(arguments(sglang_server_base_url=[other.url], weight_sync_method="ipc"))
    engine.wake_weights()
    assert engine.compare_weights(iter(weights.items())) is None
    engine.close()


def test_a_broadcast_that_a_server_has_left_loses_the_engine(start, monkeypatch):
    """At once, although another server waits for the broadcast, and the blocked call of this side goes on."""
    doubles, stop = [start("sglang"), start("sglang")], threading.Event()
    monkeypatch.setattr(weight_transfer_nccl, "PEER_TIMEOUT", 1.0)
    pool, cancelled = make_pool(doubles, kind="sglang"), []

    async def theirs(server) -> None:
        if server.url == doubles[0].url:
            raise Fault("it is out of memory")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(server.url)
            raise

    message = f"server {doubles[0].url} failed in an exchange by NCCL: it is out of memory"
    with pytest.raises(EngineLost, match=re.escape(message)):
        weight_transfer_nccl.exchange(pool, theirs, stop.wait)
    assert cancelled == [doubles[1].url]
    stop.set()
    pool.close()


def test_a_server_that_fails_in_a_broadcast_that_ends_is_given_up(start, monkeypatch):
    doubles = [start("sglang"), start("sglang")]
    pool, done = make_pool(doubles, kind="sglang"), []

    async def theirs(server) -> None:
        if server.url == doubles[0].url:
            raise Fault("it is out of memory")

    def ours() -> None:
        time.sleep(0.2)
        done.append(True)

    weight_transfer_nccl.exchange(pool, theirs, ours)
    assert done and pool.servers[0].exclusion_reason and pool.servers[1].exclusion_reason is None
    pool.close()


def test_a_broadcast_that_fails_here_does_not_wait_for_the_servers(start, monkeypatch):
    monkeypatch.setattr(weight_transfer_nccl, "PEER_TIMEOUT", 0.5)
    pool = make_pool([start("sglang")], kind="sglang")

    async def theirs(server) -> None:
        await asyncio.sleep(600)

    def ours() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    with pytest.raises(EngineLost, match="the servers could not be reached by NCCL: NCCL error"):
        weight_transfer_nccl.exchange(pool, theirs, ours)
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_sglang_servers_sleep(start, weights, one_process, level, monkeypatch):
    """In two stages and back, with their weights or without; the double ends itself when asked out of turn."""
    monkeypatch.setattr(sglang_ipc, "BUCKET_BYTES", 4000)
    saver = {"enable_memory_saver": True, "enable_weights_cpu_backup": level == 1}
    doubles = [start("sglang", **saver), start("sglang", **saver)]
    urls, version = [double.url for double in doubles], 0
    args = arguments(sglang_server_base_url=urls, weight_sync_method="ipc", sleep_level=level, rollout_engine="sglang")
    for _ in range(2):  # the second run finds them as the first has left them
        engine = build_sglang_servers(args)
        assert all(double.asleep == {"kv_cache", "weights"} for double in doubles)
        for turn in range(3):
            if turn == 2:
                doubles[1].restart()  # awake, with the weights of its start
            engine.wake_weights()
            assert all("weights" not in double.asleep for double in doubles)
            assert engine.has_weights == (level == 1 and turn == 1)
            if not engine.has_weights:
                version += 1
                engine.update_weights(iter(weights.items()), version)
            assert doubles[0].asleep == {"kv_cache"}
            engine.wake_cache()
            with engine.rollout(seed=1):
                done = list(generate(engine, REQUESTS))
            assert versions(done) == {version} and len(done) == len(REQUESTS)
            for double in doubles:
                assert_same(double.model, weights)
            engine.sleep()
            assert all(double.asleep == {"kv_cache", "weights"} for double in doubles)
        engine.close()


def test_an_sglang_server_has_its_time_out_to_move_weights(start, monkeypatch):
    """A release of level 1 copies weights. The state is recorded first: the server ends what a killed run began."""
    double = start("sglang", enable_memory_saver=True, enable_weights_cpu_backup=True)
    found, call = [], SglangServer.call

    async def noted(self, method, path, body=None, timeout=None):
        if path.endswith(("_occupation", "_version")):
            found.append((path, double.weight_version))
            assert timeout == 77.0 or "occupation" not in path
        return await call(self, method, path, body, timeout)

    monkeypatch.setattr(SglangServer, "call", noted)
    server = SglangServer(double.url, arguments(sleep_level=1, sglang_server_timeout=77.0))

    async def around():
        server.process = (await server.status(5.0)).process
        await server.sleep()
        await server.wake("weights")
        await server.wake("kv_cache")

    asyncio.run(around())
    assert [state for path, state in found if path == "/release_memory_occupation"] == [
        "default/asleep kv_cache weights"
    ]
    assert [state for path, state in found if path == "/resume_memory_occupation"] == [
        "default/asleep kv_cache",
        "default",
    ]
    assert not double.asleep


def test_a_bucket_is_copied_into_one_block():
    """Whose pieces are aligned for any dtype."""
    bucket = [
        ("odd", torch.arange(3, dtype=torch.bfloat16)),
        ("strided", torch.randn(4, 6).T),
        ("empty", torch.empty(0, 2)),
        ("scalar", torch.tensor(5.0, dtype=torch.float64)),
    ]
    block = sglang_ipc.in_one_block(bucket)
    assert len({tensor.untyped_storage().data_ptr() for _, tensor in block}) == 1
    for (name, tensor), (its_name, copied) in zip(bucket, block, strict=True):
        assert name == its_name and copied.dtype == tensor.dtype and copied.is_contiguous() and copied.equal(tensor)
        assert copied.storage_offset() * copied.itemsize % sglang_ipc._ALIGNMENT == 0


def test_a_gpu_is_named_by_its_uuid(monkeypatch):
    """In a handle: the server may have another number for it."""
    rebuild = (
        reductions.rebuild_cuda_tensor,
        (torch.Tensor, (2,), (1,), 0, torch.UntypedStorage, torch.float32, 3, b"h"),
    )
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(uuid=f"GPU-of-{device}"))
    found = sglang_ipc._Pickler(io.BytesIO()).reducer_override(mock.Mock(spec=torch.Tensor, is_cuda=True))
    assert found[0] is reductions.rebuild_cuda_tensor
    assert found[1][6] == "GPU-of-3" and found[1][:6] + found[1][7:] == rebuild[1][:6] + rebuild[1][7:]


def test_images_have_other_names_after_each_load(start, weights, tmp_path):
    """vLLM's engine ends at an image whose name it knows from before a load, even of the same weights."""
    pool, other = synced_pool([start()], weights, tmp_path), make_pool([start()])
    images = RowImages((picture(28, 28),), ((1, 2, 2),), ((6,),), 6, 2, 7)
    request = Request(0, [2, 6, 3], SAMPLING, images=images)

    def named(pool) -> str:
        (part,) = pool.servers[0]._body_of_token_ids([request], 1)["content_parts"]
        return part["uuid"]

    first = named(pool)
    assert named(pool) == first
    other.adopt(pool.states())
    assert named(other) == first  # ranks share what the server keeps
    CheckpointTransfer(str(tmp_path)).send(iter(weights.items()), 7, pool)
    assert named(pool) != first
