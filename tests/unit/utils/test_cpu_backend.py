"""The CPU layer: each patch is needed (its check fails without it) and does what it says (the check passes with it).

Patches change the whole process. So the checks run in a process of their own, this file as a program, which prints what
became of each check at each stage.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

REPO = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPO))
from megatron_grpo.patches import cpu_backend
from megatron_grpo.utils.device import device

# ---- checks by the name of their patch; megatron.core is imported by the late ones only


def current_device():
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"


def factories():
    for place in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)):
        assert torch.empty((2, 3), dtype=torch.float64, device=place).shape == (2, 3)
        assert torch.arange(4, device=place).tolist() == [0, 1, 2, 3]
        assert torch.tensor([1.5], device=place, dtype=torch.bfloat16).item() == 1.5
        assert torch.full_like(torch.zeros(2), 7.0, device=place).tolist() == [7.0, 7.0]
    assert not torch.zeros(2, pin_memory=True).is_pinned()


def tensor_cuda():
    x, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert x.cuda(non_blocking=True) is x and module.cuda(0) is module


def tensor_type():
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"  # what megatron-core's optimizers look for
    assert torch.zeros(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64  # converting is left alone


def synchronize():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def streams():
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        event = torch.cuda.Event()
        event.record(side)
    torch.cuda.default_stream().wait_event(event)

    def annotated(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None: ...


def random_state():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


def compile():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1)).item() == 1.0
    assert not compiled


def uneven_collectives():
    """Two processes gather parts of one and two numbers, and scatter sums of such parts."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = 0 if child else 1
        try:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
            parts = [torch.zeros(1), torch.zeros(2)]
            dist.all_gather(parts, torch.full((rank + 1,), float(rank + 5)))
            assert [part.tolist() for part in parts] == [[5.0], [6.0, 6.0]]
            mine = torch.zeros(rank + 1)
            dist.reduce_scatter(mine, [torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
            assert mine.tolist() == [[2.0], [4.0, 6.0]][rank]
            code = 0
        except Exception:
            code = 1
            if child:
                raise
        finally:
            if not child:
                os._exit(code)
            os.waitpid(child, 0)
            if dist.is_initialized():
                dist.destroy_process_group()


def core_random():
    """Draws inside a fork of the tracker are those of its own seed, and go on there; outside nothing has happened."""
    from megatron.core.tensor_parallel import random as core_random

    messages = []
    logging.getLogger(core_random.__name__).addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    tracker = core_random.CudaRNGStatesTracker()
    tracker.add("own", 11)
    torch.manual_seed(3)
    outer = [torch.rand(2)]
    inner = []
    for _ in range(2):
        with tracker.fork("own"):
            inner.append(torch.rand(2))
        outer.append(torch.rand(2))
    for seed, draws in ((11, inner), (3, outer)):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(torch.stack(draws), torch.stack([torch.rand(2, generator=generator) for _ in draws])), seed
    assert not messages, messages


def expert_split_sizes():
    """The split sizes of the all-to-all become numbers."""
    from megatron.core.transformer.moe import token_dispatcher

    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3, 5]), as_numpy=True)
    assert not torch.is_tensor(sizes) and sizes.tolist() == [3, 5]
    assert torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3, 5])))


EARLY = (current_device, factories, tensor_cuda, tensor_type, synchronize, streams, random_state, compile)
EARLY += (uneven_collectives,)
LATE = (core_random, expert_split_sizes)


def spoiled() -> list[str]:
    """What the patches must leave alone and do not (nothing, one hopes)."""
    with torch.device("meta"):
        places = [torch.zeros(1).device.type, torch.empty_like(torch.rand(2)).device.type]
    places += [torch.ones(1, device="meta").device.type, torch.nn.Linear(1, 1, device="meta").weight.device.type]
    wrong = [f"meta became {place}" for place in places if place != "meta"]
    if torch.zeros(1).device.type != "cpu" or torch.Tensor([1.0]).tolist() != [1.0]:
        wrong.append("the CPU's own tensors")
    if torch.cuda.is_available() or device() != torch.device("cpu"):
        wrong.append("torch.cuda.is_available()")
    return wrong


def outcomes(checks) -> dict[str, str]:
    """The traceback of each check, "" for one that passed."""
    result = {}
    for check in checks:
        try:
            check()
            result[check.__name__] = ""
        except Exception:
            result[check.__name__] = traceback.format_exc()
    return result


def main() -> None:
    stages = {"before": outcomes(EARLY)}
    late, cpu_backend.LATE = cpu_backend.LATE, ()
    cpu_backend.install()
    stages["before"] |= outcomes(LATE)
    for patch in late:
        patch()
    cpu_backend.install()  # a second call changes nothing
    stages["after"] = outcomes(EARLY + LATE)
    stages["spoiled"] = spoiled()
    print("\n" + json.dumps(stages))


# ---- tests


@pytest.fixture(scope="module")
def stages():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # a machine without a GPU
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in EARLY + LATE])
def test_patch(stages, name):
    assert stages["before"][name], "the check passes without the patch: is it still needed?"
    assert stages["after"][name] == ""


def test_every_patch_is_checked():
    names = [[check.__name__ for check in checks] for checks in (EARLY, LATE)]
    assert [[f"patch_{name}" for name in part] for part in names] == [
        [patch.__name__ for patch in part] for part in (cpu_backend.EARLY, cpu_backend.LATE)
    ]


@pytest.mark.slow
def test_nothing_else_changes(stages):
    assert stages["spoiled"] == []


def test_nothing_is_done_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cpu_backend, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_backend, "EARLY", (pytest.fail,))
    monkeypatch.setattr(cpu_backend, "LATE", (pytest.fail,))
    cpu_backend.install()


if __name__ == "__main__":
    main()
