"""The reward functions, their registry, and the pool that must survive whatever a function does."""

import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from ranks import alive, gone
from slow import slow_except

from megatron_grpo.rewards import registry
from megatron_grpo.rewards.builtin.short_answer import last_number
from megatron_grpo.rewards.pool import GroupMember, RewardPool
from megatron_grpo.rewards.registry import Sample, check_file, get_rewards, load_plugins, register_reward
from megatron_grpo.utils.errors import GrpoError

REPO = Path(__file__).resolve().parents[3]
# s for a call that hangs; one that does not must get a processor within it, also on a busy machine
LIMIT = math.ceil(3 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def reward(name, completion, prompt="", **row):
    return get_rewards([name])[0](Sample(prompt, completion, row))


# --- the functions


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [("341", "341", 1), (" 341\n", "341", 1), ("341", 341, 1), ("341.", "341", 0), ("34", "341", 0), ("", "341", 0)],
)
def test_exact_match(completion, answer, expected):
    assert reward("exact_match", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so it is 72.", "72"),
        ("costs $1,234.50.", "1234.50"),
        ("3, 4 and 5", "5"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("2,000,000 people", "2000000"),
        ("10-5", "5"),
        ("x=-5", "-5"),
        ("it fell to -$3", "-3"),
        ("about .5", "0.5"),
        ("#### -12", "-12"),
        ("007", "7"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("She sold 48+24=72 clips.\n#### 72", "Natalia ... 24\n#### 72", 1),
        ("The answer is 72.0", "72", 1),
        ("It is $1,080.", "#### 1,080", 1),
        ("72 clips in 2 months", "72", 0),
        ("I do not know", "72", 0),
        ("7", 7, 1),
    ],
)
def test_gsm8k(completion, answer, expected):
    assert reward("gsm8k", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"first \boxed{3}, no: \boxed{x^{2}+1}", "1+x^2", 1),
        ("<think>5</think><answer>1,000</answer>", "1000", 1),
        (r"<answer>it is \boxed{2\pi}</answer>", r"2\pi", 1),
        (r"<answer>2</answer> \boxed{3}", "3", 0),
        ("<answer>18 dollars.</answer>", "18", 1),
        ("<answer>2</answer>", r"2\pi", 0),
        ("<answer>5</answer>", "3, 5", 0),
        ("<answer>5, 3</answer>", "3, 5", 1),
        ("<answer>[0, 1]</answer>", "[0, 1)", 0),
        ("the answer is 18", "18", 0),  # neither <answer> nor \boxed
        (r"cut off \boxed{18", "18", 0),
        ("<answer></answer>", "18", 0),
        ("<answer>18</answer>", "9*2=<<9*2=18>>18\n#### 18", 1),
        ("<answer>18</answer>", r"We get $9\cdot 2=\boxed{18}$.", 1),
    ],
)
def test_accuracy(completion, answer, expected):
    assert reward("accuracy", completion, answer=answer) == expected


def test_accuracy_takes_the_solution_when_there_is_no_answer():
    assert reward("accuracy", r"\boxed{4}", solution=r"$2+2=\boxed{4}$") == 1


@pytest.mark.parametrize("name", ["exact_match", "gsm8k", "accuracy"])
@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": ""}, {"answer": [1, 2]}, {"answer": True}])
def test_a_row_without_a_usable_answer_is_an_error(name, row):
    with pytest.raises(GrpoError, match="answer"):
        reward(name, "<answer>1</answer>", **row)


@pytest.mark.parametrize(("name", "gold"), [("gsm8k", "blue"), ("accuracy", "blue}")])
def test_a_gold_answer_that_cannot_be_read_is_an_error(name, gold):
    with pytest.raises(GrpoError, match="blue"):
        reward(name, "<answer>blue</answer>", answer=gold)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>\na < b\n</think>\n\n<answer>\nb\n</answer>\n", 1),
        ("<think>a</think><answer>b</answer> done", 0),
        ("well <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("a</think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format(completion, expected):
    assert reward("format", completion) == expected


def test_format_with_the_tag_in_the_prompt():
    assert reward("format", "a</think><answer>b</answer>", prompt="<|assistant|>\n<think>\n") == 1


# --- the registry


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(registry, "_loaded", set())


def test_unknown_name():
    with pytest.raises(GrpoError, match=r'"exact_macth" \(did you mean "exact_match"\?\); known: accuracy, code, '):
        get_rewards(["format", "exact_macth"])


def test_flags_fill_keyword_only_parameters(clean_registry):
    @register_reward("mine")
    def mine(sample, *, max_completion_length, of_its_own=3):
        return max_completion_length + of_its_own

    (function,) = get_rewards(["mine"], {"max_completion_length": 5, "seed": 1})
    assert function(Sample("", "", {})) == 8
    with pytest.raises(
        GrpoError, match=r'parameter max_completion_length of the reward "mine" .* flag --max-completion-length'
    ):
        get_rewards(["mine"], {"seed": 1})


def test_names_are_taken_once(clean_registry):
    def mine(sample):
        return 1.0

    assert register_reward("mine")(mine) is mine
    assert get_rewards(["mine"]) == [mine]
    for name in ("mine", "accuracy"):
        with pytest.raises(GrpoError, match=f'the reward name "{name}" is already registered by'):
            register_reward(name)(lambda sample: 0.0)


def plugin(path, text):
    path.write_text("from megatron_grpo.rewards.registry import register_reward\n" + text)
    return path


def test_plugins(clean_registry, tmp_path):
    path = plugin(tmp_path / "p.py", "@register_reward('p')\ndef p(sample):\n    return len(sample.completion)\n")
    load_plugins([path, path])
    load_plugins([path])
    assert reward("p", "abc") == 3


def test_a_plugin_that_another_one_imports(clean_registry, tmp_path):
    plugin(tmp_path / "a.py", "def same(sample):\n    return 2\n\nregister_reward('ra')(same)\n")
    plugin(tmp_path / "b.py", "from .a import same\nregister_reward('rb')(same)\n")
    load_plugins([tmp_path / "b.py", tmp_path / "a.py"])
    assert (reward("ra", ""), reward("rb", "")) == (2, 2)


def test_a_folder_of_a_plugin_is_named(clean_registry, tmp_path):
    (tmp_path / "my_helpers").mkdir()
    (tmp_path / "my_helpers" / "__init__.py").touch()
    with pytest.raises(GrpoError, match=r"p\.py: No module named 'my_helpers': write from \.my_helpers import NAME"):
        load_plugins([plugin(tmp_path / "p.py", "import my_helpers\n")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = undefined\n", r"p\.py: line 3: NameError: name 'undefined' is not defined: y = undefined"),
        ("def f(:\n", r"p\.py: line 2: SyntaxError: invalid syntax: def f\(:"),
        ("x = " + "-" * 100_000 + "1\n", r"p\.py: (MemoryError|RecursionError): "),
        ("import no_such_module\n", r"p\.py: line 2: ModuleNotFoundError"),
        (
            "@register_reward('format')\ndef f(sample): ...\n",
            r"p\.py: line 2: GrpoError: the reward name .format. is already registered",
        ),
    ],
)
def test_mistakes_in_plugins(clean_registry, tmp_path, text, message):
    with pytest.raises(GrpoError, match=message):
        load_plugins([plugin(tmp_path / "p.py", text)])


def test_the_check_of_a_plugin_prints_none_of_its_warnings(tmp_path, recwarn):
    check_file(plugin(tmp_path / "p.py", "pattern = '\\d'\n"), "--external-plugins")
    assert not recwarn.list


def test_plugin_files(tmp_path):
    with pytest.raises(GrpoError, match="no such file"):
        load_plugins([tmp_path / "absent.py"])
    (tmp_path / "rewards.txt").write_text("")
    with pytest.raises(GrpoError, match="not a Python file"):
        load_plugins([tmp_path / "rewards.txt"])


# --- the pool

PLUGIN = r'''
import asyncio, contextlib, os, re, subprocess, sys, time
from pathlib import Path
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.rewards.registry import register_group_reward, register_reward

@register_reward("act")
def act(sample):
    """Does what the completion says."""
    what, _, argument = sample.completion.partition(" ")
    if what == "value":
        return float(argument)
    if what == "once":  # fails the first time
        if Path(argument).exists():
            return 1.0
        Path(argument).touch()
        raise OSError("not yet")
    if what == "hang":  # in C, holding the interpreter's lock
        return re.match("(a+)+$", "a" * 60 + "b")
    if what in ("stray", "daemon"):  # with a child of its own, in a session of its own
        child = subprocess.Popen(["sleep", "600"], start_new_session=what == "daemon")
        Path(argument).write_text(f"{child.pid}\n")
        time.sleep(600)
    if what == "gate":
        while not Path(argument).exists():
            time.sleep(0.01)
        return 1.0
    if what == "bad":
        raise GrpoError("this row is wrong")
    if what == "close":  # every file of this process
        os.closerange(0, 1000)
        return 1.0
    if what == "write":  # into every file of this process, among them the pipe of the reports
        for number in range(3, 100):
            with contextlib.suppress(OSError):
                os.write(number, argument.encode().decode("unicode_escape").encode())
        return 1.0
    if what == "surrogate":  # as json.loads makes it of an escape
        raise ValueError("no tool \ud800")
    return {
        "none": lambda: None, "true": lambda: True, "raise": lambda: 1 / 0, "text": lambda: "1.0",
        "inf": lambda: float("inf"), "nan": lambda: float("nan"), "huge": lambda: 1e39, "int": lambda: 10**400,
        "list": lambda: [1.0], "die": lambda: os._exit(3), "exit": lambda: sys.exit(3),
        "print": lambda: print("hello") or 1.0,
        "input": lambda: float(len(sys.stdin.read())), "slow": lambda: time.sleep(0.4) or 1.0,
        "fork": lambda: 1.0 if os.fork() else 2.0, "forkraise": lambda: 1.0 if os.fork() else 1 / 0,
        "pid": lambda: float(os.getpid()), "torch": lambda: float("torch" in sys.modules),
    }[what]()

@register_reward("later")
async def later(sample):
    await asyncio.sleep(0)
    return 2

@register_group_reward("rank")
def rank(samples):
    """How many samples of the group have a smaller number; or what the first sample says."""
    what, _, argument = samples[0].completion.partition(" ")
    numbers = [float(sample.completion.split()[-1]) for sample in samples]
    if what == "hang":
        time.sleep(600)
    if what == "die":
        os._exit(3)
    if what == "once" and not Path(samples[0].row["file"]).exists():  # fails the first time
        Path(samples[0].row["file"]).touch()
        raise OSError("not yet")
    faults = {"prefix": numbers[1:], "single": 1.0, "text": ["1.0", 2.0], "inf": [None, float("inf")]}
    if what == "none":
        return [None] * len(numbers)
    return faults.get(what, [sum(other < number for other in numbers) for number in numbers])

@register_group_reward("spread")
async def spread(samples, *, max_completion_length=7):
    await asyncio.sleep(0)
    return tuple(max_completion_length + place for place in range(len(samples)))

@register_reward("never")
def never(sample):
    raise ValueError("never works")
'''


@pytest.fixture
def make_pool(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    pools = []

    def make(*names, **options):
        pools.append(RewardPool(names or ["act"], [path], **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def samples(*completions):
    return [Sample("", text, {"answer": "1"}, source=f"data.jsonl:{i}") for i, text in enumerate(completions, 1)]


def test_values(make_pool):
    pool = make_pool("act", "later", "exact_match", workers=2)
    values, failures = pool.score(samples("value 0.25", "none", "true", "value -3"))
    expected = [[0.25, 2, 0], [math.nan, 2, 0], [1, 2, 0], [-3, 2, 0]]
    assert values.dtype == np.float32 and failures == []
    np.testing.assert_array_equal(values, expected)
    assert pool.score([])[0].shape == (0, 3)


def sourced(*pairs):
    return [Sample("", text, {"data_source": source}, source=source) for source, text in pairs]


def test_routes(make_pool):
    pool = make_pool("act", "later", "never", routes={"x": ["later", "act"], "y": ["later"]}, workers=2)
    values, failures = pool.score(sourced(("x", "value 4"), ("y", "raise"), ("x", "value 5")))
    np.testing.assert_array_equal(values, [[4, 2, math.nan], [math.nan, 2, math.nan], [5, 2, math.nan]])
    assert failures == []  # not to be scored is no failure


def test_all_that_was_to_be_scored_failed(make_pool):
    pool = make_pool("act", "never", routes={"x": ["act"], "y": ["never"]})
    with pytest.raises(GrpoError, match='"never" failed on all 1 samples; the first, y: raised ValueError'):
        pool.score(sourced(("x", "value 1"), ("y", ""), ("x", "value 1")))


def test_clip(make_pool):
    values, _ = make_pool("act", clip=1.5).score(samples("value 7", "value -1e30", "value 1.25", "none"))
    np.testing.assert_array_equal(values.ravel(), [1.5, -1.5, 1.25, math.nan])


def test_a_reward_that_overflows_the_weighted_sum_is_a_fault(make_pool):
    """The largest float32 is 3.4e38: half of it divided by two functions and a weight of -100 is 8.5e35."""
    completions = samples("value 8e35", "value -9e35", "value 1e39", "value 1")
    values, failures = make_pool("act", "later", weights=[-100.0, 1.0]).score(completions)
    np.testing.assert_allclose(values[:, 0], [8e35, math.nan, math.nan, 1])
    assert [failure.reason for failure in failures] == [
        "returned -9e+35, beyond float32's range in advantages (--reward-weights -100)",
        "returned 1e+39, beyond float32's range (±3.4e+38)",
    ]
    values, failures = make_pool("act", weights=[1e9], clip=2.0).score(completions[:2])
    assert values.ravel().tolist() == [2, -2] and failures == []


def test_a_large_reward_is_a_fault_of_its_whole_group(make_pool):
    completions = samples("order 1", "order 2", "order 1", "order 1")  # rewards 0, 1; 0, 0
    values, failures = make_pool("rank", weights=[3e38]).score(completions, group_size=2)
    np.testing.assert_array_equal(values.ravel(), [math.nan, math.nan, 0, 0])
    assert [failure.key for failure in failures] == [0, 1]


def test_flags_reach_the_workers():
    pool = RewardPool(["soft_overlong"], flags={"max_completion_length": 8, "soft_cache_length": 4})
    assert pool.score([Sample("", "", {}, token_ids=[1] * 6)])[0].tolist() == [[-0.5]]
    pool.close()


FAULTS = {
    "raise": "raised ZeroDivisionError: division by zero",
    "text": "returned '1.0', not a finite number",
    "inf": "returned inf, not a finite number",
    "nan": "returned nan, not a finite number",
    "huge": "returned 1e+39, beyond float32's range (±3.4e+38)",
    "int": f"returned 1{'0' * 79}, beyond float32's range (±3.4e+38)",
    "list": "returned [1.0], not a finite number",
    "die": "ended its process (exit status 3)",
    "exit": "raised SystemExit: 3",
    "surrogate": r"raised ValueError: no tool \ud800",
    "hang": f"took longer than {LIMIT} s (--reward-timeout)",
}


@pytest.mark.slow
def test_a_fault_costs_its_own_sample_only(make_pool):
    completions = ["value 1", *FAULTS, "value 2"]
    completions = [c for fault in completions for c in (fault, "value 7")]
    values, failures = make_pool("act", "later", timeout=LIMIT, retries=0).score(samples(*completions))
    expected = [math.nan if c in FAULTS else float(c.split()[1]) for c in completions]
    np.testing.assert_array_equal(values, [[value, 2] for value in expected])
    found = {failure.completion: failure.reason for failure in failures}
    assert {what: re.sub(r", \S+plugin\.py, line \d+$", "", reason) for what, reason in found.items()} == FAULTS
    assert re.search(r", \S+plugin\.py, line \d+$", found["raise"])
    assert [failure.key for failure in failures] == [i for i, c in enumerate(completions) if c in FAULTS]
    assert all(failure.reward == "act" for failure in failures)
    raised = failures[0]
    assert raised.source == "data.jsonl:3" and "1 / 0" in raised.traceback and "plugin.py" in raised.traceback


@pytest.mark.slow
def test_writing_and_closing_what_is_not_ones_own_costs_the_own_sample_only(make_pool):
    """The reports' pipe is among the files of the process: lines that no worker writes, half a line, and no pipe."""
    lines = ["text\\n", "[", '[99, 0, "value", 1.0]\\n', '["ready", [0]]\\n', "[[1]]\\n", "{}\\n", "1\\n", "\\xff\\n"]
    completions = ["value 1", "close", *(f"write {line}" for line in lines), "value 2"]
    completions = [c for fault in completions for c in (fault, "value 7")]
    values, failures = make_pool("act", "later", timeout=LIMIT, retries=0).score(samples(*completions))
    expected = [float(c.split()[1]) if c.startswith("value") else math.nan for c in completions]
    np.testing.assert_array_equal(values, [[value, 2] for value in expected])
    reasons = {failure.completion: failure.reason for failure in failures}
    assert reasons.pop("close").startswith("ended its process")
    assert set(reasons.values()) == {"wrote into a file descriptor that is not its own"} and len(reasons) == len(lines)


def test_a_second_try(make_pool, tmp_path):
    values, failures = make_pool().score(samples(f"once {tmp_path / 'a'}"))
    assert values.tolist() == [[1.0]] and failures == []
    values, failures = make_pool(retries=0).score(samples("value 0", f"once {tmp_path / 'b'}"))
    assert np.isnan(values[1, 0]) and failures[0].reason.startswith("raised OSError: not yet, ")


@pytest.mark.slow
def test_the_limit_is_for_a_call_and_not_for_a_chunk(make_pool):
    values, failures = make_pool(timeout=LIMIT).score(samples(*["slow"] * 8))  # 3.2 s in one process
    assert values.ravel().tolist() == [1.0] * 8 and failures == []


def test_output_and_input_of_functions_do_not_disturb(make_pool, capfd):
    assert make_pool().score(samples("print", "input"))[0].ravel().tolist() == [1.0, 0.0]
    assert capfd.readouterr() == ("", "hello\n")


def test_a_child_that_a_function_forks_and_lets_go_has_no_say(make_pool):
    values, failures = make_pool().score(samples("fork", "value 3", "forkraise", "value 4"))
    assert values.ravel().tolist() == [1.0, 3.0, 1.0, 4.0] and failures == []


def test_workers_import_nothing_heavy(make_pool):
    assert make_pool("act", "accuracy", "format").score(samples("torch"))[0][0, 0] == 0.0


def test_scoring_while_others_are_generated(make_pool):
    pool = make_pool()
    for key in ("a", "b"):
        pool.submit(key, samples(f"value {ord(key)}")[0])
    deadline = time.monotonic() + 60
    while pool.poll() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.poll() == 0
    pool.submit("c", samples("die")[0])
    values = pool.finish(["c", "a", "b"])
    np.testing.assert_array_equal(values, [[math.nan], [97], [98]])
    assert [failure.key for failure in pool.failures] == ["c"]
    assert pool.score(samples("value 1"))[0].tolist() == [[1.0]] and pool.failures == []


def test_known_rewards_and_failed_episodes_are_not_scored(make_pool):
    """A resume gives rewards of the ledger; an episode whose environment failed has none, and its group goes on."""
    pool = make_pool("act", "rank")
    pool.submit(0, Sample("", "value 1", {}), GroupMember("a", 0, 3))
    pool.submit(1, Sample("", "value 2", {}, finish_reason="failed"), GroupMember("a", 1, 3))
    pool.give(2, Sample("", "known", {}), [7.0, 8.0])
    pool.submit(3, Sample("", "value 3", {}), GroupMember("a", 2, 3))
    assert pool.scored([1, 2])
    values = pool.finish([2, 1, 0, 3])
    np.testing.assert_array_equal(values, [[7, 8], [math.nan, math.nan], [1, 0], [3, 1]])


def test_a_stream_of_groups_is_taken_group_by_group(make_pool, tmp_path):
    """The rewards of a group do not wait for those of another, and the pool forgets what was taken."""
    pool = make_pool("act", workers=2, timeout=600.0, retries=0)
    for key, text in enumerate(["value 7", "raise", f"gate {tmp_path / 'open'}", "value 1"]):
        pool.submit(key, samples(text)[0], GroupMember(key // 2, key % 2, 2))
    while (taken := pool.take([0, 1], 4)) is None:
        pool.poll(0.2)
    np.testing.assert_array_equal(taken[0], [[7], [math.nan]])
    assert [failure.key for failure in taken[1]] == [1]
    assert pool.take([2, 3], 4) is None
    pool.submit(0, samples("value 5")[0])  # the key is free again
    (tmp_path / "open").touch()
    while (taken := pool.take([2, 3], 4)) is None:
        pool.poll(0.2)
    assert taken[0].tolist() == [[1], [1]] and taken[1] == []
    while (taken := pool.take([0], 4)) is None:
        pool.poll(0.2)
    assert taken[0].tolist() == [[5]]


def test_a_function_that_fails_on_all_of_a_stream_ends_the_run(make_pool):
    pool = make_pool("act", retries=0)
    with pytest.raises(GrpoError, match='reward "act" failed on all 64 samples'):
        for key in range(200):
            pool.submit(key, samples("raise")[0])
            while pool.take([key], 100) is None:
                pool.poll(0.2)
    assert key == 63


def take(pool, key, text, batch_size):
    """Submit and take one sample."""
    pool.submit(key, Sample("", text, {"answer": "1", "data_source": "x"}))
    while (taken := pool.take([key], batch_size)) is None:
        pool.poll(0.2)
    return taken[0].tolist()


def test_a_function_that_has_ceased_to_work_ends_a_stream(make_pool):
    """As without a stream: it fails on a whole batch, here of 4 samples. A value begins the count again."""
    pool = make_pool("act", retries=0)
    for key, text in enumerate(["value 1", "raise", "raise", "raise", "none", "raise", "raise", "raise"]):
        take(pool, key, text, 4)
    with pytest.raises(GrpoError, match='reward "act" failed on the last 4 samples'):
        take(pool, 8, "raise", 4)


def test_a_function_that_fails_on_a_whole_evaluation_ends_a_stream(make_pool):
    pool = make_pool("act", "never", retries=0, routes={"x": ["act"], "y": ["act", "never"]})
    assert take(pool, 0, "value 2", None)[0][0] == 2.0, "never has nothing to score"
    with pytest.raises(GrpoError, match='reward "act" failed on all 1 samples'):
        take(pool, 1, "raise", None)


def test_some_samples_can_be_waited_for_while_others_are_scored(make_pool, tmp_path):
    pool = make_pool("act", "later", workers=2, timeout=600.0, retries=0)
    gate = f"gate {tmp_path / 'open'}"
    for key, text in enumerate(["value 7", "none", "raise", *[gate] * 5]):
        pool.submit(key, samples(text)[0])
    np.testing.assert_array_equal(pool.wait([1, 0, 2]), [[math.nan, 2], [7, 2], [math.nan, 2]])
    assert pool.poll() > 0  # the others wait
    (tmp_path / "open").touch()
    values = pool.finish()
    np.testing.assert_array_equal(values[:, 0], [7, math.nan, math.nan, 1, 1, 1, 1, 1])
    assert [failure.key for failure in pool.failures] == [2]


# --- group-wise functions


def test_a_group_is_scored_in_one_call(make_pool):
    """Beside functions of one sample; each value belongs to its sample, and the ranks are those of the group."""
    pool = make_pool("act", "rank", "later", "spread", workers=2, flags={"max_completion_length": 20})
    texts = ["value 3", "value 1", "value 2", "value 5", "value 5", "value -1"]
    values, failures = pool.score(samples(*texts), group_size=3)
    expected = [[3, 2, 2, 20], [1, 0, 2, 21], [2, 1, 2, 22], [5, 1, 2, 20], [5, 1, 2, 21], [-1, 0, 2, 22]]
    assert failures == []
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(pool.score(samples("value 9"))[0], [[9, 0, 2, 20]])  # a group of one


def test_a_group_is_scored_when_its_last_sample_has_arrived(make_pool):
    """In the order of places, whatever the order of arrival. Nothing waits for a group that stays incomplete."""
    pool = make_pool("rank", "spread")
    for key, group, place, text in [("d", 1, 1, "value 8"), ("a", 0, 2, "value 1"), ("b", 0, 0, "value 2")]:
        pool.submit(key, samples(text)[0], GroupMember(group, place, 3))
        assert pool.poll() == 0
    pool.submit("c", samples("value 3")[0], GroupMember(0, 1, 3))
    assert pool.wait(["a", "b", "c"]).tolist() == [[0, 9], [1, 7], [2, 8]]
    assert pool.finish(["c", "a", "b"]).tolist() == [[2, 8], [0, 9], [1, 7]] and pool.failures == []
    pool.submit("d", samples("value 4")[0], GroupMember(1, 0, 2))  # nothing is left of the incomplete group
    with pytest.raises(AssertionError, match="belong to incomplete groups"):
        pool.finish(["d"])


GROUP_FAULTS = {
    "prefix": "returned 1 values for 2 completions",
    "single": "returned 1.0, not a list of 2 values, one for each completion",
    "text": "returned '1.0', not a finite number (value 1 of 2)",
    "inf": "returned inf, not a finite number (value 2 of 2)",
    "hang": f"took longer than {LIMIT} s (--reward-timeout)",
    "die": "ended its process (exit status 3)",
}


@pytest.mark.slow
def test_a_fault_costs_its_own_group_only(make_pool):
    faulty = [text for what in GROUP_FAULTS for text in (f"{what} 1", "value 3")]
    pool = make_pool("rank", "later", timeout=LIMIT, retries=0)
    values, failures = pool.score(samples("value 1", "value 2", *faulty, "none 0", "value 1"), group_size=2)
    np.testing.assert_array_equal(values[:, 0], [0, 1, *[math.nan] * (len(faulty) + 2)])
    assert (values[:, 1] == 2).all()
    reasons = [reason for reason in GROUP_FAULTS.values() for _ in range(2)]
    assert [(f.reward, f.key, f.reason) for f in failures] == [("rank", i, r) for i, r in enumerate(reasons, 2)]


def test_a_second_try_of_a_group(make_pool, tmp_path):
    group = [Sample("", f"once {i}", {"file": str(tmp_path / "tried")}) for i in (5, 4)]
    values, failures = make_pool("rank").score(group, group_size=2)
    assert values.tolist() == [[1], [0]] and failures == []


def test_routes_and_clip_of_groups(make_pool):
    pool = make_pool("rank", "later", routes={"x": ["rank"], "y": ["later"]}, clip=1.5)
    values, failures = pool.score(sourced(*(("x", f"value {i}") for i in (2, 0, 1)), *[("y", "")] * 3), group_size=3)
    np.testing.assert_array_equal(values, [[1.5, math.nan], [0, math.nan], [1, math.nan], *[[math.nan, 1.5]] * 3])
    assert failures == []


@pytest.mark.slow
def test_a_group_wise_function_that_always_hangs_is_not_waited_for(make_pool):
    with pytest.raises(GrpoError, match='"rank" returned no value and timed out on 8 samples'):
        make_pool("rank", timeout=0.2, retries=0).score(samples(*["hang 1"] * 40), group_size=2)


def test_a_worker_that_dies_while_idle_is_replaced(make_pool):
    pool = make_pool(retries=0)
    pid = int(pool.score(samples("pid"))[0][0, 0])
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])
    assert pool.score(samples("value 1", "value 2"))[0].ravel().tolist() == [1.0, 2.0]


def test_wrong_data_ends_the_run(make_pool):
    with pytest.raises(GrpoError, match=r'reward "act" on data\.jsonl:2: this row is wrong'):
        make_pool().score(samples("value 1", "bad"))


def test_a_function_that_always_fails_ends_the_run(make_pool):
    with pytest.raises(
        GrpoError, match=r'"never" failed on all 2 samples; .*never works, .*plugin\.py, line \d+;'
    ) as raised:
        make_pool("act", "never").score(samples("value 1", "value 2"))
    assert "\n" not in str(raised.value) and raised.value.details.startswith("Traceback")


@pytest.mark.slow
def test_a_function_that_always_hangs_is_not_waited_for(make_pool):
    with pytest.raises(GrpoError, match='"act" returned no value and timed out on 4 samples'):
        make_pool(timeout=0.2).score(samples(*["hang"] * 40))


def test_mistakes_show_at_the_start(make_pool, tmp_path):
    with pytest.raises(GrpoError, match='unknown reward function "akt"'):
        make_pool("akt")
    (tmp_path / "plugin.py").write_text("1 / 0")
    with pytest.raises(GrpoError, match=r"plugin\.py: line 1: ZeroDivisionError"):
        RewardPool(["act"], [tmp_path / "plugin.py"])
    (tmp_path / "plugin.py").write_text("import os; os._exit(1)")
    with pytest.raises(GrpoError, match=r"does not start: it ended its process \(exit status 1\)"):
        RewardPool(["act"], [tmp_path / "plugin.py"])


def test_samples_travel_together(monkeypatch):
    """A round trip for every sample would cost several times what the scoring does."""
    pool, sent, dumps = RewardPool(["exact_match"]), [], pickle.dumps
    monkeypatch.setattr(pickle, "dumps", lambda chunk: sent.append(len(chunk)) or dumps(chunk))
    assert pool.score([Sample("1+1=", "2", {"answer": "2"}) for _ in range(1000)])[0].sum() == 1000
    pool.close()
    assert sum(sent) == 1000 and len(sent) < 100


@pytest.mark.parametrize("child", ["stray", "daemon"])
def test_close_ends_workers_and_what_they_started(make_pool, tmp_path, child):
    pool = make_pool(timeout=1000.0)
    pids = [worker.process.pid for worker in pool._workers]
    pool.submit(0, samples(f"{child} {tmp_path / 'child'}")[0])
    deadline = time.monotonic() + 60
    while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text().endswith("\n")):
        assert time.monotonic() < deadline
        pool.poll(0.01)
    pids.append(int((tmp_path / "child").read_text()))
    assert all(map(alive, pids))
    pool.close()
    assert gone(pids)


@pytest.mark.parametrize("end", slow_except(["SIGKILL"], ["exit", "SIGKILL"]))
def test_workers_die_with_the_trainer(tmp_path, end):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "trainer.py").write_text(f"""
import sys, time
sys.path.insert(0, {str(REPO)!r})
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import Sample
pool = RewardPool(["act"], [{str(tmp_path / "plugin.py")!r}], workers=2, timeout=1000)
pool.submit(0, Sample("", "hang", {{}}))
pool.poll()  # hands it over; the other worker waits for work
print(*[worker.process.pid for worker in pool._workers], flush=True)
sys.stdin.read()
""")
    trainer = subprocess.Popen(
        [sys.executable, tmp_path / "trainer.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    time.sleep(0.2)  # into the hang, unless the machine is slow
    assert len(pids) == 2 and all(map(alive, pids))
    if end == "exit":
        trainer.stdin.close()
    else:
        trainer.kill()
    trainer.wait(60)
    assert gone(pids)
