"""Rows, files, resumption and refusals of megatron_grpo.observability.metrics."""

import argparse
import contextlib
import fcntl
import json
import math
import os
import pty
import re
import struct
import sys
import termios

import good_args
import pytest
from full_disk import files_up_to

from megatron_grpo.observability import metrics
from megatron_grpo.observability.metric_guide import METRICS
from megatron_grpo.observability.metrics import MetricsLogger, Timers, aggregate, console_lines, truncate_after
from megatron_grpo.rollout.engine import Completion


def make_args(**overrides):
    values = {"save": None, "log_interval": 1, "tensorboard_dir": None, "wandb_project": None, "swanlab_project": None}
    values |= {"log_completions": False, "device_peak_tflops": None, "include_performance_metrics": False, "beta": 0.0}
    values |= {"on_save_error": "continue", "valid_data_path": None, "mlflow_project": None, "trackio_project": None}
    values |= {"sft_iters": None}
    return argparse.Namespace(**values | {"world_size": 1, "rollout_ranks": 0} | overrides)


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(args, start, stop, total=10):
    logger = MetricsLogger(args, 0, total, start)
    for iteration in range(start + 1, stop + 1):
        logger.log_completions(iteration, [{"prompt": "1+1=", "completion": "2", "rewards": {"exact": 1.0}}])
        logger.log(iteration, {"reward/mean": iteration / 3, "lr": 0.1, "tokens/update": 7, "time/step": 0.5})
    return logger


def test_rows_keep_every_bit(tmp_path):
    train(make_args(save=str(tmp_path)), 0, 3).close()
    assert [row["reward/mean"] for row in rows(tmp_path / "metrics.jsonl")] == [1 / 3, 2 / 3, 1.0]
    assert rows(tmp_path / "metrics.jsonl")[0] == {
        "iteration": 1,
        "reward/mean": 1 / 3,
        "lr": 0.1,
        "tokens/update": 7,
        "time/step": 0.5,
        "perf/tokens_per_second": 14.0,
    }


def test_rows_of_a_full_disk_are_written_when_there_is_room(tmp_path, capsys):
    """Also rows that are longer than a buffer, and the rest of the row that has filled the disk."""
    logger = MetricsLogger(make_args(save=str(tmp_path)), 0, 100, 0)
    texts = [f"{n}" * 12_000 for n in range(10)]
    with files_up_to(30_000):
        for n, text in enumerate(texts[:8], start=1):
            logger.log_completions(n, [{"prompt": "1+1=", "completion": text, "rewards": {"exact": 1.0}}])
        logger.flush()  # a checkpoint is saved
    assert capsys.readouterr().out.count("completions.jsonl cannot be written: File too large") == 1
    logger.flush()  # the next checkpoint, after which a resumed run continues
    assert [row["completion"] for row in rows(tmp_path / "completions.jsonl")] == texts[:8]
    for n, text in enumerate(texts[8:], start=9):
        logger.log_completions(n, [{"prompt": "1+1=", "completion": text, "rewards": {"exact": 1.0}}])
    assert [row["completion"] for row in rows(tmp_path / "completions.jsonl")] == texts
    logger.close()


@pytest.mark.parametrize("log_interval", [1, 2, 3])
def test_a_resumed_run_leaves_the_files_of_an_unbroken_one(tmp_path, log_interval):
    def run(name, kill):
        args = make_args(save=str(tmp_path / name), log_interval=log_interval)
        logger = train(args, 0, 4)
        logger.flush()  # a checkpoint is saved after update 4
        if kill:
            train_on(logger, 5, 7)  # no close(): killed after update 7
            logger = train(args, 4, 10)
        else:
            train_on(logger, 5, 10)
        logger.close()
        return [(tmp_path / name / file).read_bytes() for file in ("metrics.jsonl", "completions.jsonl")]

    def train_on(logger, start, stop):
        for iteration in range(start, stop + 1):
            logger.log_completions(iteration, [{"prompt": "1+1=", "completion": "2", "rewards": {"exact": 1.0}}])
            logger.log(iteration, {"reward/mean": iteration / 3, "lr": 0.1, "tokens/update": 7, "time/step": 0.5})

    assert run("killed", kill=True) == run("unbroken", kill=False)


def test_truncation_drops_a_torn_line_and_later_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "lr": 0.5}\n{"iteration": 2}\n{"iteration": 3}\n{"iteration": 4, "re')
    truncate_after(path, 2)
    assert path.read_text() == '{"iteration": 1, "lr": 0.5}\n{"iteration": 2}\n'
    truncate_after(path, 0)
    assert path.read_text() == ""
    truncate_after(tmp_path / "absent.jsonl", 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_extremes_of_a_reward_function_stay_extremes():
    rows = [{"reward/own/min": low, "reward/own/max": high, "reward/own/std": 1.0} for low, high in ((-1, 2), (0, 5))]
    assert aggregate(rows) == {"reward/own/min": -1, "reward/own/max": 5, "reward/own/std": 1.0}


def test_log_interval_merges_updates():
    row = aggregate(
        [
            {
                "reward/mean": 0.0,
                "ratio/max": 3.0,
                "lr": 0.2,
                "tokens/total": 10,
                "tokens/update": 10,
                "time/step": 1.0,
            },
            {
                "reward/mean": 1.0,
                "ratio/max": 2.0,
                "lr": 0.1,
                "tokens/total": 40,
                "tokens/update": 30,
                "time/step": 4.0,
            },
            {"time/save": 2.0},
        ]
    )
    assert row == {
        "reward/mean": 0.5,
        "ratio/max": 3.0,
        "lr": 0.1,
        "tokens/total": 40,
        "tokens/update": 40,
        "time/step": 5.0,
        "time/save": 2.0,
    }


def test_ratios_and_lengths_keep_their_extremes():
    names = ("ratio/min", "ratio/max", "completion/length_min", "completion/length_max", "params_norm")
    updates = [dict(zip(names, values, strict=True)) for values in ((0.5, 1.5, 3, 9, 2.0), (0.25, 4.0, 2, 8, 3.0))]
    assert aggregate(updates) == dict(zip(names, (0.25, 4.0, 2, 9, 3.0), strict=True))


def test_log_interval_writes_every_nth_update_and_the_last(tmp_path):
    train(make_args(save=str(tmp_path), log_interval=4), 0, 10).close()
    written = rows(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in written] == [4, 8, 10]
    assert written[2]["reward/mean"] == pytest.approx((9 / 3 + 10 / 3) / 2)


def test_evaluation_before_training_is_a_row_of_iteration_zero(tmp_path, capsys):
    logger = MetricsLogger(make_args(save=str(tmp_path), log_interval=5), 0, 100, 0)
    logger.log(0, {"eval/greedy_reward": 0.25, "eval/greedy_accuracy": 0.5, "time/eval": 1.0})
    logger.close()
    assert rows(tmp_path / "metrics.jsonl")[0]["iteration"] == 0
    out = capsys.readouterr().out
    assert out == "evaluation   0/100 | greedy accuracy 0.5000 | greedy reward 0.2500\n"


def test_several_files_of_an_evaluation_have_a_line_each(capsys):
    logger = MetricsLogger(make_args(), 0, 100, 0)
    metrics = {"eval/greedy_reward": 0.25, "eval/greedy_accuracy": 0.5, "eval/aime_24/greedy_accuracy": 1.0}
    logger.log(20, metrics | {"eval/gsm8k/pass_at_4": 0.75, "time/eval": 1.0})
    logger.close()
    assert capsys.readouterr().out.splitlines() == [
        "evaluation  20/100 | greedy accuracy 0.5000 | greedy reward 0.2500",
        "evaluation  20/100 aime_24 | greedy accuracy 1.0000",
        "evaluation  20/100 gsm8k | pass at 4 0.7500",
    ]


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    logger = MetricsLogger(make_args(save=str(tmp_path)), 0, 1, 0)
    logger.log(1, {"grad_norm": math.inf, "loss": math.nan, "kl": 0.0})
    logger.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"iteration": 1, "grad_norm": None, "loss": None, "kl": 0.0}]
    logger = MetricsLogger(make_args(save=str(tmp_path)), 0, 2, 1)
    logger.log_completions(2, [{"rewards": {"exact": math.nan}, "advantages": [math.inf, 1.0]}])
    logger.close()
    (sample,) = rows(tmp_path / "completions.jsonl")
    assert sample == {"iteration": 2, "rewards": {"exact": None}, "advantages": [None, 1.0]}


@pytest.mark.parametrize("rank", [0, 1])
def test_only_documented_names_are_logged(rank):
    logger = MetricsLogger(make_args(), rank, 1, 0)
    logger.log(1, {"reward/exact_match/mean": 1.0})
    logger.log(1, {"eval/pass_at_4": 1.0})
    with pytest.raises(KeyError, match="'reward/median' is not documented"):
        logger.log(1, {"reward/median": 1.0})
    with pytest.raises(KeyError, match="time/lunch"), Timers()("lunch"):
        pass
    assert all(re.fullmatch(r"[a-z_/<>]+", name) and meaning for name, meaning in METRICS.items())


def test_without_save_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(make_args(), 0, 2).close()
    assert list(tmp_path.iterdir()) == []
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_other_ranks_are_silent(tmp_path, capsys):
    logger = MetricsLogger(make_args(save=str(tmp_path), tensorboard_dir=str(tmp_path / "tb")), 1, 10, 0)
    logger.log(1, {"loss": 1.0})
    logger.log_completions(1, [{"prompt": "p"}])
    logger.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_completions_are_readable(tmp_path):
    logger = MetricsLogger(make_args(save=str(tmp_path)), 0, 10, 0)
    samples = [{"prompt": "一加一", "completion": "line\nbreak \u2028 \udc80", "rewards": {"exact": 0.0}}] * 2
    logger.log_completions(1, samples)
    logger.close()
    text = (tmp_path / "completions.jsonl").read_text(encoding="utf-8")
    assert "一加一" in text
    assert [json.loads(line) for line in text.rstrip("\n").split("\n")] == [{"iteration": 1, **samples[0]}] * 2


def test_console_line_has_a_fixed_width():
    full = {
        "reward/mean": 0.45314,
        "kl": 0.00012,
        "completion/length_mean": 12.34,
        "entropy": 0.5321,
        "grad_norm": 1.2345,
        "clip/low": 0.001,
        "clip/high": 0.0002,
        "mismatch/mean_abs": 1.2e-6,
        "lr": 1e-6,
        **{f"time/{phase}": 1.25 for phase in ("rollout", "scoring", "logprobs", "update", "sync")},
        "perf/tokens_per_second": 12345.6,
    }
    (line,) = console_lines(7, 200, full)
    assert line == (
        "iteration   7/200 | reward  0.4531 | kl  0.00012 | length   12.3 | entropy 0.532 | grad norm   1.234 | "
        "clip 0.0012 | logp diff 1.2e-06 | lr 1.00e-06 | rollout   1.25 scoring   1.25 logprobs   1.25 update   1.25 "
        "sync   1.25 s |  12,346 tokens/s | ETA       -"
    )
    (sparse,) = console_lines(8, 200, {"loss": 1.0})
    assert len(sparse) == len(line)
    (line,) = console_lines(7, 200, full | {"perf/mfu": 0.41234}, remaining=193 * 60.0)
    assert line.endswith(" | MFU 0.412 | ETA 3:13:00")
    # A narrow terminal: what comes first, and what fits beside it.
    assert console_lines(7, 200, full, 193 * 60.0, width=80) == [
        "iteration   7/200 | reward  0.4531 | kl  0.00012 | length   12.3 | ETA 3:13:00"
    ]
    assert console_lines(7, 200, full, 193 * 60.0, width=80, with_kl=False) == [
        "iteration   7/200 | reward  0.4531 | length   12.3 | entropy 0.532 | ETA 3:13:00"
    ]
    scores = {f"eval/pass_at_{2**k}": 0.5 for k in range(10)}
    (line,) = console_lines(7, 200, scores | {"time/eval": 1.0, "memory/peak": 2.0}, width=80)
    assert line == "evaluation   7/200 | pass at 1 0.5000 | pass at 2 0.5000 | pass at 4 0.5000"


def test_the_remaining_time_is_that_of_the_last_rows(capsys):
    logger = MetricsLogger(make_args(log_interval=2), 0, 100, 20)
    for iteration in range(21, 61):
        logger.log(iteration, {"lr": 0.1, "time/step": 1000.0 if iteration <= 22 else 3.0})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert lines[0].endswith("ETA 21:40:00")  # 78 updates of 1000 s
    assert lines[9].endswith("ETA 1:42:42")  # 60 updates of (2 x 1000 s + 18 x 3 s) / 20
    logger.log(61, {"lr": 0.1, "time/step": 3.0})
    logger.log(62, {"lr": 0.1, "time/step": 3.0})
    assert capsys.readouterr().out.rstrip().endswith("ETA 0:01:54")  # 38 updates of 3 s: the first row is forgotten


def test_a_log_file_shows_the_progress_of_a_rollout_every_30_seconds(capsys, monkeypatch):
    clock = iter([100.0, 110.0, 130.0, 161.0, 200.0])
    logger, silent = (MetricsLogger(make_args(), rank, 10, 0) for rank in (0, 1))
    finished = [Completion(0, [1, 2, 3, 4], None, "stop", [0] * 4), Completion(1, [5] * 56, None, "stop", [0] * 56)]
    silent.rollout_progress(1)(finished, 6)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    show = logger.rollout_progress(num_replicas=2)
    for completions, under_way in (([], 8), ([], 8), (finished[:1], 7), (finished, 6)):
        show(completions, under_way)
    assert capsys.readouterr().out.splitlines() == [
        "rollout 0/8 of replica 1/2, none is finished yet, 30 s",
        "rollout 1/8 of replica 1/2, 0 tokens/s, 61 s",  # 4 tokens in 61 s
        "rollout 2/8 of replica 1/2, 1 tokens/s, 100 s",  # 60 tokens in 100 s
    ]


def test_timers_add_up_and_start_anew(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 30.0, 31.0])  # every reading, in order
    monkeypatch.setattr(metrics, "device_time", lambda: next(clock))
    timers = Timers()
    for _ in range(2):
        with timers("rollout"):
            pass
    with pytest.raises(ValueError), timers("update"):  # not read again: the device may not answer
        raise ValueError
    assert timers.collect() == {"time/rollout": 6.0, "time/step": 30.0}
    assert timers.collect() == {"time/step": 1.0}


def test_a_phase_within_another_belongs_to_the_outer(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 5.0, 5.5, 6.0])
    monkeypatch.setattr(metrics, "device_time", lambda: next(clock))
    began = []
    timers = Timers(began=began.append)
    with timers("eval"), timers("rollout"):
        pass
    with timers("rollout"):
        pass
    assert began == ["eval", "rollout"]
    assert timers.collect() == {"time/eval": 3.0, "time/rollout": 0.5, "time/step": 6.0}


def train_in_a_terminal() -> None:
    """Three updates of a run whose output is a terminal, each bar drawn at once."""
    metrics.SECONDS_BETWEEN_DRAWS = 0.0
    logger = train(make_args(), 0, 2, total=3)
    logger.rollout_progress(1)([], 8)
    logger.show_phase("update")
    logger.log(3, {"reward/mean": 1.0, "time/step": 0.5})
    print("done", flush=True)


def test_no_progress_bar_where_the_output_is_not_a_terminal(capfd):
    train(make_args(), 0, 3, total=3).close()
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 3
    assert err == ""


def test_a_progress_bar_in_a_terminal_leaves_the_lines_whole():
    columns = 80
    process, terminal = pty.fork()  # not a program of its own, whose imports would take ten seconds
    if process == 0:
        os.environ.pop("COLUMNS", None)
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))  # rows, columns, pixels
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115  in place of pytest's
        try:
            train_in_a_terminal()
        finally:
            os._exit(0)
    output = b""
    with contextlib.suppress(OSError):  # which is how a terminal that nobody holds any more ends on Linux
        while chunk := os.read(terminal, 4096):
            output += chunk
    os.close(terminal)
    os.waitpid(process, 0)
    text = output.decode()
    assert "training:" in text
    drawn = [line.strip() for line in re.split(r"[\r\n]+", text)]
    assert max(map(len, drawn)) <= columns
    for now in ("rollout 0/8, none is finished yet", "update"):
        assert any(re.fullmatch(rf"training: 2/3 \|.*\| 00:0\d, {now}", line) for line in drawn)
    assert "done" in drawn  # on a line of its own
    lines = [line for line in drawn if "| ETA" in line]
    assert [line.startswith(f"iteration {i}/3 | reward") for i, line in enumerate(lines, 1)] == [True] * 3


@pytest.mark.parametrize(("mode", "said"), [("colocate", True), ("server", False)])
def test_the_end_names_ranks_that_are_engines(capsys, mode, said):
    """Engines 2 x 10 s, one trainer 5 s: 3 x 20 / 25. Ranks that drive servers are no engines."""
    sizes = vars(good_args.validated("--rollout-ranks 2", world_size=1))
    logger = MetricsLogger(argparse.Namespace(**sizes | vars(make_args(rollout_ranks=2, vllm_mode=mode))), 0, 8, 0)
    for update in range(1, 9):
        logger.log(update, {"time/step": 10.0, "stream/trainer_wait": 5.0, "stream/engine_idle": 0.0})
    before, _, after = capsys.readouterr().out.partition("iteration 5/8")
    line = "a step takes 10 s; the trainers wait 5 s of it for the engines, an engine is idle for 0 s"
    assert line not in before and after.count(line) == said  # once
    logger.close()
    out = capsys.readouterr().out
    assert "the trainer waits for the engines for 50% of the step" in out
    assert ("--rollout-ranks 2.4 of 3 would balance them" in out) == said
