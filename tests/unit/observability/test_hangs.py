"""The watchdog's decision, its message, and the limits of phases; tests/distributed/test_watchdog.py has real hangs."""

import os
import re
import time
from dataclasses import replace

import pytest
from good_args import validated

from megatron_grpo.observability.watchdog import (
    State,
    find_hang,
    in_words,
    phase_limits,
    place_of,
    process_state,
    stacks_of,
    waits_for_others,
    with_boards,
)
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError

STUCK = State(beat=7, position="update: backward", entered=40, seconds=11.0, limit=10.0, host="b", pid=4711)
WAITING = replace(STUCK, position="update: optimizer", entered=41, waits=True, host="a", pid=1)


def test_no_hang_as_long_as_one_rank_makes_progress():
    """Ranks 0 and 2 wait for rank 1's long rollout."""
    working = replace(STUCK, position="rollout", seconds=0.5)
    assert find_hang([WAITING, working, WAITING], [0.0] * 3, 5.0) is None
    assert find_hang([WAITING, replace(working, seconds=9.9), WAITING], [0.0] * 3, 5.0) is None


def test_the_longest_limit_of_the_ranks_phases_counts():
    saving = replace(STUCK, position="save", limit=60.0)
    assert find_hang([saving, WAITING], [0.0] * 2, 5.0) is None
    assert find_hang([replace(saving, seconds=61.0), replace(WAITING, seconds=61.0)], [0.0] * 2, 5.0) is not None


def test_the_rank_that_does_not_wait_is_the_cause():
    hang = find_hang([WAITING, WAITING, STUCK, WAITING], [0.0] * 4, 5.0)
    assert (hang.causes, hang.silent) == ([2], [])
    assert in_words(hang, {}) == (
        "rank 2 (host b) has been in 'update: backward' for 11 s; the others wait in 'update: optimizer' (rank 0-1, 3)"
    )


def test_of_ranks_that_all_wait_the_one_furthest_behind_is_the_cause():
    behind = replace(WAITING, entered=39, position="scoring")
    assert find_hang([WAITING, behind, WAITING], [0.0] * 3, 5.0).causes == [1]


def test_a_rank_that_does_not_answer_is_the_cause_with_what_its_host_has_read():
    """Its published state is older than its last step, and its seconds stand still."""
    old = replace(STUCK, position="rollout", seconds=0.1)
    assert find_hang([WAITING, old], [0.0, 4.0], 5.0) is None  # not yet silent
    hang = find_hang([WAITING, old], [0.0, 11.5], 5.0)
    assert (hang.causes, hang.silent) == ([1], [1])
    assert in_words(hang, {1: ("T (stopped)", "update: backward")}) == (
        "rank 1 (host b, process 4711: T (stopped)) has been in 'update: backward' for 12 s; "
        "the others wait in 'update: optimizer' (rank 0)"
    )
    assert "process 4711: does not answer) has been in 'rollout'" in in_words(hang, {})  # its host has ended, too


def test_a_rank_whose_host_has_ended_is_the_cause_although_another_is_still_at_work():
    """Rank 0 reads the data and makes progress; torchrun of another host has ended rank 2."""
    reads = replace(STUCK, position="start: data", seconds=0.1, limit=60.0)
    waits, lost = replace(reads, waits=True, seconds=100.0), replace(reads, host="c", waits=True, seconds=40.0)
    assert find_hang([reads, waits, lost], [0.0, 0.0, 59.0], 5.0) is None
    hang = find_hang([reads, waits, lost], [0.0, 0.0, 61.0], 5.0)
    assert (hang.causes, hang.silent) == ([2], [2])
    assert "rank 2 (host c, process 4711: does not answer) has been in 'start: data' for 101 s" in in_words(hang, {})
    assert find_hang([reads, waits, replace(lost, ended=True)], [0.0, 0.0, 61.0], 5.0) is None


def test_the_limit_of_a_silent_rank_is_that_of_the_phase_on_its_board():
    """Its thread was stopped before it published the phase after 'start'; rank 0 and rank 2 are on its host."""
    limits, unheard = {"": 10.0, "start": 60.0}, [0.0, 11.5, 0.0, 0.0]
    old = replace(STUCK, position="start", limit=60.0, seconds=0.1)
    reader = replace(WAITING, neighbour=1, neighbour_position="update: backward")
    states = [reader, old, WAITING, WAITING]
    assert find_hang(states, unheard, 5.0) is None
    hang = find_hang(with_boards(states, unheard, 5.0, limits), unheard, 5.0)
    assert (hang.causes, hang.states[1].position, hang.states[1].limit) == ([1], "update: backward", 10.0)
    assert with_boards(states, [0.0] * 4, 5.0, limits) == states  # a rank that answers knows better
    unheard[0] = 11.5  # a silent neighbour's own reading is out of date, too
    assert with_boards(states, unheard, 5.0, limits) == states
    starting = [replace(reader, neighbour_position="start: engine"), *states[1:]]
    assert with_boards(starting, [0.0, 11.5, 0.0, 0.0], 5.0, limits)[1].limit == 60.0
    compiles = [replace(reader, neighbour_first=True), *states[1:]]  # and holds the interpreter's lock
    assert with_boards(compiles, [0.0, 11.5, 0.0, 0.0], 5.0, limits)[1].limit == 60.0


def test_ranks_that_have_ended_take_no_part():
    ended = replace(STUCK, ended=True, seconds=0.0)
    assert find_hang([ended, ended], [100.0] * 2, 5.0) is None
    assert find_hang([ended, STUCK], [100.0, 0.0], 5.0).causes == [1]


def test_limits_of_phases():
    limits = phase_limits(validated("--watchdog-timeout 100 --reward-timeout 20"))
    assert (limits[""], limits["update"], limits["save"], limits["start"]) == (100, 100, 600, 600)
    assert (limits["rollout"], limits["scoring"]) == (140, 140)  # a reward may take its own time-out, and a retry
    environment = "--environment test_hangs --environment-timeout 360 --environment-retries 2"
    limits = phase_limits(validated(f"--watchdog-timeout 100 --reward-timeout 20 {environment}"))
    assert (limits["rollout"], limits["eval"], limits["update"]) == (1220, 1220, 100)
    servers = "--vllm-mode server --vllm-server-base-url http://127.0.0.1:1 --vllm-server-timeout 50"
    assert phase_limits(validated(f"--watchdog-timeout 100 {servers}"))["rollout"] == 170
    assert phase_limits(validated('--watchdog-phase-timeouts {"save":7200}'))["save"] == 7200


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ('{"saves":1}', "no phase 'saves': give some of start, rollout"),
        ('{"save":0}', "save is 0: give a number of seconds above 0"),
        ('{"save":"1"}', "save is '1'"),
        ('{"save":9} --watchdog-timeout 0', "--watchdog-phase-timeouts needs --watchdog-timeout"),
    ],
)
def test_refused_limits(flags, text):
    with pytest.raises(GrpoError, match=re.escape(text)):
        validated(f"--watchdog-phase-timeouts {flags}")


def test_positions_nest_and_are_on_the_board():
    descriptor = os.memfd_create("position")
    os.truncate(descriptor, progress.BOARD_BYTES)
    progress.show_on(descriptor)

    def shown():
        return progress.read_board(descriptor)[0]

    with progress.phase("compiles"):
        assert progress.position.first and progress.read_board(descriptor) == ("compiles", True)
    with progress.phase("compiles"):
        assert not progress.position.first and progress.read_board(descriptor) == ("compiles", False)
    entered = progress.position.entered
    with progress.phase("eval"), progress.phase("rollout"):
        progress.step("prefill")
        assert str(progress.position) == shown() == "eval: rollout: prefill"
        assert progress.position.entered == entered + 3
        before, signs = progress.moved, progress.signs
        progress.advance()
        assert progress.moved > before and progress.signs == signs + 1 and progress.position.entered == entered + 3
    assert "eval" not in shown()


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("/venv/torch/distributed/distributed_c10d.py", True),
        ("/venv/megatron/core/pipeline_parallel/p2p_communication.py", True),
        ("/repo/megatron_grpo/parallel/initialize.py", True),  # led_by_rank_0 polls the store
        ("/venv/torch/nn/functional.py", False),
    ],
)
def test_a_thread_in_a_collective_waits_for_others(file, waits):
    scope: dict = {}
    exec(compile("import sys\ndef function(): return sys._getframe()\nframe = function()", file, "exec"), scope)
    assert waits_for_others(scope["frame"]) is waits
    assert place_of(scope["frame"]) == f"{'/'.join(file.split('/')[-2:])}:2 (function)"


def test_the_state_of_a_process_and_the_stacks_of_one_that_has_ended():
    assert re.match(r"[RS] \((running|sleeping)\)\n  thread \d+: ", process_state(os.getpid()))
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    assert process_state(child) == "it has ended"
    assert stacks_of(State(pid=child), patience=time.monotonic()) == "The process has ended.\n"
