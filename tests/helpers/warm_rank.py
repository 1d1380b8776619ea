"""A process that has imported what every rank needs, and forks ranks on request: ranks.py has two of them, since
importing takes a rank some 15 s of CPU time, and most tests' own work less.

Each line of standard input is a request, {"argv": [script, ...], "environments": [{...}, ...], "output": file}, for a
rank in each of the environments. The answer is a line of the ranks' process ids, which are their groups', and a line
with the exit status of each rank when it ends.
"""

import atexit
import gc
import json
import os
import random
import runpy
import sys
import tempfile
import threading
import traceback
from typing import Any

import numpy as np

import pretrain_grpo  # noqa: F401  with the CPU layer, megatron-core and transformers
from megatron_grpo.rollout.vllm import colocate  # noqa: F401  which sets what vLLM reads when it is imported

# isort: split
import vllm
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor  # not vllm.v1.worker.cpu_worker: it replaces the CPU layer's streams

from megatron_grpo.training.arguments import parse_args

getattr(vllm, "LLM")  # noqa: B009  imported at its first use
parse_args([])  # which keeps what it reads of megatron-core
gc.collect()
gc.freeze()  # a rank's collections then need not go through all that was imported


def next_rank() -> dict[str, Any]:
    """Return in each new rank, with its request and its environment as "env"; in this process never."""
    for line in sys.stdin:
        request = json.loads(line)
        ranks = []
        for environment in request["environments"]:
            rank = os.fork()
            if rank == 0:
                return request | {"env": environment}
            os.setpgid(rank, rank)  # to be ended with all that it starts
            ranks.append(rank)
        print(*ranks, flush=True)
        for _ in ranks:
            print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    sys.exit()


request = next_rank()
random.seed()  # forked ranks have this process's states
np.random.seed()
tempfile.tempdir = None  # the request's environment has its own
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
