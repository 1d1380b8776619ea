"""tools/plot_metrics.py: what is drawn from made-up rows, and what is refused."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "plot_metrics.py"
spec = importlib.util.spec_from_file_location("plot_metrics", TOOL)
plot_metrics = importlib.util.module_from_spec(spec)
sys.modules["plot_metrics"] = plot_metrics  # dataclasses looks its module up
spec.loader.exec_module(plot_metrics)


def write_run(directory, rows):
    directory.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text)
    return directory


def made_up_rows(count, **extra):
    rows = [{"iteration": 0, "eval/greedy_accuracy": 0.25}]
    for i in range(1, count + 1):
        rows.append(
            {
                "iteration": i,
                "reward/mean": i / count,
                "completion/length_mean": 10.0,
                "entropy": 1 / i,
                "grad_norm": None if i == 2 else 2.0,  # not a finite number
                "mismatch/mean_abs": 1e-6,
                "time/rollout": 0.5,
                "time/update": 0.25,
                "time/step": 1.0,
                "perf/tokens_per_second": 100.0,
                **extra,
            }
        )
    return rows


def panels(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_runs_with_an_environment_show_their_turns(tmp_path):
    rows = made_up_rows(3, **{"environment/turns": 1.5})
    run = plot_metrics.read_run(write_run(tmp_path / "run", rows), "run")
    lines = panels(plot_metrics.draw([run]))["Turns of an episode"].lines
    assert list(lines[0].get_ydata()) == [1.5] * 3


def test_a_picture_is_written_by_the_command(tmp_path):
    run = write_run(tmp_path / "run", made_up_rows(5))
    output = tmp_path / "curves.png"
    command = [sys.executable, str(TOOL), str(run), "--output", str(output), "--smooth", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == f"wrote {output}\n"
    data = output.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 1800  # pixels across, from the PNG header


def test_panels_show_what_was_logged(tmp_path):
    run = plot_metrics.read_run(write_run(tmp_path / "run", made_up_rows(4)), "run")
    axes = panels(plot_metrics.draw([run]))
    assert list(axes) == [
        "Reward and held-out accuracy",
        "Trainer/engine log-prob gap (nats)",
        "Completion length (tokens)",
        "Entropy (nats/token)",
        "Gradient norm",
        "Seconds by phase",
    ]
    reward, accuracy = axes["Reward and held-out accuracy"].lines[:2]
    assert list(reward.get_xdata()) == [1, 2, 3, 4]
    assert list(reward.get_ydata()) == [0.25, 0.5, 0.75, 1.0]
    assert (list(accuracy.get_xdata()), list(accuracy.get_ydata())) == ([0], [0.25])
    assert list(axes["Gradient norm"].lines[0].get_xdata()) == [1, 3, 4]
    assert axes["Seconds by phase"].get_legend_handles_labels()[1] == ["rollout", "update"]


def test_kl_takes_its_panel_when_there_is_one(tmp_path):
    run = plot_metrics.read_run(write_run(tmp_path / "run", made_up_rows(4, kl=0.5)), "run")
    assert list(panels(plot_metrics.draw([run]))["KL to the reference (nats/token)"].lines[0].get_ydata()) == [0.5] * 4


def test_missing_metrics_leave_their_panels_empty(tmp_path):
    run = plot_metrics.read_run(write_run(tmp_path / "run", [{"iteration": 1, "reward/mean": 0.5}]), "run")
    axes = panels(plot_metrics.draw([run]))
    texts = {title: [text.get_text() for text in a.texts] for title, a in axes.items()}
    assert texts.pop("Reward and held-out accuracy") == []
    assert set(map(tuple, texts.values())) == {("not logged",)}


def test_runs_are_overlaid_under_names_that_tell_them_apart(tmp_path):
    directories = [write_run(tmp_path / name / "run", made_up_rows(3)) for name in ("first", "second")]
    names = plot_metrics.labels(directories)
    assert names == ["first/run", "second/run"]
    figure = plot_metrics.draw([plot_metrics.read_run(d, n) for d, n in zip(directories, names, strict=True)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert len(panels(figure)["Tokens per second"].lines) == 2


def test_smoothing_is_the_mean_of_the_neighbours():
    assert plot_metrics.smoothed([1.0, 2.0, 6.0, 9.0], 1) == [1.0, 2.0, 6.0, 9.0]
    assert plot_metrics.smoothed([1.0, 2.0, 6.0, 9.0], 3) == [1.5, 3.0, 17 / 3, 7.5]
    assert plot_metrics.smoothed([1.0, 2.0, 6.0, 9.0], 2) == [1.5, 4.0, 7.5, 9.0]


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", made_up_rows(2))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 3, "rew')
    assert [row["iteration"] for row in plot_metrics.read_run(run, "run").rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "metrics.jsonl cannot be read"),
        ("", [], "metrics.jsonl is empty"),
        ('{"iteration": 1}\nnot json\n', [], "metrics.jsonl:2 is not JSON"),
        ("[1, 2]\n", [], "metrics.jsonl:1 is not a row of a run"),
        ('{"loss": 1}\n', [], "metrics.jsonl:1 is not a row of a run"),
        ('{"iteration": 1}\n', ["--smooth", "0"], "--smooth 0 must be at least 1"),
        ('{"iteration": 1}\n', ["--output", "curves.doc"], "curves.doc cannot be written"),
        ('{"iteration": 1}\n', ["--output", "absent/curves.png"], "absent/curves.png cannot be written"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch, capsys, content, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run" / "metrics.jsonl").write_text(content)
    assert plot_metrics.main(["run", "--output", "curves.png", *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
