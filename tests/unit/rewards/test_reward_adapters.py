"""Reward functions of verl and TRL run unchanged: their arguments, by the schemas that both document, and their values.

verl: docs/preparation/reward_function.rst and prepare_data.rst; TRL: docs/source/grpo_trainer.md.
"""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_grpo.data.row_files import read_rows
from megatron_grpo.rewards import adapters, registry
from megatron_grpo.rewards.adapters import register_adapters
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import Sample, get_rewards, is_group_wise
from megatron_grpo.utils.errors import GrpoError

FUNCTIONS = """
import asyncio
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] == 7 and extra_info["num_turns"] == 2
    return 1.0 if solution_str.split()[-1] == ground_truth else 0.1


def detailed(data_source, solution_str, ground_truth, extra_info):
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}


async def slow(data_source, solution_str, ground_truth, extra_info, factor=2):
    await asyncio.sleep(0)
    return factor * (solution_str == ground_truth)


def everything(**arguments):
    return 0


def by_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_text(completions, **kwargs):
    return [float(len(text)) for text in completions]


def boxed(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    found = [re.search(r"\\\\boxed{(.*?)}", text) for text in completions]
    rewards = [float(match is not None and match[1] == gold) for match, gold in zip(found, ground_truth)]
    log_extra("gold", list(ground_truth))
    log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


def of_messages(prompts, completions, completion_ids):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(completion[-1]["content"].startswith("<think>")) for completion in completions]


def one_by_one(prompts, completions, **kwargs):
    yield from (float(len(text)) for text in completions)


def answers(prompts, completions, **kwargs):
    found = [[m["content"] for m in messages if m["role"] == "assistant"] for messages in completions]
    return [float(texts == ["a", "b"]) for texts in found]


def of_a_task(prompts, completions, task, **kwargs):
    return [float(len(text)) if kind == "math" else None for text, kind in zip(completions, task)]


async def nonempty(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if completion else 0.0 for completion in completions]


def with_state(completions, trainer_state, **kwargs):
    return [0.0 for _ in completions]
"""
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "6 x 12?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 7},
}


@pytest.fixture
def reward(tmp_path, monkeypatch):
    """Return a function that gives the reward function NAME of the file above, as the pool would call it."""
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(adapters, "_registered", set())
    file = tmp_path / "theirs.py"
    file.write_text(FUNCTIONS)

    def registered(function, **flags):
        register_adapters([f"{function.replace(':', '_')}={file}:{function}"])
        return get_rewards([function.replace(":", "_")], flags)[0]

    registered.file = file
    return registered


@pytest.mark.parametrize(
    "function, completion, expected",
    [
        ("compute_score", "it is 72", 1.0),
        ("compute_score", "it is 71", 0.1),
        ("detailed", "72", 1.0),
        ("detailed", "71", -1.0),
        ("detailed:acc", "72", True),
        ("detailed:acc", "71", False),
        ("slow", "72", 2),
        ("slow", "71", 0),
    ],
)
def test_a_function_of_verl(function, completion, expected, reward):
    assert reward(function)(Sample("6 x 12?", completion, VERL_ROW)) == expected


def test_rows_of_verls_parquet_reach_the_function(reward, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW]), tmp_path / "train.parquet")
    (_, row), *_ = read_rows(tmp_path / "train.parquet")
    assert reward("compute_score")(Sample("", "72", row)) == 1.0
    as_text = row | {"reward_model": '{"ground_truth": "72"}', "extra_info": '{"index": 7}'}
    assert reward("compute_score")(Sample("", "72", as_text)) == 1.0
    assert reward("compute_score")(Sample("", "72", row | {"answer": "not the ground truth"})) == 1.0
    assert reward("slow")(Sample("", "72", {"answer": "72"})) == 2  # a row of ours


@pytest.mark.parametrize(
    "function, row, message",
    [
        ("compute_score", {"data_source": "a"}, "no answer for verl's ground_truth"),
        ("compute_score", VERL_ROW | {"extra_info": [1]}, '"extra_info" must be an object'),
        ("detailed:accuracy", VERL_ROW, 'a dict with "accuracy" here, and the function returned the keys score, acc'),
        ("slow:acc", VERL_ROW, 'a dict with "acc" here, and the function returned 0'),
    ],
)
def test_what_verls_functions_cannot_be_called_with_is_refused(function, row, message, reward):
    with pytest.raises(GrpoError, match=message):
        reward(function)(Sample("", "so", row))


def group(row, *completions):
    return [Sample("", text, row, token_ids=list(range(len(text)))) for text in completions]


@pytest.mark.parametrize(
    "function, row, completions, expected",
    [
        ("by_ids", {"prompt": "The sky is"}, ["ab", "abcd"], [2.0, 4.0]),
        ("by_text", {"prompt": "The sky is"}, [" blue.", " in the sky."], [6.0, 12.0]),
        ("boxed", {"prompt": "2x?", "ground_truth": "2"}, [r"so \boxed{2}.", r"\boxed{6}"], [1.0, 0.0]),
        ("of_messages", {"prompt": [{"role": "user", "content": "1+1?"}]}, ["<think>2", "2"], [1.0, 0.0]),
        ("of_a_task", {"prompt": "2+2?", "task": "math"}, ["four", "4"], [4.0, 1.0]),
        ("of_a_task", {"prompt": "2+2?", "task": "code"}, ["four"], [None]),
        ("nonempty", {"prompt": "2+2?"}, ["four", ""], [1.0, 0.0]),
        ("one_by_one", {"prompt": "2+2?"}, ["four", "4"], [4.0, 1.0]),
    ],
)
def test_a_function_of_trl(function, row, completions, expected, reward):
    function = reward(function)
    assert function(group(row, *completions)) == expected


def test_a_system_prompt_and_the_column_of_the_prompt_are_those_of_the_run(reward):
    function = reward("of_messages", prompt_key="question", system_prompt="Think.")
    assert function(group({"question": "1+1?"}, "<think>2")) == [1.0]


def test_trl_gets_all_messages_of_an_episode(reward):
    prompt = [{"role": "user", "content": "1+1?"}]
    turns = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "2"}]
    sample = Sample("", "<think>2", {"prompt": prompt}, messages=[*prompt, *turns, {"role": "x", "content": "<think>"}])
    assert reward("of_messages")([sample]) == [1.0]
    assert reward("nonempty")([sample]) == [1.0]


@pytest.mark.parametrize(
    "own",
    [
        [("user", "1+1?")],  # an agent without the row's system prompt
        [("system", "Use the tool."), ("user", "1+1?")],
        [("system", "Think."), ("user", "1+1?")],
        [("system", "Think."), ("user", [{"type": "image"}, {"type": "text", "text": "1+1?"}])],
    ],
)
def test_trl_gets_all_answers_of_an_agent_with_messages_of_its_own(own, reward):
    prompt = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]
    turns = [*own, ("assistant", "a"), ("user", "more"), ("assistant", "b")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert reward("answers")([Sample("", "b", {"prompt": prompt}, messages=messages)]) == [1.0]


def test_answers_of_the_prompt_are_no_answers_of_the_policy(reward):
    shots = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "2"}]
    turns = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert reward("answers")([Sample("", "b", {"prompt": shots}, messages=[*shots, *turns])]) == [1.0]


@pytest.mark.parametrize("function, missing", [("boxed", "ground_truth"), ("with_state", "trainer_state")])
def test_an_argument_that_is_missing_here_is_named(function, missing, reward):
    with pytest.raises(GrpoError, match=f"the function needs {missing}, which is neither a column"):
        reward(function)(group({"prompt": "a"}, "b"))


@pytest.mark.parametrize(
    "word, message",
    [
        ("score=theirs.py", "expected NAME=FILE.py:FUNCTION"),
        ("score={file}", "expected NAME=FILE.py:FUNCTION"),
        ("score=gone.py:f", "no such file: gone.py"),
        ("score={file}:gone", "has no function gone"),
        ("score={file}:everything", "its parameters are arguments: expected verl's"),
        ("score={file}:by_text:acc", "its parameters are completions, kwargs: expected verl's"),
        ("gsm8k={file}:compute_score", '"gsm8k" is already registered'),
    ],
)
def test_what_is_no_function_of_verl_or_trl_is_refused(word, message, reward):
    with pytest.raises(GrpoError, match=message):
        register_adapters([word.format(file=reward.file)])


def test_they_run_in_the_worker_processes(reward):
    names = ["compute_score", "acc", "trl"]
    functions = ["compute_score", "detailed:acc", "by_ids"]
    words = [f"{name}={reward.file}:{function}" for name, function in zip(names, functions, strict=True)]
    pool = RewardPool(names, flags={"reward_adapter": words, "prompt_key": "prompt", "system_prompt": None})
    values, failures = pool.score(group(VERL_ROW, "72", "7"), group_size=2)
    pool.close()
    assert failures == [] and np.allclose(values, [[1, 1, 2], [0.1, 0, 1]])
    register_adapters(words)
    register_adapters(words)  # a second run in one process
    assert [is_group_wise(name) for name in names] == [False, False, True]


HELPED = """
from .helpers import right
from . import helpers


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return helpers.FACTOR * right(solution_str, ground_truth)
"""


def test_a_file_imports_files_of_its_folder(tmp_path, monkeypatch):
    """Folders with dots in their names, and two files of the same name in folders whose names differ by a dot."""
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(adapters, "_registered", set())
    words = []
    for factor, folder in enumerate(["v1.0", "v1_0"], start=1):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.score.py").write_text(HELPED)
        text = f"FACTOR = {factor}\ndef right(a, b):\n    return a == b\n"
        (tmp_path / folder / "helpers.py").write_text(text)
        words.append(f"score{factor}={tmp_path}/{folder}/my.score.py:compute_score")
    register_adapters(words)
    sample = Sample("", "7", {"answer": "7"}, messages=[])
    assert [function(sample) for function in get_rewards(["score1", "score2"])] == [1, 2]


def test_an_import_of_its_folder_without_the_dot_is_named(tmp_path):
    (tmp_path / "helpers_of_mine.py").write_text("right = 1\n")
    (tmp_path / "score.py").write_text("from helpers_of_mine import right\n")
    with pytest.raises(GrpoError, match=r"score\.py: No module named 'helpers_of_mine': write from \.helpers"):
        register_adapters([f"score={tmp_path}/score.py:compute_score"])
