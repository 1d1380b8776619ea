"""A process that has imported what every rank needs, and forks a rank whenever it is told to: tests/conftest.py has one
for each rank number, since importing takes a rank some 9 s of CPU time, and most tests' own work less.

Each line of standard input is a request, {"argv": [script, ...], "env": {...}, "output": file}. It is answered by two
lines: the process id of the rank, which is its group's, then its exit status.
"""

import atexit
import gc
import json
import os
import runpy
import sys
import threading
import traceback
from typing import Any

import pretrain_grpo  # noqa: F401  with the CPU layer, megatron-core and transformers

gc.collect()
gc.freeze()  # a rank's collections then need not go through all that was imported


def next_rank() -> dict[str, Any]:
    """Return in each new rank, with its request; in this process never."""
    for line in sys.stdin:
        rank = os.fork()
        if rank == 0:
            return json.loads(line)
        os.setpgid(rank, rank)  # to be ended with all that it starts
        print(rank, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]), flush=True)
    sys.exit()


request = next_rank()
output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
    os.dup2(descriptor, target)
os.environ.update(request["env"])
sys.argv = request["argv"]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
status: object = 0
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    status = end.code or 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
except BaseException:
    traceback.print_exc()
    status = 1
# What Python does at its end, but for taking all modules apart, which takes longer than many a script.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
