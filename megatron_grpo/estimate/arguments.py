"""The flag of the dry run."""

from megatron_grpo.utils.flags import FlagRow

DRY_RUN: FlagRow = ("--dry-run", bool, False, "print batch sizes, rank coordinates and estimated memory, then exit")
