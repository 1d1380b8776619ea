"""A process that holds the lock of a run on its --save directory."""

import subprocess
import sys

from ranks import REPO

HOLDER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from megatron_grpo.checkpointing.run_lock import RunLock
try:
    lock = RunLock(sys.argv[2], patience=0.3, lease=1.0, beat=0.05)
except Exception as error:
    print(error, flush=True)
    os._exit(1)
print("held", lock.taken_over, flush=True)
sys.stdin.readline()
lock.release()
"""


class Holder:
    """A process that holds the lock of a directory, or prints why it does not."""

    def __init__(self, save):
        command = [sys.executable, "-c", HOLDER, str(REPO), str(save)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer = self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def end(self, *, killed):
        if killed:
            self.process.kill()
        self.process.communicate("\n" if not killed else None)
