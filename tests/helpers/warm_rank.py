"""Process that imports all modules of a rank once and forks ranks on request: warm_rank.py SOCKET

ranks.py starts one of these processes for all lanes of a test session, with --thorough two: the imports take about 20 s
of CPU time.

A connection to the Unix socket SOCKET sends one line, {"argv": [script, ...], "environments": [{...}, ...],
"output": file}, for one rank per environment. The answer is one line with the process ids of the ranks (also their
process group ids), and, when a rank ends, a line with its exit status. The process ends with its standard input.
"""

import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from typing import Any

# The libraries' threads are idle at a fork, and the ranks start threads of their own.
warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)

listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{sys.argv[1]}.new")
listener.listen(64)  # before the imports: connections wait meanwhile
os.rename(f"{sys.argv[1]}.new", sys.argv[1])  # a name that exists can be connected to

# isort: split
import numpy as np
from gloo_device import share_gloo_device

import pretrain_grpo  # noqa: F401  imports the CPU layer, megatron-core and transformers
from megatron_grpo.rollout.vllm import colocate  # noqa: F401  sets environment variables that vLLM reads at import

# isort: split
import megatron.core.models.mimo.model.base  # noqa: F401  megatron-core's optimizer imports it at its first use
import vllm
import vllm.model_executor.layers.quantization.online.base
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_model_runner  # not vllm.v1.worker.cpu_worker: it replaces the CPU layer's streams
import vllm.v1.worker.gpu_worker

from megatron_grpo.training.arguments import parse_args

share_gloo_device()
getattr(vllm, "LLM")  # noqa: B009  vllm imports LLM at first use
parse_args([])  # caches the data that it reads from megatron-core
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"  # vLLM sets 1: torch.cuda.is_available then looks for a library
gc.collect()
gc.freeze()  # excludes the imported objects from the ranks' garbage collections
gc.unfreeze = lambda: None  # vLLM calls it at its end: a collection of these objects would also copy their pages


def next_rank() -> dict[str, Any]:
    """Return the request, with the rank's environment as "env", in each new rank; never return in this process."""
    child_ended, wake_up = socket.socketpair()
    wake_up.setblocking(False)
    signal.set_wakeup_fd(wake_up.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    events = selectors.DefaultSelector()
    for source in (sys.stdin, child_ended, listener):
        events.register(source, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}  # by process id of a rank
    while True:
        for source in [key.fileobj for key, _ in events.select()]:
            if source is sys.stdin:
                sys.exit()
            elif source is child_ended:
                child_ended.recv(4096)
                for rank in list(clients):
                    ended, status = os.waitpid(rank, os.WNOHANG)
                    if ended:
                        send(clients.pop(rank), os.waitstatus_to_exitcode(status))
            else:
                client, _ = listener.accept()
                with client.makefile() as lines:
                    request = json.loads(lines.readline())
                ranks = []
                for environment in request["environments"]:
                    rank = os.fork()
                    if rank == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for opened in (events, child_ended, wake_up, listener, client, *clients.values()):
                            opened.close()
                        return request | {"env": environment}
                    os.setpgid(rank, rank)  # own process group, so that its children end with it
                    ranks.append(rank)
                    clients[rank] = client
                send(client, *ranks)


def send(client: socket.socket, *numbers: int) -> None:
    """Send a line; a client that has ended reads no more."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(f"{' '.join(map(str, numbers))}\n".encode())


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
