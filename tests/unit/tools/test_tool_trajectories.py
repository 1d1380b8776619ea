"""tools/data/trajectories.py, and runs with --train-only that learn from what it wrote."""

import importlib.util
import json
import math
import signal

import bad_input_runs
import numpy as np
import pytest
import torch
from bad_input_bench import Bench
from bad_input_runs import REPO, TRAIN, launch
from instruct_models import build_tokenizer
from run_files import metrics_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.rollout.ledger import content
from megatron_grpo.rollout.ledger.ledger import load, recorded_prompt

spec = importlib.util.spec_from_file_location("trajectories", REPO / "tools" / "data" / "trajectories.py")
trajectories = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trajectories)

TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == "assistant" %}{{ eos_token }}
{% else %};{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
CHAT = [{"role": "user", "content": "1+1="}]
TEXT = {"prompt": "1+", "completion": "2", "completion_ids": None, "log_probs": None}
RUN = "--num-generations 2 --reward-funcs exact_match"


@pytest.fixture
def bench(tiny_models, tmp_path, monkeypatch):
    """A valid run of two completions a prompt; no engine may start."""
    kept = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(bad_input_runs, "StubEngine", None)
    found = Bench(tmp_path, tiny_models["qwen3"])
    found.without("--num-generations"), found.without("--reward-funcs")
    found.good += RUN.split()
    yield found
    signal.signal(signal.SIGTERM, kept)


def convert(bench, rows, *flags):
    """Run the tool on rows; return its exit code."""
    return convert_at(bench.root, rows, "--load-hf", bench.model, *flags)


def convert_at(root, rows, *flags):
    (root / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--input", root / "trajectories.jsonl", "--output", root / "ledger", *RUN.split(), *flags]
    return trajectories.main([str(word) for word in words])


def groups_of(root):
    found = content.read(root / "ledger")
    keys = [key for number in sorted(found.batches) for key in found.batches[number].groups]
    return [load(found, [key], recorded_prompt)[key] for key in keys]


def tokens_of(bench, rng, count):
    """Rows with made-up tokens: four prompts, two completions each, and log-probabilities around those of the model."""
    rows, end = [], AutoTokenizer.from_pretrained(bench.model).eos_token_id
    for number in range(count):
        ids = rng.integers(5, 60, rng.integers(1, 4)).tolist() + [end]
        row = {"prompt_ids": [7, 8, 9 + number // 2], "completion_ids": ids, "reward": number % 2}
        rows.append(row | {"log_probs": (-4 - 2 * rng.random(len(ids))).tolist()})
    return rows


def test_texts_become_what_the_policy_would_have_sampled(bench, capsys):
    """A chat prompt and a plain one; a truncated completion has no end; the fifth row has no mate."""
    chat, plain = CHAT, "2+2="
    rows = [
        {"prompt": plain, "completion": "4", "reward": 1, "answer": "not this"},
        {"prompt": chat, "completion": "2", "reward": None},
        {"prompt": plain, "completion": "5!", "reward": 0.5, "truncated": True},
        {"prompt": chat, "completion": "3", "rewards": [0]},
        {"prompt": "3+3=", "completion": "6", "reward": 1},
    ]
    template = bench.write("template.jinja", TEMPLATE)
    assert convert(bench, rows, "--chat-template", template) == 0
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    first, second = groups_of(bench.root)
    ids = [c.token_ids for c in first.completions]
    assert tokenizer.decode(first.prompt.ids) == plain and tokenizer.decode(ids[0][:-1]) == "4"
    assert ids[0][-1] == tokenizer.eos_token_id and tokenizer.decode(ids[1]) == "5!"
    assert [c.finish_reason for c in first.completions] == ["stop", "length"]
    assert tokenizer.decode(second.prompt.ids) == "user:1+1=;assistant:"
    assert [tokenizer.decode(c.token_ids[:-1]) for c in second.completions] == ["2", "3"]
    assert first.rewards.tolist() == [[1], [0.5]] and math.isnan(second.rewards[0, 0]) and second.rewards[1, 0] == 0
    assert all(c.log_probs is None for group in (first, second) for c in group.completions)
    assert "1 rows of smaller groups" in capsys.readouterr().out
    assert (
        convert(bench, rows, "--chat-template", template) == 1
        and "there is a ledger already" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"reward": "good"},
            "the rewards must be 1 numbers (--reward-funcs exact_match) of at most 3.4e+38, found ['g",
        ),
        ({"reward": 10**400}, "the rewards must be 1 numbers"),
        ({"reward": -1e300}, "the rewards must be 1 numbers"),
        ({"log_probs": [-(10**400)] * 2}, '"log_probs" must have a number up to 0 for each of'),
        ({"truncated": "false"}, "\"truncated\" must be true or false, found 'false'"),
        ({"completion_ids": [3, 4], "log_probs": None}, '"completion_ids" ends with 4, which ends no turn: add the'),
        ({**TEXT, "completion": None}, '"completion" must be a text, or messages of the assistant, found None'),
        ({**TEXT, "completion": "", "truncated": True}, "a truncated completion has no token"),
        ({**TEXT, "completion": CHAT}, '"completion" can be messages that end with the assistant\'s'),
        ({**TEXT, "prompt": None, "messages": CHAT}, '"completion" needs its prompt in "prompt" (--prompt-key)'),
        ({**TEXT, "completion": "2" * 1100}, "the row has 1103 tokens, more than --max-prompt-length (512) + "),
        ({"rewards": [1, 2]}, "the rewards must be 1 numbers"),
        ({"log_probs": [-1.0]}, '"log_probs" must have a number up to 0 for each of'),
        ({"completion_ids": [1, -2]}, '"completion_ids" must be a list of token ids from 0 to'),
        ({"completion_ids": None, "prompt": "1", "completion": "2"}, '"log_probs" are of tokens'),
        ({"group": 5}, "the rows of its group have different prompts"),
    ],
)
def test_a_bad_row_is_named(bench, change, message, capsys):
    rows = [row | change for row in tokens_of(bench, np.random.default_rng(0), 4)]
    assert convert(bench, rows) == 1
    error = capsys.readouterr().err
    assert message in error and "trajectories.jsonl" in error
    assert "demonstration" not in error and "left" not in error and not list((bench.root / "ledger").glob("*"))


SAID = [  # and whether it was cut
    ("2", False),
    ("<think>one and one</think>2", False),
    ("<think>\nlet me", True),
    ("\n\n 2 \n\n", False),
    ("", False),
    ([{"role": "assistant", "content": "3\n"}], False),
]
ENDS = {
    "Qwen3-8B": "<|im_end|>",
    "DeepSeek-R1-Distill-Qwen-7B": "<｜end▁of▁sentence｜>",
    "Llama-3.2-3B-Instruct": "<|eot_id|>",
    "Phi-3-mini-4k-instruct": "<|end|>",
    "gemma-3-1b-it": "<end_of_turn>",
    "gpt-oss-20b": "<|return|>",
    "GLM-4-9B-0414": "<|user|>",
    "GLM-4.5-Air": "<|user|>",
    "GLM-4.7-Flash": "<|user|>",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_completion_is_what_the_policy_said(name, tmp_path):
    """The chat template renders the prompt and ends the turn; thoughts and white space of the completion are kept."""
    build_tokenizer(name, tmp_path / "model")
    said = [*SAID, ("1" + ENDS[name], False)]  # it brings its end
    rows = [{"prompt": CHAT, "completion": text, "truncated": cut, "reward": 1} for text, cut in said]
    date = {"Llama-3.2-3B-Instruct": {"date_string": "26 Jul 2024"}}.get(name, {})
    flags = ["--tokenizer-model", tmp_path / "model", "--vocab-size", 2000, "--num-generations", len(said)]
    assert convert_at(tmp_path, rows, *flags, "--chat-template-kwargs", json.dumps(date)) == 0
    (group,), tokenizer = groups_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path / "model")
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, **date)
    assert group.prompt.ids == rendered
    texts = [said if isinstance(said, str) else said[0]["content"] for said, _ in SAID]
    ended = [text + ENDS[name] * (not cut) for text, (_, cut) in zip(texts, SAID, strict=True)] + ["1" + ENDS[name]]
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in ended]
    assert [completion.token_ids for completion in group.completions] == expected
    assert {completion.response_mask for completion in group.completions} == {None}


TRIM = """{% for m in messages %}{{ m.role }}:{{ m.content | trim }}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""


def test_several_messages_are_learnt_where_the_template_keeps_them(bench, capsys):
    """Of a completion of messages the assistant's turns, of the prompt none; a trimmed turn is refused."""
    prompt = [*CHAT, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+1="}]
    more = [{"role": "assistant", "content": said} for said in ("a", "b")]
    row = {"prompt": prompt, "completion": [more[0], {"role": "tool", "content": "x"}, more[1]], "reward": 1}
    template = ["--chat-template", bench.write("template.jinja", TRIM)]
    assert convert(bench, [row, row], *template) == 0
    (group,), tokenizer = groups_of(bench.root), AutoTokenizer.from_pretrained(bench.model)
    end, completion = tokenizer.eos_token, group.completions[0]
    assert tokenizer.decode(group.prompt.ids) == f"user:1+1={end}assistant:2{end}user:2+1={end}assistant:"
    assert tokenizer.decode(completion.token_ids) == f"a{end}tool:x{end}assistant:b{end}"
    learnt = [i for i, own in zip(completion.token_ids, completion.response_mask, strict=True) if own]
    assert tokenizer.decode(learnt) == f"a{end}b{end}" and completion.turns == 2
    call = {"role": "assistant", "content": "sum", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    (bench.root / "ledger").rename(bench.root / "messages")
    assert convert(bench, [{"messages": [*CHAT, call], "reward": 1}] * 2, *template) == 0
    assert tokenizer.decode(groups_of(bench.root)[0].completions[0].token_ids) == f"sum<add>{end}"
    changed = {"messages": [*CHAT, {"role": "assistant", "content": "2\n"}], "reward": 1}
    (bench.root / "ledger").rename(bench.root / "first")
    assert convert(bench, [changed], *template) == 1
    assert (
        "the chat template changes message 2, the assistant's, from '2\\n' to '2', which the p"
        in capsys.readouterr().err
    )


def test_stop_words_end_token_ids_and_long_rows_are_left_out(bench, capsys):
    """A stop word of text leaves no end token. Cutting prompts is refused: the rows of a group would differ."""
    rows = [{"prompt_ids": [7, 8], "completion_ids": [9] * count, "reward": count} for count in (2, 30, 3)]
    lengths = "--max-prompt-length 8 --max-completion-length 8 --stop-words x --truncation-strategy".split()
    assert convert(bench, rows, *lengths, "left") == 1
    assert "--truncation-strategy left would cut prompts after they were answered" in capsys.readouterr().err
    assert convert(bench, rows, *lengths, "raise") == 1
    error = capsys.readouterr().err
    assert "the row has 32 tokens, more than" in error and "delete (leave such rows out)" in error
    assert (
        convert(bench, rows, *lengths, "delete") == 0 and "0 rows of smaller groups, 1 too" in capsys.readouterr().out
    )
    assert groups_of(bench.root)[0].rewards.tolist() == [[2], [3]]


def test_groups_are_written_when_they_are_whole(bench, monkeypatch, capsys):
    """Six rows of three groups, mixed; a bad last row leaves no ledger, though whole groups were written before."""
    monkeypatch.setattr(trajectories, "BATCH", 1), monkeypatch.setattr(trajectories, "REPORTED", 2)
    rows = tokens_of(bench, np.random.default_rng(0), 6)
    rows = [rows[number] for number in (0, 2, 3, 4, 1, 5)]
    assert convert(bench, rows) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if " of 6 rows" in line] == ["2 of 6 rows", "4 of 6 rows"]
    assert [group.prompt.ids[-1] for group in groups_of(bench.root)] == [10, 9, 11]
    written = sum(path.stat().st_size for path in (bench.root / "ledger").glob("groups-*.bin"))
    for path in (bench.root / "ledger").glob("*"):
        path.unlink()
    before = []
    append = trajectories.Ledger.append
    monkeypatch.setattr(trajectories.Ledger, "append", lambda *given: before.append(given[1]) or append(*given))
    assert written and convert(bench, [*rows, rows[0] | {"reward": "x"}]) == 1 and before == [0, 1, 2]
    assert not list((bench.root / "ledger").glob("*"))


def test_large_groups_have_records_of_their_own(bench, monkeypatch):
    """Four groups of a batch: one record where they have room, one each where they are large."""
    rows = tokens_of(bench, np.random.default_rng(0), 8)
    for most, count in ((trajectories.TOKENS, 1), (1, 4)):
        monkeypatch.setattr(trajectories, "TOKENS", most)
        assert convert(bench, rows) == 0
        assert len(set(content.read(bench.root / "ledger").groups.values())) == count
        learnt = [completion.token_ids for group in groups_of(bench.root) for completion in group.completions]
        assert learnt == [row["completion_ids"] for row in rows]
        (bench.root / "ledger").rename(bench.root / f"records_{count}")


def test_a_run_takes_no_longer_sequences_and_no_ledger_without_rewards(bench, capsys):
    """The run allows 8 + 24 tokens, the rows have 8 + 25. Rewards that are all null are the ledger's, no function's."""
    rows = tokens_of(bench, np.random.default_rng(0), 8)
    for row in rows:
        row |= {"prompt_ids": row["prompt_ids"] + [9] * 5, "log_probs": None, "reward": None}
        row["completion_ids"] = [9] * 24 + row["completion_ids"][-1:]
    assert convert(bench, rows) == 0
    run = [*bench.good, "--no-save-hf", "--generation-batch-size", "8", "--train-iters", "5"]
    run += ["--train-only", str(bench.root / "ledger"), "--max-completion-length"]
    assert launch(TRAIN, [*run, "24"]) == 1
    text = (
        "has sequences of up to 33 tokens, more than --max-prompt-length (8) + --max-completion-length (24) = 32: raise"
    )
    assert text in capsys.readouterr().err
    assert launch(TRAIN, [*run, "25"]) == 1
    found = capsys.readouterr()
    null = 'reward "exact_match" is null in the ledger of --train-only for every completion of the first'
    assert f"note: {null} rollout: write it from scored rows" in found.out and f"{null} 3 rollouts" in found.err
    assert "returned" not in found.out + found.err


def log_probs_of(model, row):
    ids = torch.tensor([*row["prompt_ids"], *row["completion_ids"]])
    log_p = torch.log_softmax(model(ids[None]).logits[0], -1)
    return log_p[len(row["prompt_ids"]) - 1 : -1].gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]


def test_a_run_corrects_for_the_policy_that_sampled(bench, capsys):
    """The loss of an update from transformers: weights min(p(policy) / p(behaviour), 1 / 4), and advantages.

    Then the same without log-probabilities: the weight is 1, and a correction by them is refused.
    """
    rows = tokens_of(bench, np.random.default_rng(1), 8)
    assert convert(bench, rows) == 0 and "8 with log-probabilities" in capsys.readouterr().out
    more = "--loss-type reinforce --scale-rewards group --train-iters 1 --no-save-hf --generation-batch-size 8".split()
    truncated = "--rollout-importance-sampling-mode token_truncate --rollout-importance-sampling-threshold 0.25".split()
    assert launch(TRAIN, [*bench.good, *more, *truncated, "--train-only", str(bench.root / "ledger")]) == 0
    found = metrics_of(bench.save)[-1]

    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float64)
    with torch.no_grad():
        ours = [log_probs_of(model, row) for row in rows]
    weights = [(lp - torch.tensor(row["log_probs"])).exp().clamp(max=0.25) for lp, row in zip(ours, rows, strict=True)]
    signs = [1 if row["reward"] else -1 for row in rows]
    scale = 0.5 / (math.sqrt(0.5) + 1e-4)  # rewards 0 and 1: their distance from the mean over their deviation
    terms = [-w * scale * sign * lp for w, lp, sign in zip(weights, ours, signs, strict=True)]
    assert found["loss"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-5)
    assert len({w for values in weights for w in values.tolist()}) > 3 and any((w == 0.25).any() for w in weights)

    (bench.root / "ledger").rename(bench.root / "known")
    assert convert(bench, [{k: v for k, v in row.items() if k != "log_probs"} for row in rows]) == 0
    plain = [*bench.good, *more, "--train-only", str(bench.root / "ledger"), "--save", str(bench.root / "plain")]
    assert launch(TRAIN, plain) == 0
    terms = [-scale * sign * lp for lp, sign in zip(ours, signs, strict=True)]
    assert metrics_of(bench.root / "plain")[-1]["loss"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-5)
    capsys.readouterr()
    assert launch(TRAIN, [*plain, *truncated, "--save", str(bench.root / "refused")]) == 1
    error = capsys.readouterr().err
    assert "needs the log-probabilities of all sampled tokens" in error and "engine" not in error
    assert "the ledger of --train-only lacks them; leave the flag out, or write it from rows that all have" in error
