"""A vLLM server on a CPU, in processes of its own, for tools and tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def cpu_server(model: Path, log_file: Path, options: str = "", **environment: str) -> Iterator[tuple[str, int]]:
    """Context with the address and the process id of a server of ``model`` in float32, which may still be starting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += f"--host 127.0.0.1 --port {port} --dtype float32 --max-model-len 400 --enforce-eager".split()
    command += f"--no-enable-chunked-prefill {options}".split()
    settings = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", **environment}
    with open(log_file, "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | settings, start_new_session=True)
        try:
            yield f"http://127.0.0.1:{port}", server.pid
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
