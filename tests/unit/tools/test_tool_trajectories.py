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
from run_files import metrics_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.rollout.ledger import content
from megatron_grpo.rollout.ledger.ledger import load, recorded_prompt

spec = importlib.util.spec_from_file_location("trajectories", REPO / "tools" / "data" / "trajectories.py")
trajectories = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trajectories)

TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == "assistant" %}{{ eos_token }}
{% else %};{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
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
    path = bench.write("trajectories.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    words = ["--input", path, "--output", bench.root / "ledger", "--load-hf", bench.model, *RUN.split(), *flags]
    return trajectories.main([str(word) for word in words])


def groups_of(bench):
    found = content.read(bench.root / "ledger")
    keys = [key for number in sorted(found.batches) for key in found.batches[number].groups]
    return [load(found, [key], recorded_prompt)[key] for key in keys]


def tokens_of(rng, count):
    """Rows with made-up tokens: four prompts, two completions each, and log-probabilities around those of the model."""
    rows = []
    for number in range(count):
        ids = rng.integers(5, 60, rng.integers(2, 5)).tolist()
        row = {"prompt_ids": [7, 8, 9 + number // 2], "completion_ids": ids, "reward": number % 2}
        rows.append(row | {"log_probs": (-4 - 2 * rng.random(len(ids))).tolist()})
    return rows


def test_texts_become_what_the_policy_would_have_sampled(bench, capsys):
    """A chat prompt and a plain one; a truncated completion has no end; the fifth row has no mate."""
    chat, plain = [{"role": "user", "content": "1+1="}], "2+2="
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
    first, second = groups_of(bench)
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
        ({"reward": "good"}, "the rewards must be 1 numbers (--reward-funcs exact_match), found ['good']"),
        ({"rewards": [1, 2]}, "the rewards must be 1 numbers"),
        ({"log_probs": [-1.0]}, '"log_probs" must have a number up to 0 for each of'),
        ({"completion_ids": [1, -2]}, '"completion_ids" must be a list of token ids from 0 to'),
        ({"completion_ids": None, "prompt": "1", "completion": "2"}, '"log_probs" are of tokens'),
        ({"group": 5}, "the rows of its group have different prompts"),
    ],
)
def test_a_bad_row_is_named(bench, change, message, capsys):
    rows = [row | change for row in tokens_of(np.random.default_rng(0), 4)]
    assert convert(bench, rows) == 1
    error = capsys.readouterr().err
    assert message in error and "trajectories.jsonl" in error


def log_probs_of(model, row):
    ids = torch.tensor([*row["prompt_ids"], *row["completion_ids"]])
    log_p = torch.log_softmax(model(ids[None]).logits[0], -1)
    return log_p[len(row["prompt_ids"]) - 1 : -1].gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]


def test_a_run_corrects_for_the_policy_that_sampled(bench, capsys):
    """The loss of an update from transformers: weights min(p(policy) / p(behaviour), 1 / 4), and advantages.

    Then the same without log-probabilities: the weight is 1, and a correction by them is refused.
    """
    rows = tokens_of(np.random.default_rng(1), 8)
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
    assert found["loss"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-3)
    assert len({w for values in weights for w in values.tolist()}) > 3 and any((w == 0.25).any() for w in weights)

    (bench.root / "ledger").rename(bench.root / "known")
    assert convert(bench, [{k: v for k, v in row.items() if k != "log_probs"} for row in rows]) == 0
    plain = [*bench.good, *more, "--train-only", str(bench.root / "ledger"), "--save", str(bench.root / "plain")]
    assert launch(TRAIN, plain) == 0
    terms = [-scale * sign * lp for lp, sign in zip(ours, signs, strict=True)]
    assert metrics_of(bench.root / "plain")[-1]["loss"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-3)
    capsys.readouterr()
    assert launch(TRAIN, [*plain, *truncated, "--save", str(bench.root / "refused")]) == 1
    assert "needs the log-probabilities of all sampled tokens" in capsys.readouterr().err
