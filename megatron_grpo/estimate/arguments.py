"""The flag of the dry run."""

from megatron_grpo.utils.arguments import Row

DRY_RUN: Row = ("--dry-run", bool, False, "print the batch arithmetic, the layout and the memory, and end")
