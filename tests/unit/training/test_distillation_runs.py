"""Whole runs with --loss-type gkd: on the policy's completions and on recorded ones, with one teacher and with two.

pretrain_grpo.py runs in this process, with an engine that gives one token a step.
"""

import json
import signal

import bad_input_runs
import pytest
from bad_input_bench import Bench
from bad_input_runs import TRAIN, launch
from run_files import metrics_of
from test_partial_rollouts import Slow

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1), "data_source": ("even", "odd")[a % 2]} for a in range(1, 10)]
FLAGS = """--train-iters 3 --mismatch-limit 100 --max-completion-length 40 --no-save-hf --loss-type gkd
 --max-tokens-per-microbatch 64 --global-batch-size 8""".split()


@pytest.fixture
def bench(tiny_models, tmp_path, monkeypatch):
    kept = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(bad_input_runs, "StubEngine", Slow)
    found = Bench(tmp_path, tiny_models["qwen3"])
    found.without("--micro-batch-size")
    found.words = [*found.good, *found.data(*map(json.dumps, ROWS), name="rows.jsonl"), *FLAGS]
    yield found
    signal.signal(signal.SIGTERM, kept)


def test_recorded_completions_teach_what_the_teacher_would_say(bench, tiny_models, monkeypatch, capfd):
    """The rewards are equal in every group, and no note says that they teach nothing."""
    teacher = ["--teacher-load-hf", str(tiny_models["llama"])]
    assert launch(TRAIN, [*bench.words, *teacher, "--ledger", str(bench.root / "ledger")]) == 0
    first = [row["teacher/divergence"] for row in metrics_of(bench.save) if "loss" in row]
    assert len(first) == 3 and first[0] > 0 and "rewards teach nothing" not in capfd.readouterr().out

    monkeypatch.setattr(bad_input_runs, "StubEngine", None)
    more = f"--train-only {bench.root / 'ledger'} --train-iters 12 --lr 1e-2 --gkd-beta 1 --save {bench.root / 'again'}"
    assert launch(TRAIN, [*bench.words, *teacher, *more.split()]) == 0
    rows = metrics_of(bench.root / "again")
    divergences = [row["teacher/divergence"] for row in rows]
    assert len(rows) == 12 and sum(divergences[-3:]) < 0.7 * sum(divergences[:3])
    assert [row["loss"] for row in rows] == pytest.approx(divergences)  # the average over the tokens of an update


@pytest.mark.slow
def test_16_bits(bench, tiny_models):
    """The policy as its own teacher has no divergence; another teacher has that of float32, but for roundings."""
    found = {}
    for name, words in {"own": "--bf16", "llama": "--bf16", "float32": ""}.items():
        teacher = bench.model if name == "own" else tiny_models["llama"]
        more = f"--teacher-load-hf {teacher} --train-iters 1 --save {bench.root / name} {words}"
        assert launch(TRAIN, [*bench.words, *more.split()]) == 0
        found[name] = metrics_of(bench.root / name)[-1]["teacher/divergence"]
    assert abs(found["own"]) < 1e-6 and found["llama"] == pytest.approx(found["float32"], rel=0.05) and found["llama"]


@pytest.mark.slow
def test_rows_choose_their_teachers(bench, tiny_models, capfd):
    """The teacher of the odd rows is the policy itself: it has no divergence from it."""
    more = "--gkd-logits-topk 4 --num-generations 1 --global-batch-size 4".split()
    teachers = ["--teacher-load-hf", f"odd={bench.model}", f"even={tiny_models['llama']}"]
    assert launch(TRAIN, [*bench.words, *teachers, *more, "--train-iters", "1"]) == 0
    mixed = metrics_of(bench.save)[-1]["teacher/divergence"]
    other = ["--save", str(bench.root / "other"), "--train-iters", "1"]
    assert launch(TRAIN, [*bench.words, "--teacher-load-hf", str(tiny_models["llama"]), *more, *other]) == 0
    assert 0 < mixed < metrics_of(bench.root / "other")[-1]["teacher/divergence"]
    rows = bench.data(*(json.dumps(row | {"data_source": "third"}) for row in ROWS), name="third.jsonl")
    third = ["--save", str(bench.root / "third")]
    assert launch(TRAIN, [*bench.words, *teachers, *more, *rows, *third]) == 1
    assert "--teacher-load-hf has no \"data_source\" 'third', only odd, even" in capfd.readouterr().err
