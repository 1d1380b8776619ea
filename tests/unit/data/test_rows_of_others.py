"""Rows as verl, ms-swift and TRL write them, without conversion: prompt, answer, reward, and the printed line."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bad_input_bench import GOOD
from bad_input_runs import TRAIN, launch, model  # noqa: F401 (a fixture)
from run_files import json_lines
from test_prompts import Characters, flags, text, user

from megatron_grpo.data import prompts
from megatron_grpo.data.answer_column import ANSWER_COLUMNS, find_answers
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.rewards.builtin.math_answer import accuracy
from megatron_grpo.rewards.builtin.short_answer import exact_match, gold_text, gsm8k
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.utils.errors import GrpoError

ASSISTANT = {"role": "assistant", "content": "It is 72.\n#### 72"}


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset([path], Characters(), flags())


def verl_gsm8k(index=0, split="train"):
    """A row as verl's examples/data_preprocess/gsm8k.py writes it; the answer in extra_info is the whole solution."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": "48 and half of it?", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": "72", "style": "rule"},
        "extra_info": {"answer": "48/2=24, 48+24=72\n#### 72", "index": index, "question": "48?", "split": split},
    }


def verl_deepscaler(index=0):
    return {
        "data_source": "",
        "prompt": [{"content": "A half? Let's think step by step.", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
    }


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_verl(tmp_path, capsys, suffix):
    data = write(tmp_path / f"gsm8k.{suffix}", [verl_gsm8k(0), verl_gsm8k(1)])
    assert text(data[1]) == "user:48 and half of it?|>" and data[1].row["extra_info"]["index"] == 1
    assert "answers from reward_model.ground_truth\n" in capsys.readouterr().out
    for reward in (gsm8k, exact_match):
        assert [reward(Sample("", said, data[0].row)) for said in ("72", "73")] == [1, 0]
    data = write(tmp_path / f"deepscaler.{suffix}", [verl_deepscaler()])
    assert [accuracy(Sample("", said, data[0].row)) for said in ("\\boxed{0.5}", "\\boxed{2}")] == [1, 0]


def test_parquet_with_the_arrays_of_pandas(tmp_path):
    """pandas hands pyarrow numpy arrays of objects for nested lists."""
    rows = [verl_gsm8k(index) for index in range(3)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["prompt"] = [np.array(messages, dtype=object) for messages in columns["prompt"]]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    data = PromptDataset([tmp_path / "a.parquet"], Characters(), flags())
    assert text(data[2]) == "user:48 and half of it?|>" and gold_text(Sample("", "", data[2].row)) == "72"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_answer_in_a_list_of_one(tmp_path, suffix):
    """As in verl's description of its rows."""
    row = verl_gsm8k() | {"reward_model": {"style": "rule", "ground_truth": ["72"]}}
    assert exact_match(Sample("", "72", write(tmp_path / f"a.{suffix}", [row])[0].row)) == 1
    row["reward_model"]["ground_truth"] = ["72", "seventy-two"]
    with pytest.raises(GrpoError, match=r"has several values, \['72', 'seventy-two'\]: give one, or compare"):
        exact_match(Sample("", "72", row))


@pytest.mark.parametrize(("suffix", "messages"), [("parquet", True), ("jsonl", False)])
def test_a_run_trains_on_rows_of_verl(tmp_path, model, capfd, suffix, messages):
    """pretrain_grpo.py itself, with a stub for the engine and the messages as a text of the tiny model's vocabulary."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    rows = [
        verl_gsm8k(a) | {"prompt": [user(f"{a}+1=")] if messages else f"{a}+1=", "reward_model": {"ground_truth": "2"}}
        for a in range(1, 9)
    ]
    write(tmp_path / f"a.{suffix}", rows)
    flags = f"{GOOD} --load-hf {model} --train-data-path {tmp_path}/a.{suffix} --save {tmp_path}/run".split()
    flags += ["--reward-routing", "openai/gsm8k=exact_match", *(["--chat-template", template] if messages else [])]
    capfd.readouterr()
    assert launch(TRAIN, flags) == 0
    assert "answers from reward_model.ground_truth\n" in capfd.readouterr().out
    logged = json_lines(tmp_path / "run" / "completions.jsonl")
    assert logged and all(line["prompt"] in [f"{a}+1=" for a in range(1, 9)] for line in logged)
    assert all(line["rewards"]["exact_match"] == (line["completion"].strip() == "2") for line in logged)


def test_a_reward_model_column_of_json_text(tmp_path):
    row = verl_gsm8k() | {"reward_model": json.dumps({"style": "rule", "ground_truth": 72})}
    assert gold_text(Sample("", "", write(tmp_path / "a.parquet", [row])[0].row)) == "72"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_swift(tmp_path, capsys, suffix):
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": [system, user("48 and half?")], "solution": "So \\boxed{72}"},
        {"messages": [system, user("48 and half?"), ASSISTANT], "solution": None},
        {
            "messages": [user("1?"), {"role": "assistant", "content": "2"}, user("48 and half?"), ASSISTANT],
            "solution": "72",
        },
    ]
    data = write(tmp_path / f"a.{suffix}", rows)
    assert [text(prompt) for prompt in data] == [
        "system:Be brief.|user:48 and half?|>",
        "system:Be brief.|user:48 and half?|>",
        "user:1?|assistant:2|user:48 and half?|>",
    ]
    assert [accuracy(Sample("", "\\boxed{72}", prompt.row)) for prompt in data] == [1, 1, 1]
    assert (
        "answers from solution (2 rows), the last assistant message of messages (1 rows); not used, because an earlier "
        "column has the answer: the last assistant message of messages (1 rows)\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("column", ["answer", "solution", "ground_truth"])
def test_rows_of_trl(tmp_path, capsys, suffix, column):
    data = write(tmp_path / f"standard.{suffix}", [{"prompt": "3*24=", column: "72"}])
    assert text(data[0]) == "3*24=" and exact_match(Sample("", "72", data[0].row)) == 1
    data = write(tmp_path / f"conversational.{suffix}", [{"prompt": [user("3*24?")], column: 72}])
    assert text(data[0]) == "user:3*24?|>" and gsm8k(Sample("", "so 72.", data[0].row)) == 1
    assert capsys.readouterr().out.count(f"answers from {column}\n") == 2


def test_the_first_column_of_the_table_has_the_answer():
    row = {
        "ground_truth": 4,
        "messages": [user("?"), {"role": "assistant", "content": "5"}],
        "answer": 1,
        "solution": "3",
        "reward_model": {"ground_truth": 2},
    }
    for number, name in enumerate(ANSWER_COLUMNS, 1):
        assert gold_text(Sample("", "", row)) == str(number)
        assert next(iter(find_answers(row))) == name
        column = name.partition(".")[0] if number < 5 else "messages"
        row = row | {column: None}
    assert find_answers(row) == {}


def test_a_prompt_of_messages_only_loses_its_own_last_turn(tmp_path):
    """Of a row with prompt and messages, prompt is the prompt; the answer may still be the conversation's last turn."""
    data = write(tmp_path / "a.jsonl", [{"prompt": "3*24=", "messages": [user("3*24?"), ASSISTANT]}])
    assert text(data[0]) == "3*24=" and gsm8k(Sample("", "72", data[0].row)) == 1


def test_rows_without_answers_are_counted(tmp_path, capsys):
    write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b", "answer": 1}, {"prompt": "c", "reward_model": {}}])
    assert "answers from answer (1 rows); 2 rows have none\n" in capsys.readouterr().out
    write(tmp_path / "b.jsonl", [{"prompt": "a", "nums": [1], "target": 1}])
    assert "; answers" not in capsys.readouterr().out


def test_streamed_files_name_the_column_of_the_first_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prompts, "CHECKED_BYTES", 100)
    write(tmp_path / "a.parquet", [verl_gsm8k()] * 5)
    assert "answers from reward_model.ground_truth, in the first row (" in capsys.readouterr().out
    (tmp_path / "b.jsonl").write_text("{\n" + '{"prompt": "1"}\n' * 5)
    PromptDataset([tmp_path / "b.jsonl"], Characters(), flags())
    assert "answers" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "no answer to compare with: expected answer, reward_model.ground_truth, .*found prompt$"),
        ({"prompt": "a", "answer": float("nan")}, "found prompt, answer without a value$"),
        ({}, "found no column"),
        ({"reward_model": {"style": "model"}}, "no answer to compare with.*found reward_model"),
        (
            {"reward_model": {"ground_truth": {"target": 3}}},
            r'in "reward_model.ground_truth", must be .*\{\'target\': 3\}',
        ),
        (
            {"reward_model": {"ground_truth": ""}, "solution": "1"},
            'in "reward_model.ground_truth", must be a non-empty',
        ),
        ({"answer": True}, 'in "answer", must be a non-empty string or a number, found True: correct'),
        ({"messages": [user("a"), ASSISTANT | {"content": " "}]}, 'in "the last assistant message of messages", must'),
    ],
)
def test_bad_answers_are_named_with_the_cure(row, message):
    with pytest.raises(GrpoError, match=message):
        exact_match(Sample("", "1", row))
