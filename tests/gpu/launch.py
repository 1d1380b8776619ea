"""What the tests of this folder share: torchrun on GPUs, and an engine that shares its GPU with others."""

import json
import os

import pytest
from ranks import REPO, real_torchrun


def torchrun(nproc: int, script: str, *args, timeout: float = 300, env: dict | None = None) -> str:
    """Run a script on ``nproc`` GPUs, as a user does; returns its output, and fails the test with it."""
    command = [str(REPO / script), *map(str, args)]
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_DEVICE_MAX_CONNECTIONS": "1"} | (env or {})
    status, output = real_torchrun(nproc, command, environment, timeout)
    if status is None:
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{output[-8000:]}")
    if status:
        pytest.fail(f"exit status {status}: {' '.join(command)}\n{output[-8000:]}")
    return output


def engine_flags(mebibytes: int) -> list[str]:
    """Flags for a KV cache of fixed size: several tests share a GPU, so no engine may take what is free just now."""
    return ["--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": mebibytes << 20})]
