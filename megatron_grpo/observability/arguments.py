"""Flags and rules of what a run reports: metrics, completions, trackers, profiles."""

import importlib.util
from argparse import Namespace

import torch

from megatron_grpo.utils.arguments import FlagRow
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag, needs, positive

LOGGING: tuple[FlagRow, ...] = (
    ("--log-interval", int, 1, "updates between two lines"),
    ("--log-params-norm", bool, False, "also log the L2 norm of the parameters"),
    ("--include-performance-metrics", bool, False, "also log tokens/s by phase and device, and TFLOP/s"),
    ("--device-peak-tflops", float, None, "dense TFLOP/s of a device, for perf/mfu [known ones, in 16 bits]"),
    ("--num-completions-to-log", int, 8, "completions of a rollout that are written to {save}/completions.jsonl"),
)

TRACKERS: tuple[FlagRow, ...] = (
    ("--tensorboard-dir", str, None, "directory for TensorBoard"),
    ("--wandb-project", str, None, "Weights & Biases project"),
    ("--wandb-exp-name", str, None, "Weights & Biases run name"),
    ("--wandb-entity", str, None, "user or team that the project belongs to"),
    ("--wandb-save-dir", str, None, "directory for the folder wandb [{save}]"),
    ("--wandb-mode", ("online", "offline"), None, "offline: keep the run here, for wandb sync [WANDB_MODE]"),
    ("--swanlab-project", str, None, "SwanLab project"),
    ("--swanlab-exp-name", str, None, "SwanLab run name"),
    ("--swanlab-workspace", str, None, "user or organization that the project belongs to"),
    ("--swanlab-save-dir", str, None, "directory for its runs [{save}/swanlog]"),
    ("--swanlab-mode", ("online", "offline", "local"), None, "offline: keep the run here, for swanlab sync"),
    ("--log-completions", bool, False, "show what completions.jsonl gets as tables in these, too"),
)

PROFILE: tuple[FlagRow, ...] = (
    ("--profile", bool, False, "record the updates between --profile-step-start and --profile-step-end"),
    ("--use-pytorch-profiler", bool, False, "write traces and tables to {save}/profile [mark the updates for nsys]"),
    ("--profile-step-start", int, 10, "record what comes after this update"),
    ("--profile-step-end", int, 12, "and up to this one"),
    ("--profile-ranks", [int], None, "ranks that record [0]"),
)

PACKAGES = ("wandb", "swanlab")


def check_logging(args: Namespace) -> None:
    """Refuse what is reported nowhere, or cannot be recorded here."""
    if not args.log_completions:
        needs(args, "num_completions_to_log", "save", "there is no directory to write to")
    if args.num_completions_to_log < 0:
        raise GrpoError(f"--num-completions-to-log ({args.num_completions_to_log}) must not be negative")
    positive(args, "device_peak_tflops")
    check_trackers(args)
    check_profiling(args)


def check_trackers(args: Namespace) -> None:
    """Refuse a tracker's flags without the tracker, tables without any, and (unless it is a dry run) what is not
    installed.
    """
    for package in PACKAGES:
        for name in ("exp_name", "mode", "save_dir", "entity" if package == "wandb" else "workspace"):
            needs(args, f"{package}_{name}", f"{package}_project", "a run belongs to a project")
    if args.log_completions and not (args.tensorboard_dir or args.wandb_project or args.swanlab_project):
        raise GrpoError(
            "--log-completions needs --tensorboard-dir, --wandb-project or --swanlab-project: it makes tables there. "
            "{save}/completions.jsonl is written anyway"
        )
    if args.log_completions and args.num_completions_to_log == 0:
        raise GrpoError("--log-completions makes tables of --num-completions-to-log, which is 0: raise it")
    if args.dry_run:
        return
    for package in PACKAGES:
        project = getattr(args, f"{package}_project")
        if project and importlib.util.find_spec(package) is None:
            raise GrpoError(
                f"{flag(f'{package}_project')} {project} needs the package {package}, which is not installed: "
                f"pip install {package}, or leave the flag out"
            )


def check_profiling(args: Namespace) -> None:
    """Refuse flags without effect, ranges without updates, and what this machine cannot record."""
    for dest in ("use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"):
        needs(args, dest, "profile", "nothing is recorded without it")
    if not args.profile:
        return
    start, end = args.profile_step_start, args.profile_step_end
    if not 0 <= start < end <= (args.train_iters or end):
        raise GrpoError(
            f"--profile-step-start ({start}) must be at least 0 and less than --profile-step-end ({end}), and that at "
            f"most --train-iters ({args.train_iters})"
        )
    if args.use_pytorch_profiler and not args.save:
        raise GrpoError("--use-pytorch-profiler needs --save: there is no directory to write traces to")
    if not args.use_pytorch_profiler and not torch.cuda.is_available() and not args.dry_run:
        raise GrpoError(
            f"--profile marks the updates for nsys, which sees a GPU's work and there is none: add "
            f"{flag('use_pytorch_profiler')}"
        )
