"""Memory of this rank's GPU: its peak, and an explanation when it is exhausted."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.estimate.memory import GIB
from megatron_grpo.estimate.savings import savings
from megatron_grpo.models.fp8_weight import stored
from megatron_grpo.models.layer_graphs import layer_graphs
from megatron_grpo.training.offload import gradient_tensors, optimizer_tensors
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError, is_out_of_memory

# The phases of Timers and of setup.py, as an error message names them.
PHASES = {
    "rollout": "generation",
    "scoring": "the scoring of completions",
    "logprobs": "a forward pass for log-probabilities",
    "update": "an update (forward pass, backward pass and optimizer)",
    "sync": "the weight sync",
    "offload": "the return of the trainer's tensors from the host",
    "save": "the save of a checkpoint",
    "eval": "an evaluation",
}
TRAINING = "logprobs", "update"  # phases with activations


class DeviceMemory:
    """Peak and holders of the memory of this rank's GPU.

    ``model``, ``optimizer`` and ``engine`` are set when they have been built.
    """

    def __init__(self, args):
        self.args = args
        self.model: list = []
        self.optimizer = None
        self.engine = None
        self._peak = self._peak_without_engine = 0

    def mark(self, engine: bool) -> None:
        """Take the peak since the last call. Call this before the engine allocates or frees memory.

        ``engine``: whether it was awake since the last call. torch counts its memory as allocated while it sleeps,
        although the GPU has it back.
        """
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() - self._engine_bytes()[1] + self._graphs()
            self._peak = max(self._peak, peak)
            if not engine:
                self._peak_without_engine = max(self._peak_without_engine, peak)
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, float]:
        """Return the peaks of this process's tensors since the last call, in GiB, with the names of METRICS."""
        self.mark(engine=False)
        found = {"memory/peak": self._peak / GIB, "memory/peak_update": self._peak_without_engine / GIB}
        self._peak = self._peak_without_engine = 0
        return found

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of a phase, a key of PHASES or words; if memory runs out, the error says who holds it and what helps.

        Raises GrpoError. A GrpoError passes unchanged: it has its own message, such as an engine's with `explanation`.
        """
        try:
            yield
        except GrpoError:
            raise
        except Exception as error:
            if not is_out_of_memory(error) or not torch.cuda.is_available():
                raise
            first = str(error).strip().partition("\n")[0].partition(" GPU ")[0]
            raise GrpoError(f"out of memory in {PHASES.get(name, name)}: {first}\n{self.explanation(name)}") from error

    def _graphs(self) -> int:
        """Return the bytes that --cuda-graphs keeps for activations; torch counts them as free."""
        return sum(graphs.reserved for chunk in self.model for graphs in layer_graphs(chunk))

    def held(self) -> dict[str, float]:
        """Return the GiB that each holder has on the GPU, in this process and outside it.

        A storage counts for its first holder: the parameters of some optimizers are the weights, or views of them.
        """
        free, total = torch.cuda.mem_get_info()
        awake, asleep = self._engine_bytes()
        allocated = torch.cuda.memory_allocated() - asleep + self._graphs()
        reserved = torch.cuda.memory_reserved() - asleep
        trained = self.optimizer is not None
        counted: dict[int, int] = {}
        known = {
            "weights": _bytes(
                (part for chunk in self.model for w in chunk.parameters() for part in stored(w)), counted
            ),
            "gradients": _bytes(gradient_tensors(self.model), counted) if trained else 0,
            "optimizer state": _bytes(optimizer_tensors(self.optimizer), counted) if trained else 0,
            "engine": awake,
        }
        rest = {
            "activations and other tensors": allocated - sum(known.values()),
            "free in torch's allocator": reserved - allocated,
            "CUDA, NCCL and other programs": total - free - reserved,
            "free": free,
        }
        return {name: size / GIB for name, size in (known | rest).items()}

    def explanation(self, phase: str = "rollout") -> str:
        """Return lines on who holds the memory, and on the flags that free some; empty on a CPU."""
        if not torch.cuda.is_available():
            return ""
        held = self.held()
        sizes = ", ".join(f"{name} {size:.1f}" for name, size in held.items())
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
        rank = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
        lines = [f"{rank}GPU {torch.cuda.current_device()} of {total:.1f} GiB: {sizes}"]
        lines += other_programs()
        lines.append("Flags that help: " + "; ".join(self._advice(phase, held)))
        return "\n".join(lines)

    def _advice(self, phase: str, held: dict[str, float]) -> list[str]:
        args = self.args
        if phase in TRAINING:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            found = [f"{flags} (about {size:.1f} GiB less)" for flags, size in savings(args, stage)]
            if not args.sleep_level and held["engine"] > 0:
                found.append(f"--sleep-level 2 ({held['engine']:.1f} GiB less)")
            return found or ["a larger --tensor-model-parallel-size or --pipeline-model-parallel-size"]
        offloads = {
            "--offload-model": (args.offload_model, "weights"),
            "--offload-gradients": (args.offload_gradients, "gradients"),
            "--offload-optimizer": (args.offload_optimizer, "optimizer state"),
        }
        found = [f"{flag} ({held[name]:.1f} GiB less)" for flag, (given, name) in offloads.items() if not given]
        if args.rollout_engine == "megatron":
            return [*found, "a smaller --inference-max-requests"]
        less = max(args.vllm_gpu_memory_utilization - 0.1, 0.1)
        return [*found, f"--vllm-gpu-memory-utilization {less:.2g} (it is {args.vllm_gpu_memory_utilization:g})"]

    def _engine_bytes(self) -> tuple[int, int]:
        """Return the bytes of the engine on the GPU, and those that its sleep has freed; 0 before it is built."""
        return (0, 0) if self.engine is None else self.engine.device_bytes()


def _bytes(tensors: Iterable[torch.Tensor], counted: dict[int, int]) -> int:
    """Return the bytes of the storages of ``tensors`` on the GPU that are not ``counted``; count them.

    ``counted``: the bytes from each address that have been counted.
    """
    found = 0
    for storage in (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device().type):
        before = counted.get(storage.data_ptr(), 0)
        if storage.nbytes() > before:
            counted[storage.data_ptr()] = storage.nbytes()
            found += storage.nbytes() - before
    return found


def other_programs(query: Callable = subprocess.run) -> list[str]:
    """Return a line on the other processes on this GPU that the driver shows; none in most containers."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        rows = query(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    mine = str(os.getpid())
    others = [row.split(", ") for row in rows]
    found = [f"{name} (pid {pid}) {size}" for gpu, pid, name, size in others if gpu == uuid and pid != mine]
    return [f"Other programs on this GPU: {', '.join(found)}"] if found else []
