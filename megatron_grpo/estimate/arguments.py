"""The flag of the dry run."""

from megatron_grpo.utils.arguments import FlagRow

DRY_RUN: FlagRow = ("--dry-run", bool, False, "print the batch arithmetic, the layout and the memory, and end")
