"""Estimates without a run: memory, FLOPs, and the report of --dry-run."""
