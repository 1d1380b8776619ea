"""Order of the tests and the one helper they share: a torchrun that cannot hang or outlive its test."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests first: they are quick, and their failures explain those of the tests that start processes."""
    items.sort(key=lambda item: any(item.get_closest_marker(name) for name in ("distributed", "vllm")))


@pytest.fixture
def torchrun() -> Callable[..., subprocess.CompletedProcess]:
    """`torchrun(nproc, script, *args, timeout=300, check=True, env=None)`: run a script on `nproc` local ranks.

    Output of all ranks is in `.stdout` (stderr joined in). With `check` a failing script fails the test with that
    output. At the time-out (seconds) the whole process group is killed.
    """
    return run_torchrun


def run_torchrun(nproc, script, *args, timeout=300.0, check=True, env=None) -> subprocess.CompletedProcess:
    """See the fixture `torchrun`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += [str(script), *map(str, args)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)} | (env or {})
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its own process group, so that the ranks die with their parent
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{output}")
    if check and process.returncode:
        pytest.fail(f"exit status {process.returncode}: {' '.join(command)}\n{output}")
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, str]:
    """Hugging Face directories of tiny random models by family, with a byte tokenizer that has a chat template."""
    sys.path.insert(0, str(REPO / "tools"))
    import make_tiny_model

    root = tmp_path_factory.mktemp("models")
    sizes = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32 --max-position-embeddings 512"
    for family in ("qwen3", "qwen2", "llama"):
        words = f"--save {root / family} --shape {family} --tokenizer bytes --steps 0 --quiet {sizes}".split()
        make_tiny_model.make(make_tiny_model.build_parser().parse_args(words))
    return {family: str(root / family) for family in ("qwen3", "qwen2", "llama")}
