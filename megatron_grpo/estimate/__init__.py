"""What a run will take, computed without running it: memory, the dry run, FLOPs."""
