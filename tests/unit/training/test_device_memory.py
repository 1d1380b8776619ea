"""Peak of the GPU's memory, and the message when it is exhausted; the GPU is made up."""

from types import SimpleNamespace

import pytest
import torch
from good_args import validated

from megatron_grpo.rollout.engine import OutOfMemory, lost_on_failure
from megatron_grpo.training import device_memory, offload
from megatron_grpo.training.device_memory import DeviceMemory, other_programs
from megatron_grpo.utils.errors import EngineLost, GrpoError

GIB = 2**30
FLAGS = "--max-tokens-per-microbatch 131072 --max-prompt-length 512 --max-completion-length 1024"


class Gpu:
    """A GPU of 140 GiB: what torch counts, in GiB."""

    def __init__(self, monkeypatch, allocated=100, reserved=110, free=5):
        self.peak = 0
        cuda = {
            "is_available": lambda: True,
            "memory_allocated": lambda: allocated * GIB,
            "memory_reserved": lambda: reserved * GIB,
            "mem_get_info": lambda: (free * GIB, 140 * GIB),
            "current_device": lambda: 0,
            "max_memory_allocated": lambda: self.peak * GIB,
            "reset_peak_memory_stats": lambda: None,
            "get_device_properties": lambda _: SimpleNamespace(total_memory=140 * GIB, uuid="1234"),
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)


@pytest.fixture
def memory(monkeypatch, one_process):
    """The memory of a process whose engine has 20 GiB awake and 30 GiB that its sleep has freed."""
    monkeypatch.setattr(device_memory, "other_programs", list)
    monkeypatch.setattr(device_memory.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    memory = DeviceMemory(validated(FLAGS, world_size=1))
    memory.engine = SimpleNamespace(device_bytes=lambda: (20 * GIB, 30 * GIB))
    return memory


def test_the_peak_leaves_out_what_sleep_has_freed(memory, monkeypatch):
    gpu = Gpu(monkeypatch)
    gpu.peak = 130  # in an update
    memory.mark(engine=False)
    memory.engine.device_bytes = lambda: (50 * GIB, 0)
    gpu.peak = 110  # awake
    memory.mark(engine=True)
    gpu.peak = 90
    assert memory.peaks() == {"memory/peak": 110, "memory/peak_update": 100}
    gpu.peak = 60
    assert memory.peaks() == {"memory/peak": 60, "memory/peak_update": 60}


def test_holders_add_up_to_the_device(memory, monkeypatch):
    Gpu(monkeypatch)
    assert memory.held() == {
        "weights": 0,
        "gradients": 0,
        "optimizer state": 0,
        "engine": 20,
        "activations and other tensors": 50,
        "free in torch's allocator": 10,
        "CUDA, NCCL and other programs": 55,
        "free": 5,
    }
    assert sum(memory.held().values()) == 140


def test_a_storage_counts_once(memory, monkeypatch):
    """Weights, their gradients, and an optimizer that holds views of weights, a weight itself and a moment."""
    Gpu(monkeypatch)
    monkeypatch.setattr(device_memory, "device", lambda: torch.device("cpu"))  # where the tensors are
    mib = 2**18  # float32 elements of 1 MiB
    flat = torch.zeros(4 * mib)
    first, second = torch.nn.Parameter(flat[:mib]), torch.nn.Parameter(flat[mib:])
    frozen = torch.nn.Parameter(torch.zeros(mib))
    monkeypatch.setattr(offload, "DistributedDataParallel", SimpleNamespace)  # the kind of the chunk
    chunk = SimpleNamespace(
        modules=list,
        parameters=lambda: [first, second, frozen],
        buffers=[SimpleNamespace(grad_data=torch.zeros(3 * mib))],
        expert_parallel_buffers=[],
    )
    shard = first.detach()[: mib // 2]
    state = {shard: {"exp_avg": torch.zeros(2 * mib)}}
    inner = SimpleNamespace(param_groups=[{"params": [shard, second, frozen]}], state=state)
    memory.model, memory.optimizer = [chunk], SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    held = {name: GIB * size / 2**20 for name, size in memory.held().items()}
    assert [held[name] for name in ("weights", "gradients", "optimizer state")] == [5, 3, 2]
    assert sum(memory.held().values()) == pytest.approx(140)


def exhausted(memory, phase, error):
    with pytest.raises(GrpoError) as caught, memory.phase(phase):
        raise error
    return caught.value


def test_an_update_that_runs_out_of_memory(memory, monkeypatch):
    Gpu(monkeypatch)
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 140 GiB\nand more"
    lines = str(exhausted(memory, "update", torch.OutOfMemoryError(text))).splitlines()
    assert lines[0] == (
        "out of memory in an update (forward pass, backward pass and optimizer): "
        "CUDA out of memory. Tried to allocate 2.50 GiB."
    )
    assert lines[1].startswith("rank 0, GPU 0 of 140.0 GiB: weights 0.0, gradients 0.0") and "engine 20.0" in lines[1]
    assert lines[2].startswith("Flags that help: ") and "--max-tokens-per-microbatch 65536 (about " in lines[2]
    assert "--recompute-granularity full" in lines[2]


def test_an_engine_that_runs_out_of_memory(memory, monkeypatch, capfd):
    Gpu(monkeypatch)
    monkeypatch.setattr(OutOfMemory, "explain", memory.explanation)
    with pytest.raises(EngineLost) as lost, memory.phase("rollout"), lost_on_failure("vLLM's step"):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
    lines = str(lost.value).splitlines()
    assert lines[0] == "vLLM's step failed on rank 0: OutOfMemoryError: CUDA out of memory."
    assert lines[1].startswith("rank 0, GPU 0 of 140.0 GiB: weights 0.0")
    assert "--offload-optimizer (0.0 GiB less)" in lines[2] and "--vllm-gpu-memory-utilization" in lines[2]
    assert capfd.readouterr().err == ""  # no traceback


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Free memory on device cuda:0 (3.1/139.8 GiB) on startup is less than desired GPU memory utilization",
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ],
)
def test_texts_of_cuda_and_vllm_for_want_of_memory(memory, monkeypatch, text):
    Gpu(monkeypatch)
    assert str(exhausted(memory, "the start of the engine", RuntimeError(text))).startswith(
        f"out of memory in the start of the engine: {text[:20]}"
    )


@pytest.mark.parametrize("error", [ValueError("a bad row"), EngineLost("no server is left"), GrpoError("a bad flag")])
def test_other_errors_pass_unchanged(memory, error):
    with pytest.raises(type(error)) as caught, memory.phase("update"):
        raise error
    assert caught.value is error


def test_other_programs_on_this_gpu_are_named(monkeypatch):
    Gpu(monkeypatch)
    rows = "GPU-1234, 77, python3, 16384 MiB\nGPU-99, 78, other, 1 MiB\n"
    query = lambda *_, **__: SimpleNamespace(stdout=rows)  # noqa: E731
    assert other_programs(query) == ["Other programs on this GPU: python3 (pid 77) 16384 MiB"]

    def absent(*_, **__):
        raise FileNotFoundError

    assert other_programs(absent) == []
