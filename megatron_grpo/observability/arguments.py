"""Flags and rules of metrics, completions, trackers and profiles."""

from argparse import Namespace

import torch

from megatron_grpo.utils.device import needs_gpu
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, COUNT_OR_0, PATH, POSITIVE, SECONDS, SECONDS_OR_0, FlagRow
from megatron_grpo.utils.packages import require
from megatron_grpo.utils.rules import flag, needs

LOGGING: tuple[FlagRow, ...] = (
    ("--print-arguments", bool, False, "print all arguments at the start, not only the given ones"),
    (
        "--log-level",
        ("debug", "info", "warning", "error"),
        None,
        "lowest level of the messages of megatron-core, vLLM and transformers [warning; of vLLM error]",
    ),
    ("--log-interval", COUNT, 1, "updates between two rows of metrics"),
    ("--log-params-norm", bool, False, "also log the L2 norm of the parameters"),
    ("--include-performance-metrics", bool, False, "also log tokens per second by phase and by device, and TFLOP/s"),
    (
        "--device-peak-tflops",
        POSITIVE,
        None,
        "peak dense TFLOP/s of a device, for perf/mfu [16-bit peak of a known device, also with --fp8-format]",
    ),
    ("--num-completions-to-log", COUNT_OR_0, 8, "completions of each rollout to write to {save}/completions.jsonl"),
)

TRACKERS: tuple[FlagRow, ...] = (
    ("--tensorboard-dir", PATH, None, "directory to write TensorBoard files to"),
    ("--wandb-project", str, None, "Weights & Biases project"),
    ("--wandb-exp-name", str, None, "Weights & Biases run name"),
    ("--wandb-entity", str, None, "user or team that owns the project"),
    ("--wandb-save-dir", PATH, None, "parent directory of the folder wandb [{save}]"),
    (
        "--wandb-mode",
        ("online", "offline"),
        None,
        "offline: store the run on this machine; upload it with wandb sync [WANDB_MODE]",
    ),
    ("--swanlab-project", str, None, "SwanLab project"),
    ("--swanlab-exp-name", str, None, "SwanLab run name"),
    ("--swanlab-workspace", str, None, "user or organization that owns the project"),
    ("--swanlab-save-dir", PATH, None, "directory to write SwanLab runs to [{save}/swanlog]"),
    (
        "--swanlab-mode",
        ("online", "offline", "local"),
        None,
        "offline: store the run on this machine; upload it with swanlab sync",
    ),
    ("--mlflow-project", str, None, "MLflow experiment, at MLFLOW_TRACKING_URI"),
    ("--mlflow-exp-name", str, None, "MLflow run name"),
    ("--trackio-project", str, None, "trackio project, in TRACKIO_DIR"),
    ("--trackio-exp-name", str, None, "trackio run name; an identifier is added"),
    ("--log-completions", bool, False, "also write the logged completions to the trackers, as tables"),
)

PROFILE: tuple[FlagRow, ...] = (
    ("--profile", bool, False, "record a profile of the updates from --profile-step-start to --profile-step-end"),
    (
        "--use-pytorch-profiler",
        bool,
        False,
        "use PyTorch's profiler; write to {save}/profile [mark the updates for nsys]",
    ),
    ("--profile-step-start", COUNT_OR_0, 10, "start the profile after this update"),
    ("--profile-step-end", COUNT, 12, "end the profile after this update"),
    ("--profile-ranks", [COUNT_OR_0], None, "ranks to profile [0]"),
)

# The phases of Timers (observability/metrics.py), the start of a run, and the export at its end.
PHASES = ("start", "rollout", "scoring", "logprobs", "update", "sync", "offload", "save", "eval", "export")

WATCHDOG: tuple[FlagRow, ...] = (
    (
        "--watchdog-timeout",
        SECONDS_OR_0,
        300.0,
        "end a run in which no rank makes progress for so many seconds, and name the rank; 0: never",
    ),
    (
        "--watchdog-phase-timeouts",
        dict,
        None,
        'seconds of single phases, such as {"save": 3600} [--watchdog-timeout; start, save, export: 6 times]',
    ),
)

# By package: flags beside --{package}-project and --{package}-exp-name.
PACKAGES = {
    "wandb": ("mode", "save_dir", "entity"),
    "swanlab": ("mode", "save_dir", "workspace"),
    "mlflow": (),
    "trackio": (),
}


def check_logging(args: Namespace) -> None:
    """Raise GrpoError for output without a destination, and for profiles that this machine cannot record."""
    if not args.log_completions:
        needs(args, "num_completions_to_log", "save", "there is no directory to write to")
    check_watchdog(args)
    check_trackers(args)
    check_profiling(args)


def check_watchdog(args: Namespace) -> None:
    """Raise GrpoError for time limits without a watchdog, of unknown phases, and that are no positive numbers."""
    needs(args, "watchdog_phase_timeouts", "watchdog_timeout", "0 starts no watchdog")
    for phase, seconds in (args.watchdog_phase_timeouts or {}).items():
        if phase not in PHASES:
            raise GrpoError(f"--watchdog-phase-timeouts has no phase {phase!r}: give some of {', '.join(PHASES)}")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not SECONDS.contains(seconds):
            raise GrpoError(f"--watchdog-phase-timeouts: {phase} is {seconds!r}: give a number of seconds above 0")


def check_trackers(args: Namespace) -> None:
    """Raise GrpoError for a tracker's flags without the tracker, tables without a tracker, and missing packages.

    A dry run does not check packages.
    """
    for package, others in PACKAGES.items():
        for name in ("exp_name", *others):
            needs(args, f"{package}_{name}", f"{package}_project", "every run is in a project")
    if args.log_completions and not (
        args.tensorboard_dir or any(getattr(args, f"{name}_project") for name in PACKAGES)
    ):
        raise GrpoError(
            "--log-completions needs --tensorboard-dir, --wandb-project, --swanlab-project, --mlflow-project or "
            "--trackio-project: it writes tables there. {save}/completions.jsonl does not need the flag"
        )
    if args.log_completions and args.num_completions_to_log == 0:
        raise GrpoError("--log-completions writes --num-completions-to-log completions, and that is 0: raise it")
    if args.dry_run:
        return
    if args.tensorboard_dir:
        require("--tensorboard-dir", "tensorboard", instead="leave the flag out")
    for package in PACKAGES:
        project = getattr(args, f"{package}_project")
        if project:
            require(f"{flag(f'{package}_project')} {project}", package, instead="leave the flag out")


def check_profiling(args: Namespace) -> None:
    """Raise GrpoError for flags without effect, an empty range of updates, and profiles that need a GPU."""
    for dest in ("use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"):
        needs(args, dest, "profile", "no profile is recorded without it")
    if not args.profile or args.eval_only:  # an evaluation records none
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
        raise needs_gpu("--profile marks the updates for nsys, which", "add --use-pytorch-profiler")
