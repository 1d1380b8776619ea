"""Where rows of metrics, and completions as tables, go besides the files of ``--save``: TensorBoard, W&B, SwanLab.

A tracker has ``log_row``, ``log_table``, ``flush`` and ``close``. W&B and SwanLab are no requirements of the project.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.utils.arguments import args_to_json
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag

TABLE = "completions"  # the tables' name in every tracker
Rows = Sequence[Sequence[Any]]


def build_trackers(args: Namespace, start_iteration: int) -> list["TensorBoard | Wandb | SwanLab"]:
    """Open those that the arguments name; GrpoError when one cannot be had, as without a login."""
    trackers: list[TensorBoard | Wandb | SwanLab] = []
    if args.tensorboard_dir:
        trackers.append(TensorBoard(args, start_iteration))
    if args.wandb_project:
        trackers.append(Wandb(args))
    if args.swanlab_project:
        trackers.append(SwanLab(args))
    return trackers


def completion_table(samples: Sequence[dict[str, Any]]) -> tuple[list[str], Rows]:
    """(columns, rows) of what ``completion_log.completion_row`` says of some completions, without their tokens."""
    rewards = list(samples[0]["rewards"])
    told = ["prompt", "completion", "advantage", "length", "finish_reason", "picked", "row"]
    rows = [[*(sample[name] for name in told), *(sample["rewards"][name] for name in rewards)] for sample in samples]
    return told + [f"reward/{name}" for name in rewards], rows


class TensorBoard:
    """Scalars and Markdown tables in ``--tensorboard-dir``; a resumed run's later steps replace those there."""

    def __init__(self, args: Namespace, start_iteration: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(args.tensorboard_dir, purge_step=start_iteration + 1)

    def log_row(self, iteration: int, row: dict[str, float]) -> None:
        """Add a scalar for each metric."""
        for name, value in row.items():
            self.writer.add_scalar(name, value, iteration)

    def log_table(self, iteration: int, columns: Sequence[str], rows: Rows) -> None:
        """Add a table; it stays one whatever the texts hold."""
        lines = [columns, ["---"] * len(columns), *rows]
        self.writer.add_text(TABLE, "\n".join(" | ".join(map(_markdown, line)) for line in lines), iteration)

    def flush(self) -> None:
        """Put everything on the disk."""
        self.writer.flush()

    def close(self) -> None:
        """End it."""
        self.writer.close()


# What would not be shown but obeyed, as a table's bar or an HTML element <think>.
_ESCAPES = {ord(char): f"&#{ord(char)};" for char in "&\\`*_{}[]<>()#|"} | {ord("\n"): " "}


def _markdown(value: Any) -> str:
    return (f"{value:.4f}" if isinstance(value, float) else str(value)).translate(_ESCAPES)


class _Hosted:
    """A run of a service whose package has the interface of W&B's."""

    run: Any

    def log_row(self, iteration: int, row: dict[str, float]) -> None:
        """Add a point to each metric's chart."""
        self.run.log(row, step=iteration)

    def flush(self) -> None:
        """It writes by itself."""

    def close(self) -> None:
        """Finish the run, which waits for uploads."""
        self.run.finish()


class Wandb(_Hosted):
    """A run of W&B. What has no flag here is W&B's own business: its login, ``WANDB_RUN_GROUP``, ``WANDB_TAGS``."""

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
            raise _refused("wandb", args.wandb_project, error) from error

    def log_table(self, iteration: int, columns: Sequence[str], rows: Rows) -> None:
        """Add a table to the history."""
        table = self.wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self.run.log({TABLE: table}, step=iteration)


class SwanLab(_Hosted):
    """A run of SwanLab."""

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
            raise _refused("swanlab", args.swanlab_project, error) from error

    def log_table(self, iteration: int, columns: Sequence[str], rows: Rows) -> None:
        """Add a table."""
        table = self.swanlab.echarts.Table()
        table.add(list(columns), [list(row) for row in rows])
        self.run.log({TABLE: table}, step=iteration)


def _directory(path: str | None) -> str | None:
    if path:
        Path(path).mkdir(parents=True, exist_ok=True)  # W&B would quietly take another
    return path


def _config(args: Namespace) -> dict[str, Any]:
    stored = args_to_json(args)  # without keys
    return {name: value for name, value in stored.items() if isinstance(value, str | int | float | list)}


def _refused(package: str, project: str, error: Exception) -> GrpoError:
    return GrpoError(
        f"{flag(f'{package}_project')} {project}: {package} says: {error} "
        f"(log in by {package} login, or keep the run on this machine by {flag(f'{package}_mode')} offline)"
    )
