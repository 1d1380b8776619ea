"""What the tests of this folder share: torchrun on GPUs, and an engine that shares its GPU with others."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def torchrun(nproc: int, script: str, *args, timeout: float = 300, env: dict | None = None) -> str:
    """Run a script on ``nproc`` GPUs, as a user does; returns its output, and fails the test with it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += [str(REPO / script), *map(str, args)]
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_DEVICE_MAX_CONNECTIONS": "1"} | (env or {})
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{process.communicate()[0][-8000:]}")
    if process.returncode:
        pytest.fail(f"exit status {process.returncode}: {' '.join(command)}\n{output[-8000:]}")
    return output


def engine_flags(mebibytes: int) -> list[str]:
    """Flags for a KV cache of fixed size: several tests share a GPU, so no engine may take what is free just now."""
    return ["--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": mebibytes << 20})]
