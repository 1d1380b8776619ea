"""Programs on GPUs, an engine that shares its GPU with others, and what cases need."""

import json
import os
from pathlib import Path

import pytest
import torch
from ranks import REPO, real_torchrun, run_group

from megatron_grpo.models.attention_kernels import FLASH_ATTENTION_4

TE = pytest.mark.needs("transformer_engine")
FLASH_4 = pytest.mark.needs(*FLASH_ATTENTION_4, capability=(9, 0))
HANGS = 480.0  # seconds after which a program has stopped; the slowest takes a fraction of it on GPUs that others use


def torchrun(nproc: int, script: str, *args, env: dict | None = None) -> str:
    """Run a script on ``nproc`` GPUs, as a user does; returns its output, and fails the test with it."""
    command = [str(REPO / script), *map(str, args)]
    environment = _environment(env)
    if nproc == 1:
        environment["CUDA_VISIBLE_DEVICES"] = own_gpu()
    return _output(command, *real_torchrun(nproc, command, environment, HANGS))


def own_gpu() -> str:
    """Return the GPU of this worker of pytest-xdist for programs on one GPU: the workers share all GPUs evenly."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    return gpus[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(gpus)]


def program(*command) -> str:
    """Run a program that starts its ranks itself; returns its output, and fails the test with it."""
    return _output(command, *run_group(command, _environment(), HANGS))


def _environment(more: dict | None = None) -> dict[str, str]:
    places = REPO, REPO / "tests" / "helpers"
    paths = [*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_DEVICE_MAX_CONNECTIONS": "1"} | (more or {})


def _output(command, status: int | None, output: str) -> str:
    if status != 0:
        what = f"no end after {HANGS:.0f} s" if status is None else f"exit status {status}"
        pytest.fail(f"{what}: {' '.join(map(str, command))}\n{output[-8000:]}", pytrace=False)
    return output


def cache_flags(mebibytes: int, **options) -> list[str]:
    """Flags for a KV cache of fixed size: several tests share a GPU, so no engine may take what is free just now.

    ``options`` are more of vLLM's.
    """
    return ["--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": mebibytes << 20, **options})]


def engine_flags(mebibytes: int, **options) -> list[str]:
    """`cache_flags`; compiled pieces of a model check the strides of what the piece before them returns."""
    checks = {"inductor_compile_config": {"size_asserts": True}}
    return cache_flags(mebibytes, compilation_config=checks, **options)


def found(out: Path, nproc: int, cases: str, model: str, *flags, env: dict | None = None) -> list[dict]:
    """What each rank of `engine_worker.py` finds."""
    out.mkdir(exist_ok=True)
    words = "--load-hf", model, *engine_flags(256), *flags
    torchrun(nproc, "tests/gpu/engine_worker.py", out, cases, *words, env=env)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(nproc)]
