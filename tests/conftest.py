"""Order of the tests and the one helper they share: a torchrun that cannot hang or outlive its test, and is quick."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parents[1]

# No example fails because the machine is slow.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests first: they are quick, and their failures explain those of the tests that start processes."""
    # Of the others, files that take a minute or more, the longest first: lanes side by side then end at about one time.
    files = "end_to_end parallel_layouts resume rollout checkpointing stream reward_model_servers".split()
    long = {f"test_{name}": place for place, name in enumerate(files)}

    def place(item: pytest.Item) -> tuple[bool, int]:
        starts_processes = any(item.get_closest_marker(name) for name in ("distributed", "vllm"))
        return starts_processes, long.get(item.path.stem, len(long)) if starts_processes else 0

    items.sort(key=place)


@pytest.fixture
def torchrun() -> Callable[..., subprocess.CompletedProcess]:
    """`torchrun(nproc, script, *args, timeout=600, check=True, env=None)`: run a script on `nproc` local ranks.

    Output of all ranks is in `.stdout` (stderr joined in). With `check` a failing script fails the test with that
    output. At the time-out (seconds) all processes are killed. Scripts of tests/ and tools/ run in ranks that are
    forked from `warm_rank.py`; pretrain_grpo.py is what users run, and is started as they start it.
    """
    return run_torchrun


def run_torchrun(nproc, script, *args, timeout=600.0, check=True, env=None) -> subprocess.CompletedProcess:
    """See the fixture `torchrun`."""
    command = [str(REPO / script), *map(str, args)]
    environment = _environment() | (env or {})
    warm = (REPO / script).parent in (REPO / "tests", REPO / "tools")
    status, output = (_warm_ranks if warm else _real_torchrun)(nproc, command, environment, timeout)
    if status is None:
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{output}")
    if check and status:
        pytest.fail(f"exit status {status}: {' '.join(command)}\n{output}")
    return subprocess.CompletedProcess(command, status, output)


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}


def _real_torchrun(nproc, command, environment, timeout) -> tuple[int | None, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *command],
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
        return None, process.communicate()[0]
    return process.returncode, output


# By rank number: each has a hash seed and random states of its own, as ranks have.
_warm: list[subprocess.Popen] = []


def _warm_ranks(nproc, command, environment, timeout) -> tuple[int | None, str]:
    """What torchrun does, with forked ranks: it keeps their store, and ends all as soon as one fails."""
    from torch.distributed import TCPStore

    while len(_warm) < nproc:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPO, "env": _environment()}
        _warm.append(subprocess.Popen([sys.executable, str(REPO / "tests" / "warm_rank.py")], **pipes))
    processes = _warm[:nproc]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    world |= {"TORCHELASTIC_RUN_ID": "warm", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    with tempfile.NamedTemporaryFile("r", errors="replace") as output, ThreadPoolExecutor(nproc) as waiting:
        for rank, process in enumerate(processes):
            own = {name: str(value) for name, value in (world | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            request = {"argv": command, "env": environment | own, "output": output.name}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        started = [process.stdout.readline() for process in processes]
        assert all(started), "warm_rank.py has ended; standard error says why"
        groups = [int(line) for line in started]
        ends = [waiting.submit(process.stdout.readline) for process in processes]
        status: int | None = 0
        try:
            for end in as_completed(ends, timeout):
                if status := int(end.result()):
                    break
        except TimeoutError:
            status = None
        finally:  # those that are left, and what they have started
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        return status, output.read()


def pytest_sessionfinish() -> None:
    """End what forks ranks."""
    for process in _warm:
        process.stdin.close()
        process.wait()


def alive(pid: int | str) -> bool:
    """Whether a process runs: one that has ended and that nobody has asked for its status does not."""
    try:
        return re.search(r"State:\s+[^ZX]", Path(f"/proc/{pid}/status").read_text()) is not None
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or while it is read
        return False


def gone(pids: Collection[int | str]) -> bool:
    """Whether these processes end within a minute."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture
def one_process(monkeypatch):
    """A process group of this process alone, as a trainer has it."""
    import torch.distributed as dist

    from megatron_grpo.parallel import initialize  # now that the test has prepared for machines without a GPU

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(initialize, "_host_group", dist.group.WORLD)
    yield
    dist.destroy_process_group()


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
