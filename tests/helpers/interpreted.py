"""Workers that ask Triton's kernels in its interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

from ranks import REPO


def last_line(worker: Path) -> str:
    """Run a worker in a process of its own; returns the last line that it prints, and fails the test with its error."""
    places = REPO, *sys.path  # sys.path has the folders of tests and helpers, too
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]
