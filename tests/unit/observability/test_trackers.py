"""What TensorBoard, W&B, SwanLab, MLflow and trackio are given, and what is refused.

W&B and SwanLab are no requirements, so stand-ins take their place that know the parameters of the real functions (W&B
0.31, SwanLab 0.10). Where the packages are installed the same runs are made with them, offline, and read back; MLflow
and trackio are tested in this way only.
"""

import importlib.util
import inspect
import json
import math
import re
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_grpo.observability.arguments import check_trackers
from megatron_grpo.observability.metrics import MetricsLogger
from megatron_grpo.observability.trackers import completion_table
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

SAMPLE = {
    "picked": "first",
    "prompt": "1+1=",
    "completion": "<think>a|b</think>\n2",
    "rewards": {"exact": 1.0, "form": math.nan},
    "advantage": 0.5,
    "finish_reason": "stop",
    "length": 3,
    "row": 7,
    "tokens": ["2"],
    "log_probs": [-0.5],
}
COLUMNS = ["prompt", "completion", "advantage", "length", "finish_reason", "picked", "row", "reward/exact"]
COLUMNS += ["reward/form"]


def parsed(*flags):
    return replaced(parse_args([str(flag) for flag in flags]), world_size=1)


def train(args, start, stop, total=10):
    logger = MetricsLogger(args, 0, total, start)
    for iteration in range(start + 1, stop + 1):
        logger.log_completions(iteration, [SAMPLE])
        logger.log(iteration, {"reward/mean": iteration / 3, "lr": 0.1})
    logger.close()


def test_a_table_has_a_column_for_each_reward():
    columns, rows = completion_table([SAMPLE, SAMPLE | {"prompt": "x"}])
    assert columns == COLUMNS
    assert rows[1][:-1] == ["x", "<think>a|b</think>\n2", 0.5, 3, "stop", "first", 7, 1.0]
    assert math.isnan(rows[1][-1])


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # a traceback beside our line
@pytest.mark.parametrize("action", ["continue", "stop"])
def test_a_run_goes_on_without_a_tracker_that_cannot_write(tmp_path, action, capsys):
    curves, save = tmp_path / "curves", tmp_path / "run"
    args = parsed("--tensorboard-dir", curves, "--save", save, "--on-save-error", action)
    logger = MetricsLogger(args, 0, 10, 0)
    logger.log(1, {"lr": 0.1})
    logger.flush()  # TensorBoard's thread has written the first event, which it flushes by itself
    shutil.rmtree(curves)
    with (
        pytest.raises(GrpoError, match=r"TensorBoard cannot be written.* Make room, or")
        if action == "stop"
        else nullcontext()
    ):
        for iteration in (2, 3):
            logger.log(iteration, {"lr": 0.1})
            logger.flush()
        logger.close()
    if action == "continue":
        assert len((save / "metrics.jsonl").read_text().splitlines()) == 3
        assert capsys.readouterr().out.count("TensorBoard cannot be written") == 1


def test_a_run_does_not_start_without_room_for_tensorboard(tmp_path, monkeypatch):
    from torch.utils import tensorboard

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboard, "SummaryWriter", full)
    with pytest.raises(GrpoError, match=r"--tensorboard-dir .* cannot be written: No space left on device"):
        MetricsLogger(parsed("--tensorboard-dir", tmp_path), 0, 10, 0)


def test_tensorboard_events_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = parsed("--tensorboard-dir", tmp_path, "--log-completions")
    train(args, 0, 3)
    time.sleep(1.1)  # event files are ordered by the second in their name
    train(args, 2, 4)  # resumed from update 2: the first run's update 3 must go
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("reward/mean")
    assert [event.step for event in scalars] == [1, 2, 3, 4]
    assert scalars[0].value == pytest.approx(1 / 3)
    (text,) = [e for e in events.Tensors("completions/text_summary") if e.step == 4]
    head, rule, line = text.tensor_proto.string_val[0].decode().split("\n")
    assert rule == " | ".join(["---"] * len(COLUMNS))
    assert len(head.split(" | ")) == len(line.split(" | ")) == len(COLUMNS)
    assert "&#60;think&#62;a&#124;b&#60;/think&#62; 2" in line


def stand_in(monkeypatch, package):
    """A module in the package's place, whose ``calls`` say what was asked of it."""
    module, calls = ModuleType(package), []
    module.__spec__ = importlib.util.spec_from_loader(package, None)

    class Run:
        def log(self, data, step=None):
            calls.append((step, data))

        def finish(self):
            calls.append("finish")

    class Table:  # W&B's takes all at once, SwanLab's is filled
        def __init__(self, columns=None, data=None):
            assert (columns is not None) == (package == "wandb")
            self.columns, self.data = columns, data

        def add(self, headers, rows):
            self.columns, self.data = headers, rows

    def wandb_init(project=None, name=None, entity=None, mode=None, dir=None, config=None, id=None, resume=None):
        calls.append(locals() | {"calls": None})
        return Run()

    def swanlab_init(
        *, project=None, name=None, workspace=None, mode=None, log_dir=None, config=None, id=None, resume=None
    ):
        calls.append(locals() | {"calls": None})
        return Run()

    module.init = wandb_init if package == "wandb" else swanlab_init
    module.Error, module.Table, module.echarts = type("Error", (Exception,), {}), Table, ModuleType("echarts")
    module.echarts.Table, module.calls = Table, calls
    monkeypatch.setitem(sys.modules, package, module)
    return module


def mlflow_stand_in(monkeypatch):
    module = ModuleType("mlflow")
    module.__spec__ = importlib.util.spec_from_loader("mlflow", None)
    module.exceptions, module.entities = ModuleType("exceptions"), ModuleType("entities")
    module.exceptions.MlflowException = type("MlflowException", (Exception,), {})
    module.entities.Param = module.entities.Metric = lambda *parts: parts

    class Client:
        log_batch = log_text = set_terminated = lambda self, *_, **__: None
        get_experiment_by_name = create_run = lambda self, *_, **__: SimpleNamespace(
            experiment_id="0", info=SimpleNamespace(run_id="1")
        )

    module.MlflowClient = Client
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


@pytest.mark.parametrize("action", ["continue", "stop"])
@pytest.mark.parametrize("package", ["wandb", "swanlab", "mlflow"])
def test_a_run_goes_on_without_a_tracker_that_raises_its_own_error(package, action, tmp_path, monkeypatch, capsys):
    """As a lost network is one: of W&B and MLflow a class of the package, of SwanLab RuntimeError."""
    rows = []

    def log(*_, **__):
        rows.append(1)
        if len(rows) == 2:
            raise error("the server does not answer")

    if package == "mlflow":
        module = mlflow_stand_in(monkeypatch)
        error = module.exceptions.MlflowException
    else:
        module = stand_in(monkeypatch, package)
        error = module.Error if package == "wandb" else RuntimeError
    args = parsed(f"--{package}-project", "p", "--save", tmp_path, "--on-save-error", action)
    logger = MetricsLogger(args, 0, 3, 0)
    (tracker,) = logger.trackers
    if package == "mlflow":
        tracker.client.log_batch = log
    else:
        tracker.run.log = log
    line = rf"{type(tracker).__name__} cannot be written: the server does not answer"
    logger.log(1, {"lr": 0.1})
    if action == "stop":
        with pytest.raises(GrpoError, match=rf"{line}\. (?!Make room)"):
            logger.log(2, {"lr": 0.1})
        return
    for iteration in (2, 3):
        logger.log(iteration, {"lr": 0.1})
    logger.close()
    assert len(rows) == 2 and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().out.count(f"{line}; the run goes on without it") == 1


PLACES = {"wandb": ("dir", "entity", ""), "swanlab": ("log_dir", "workspace", "/swanlog")}


@pytest.mark.parametrize("package", PLACES)
def test_rows_and_tables_arrive(package, tmp_path, monkeypatch):
    module = stand_in(monkeypatch, package)
    directory, owner, default = PLACES[package]
    words = [f"--{package}-project demo --{package}-exp-name one --{package}-mode offline --{package}-{owner} team"]
    args = parsed(*words[0].split(), "--save", tmp_path / "run", "--log-completions", "--lr", 0.5)
    train(args, 0, 2)
    options, table, row, *rest, end = module.calls
    wanted = {"project": "demo", "name": "one", "mode": "offline", owner: "team"}
    assert {name: options[name] for name in wanted} == wanted
    assert options[directory] == f"{tmp_path}/run{default}" and Path(options[directory]).is_dir()
    assert options["config"]["lr"] == 0.5 and "vllm_server_api_key" not in options["config"]
    assert (table[0], row, end) == (1, (1, {"reward/mean": 1 / 3, "lr": 0.1}), "finish")
    assert table[1]["completions"].columns == COLUMNS and table[1]["completions"].data[0][0] == "1+1="
    assert [step for step, _ in rest] == [2, 2]

    module.calls.clear()
    args = parsed(f"--{package}-project", "demo", f"--{package}-save-dir", tmp_path / "elsewhere")
    train(args, 0, 1)
    assert module.calls[0][directory] == f"{tmp_path}/elsewhere"
    assert module.calls[1:] == [(1, {"reward/mean": 1 / 3, "lr": 0.1}), "finish"]  # no tables unless asked for


@pytest.mark.parametrize("package", PLACES)
def test_a_resumed_run_continues_its_run(package, tmp_path, monkeypatch):
    module = stand_in(monkeypatch, package)
    args = parsed(f"--{package}-project", "demo", "--save", tmp_path)
    train(args, 0, 2)
    train(args, 2, 3)
    train(args, 0, 1)  # begun anew
    first, resumed, anew = (call for call in module.calls if isinstance(call, dict))
    assert first["resume"] is None and anew["resume"] is None and resumed["resume"] == "allow"
    assert first["id"] == resumed["id"] != anew["id"]


def test_mlflow_for_real(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # no database here
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    args = parsed(
        *"--mlflow-project demo --mlflow-exp-name one --lr 0.5 --log-completions --save".split(), tmp_path / "run"
    )
    train(args, 0, 2)
    train(args, 2, 3)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    assert run.info.run_name == "one" and run.info.status == "FINISHED" and run.data.params["lr"] == "0.5"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(i, pytest.approx(i / 3)) for i in (1, 2, 3)]
    (file,) = tmp_path.glob("mlruns/*/*/artifacts/completions/update_000003.json")
    table = json.loads(file.read_text())
    assert table["columns"] == COLUMNS and table["data"][0][0] == "1+1=" and table["data"][0][-1] is None


def test_trackio_for_real(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    import sqlite3

    args = parsed(*"--trackio-project demo --trackio-exp-name one --log-completions --save".split(), tmp_path / "run")
    train(args, 0, 2)
    train(args, 2, 3)
    name = json.loads((tmp_path / "run" / "trackers.json").read_text())["trackio"]
    assert name.startswith("one-")
    (file,) = (tmp_path / "trackio").glob("**/demo.db")
    rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    assert {run for run, _, _ in rows} == {name}
    logged = [(step, json.loads(text)) for _, step, text in rows]
    assert [(step, row["reward/mean"]) for step, row in logged if "reward/mean" in row] == [
        (i, pytest.approx(i / 3)) for i in (1, 2, 3)
    ]
    assert any("completions" in row for _, row in logged)


@pytest.mark.parametrize("package", PLACES)
def test_a_login_that_is_missing_is_an_error_with_its_cure(package, monkeypatch):
    module = stand_in(monkeypatch, package)

    def no_login(**options):
        raise (module.Error if package == "wandb" else RuntimeError)("no key")

    module.init = no_login
    with pytest.raises(GrpoError, match=rf"--{package}-project p: {package} failed: no key .*--{package}-mode offline"):
        MetricsLogger(parsed(f"--{package}-project", "p"), 0, 1, 0)
    MetricsLogger(parsed(f"--{package}-project", "p"), 1, 1, 0)  # other ranks ask for nothing


@pytest.mark.parametrize("package", PLACES)
def test_a_missing_package_is_refused_with_the_command(package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    needs = rf"--{package}-project demo needs the package {package}, .*: pip install {package}"
    with pytest.raises(GrpoError, match=needs):
        check_trackers(parsed(f"--{package}-project", "demo"))
    check_trackers(parsed(f"--{package}-project", "demo", "--dry-run"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--wandb-mode offline", "--wandb-mode needs --wandb-project"),
        ("--wandb-entity me", "--wandb-entity needs --wandb-project"),
        ("--wandb-save-dir d --swanlab-project p", "--wandb-save-dir needs --wandb-project"),
        ("--swanlab-exp-name n", "--swanlab-exp-name needs --swanlab-project"),
        ("--swanlab-workspace w", "--swanlab-workspace needs --swanlab-project"),
        ("--mlflow-exp-name n", "--mlflow-exp-name needs --mlflow-project"),
        ("--trackio-exp-name n", "--trackio-exp-name needs --trackio-project"),
        ("--log-completions --save s", "--log-completions needs --tensorboard-dir, --wandb-project, --swanlab-project"),
        ("--log-completions --tensorboard-dir t --num-completions-to-log 0", "and that is 0: raise it"),
    ],
)
def test_flags_without_effect_are_refused(flags, message):
    with pytest.raises(GrpoError, match=re.escape(message)):
        check_trackers(parsed(*flags.split()))


@pytest.mark.parametrize("package", PLACES)
def test_the_stand_in_has_parameters_of_the_real_one(package, monkeypatch):
    real = pytest.importorskip(package)
    given = inspect.signature(stand_in(monkeypatch, package).init).parameters
    assert given.keys() <= inspect.signature(real.init).parameters.keys()


def test_wandb_offline_for_real(tmp_path):
    pytest.importorskip("wandb")
    words = "--wandb-project demo --wandb-exp-name one --wandb-mode offline --log-completions".split()
    train(parsed(*words, "--save", tmp_path), 0, 3)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    stored = path.read_bytes()  # messages in which values are JSON
    assert [b"reward/mean" in stored, *(json.dumps(i / 3).encode() in stored for i in (1, 2, 3))] == [True] * 4
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/completions_2_*")
    shown = json.loads(table.read_text())
    assert shown["columns"] == COLUMNS
    assert shown["data"][0][:3] == ["1+1=", "<think>a|b</think>\n2", 0.5]


@pytest.mark.parametrize("mode", ["offline", "local"])
def test_swanlab_on_this_machine_for_real(mode, tmp_path):
    pytest.importorskip("swanlab")
    words = f"--swanlab-project demo --swanlab-exp-name one --swanlab-mode {mode} --log-completions".split()
    train(parsed(*words, "--save", tmp_path), 0, 3)
    (path,) = tmp_path.glob("swanlog/run-*/run-*.swanlab")
    stored = path.read_bytes()
    assert b"reward/mean" in stored and b"completions" in stored
    table = (tmp_path / "swanlog").glob("run-*/media/echarts/003-*.json")
    assert "1+1=" in next(table).read_text()
