"""Process that imports all modules of a rank once and forks ranks on request.

ranks.py starts two of these processes: the imports take about 15 s of CPU time per rank, more than most tests.

Each line of standard input is a request, {"argv": [script, ...], "environments": [{...}, ...], "output": file}, for one
rank per environment. The answer is one line with the process ids of the ranks (also their process group ids), and, when
a rank ends, a line with its exit status.
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

import pretrain_grpo  # noqa: F401  imports the CPU layer, megatron-core and transformers
from megatron_grpo.rollout.vllm import colocate  # noqa: F401  sets environment variables that vLLM reads at import

# isort: split
import vllm
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor  # not vllm.v1.worker.cpu_worker: it replaces the CPU layer's streams

from megatron_grpo.training.arguments import parse_args

getattr(vllm, "LLM")  # noqa: B009  vllm imports LLM at first use
parse_args([])  # caches the data that it reads from megatron-core
gc.collect()
gc.freeze()  # excludes the imported objects from the ranks' garbage collections


def next_rank() -> dict[str, Any]:
    """Return the request, with the rank's environment as "env", in each new rank; never return in this process."""
    for line in sys.stdin:
        request = json.loads(line)
        ranks = []
        for environment in request["environments"]:
            rank = os.fork()
            if rank == 0:
                return request | {"env": environment}
            os.setpgid(rank, rank)  # own process group, so that its children end with it
            ranks.append(rank)
        print(*ranks, flush=True)
        for _ in ranks:
            print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    sys.exit()


request = next_rank()
random.seed()  # forked ranks inherit this process's random states
np.random.seed()
tempfile.tempdir = None  # the request's environment sets another one
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
# Python's exit sequence without the destruction of modules, which takes longer than many scripts.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
