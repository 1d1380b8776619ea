"""Trackers for rows of metrics and tables of completions: TensorBoard, W&B, SwanLab, MLflow, trackio.

A tracker has ``log_row``, ``log_table``, ``flush`` and ``close``, and ``errors``: the exceptions of these besides
OSError, such as that of a server that does not answer. All but TensorBoard are optional packages. A run's
name in each of them is in ``{save}/trackers.json``, so that a resumed run continues it (`run_ids`).
"""

import json
import math
import os
import secrets
import sqlite3
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.utils.arguments import args_to_json
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_json_object
from megatron_grpo.utils.rules import flag

TABLES = "completions", "eval_completions"  # names of the tables in every tracker: of rollouts, of evaluations
IDS = "trackers.json"
FIELDS = "file", "kind", "prompt", "completion", "advantage", "length", "finish_reason", "picked", "row"
Rows = Sequence[Sequence[Any]]


def build_trackers(args: Namespace, start_step: int, resumed_run: bool) -> list[Any]:
    """Open the trackers that the arguments name; raise GrpoError if one fails, for example without a login.

    ``start_step``: the newest step before.
    """
    trackers: list[Any] = [TensorBoard(args, start_step)] if args.tensorboard_dir else []
    kinds = {"wandb": Wandb, "swanlab": SwanLab, "mlflow": Mlflow, "trackio": Trackio}
    used = {name: kind for name, kind in kinds.items() if getattr(args, f"{name}_project")}
    if not used:
        return trackers
    ids, resumed = run_ids(args.save, list(used), resumed_run)
    for name, kind in used.items():
        trackers.append(kind(args, ids[name], name in resumed))
        ids[name] = trackers[-1].id
    if args.save:
        file = Path(args.save, IDS)
        temporary = file.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(ids))
            os.replace(temporary, file)
        except OSError as error:
            raise GrpoError(f"{file} cannot be written: {error.strerror}; a resumed run needs it") from error
    return trackers


def run_ids(save: str | None, names: Sequence[str], resume: bool) -> tuple[dict[str, str], set[str]]:
    """Return the run's identifier in each tracker, and the trackers in which the run exists.

    A new run gets new ones; a resumed run those of ``{save}/trackers.json``, if it used these trackers before.
    """
    file = Path(save or "", IDS)
    known: dict[str, str] = {}
    if resume and save and file.exists():
        known = {name: value for name, value in read_json_object(file).items() if isinstance(value, str)}
    fresh = secrets.token_hex(4)
    return known | {name: known.get(name, fresh) for name in names}, set(known)


def completion_table(samples: Sequence[dict[str, Any]]) -> tuple[list[str], Rows]:
    """Return (columns, rows) for samples of ``completion_log``, without their tokens."""
    rewards = list(samples[0]["rewards"])
    fields = [name for name in FIELDS if name in samples[0]]
    rows = [[*(sample[name] for name in fields), *(sample["rewards"][name] for name in rewards)] for sample in samples]
    return fields + [f"reward/{name}" for name in rewards], rows


class TensorBoard:
    """Scalars and Markdown tables in ``--tensorboard-dir``; a resumed run replaces later steps."""

    errors: tuple[type[Exception], ...] = ()

    def __init__(self, args: Namespace, start_step: int):
        from torch.utils.tensorboard import SummaryWriter

        _hide_tracebacks_of_tensorboards_threads()
        try:
            self.writer = SummaryWriter(args.tensorboard_dir, purge_step=start_step + 1)
        except OSError as error:
            raise GrpoError(
                f"--tensorboard-dir {args.tensorboard_dir} cannot be written: {error.strerror}; make room there"
            ) from error

    def log_row(self, iteration: int, row: dict[str, float]) -> None:
        """Add a scalar for each metric."""
        for name, value in row.items():
            self.writer.add_scalar(name, value, iteration)

    def log_table(self, iteration: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a Markdown table; special characters of the texts are escaped."""
        lines = [columns, ["---"] * len(columns), *rows]
        self.writer.add_text(name, "\n".join(" | ".join(map(_markdown, line)) for line in lines), iteration)

    def flush(self) -> None:
        """Write everything to the disk."""
        self.writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self.writer.close()


def _hide_tracebacks_of_tensorboards_threads() -> None:
    """Print no traceback of TensorBoard's writer threads: the next call of the writer raises their error."""
    hook = threading.excepthook

    def hook_of_others(error: threading.ExceptHookArgs) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            hook(error)

    threading.excepthook = hook_of_others


# Characters with a meaning in Markdown or HTML, such as a table's | or the < of <think>.
_ESCAPES = {ord(char): f"&#{ord(char)};" for char in "&\\`*_{}[]<>()#|"} | {ord("\n"): " "}


def _markdown(value: Any) -> str:
    return (f"{value:.4f}" if isinstance(value, float) else str(value)).translate(_ESCAPES)


class _HostedTracker:
    """Base class of trackers for services with an interface like W&B's."""

    run: Any
    errors: tuple[type[Exception], ...]

    def log_row(self, iteration: int, row: dict[str, float]) -> None:
        """Add a point to each metric's chart."""
        self.run.log(row, step=iteration)

    def flush(self) -> None:
        """Do nothing: the service writes in the background."""

    def close(self) -> None:
        """Finish the run; wait for uploads."""
        self.run.finish()


class Wandb(_HostedTracker):
    """A run in W&B. Settings without a flag are those of W&B: login, ``WANDB_RUN_GROUP``, ``WANDB_TAGS``.

    A resumed run repeats the updates since its checkpoint; W&B keeps the values that it has.
    """

    def __init__(self, args: Namespace, id: str, resumed: bool):
        import wandb

        self.wandb, self.id, self.errors = wandb, id, (wandb.Error,)
        try:
            self.run = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name,
                entity=args.wandb_entity,
                mode=args.wandb_mode,
                dir=_directory(args.wandb_save_dir or args.save),
                id=id,
                resume="allow" if resumed else None,
                config=_config(args),
            )
        except wandb.Error as error:
            raise _login_error("wandb", args.wandb_project, error) from error

    def log_table(self, iteration: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table to the history."""
        table = self.wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self.run.log({name: table}, step=iteration)


class SwanLab(_HostedTracker):
    """A run in SwanLab."""

    errors = (RuntimeError,)

    def __init__(self, args: Namespace, id: str, resumed: bool):
        import swanlab

        self.swanlab, self.id = swanlab, id.ljust(21, "0")  # the length that SwanLab wants
        try:
            self.run = swanlab.init(
                project=args.swanlab_project,
                name=args.swanlab_exp_name,
                workspace=args.swanlab_workspace,
                mode=args.swanlab_mode,
                log_dir=_directory(args.swanlab_save_dir or (args.save and f"{args.save}/swanlog")),
                id=self.id,
                resume="allow" if resumed else None,
                config=_config(args),
            )
        except RuntimeError as error:
            raise _login_error("swanlab", args.swanlab_project, error) from error

    def log_table(self, iteration: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table."""
        table = self.swanlab.echarts.Table()
        table.add(list(columns), [list(row) for row in rows])
        self.run.log({name: table}, step=iteration)


class Mlflow:
    """A run in MLflow; its experiment is ``--mlflow-project``. Other settings are MLflow's: ``MLFLOW_TRACKING_URI``.

    A table is the artifact ``{name}/update_{iteration}.json``: MLflow's ``log_table`` reads and writes the whole table
    each time.
    """

    def __init__(self, args: Namespace, id: str, resumed: bool):
        import mlflow

        self.mlflow, self.errors = mlflow, (mlflow.exceptions.MlflowException,)
        try:
            self.client = mlflow.MlflowClient()
            found = self.client.get_experiment_by_name(args.mlflow_project)
            experiment = found.experiment_id if found else self.client.create_experiment(args.mlflow_project)
            if resumed:
                self.id = self.client.get_run(id).info.run_id
                self.client.update_run(self.id, status="RUNNING")
            else:
                self.id = self.client.create_run(experiment, run_name=args.mlflow_exp_name).info.run_id
                params = [mlflow.entities.Param(name, str(value)) for name, value in _config(args).items()]
                for begin in range(0, len(params), 100):  # the most that a call takes
                    self.client.log_batch(self.id, params=params[begin : begin + 100])
        except mlflow.exceptions.MlflowException as error:
            raise GrpoError(
                f"--mlflow-project {args.mlflow_project}: mlflow failed: {error} (set MLFLOW_TRACKING_URI to a server "
                "that answers, or to sqlite:///FILE)"
            ) from error

    def log_row(self, iteration: int, row: dict[str, float]) -> None:
        """Add a point to each metric's chart."""
        now = int(1000 * time.time())
        metrics = [self.mlflow.entities.Metric(name, float(value), now, iteration) for name, value in row.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def log_table(self, iteration: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table as a JSON artifact with ``columns`` and ``data``."""
        data = [[None if isinstance(v, float) and not math.isfinite(v) else v for v in row] for row in rows]
        text = json.dumps({"columns": list(columns), "data": data}, ensure_ascii=True)
        self.client.log_text(self.id, text, f"{name}/update_{iteration:06}.json")

    def flush(self) -> None:
        """Do nothing: each call has been stored when it returns."""

    def close(self) -> None:
        """End the run."""
        self.client.set_terminated(self.id)


class Trackio(_HostedTracker):
    """A run in trackio, on this machine. Settings without a flag are trackio's: ``TRACKIO_DIR``.

    trackio knows a run by its name. It is ``--trackio-exp-name`` and the run's identifier.
    """

    errors = (sqlite3.Error,)  # of its file

    def __init__(self, args: Namespace, id: str, resumed: bool):
        import trackio

        self.trackio = trackio
        self.id = id if resumed else "-".join(filter(None, (args.trackio_exp_name, id)))
        self.run = trackio.init(
            project=args.trackio_project,
            name=self.id,
            config=_config(args),
            resume="allow" if resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_table(self, iteration: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table."""
        table = self.trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self.run.log({name: table}, step=iteration)


def _directory(path: str | None) -> str | None:
    if path:
        Path(path).mkdir(parents=True, exist_ok=True)  # W&B would use another directory without a warning
    return path


def _config(args: Namespace) -> dict[str, Any]:
    stored = args_to_json(args)  # API keys are masked
    return {name: value for name, value in stored.items() if isinstance(value, str | int | float | list)}


def _login_error(package: str, project: str, error: Exception) -> GrpoError:
    return GrpoError(
        f"{flag(f'{package}_project')} {project}: {package} failed: {error} "
        f"(log in with {package} login, or keep the run on this machine with {flag(f'{package}_mode')} offline)"
    )
