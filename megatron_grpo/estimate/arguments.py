"""The flags of the dry run."""

from argparse import Namespace

from megatron_grpo.utils.flags import FlagRow, Number
from megatron_grpo.utils.rules import needs

DRY_RUN: tuple[FlagRow, ...] = (
    ("--dry-run", bool, False, "print batch sizes, rank coordinates and estimated memory, then exit"),
    (
        "--gpu-memory",
        Number(float, 1, 10000),
        None,
        "GiB of a GPU that --dry-run finds flags for [this machine's]",
    ),
)


def check_dry_run(args: Namespace) -> None:
    """Raise GrpoError for a size that nothing reads."""
    needs(args, "gpu_memory", "dry_run", "a run has the memory of its GPU")
