"""Decode steps against vLLM's own scheduler: every step, completion and state of random lives; what is left to vLLM."""

import gc
import os
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
from slow import slow_except

from megatron_grpo.patches import cpu_backend
from megatron_grpo.patches import vllm as patches
from megatron_grpo.rollout.vllm import scheduler as options

cpu_backend.install()

pytestmark = pytest.mark.vllm
GPU_VLLM = os.environ.get("GPU_VLLM")  # directory with the unpacked wheel of requirements-gpu.txt's vLLM
LIVES = 12
PLAIN = {"caching": True, "block": 8, "blocks": 200, "sequences": 4, "budget": 4096, "log_probs": 0, "adapters": False}


@pytest.fixture(scope="module")
def lives():
    """The module of the lives, which imports vLLM."""
    import scheduler_lives

    return scheduler_lives


def life(lives, arrivals: list[tuple], is_async=False, v2_runner=False, **other):
    """A life in which requests arrive, each (step, kind, tokens of the prompt, most tokens)."""
    events: dict[int, list[tuple]] = {}
    for number, (step, *request) in enumerate(arrivals):
        events.setdefault(step, []).append(("arrive", number, *request))
    return lives.Life(is_async=is_async, v2_runner=v2_runner, events=events, **PLAIN | other)


@pytest.mark.parametrize("is_async", slow_except([True], [False, True]))  # True: vLLM's default on GPUs
def test_lives_are_those_of_vllms_own_scheduler(lives, is_async):
    counts: Counter = Counter()
    number = LIVES * (5 if ranks.thorough else 1)
    for seed in range(number):
        try:
            always, seldom = lives.looks_of(seed)
            counts += lives.compare(lives.Life.of_seed(seed, is_async, always))
            lives.compare(lives.Life.of_seed(seed, is_async, seldom))
        except AssertionError as error:
            raise AssertionError(f"life {seed}: {error}") from error
    assert counts["decode steps"] > 50 * number and counts["steps"] > counts["decode steps"] + 30 * number
    assert counts["with others"] > 4 * number and counts["finished"] > 20 * number
    assert counts["preemptions"] > 2 * number


@pytest.mark.parametrize("is_async", slow_except([True], [False, True]))
def test_completions_of_steps_with_several_tokens_are_those_of_vllms_own_scheduler(lives, is_async):
    counts: Counter = Counter()
    number = LIVES * (5 if ranks.thorough else 1)
    for seed in range(number):
        try:
            counts += lives.compare_several(lives.Life.with_several(seed, is_async))
        except AssertionError as error:
            raise AssertionError(f"life {seed}: {error}") from error
    assert counts["with several"] > 20 * number and counts["finished"] > 15 * number
    assert counts["preemptions"] > number


@pytest.mark.parametrize("tokens", [*range(1, 12), 200])  # they end at each place of a step, and by the model's length
def test_requests_that_end_within_a_step(lives, tokens):
    arrivals = [(0, "plain", 5 + 7 * number, tokens + number % 2) for number in range(4)]
    for caching in (False, True):
        counts = lives.compare_several(life(lives, arrivals, True, True, caching=caching, block=4, several=True))
        assert counts["finished"] == 4 and counts["with several"] >= (tokens > 4)


def test_lives_with_the_vllm_for_gpus():
    if GPU_VLLM is None:
        pytest.skip("GPU_VLLM names no directory with the vLLM for GPUs")
    environment = {**os.environ, "PYTHONPATH": GPU_VLLM, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, ranks.REPO / "tests/helpers/scheduler_lives.py", *map(str, range(LIVES))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "'decode steps'" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("v2_runner", slow_except([True], [False, True]))
def test_every_step_after_the_first_token_is_a_decode_step(lives, is_async, v2_runner):
    """Also while others wait, if as many run as may; a step at a request's last token frees its place."""
    alone = life(lives, [(0, "plain", 9, 70)] * 4, is_async, v2_runner, sequences=8)
    alone.events[0] = [(*event[:1], 3, *event[2:]) for event in alone.events[0][:1]]  # "r3" ends by its length
    counts = lives.compare(alone)
    assert counts["steps"] - counts["decode steps"] <= 3
    waiting = life(lives, [(0, "least", 9, 40)] * 12, is_async, v2_runner)
    counts = lives.compare(waiting)
    assert counts["steps"] - counts["decode steps"] <= 4 and counts["with others"] >= 2
    crowded = replace(waiting, sequences=16, blocks=20, events={0: [("arrive", i, "plain", 9, 70) for i in range(12)]})
    counts = lives.compare(crowded)
    assert counts["preemptions"] and counts["decode steps"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("v2_runner", [False, True])
def test_pauses_between_decode_steps(lives, is_async, v2_runner):
    """After a pause the first runner needs all tokens; a step under way at a pause can fill a block."""
    paused = life(lives, [(0, "plain", 5 + number, 70) for number in range(4)], is_async, v2_runner)
    for step in range(9, 70, 7):
        paused.events[step] = [("pause", 2)]
    assert lives.compare(paused)["decode steps"] > 20


def test_a_wrong_constraint_fails_at_once(lives):
    """The step in which it is found out is scheduled while a decode step is under way."""
    arrivals = [(0, "plain", 5, most) for most in (10, 30, 30, 30)]
    for step in range(6):
        counts = lives.compare(life(lives, [*arrivals, (step, "wrong constraint", 5, 9)], is_async=True))
        assert counts["finished"] == 5 and counts["decode steps"]


@pytest.mark.parametrize("caching", [False, True])  # with a cache, requests are settled at each block
def test_hundreds_of_requests_with_tokens_in_their_rings(lives, caching):
    """The table grows while the newest tokens of requests are in it alone, and gives rows of ended ones to others."""
    arrivals = [(0, "plain", 9, 110)] * 50 + [(4, "plain", 9, 30)] * 60 + [(39, "plain", 9, 60)] * 90
    counts = lives.compare(life(lives, arrivals, True, caching=caching, sequences=200, blocks=4000, look=50))
    assert counts["finished"] == 200 and counts["decode steps"] > 90


def test_requests_whose_blocks_fill_are_settled_together(lives, monkeypatch):
    """A step has four tokens of each of 40 requests, and fills a block of 8 for half of them.

    To settle one after the other would take the host longer than the rest of the step.
    """
    table, calls = lives.running_table.RunningTable, []
    settle = table.settle
    monkeypatch.setattr(table, "settle", lambda self, rows: (calls.append(0), settle(self, rows))[1])
    arrivals = [(0, "plain", 1 + number % 8, 90) for number in range(40)]
    counts = lives.compare_several(life(lives, arrivals, True, True, sequences=64, blocks=1000, several=True))
    assert counts["with several"] > 15 and counts["finished"] == 40
    assert len(calls) <= 3 * counts["steps"]


def test_nothing_is_kept_of_finished_requests(lives):
    world = lives.World(life(lives, []), True)
    for number in range(3):
        world.arrive(number, "plain", 5, 20)
    requests = [weakref.ref(request) for request in world.scheduler.requests.values()]
    for number in range(1, 40):
        world.step_number = number
        if world.schedule() is not None:
            world.update()
        if number == 3:
            assert len(world.scheduler._table._rows) == 3
            world.abort(0)
    assert not world.scheduler._table._rows and not world.outputs.request_states
    gc.collect()
    assert [request() for request in requests] == [None] * 3  # else its tokens stay until the next rollout


@pytest.fixture
def running(lives):
    """A world with a request that decodes."""
    world = lives.World(life(lives, []), True)
    world.arrive(0, "plain", 5, 40)
    world.schedule()
    world.update()
    step = world.scheduler.schedule()
    assert isinstance(step, lives.DecodeStep)
    output = lives.ModelRunnerOutput(["r0"], {"r0": 0}, [[200_030]])
    assert world.scheduler.record(step, output, np.array([-1.0]), world.outputs.request_states) is None  # all is done
    return world


def test_a_step_has_several_tokens_where_that_is_exact(running, lives):
    """At the model's length fewer, with too few blocks one, and one where vLLM's code records a token."""
    made, table, (request,) = running.scheduler, running.scheduler._table, running.scheduler.running
    (row,), most = table._rows.values(), lives.decode_steps.AT_ONCE

    def tokens(computed=8):
        rows = np.array([row])
        return made._number_of_tokens(most, [request.request_id], rows, np.array([computed]))

    assert tokens() == 1  # the runner takes no more
    asked = []
    made.takes_several = lambda ids: asked.append(ids) or True
    assert tokens() == most == 4 and asked == [["r0"]]
    longest = made.max_model_len
    assert [tokens(longest - less) for less in (6, 5, 4, 3, 2)] == [4, 4, 3, 2, 1]
    assert made._number_of_tokens(1, ["r0"], np.array([row]), np.array([8])) == 1
    for known, left in ((0, 0), (1, 1)):
        table.is_known[row], table.is_left[row] = known, left
        assert tokens() == 1
    table.is_known[row], table.is_left[row] = 1, 0
    pool = made.kv_cache_manager.block_pool
    pool.get_num_free_blocks = lambda: 0  # blocks have 8 tokens
    assert [tokens(computed) for computed in (8, 9, 12, 13, 15)] == [0, 4, 4, 1, 1]


def test_a_step_with_several_tokens(lives):
    """It is one step of the core, whose blocks, placeholders and tokens are those of several."""
    world = lives.World(life(lives, [], True, True), True)
    world.arrive(0, "plain", 5, 40)
    for _ in range(2):
        world.schedule()
        world.update()
    made, table, (request,) = world.scheduler, world.scheduler._table, world.scheduler.running
    made.takes_several = lambda ids: True
    steps = [made.schedule(), made.schedule()]
    for step in steps:
        assert step.tokens == 4 and step.num_scheduled_tokens == {"r0": 4} and step.total_num_scheduled_tokens == 4
    assert steps[1].scheduled_cached_reqs.num_computed_tokens == [10]
    assert len(made.kv_cache_manager.get_block_ids("r0")[0]) == 2  # of 8 tokens, for 14
    row = table._rows["r0"]
    assert (table.ahead[row], table.in_flight[row], table.computed[row]) == (8, 8, 14)
    output = lives.ModelRunnerOutput(["r0"], {"r0": 0}, [[21, 22, 23, 24]])
    assert made.record(steps[0], output, np.arange(4.0), world.outputs.request_states) is None
    assert (table.ahead[row], table.in_flight[row], table.computed[row]) == (4, 4, 14)
    assert made._cached_blocks[0]["r0"] == 1  # the step has filled it and gone on
    made.settle()
    assert list(request.output_token_ids)[-4:] == [21, 22, 23, 24]


def test_images_are_vllms_part(running):
    """Nothing is read of their requests, in any step."""
    (request,), table = running.scheduler.running, running.scheduler._table
    table.release(request.request_id)
    request.mm_features = [object()]
    for _ in range(2):
        assert running.scheduler._decode_step(running.scheduler._none_admitted, 1) is None
        assert table._stale == {table._rows[request.request_id]}


def test_states_have_all_tokens(running):
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=running.scheduler))
    (state,) = running.outputs.request_states.values()
    before = list(state.detokenizer.token_ids)
    engine = SimpleNamespace(engine_core=core, output_processor=running.outputs)
    assert options.request_states(engine) == [state]
    assert state.detokenizer.token_ids == [*before, 200_030]


@pytest.mark.parametrize("sampled", [[], [30, 31]])
def test_a_row_with_no_token_or_several_is_vllms_part(running, lives, sampled):
    step = running.scheduler.schedule()
    output = lives.ModelRunnerOutput(["r0"], {"r0": 0}, [sampled])
    table = running.scheduler._table
    before = table.tokens.copy()
    rest = running.scheduler.record(step, output, np.array([-1.0]), running.outputs.request_states)
    assert rest.num_scheduled_tokens == {"r0": 1} and (table.tokens == before).all()


def test_a_token_of_an_aborted_request_is_dropped(running, lives):
    """Its row is free, or another request's."""
    step, table = running.scheduler.schedule(), running.scheduler._table
    running.abort(0)
    output = lives.ModelRunnerOutput(["r0"], {"r0": 0}, [[200_030]])
    for _ in range(2):
        before = table.tokens.copy()
        rest = running.scheduler.record(step, output, np.array([-1.0]), running.outputs.request_states)
        assert rest.num_scheduled_tokens == {"r0": 1} and (table.tokens == before).all()
        assert not running.scheduler.update_from_output(rest, output)
        if not table._rows:
            running.arrive(1, "plain", 5, 40)
            running.schedule()
            running.update()
            assert [*running.scheduler.schedule().rows] == [*step.rows]


@pytest.mark.parametrize("queue", ["waiting", "skipped_waiting", "kv_holding_waiting"])
def test_vllm_admits_requests(running, queue):
    """From each of its queues, unless as many run as may."""
    made = running.scheduler
    if not hasattr(made, queue):
        pytest.skip("a queue of another version")
    getattr(made, queue).add_request(made.running[0])
    asked: list = []
    made._decode_step = lambda admit, most: asked.append(admit) or "a step"
    made._can_admit_apart = True
    for below, expected in ((4, made._admitted), (1, made._none_admitted)):
        made._admits_below = below
        assert made.schedule() == "a step" and asked.pop() == expected


def test_requests_that_wait_are_admitted_together(lives, monkeypatch):
    """Some end in most steps; with vLLM's admissions, most steps have a new request beside those that decode."""
    waiting = life(lives, [(0, "plain", 9, 10 + 7 * number % 90) for number in range(160)], sequences=40, blocks=900)

    def lived():
        world, mixed, finished, number = lives.World(waiting, True), 0, [], 0
        for event in waiting.events[0]:
            world.happen(event)
        while world.scheduler.has_unfinished_requests():
            number = world.step_number = number + 1
            step = world.schedule()
            mixed += bool(step.scheduled_new_reqs and step.scheduled_cached_reqs.req_ids)
            finished += [name for name, ended, *_ in world.update() if ended]
        assert len(set(finished)) == len(finished) == 160
        return mixed, number

    often, fewest = lived()
    monkeypatch.setattr(lives.decode_steps, "BETWEEN_ADMISSIONS", 16)
    seldom, steps = lived()
    assert often > 30 and seldom <= 1 + steps / 8 and steps < 1.2 * fewest


def test_requests_with_more_work_are_vllms_part(running):
    (request,), (state,) = running.scheduler.running, running.outputs.request_states.values()
    assert running.scheduler._records_of(request, state) is not None
    sampling = request.sampling_params
    for name, value in (("min_tokens", 1), ("prompt_logprobs", 0), ("repetition_detection", object())):
        before = getattr(sampling, name)
        setattr(sampling, name, value)
        assert running.scheduler._records_of(request, state) is None
        setattr(sampling, name, before)
    request.resumable = True
    assert running.scheduler._records_of(request, state) is None
    request.resumable, request.sampling_params = False, None
    assert running.scheduler._records_of(request, state) is None


def test_the_end_of_sequence_ends_a_request(running):
    (request,), (state,) = running.scheduler.running, running.outputs.request_states.values()
    request.sampling_params.stop_token_ids, request.sampling_params._eos_token_id = [5], 0
    assert running.scheduler._records_of(request, state).ends == {0, 5}


def test_equal_ends_are_kept_once(running):
    table = running.scheduler._table
    (row,), before = table._rows.values(), len(table.ends)
    table.know(row, table._records[row]._replace(ends=frozenset([38, 39])))
    table.know(row, table._records[row]._replace(ends=frozenset([39, 38])))
    assert len(table.ends) == before + 1


@pytest.mark.parametrize(
    "name",
    "connector ec_connector aux_output_connector enable_return_routed_experts return_sampling_mask defer_block_free "
    "num_spec_tokens num_lookahead_tokens num_hash_lookahead_tokens use_pp is_encoder_decoder log_stats perf_metrics "
    "enable_kv_cache_events needs_kv_cache_zeroing has_mamba_layers is_mm_encoder_only".split(),
)
def test_engines_with_more_work_are_vllms_part(running, name):
    managers = running.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert running.scheduler._can_have_decode_steps(managers)
    setattr(running.scheduler, name, 1)
    assert not running.scheduler._can_have_decode_steps(managers)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("scheduler_config", "watermark", 0.1), ("scheduler_config", "long_prefill_token_threshold", 4)]
    + [("scheduler_config", "max_num_scheduled_tokens", 9999), ("", "lora_config", SimpleNamespace(max_loras=1))],
)
def test_where_admissions_look_at_running_requests_they_are_vllms_part(lives, monkeypatch, section, name, value):
    assert lives.World(life(lives, []), True).scheduler._can_admit_apart
    config = lives.World._config

    def other(world):
        made = config(world)
        setattr(getattr(made, section) if section else made, name, value)
        return made

    monkeypatch.setattr(lives.World, "_config", other)
    made = lives.World(life(lives, []), True).scheduler
    assert made.has_decode_steps and not made._can_admit_apart


def test_throttled_steps_are_vllms_part(running, lives):
    assert not isinstance(running.scheduler.schedule(True), lives.DecodeStep)


def test_other_caches_and_cores_are_vllms_part(running):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    made = running.scheduler
    (manager,) = made.kv_cache_manager.coordinator.single_type_managers
    other = object.__new__(type("Window", (FullAttentionManager,), {}))
    other.block_size = manager.block_size
    larger = object.__new__(FullAttentionManager)
    larger.block_size = 2 * manager.block_size
    for managers in ([], [other], [manager, other], [manager, larger]):
        assert not made._can_have_decode_steps(managers)
    assert made._can_have_decode_steps([manager, manager])
    for name, value in (
        ("finished_req_ids_dict", {}),
        ("num_sampled_tokens_per_step", 0),
        ("local_prefill_interval", 2),
    ):
        before = getattr(made, name, 1)
        setattr(made, name, value)
        assert not made._can_have_decode_steps([manager])
        setattr(made, name, before)


def test_only_sources_that_were_compared_are_known(tmp_path, monkeypatch, capsys):
    """The installed vLLM is known; one with another line in one file is not, and gets its own scheduler with a line."""
    import importlib.util

    sources = patches.DECODE_STEPS
    assert sources.known()
    package = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    for file in sources.files.split():
        made = tmp_path / sources.folder / file
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_bytes((package.parent / sources.folder / file).read_bytes())
    assert sources.known(tmp_path)
    for file in sources.files.split():
        made = tmp_path / sources.folder / file
        before = made.read_bytes()
        made.write_bytes(before + b"\n")
        assert not sources.known(tmp_path)
        made.write_bytes(before)
    made.unlink()
    assert sources.digest(tmp_path) == ""
    monkeypatch.setattr(options.dist, "get_rank", lambda: 0)
    assert options.scheduler_options() == {"scheduler_cls": "megatron_grpo.rollout.vllm.decode_steps.scheduler"}
    assert not capsys.readouterr().out
    monkeypatch.setattr(patches, "DECODE_STEPS", replace(sources, digests={"0.1": "", "0.2": "a"}))
    assert options.scheduler_options() == {}
    assert "are tested with vLLM 0.1 and 0.2, and the sources of this version differ" in capsys.readouterr().out
