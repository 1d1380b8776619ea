"""What survives a crash of the host."""

import os
from pathlib import Path


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
