"""Trackers for rows of metrics and tables of completions: TensorBoard, W&B, SwanLab.

A tracker has ``log_row``, ``log_table``, ``flush`` and ``close``. W&B and SwanLab are optional packages.
"""

import threading
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.utils.arguments import args_to_json
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag

TABLES = "completions", "eval_completions"  # names of the tables in every tracker: of rollouts, of evaluations
FIELDS = "file", "kind", "prompt", "completion", "advantage", "length", "finish_reason", "picked", "row"
Rows = Sequence[Sequence[Any]]


def build_trackers(args: Namespace, start_iteration: int) -> list["TensorBoard | Wandb | SwanLab"]:
    """Open the trackers that the arguments name; raise GrpoError if one fails, for example without a login."""
    trackers: list[TensorBoard | Wandb | SwanLab] = []
    if args.tensorboard_dir:
        trackers.append(TensorBoard(args, start_iteration))
    if args.wandb_project:
        trackers.append(Wandb(args))
    if args.swanlab_project:
        trackers.append(SwanLab(args))
    return trackers


def completion_table(samples: Sequence[dict[str, Any]]) -> tuple[list[str], Rows]:
    """Return (columns, rows) for samples of ``completion_log``, without their tokens."""
    rewards = list(samples[0]["rewards"])
    fields = [name for name in FIELDS if name in samples[0]]
    rows = [[*(sample[name] for name in fields), *(sample["rewards"][name] for name in rewards)] for sample in samples]
    return fields + [f"reward/{name}" for name in rewards], rows


class TensorBoard:
    """Scalars and Markdown tables in ``--tensorboard-dir``; a resumed run replaces later steps."""

    def __init__(self, args: Namespace, start_iteration: int):
        from torch.utils.tensorboard import SummaryWriter

        _hide_tracebacks_of_tensorboards_threads()
        try:
            self.writer = SummaryWriter(args.tensorboard_dir, purge_step=start_iteration + 1)
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

    def log_row(self, iteration: int, row: dict[str, float]) -> None:
        """Add a point to each metric's chart."""
        self.run.log(row, step=iteration)

    def flush(self) -> None:
        """Do nothing: the service writes in the background."""

    def close(self) -> None:
        """Finish the run; wait for uploads."""
        self.run.finish()


class Wandb(_HostedTracker):
    """A run in W&B. Settings without a flag are those of W&B: login, ``WANDB_RUN_GROUP``, ``WANDB_TAGS``."""

    def __init__(self, args: Namespace):
        import wandb

        self.wandb = wandb
        try:
            self.run = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name,
                entity=args.wandb_entity,
                mode=args.wandb_mode,
                dir=_directory(args.wandb_save_dir or args.save),
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

    def __init__(self, args: Namespace):
        import swanlab

        self.swanlab = swanlab
        try:
            self.run = swanlab.init(
                project=args.swanlab_project,
                name=args.swanlab_exp_name,
                workspace=args.swanlab_workspace,
                mode=args.swanlab_mode,
                log_dir=_directory(args.swanlab_save_dir or (args.save and f"{args.save}/swanlog")),
                config=_config(args),
            )
        except RuntimeError as error:
            raise _login_error("swanlab", args.swanlab_project, error) from error

    def log_table(self, iteration: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table."""
        table = self.swanlab.echarts.Table()
        table.add(list(columns), [list(row) for row in rows])
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
