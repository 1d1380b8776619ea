"""Patches that let megatron-core run on a CPU with gloo.

megatron-core hard-codes CUDA in several places. Each patch below is one function with its reason. On a machine without
a GPU ``install`` applies the patches before ``megatron.core`` is imported; on a GPU this module does nothing. Gloo
supports all-to-all, bf16, coalescing and collectives over equal shards without a patch.
"""

import contextlib
import logging

import torch
import torch.distributed as dist
import torch.utils._device

CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided full full_like linspace ones ones_like rand randint randn tensor "
    "zeros zeros_like"
).split()


def device() -> torch.device:
    """Return the device of this process: its current GPU, or the CPU."""
    return CPU if not _has_gpu() else torch.device("cuda", torch.cuda.current_device())


def to_device(tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device ``to``; the host does not wait for the device's earlier work.

    A copy from memory that is not pinned may wait for it.
    """
    return tensor.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else tensor.to(to)


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _is_cuda_device(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


def patch_current_device() -> None:
    """Return the CPU from ``torch.cuda.current_device()``, on which megatron-core places buffers."""
    torch.cuda.current_device = lambda: CPU


def patch_factories() -> None:
    """Create tensors on the CPU for ``torch.zeros(..., device="cuda")`` and similar functions.

    ``pin_memory`` is ignored, because pinning needs a GPU driver.
    """

    def on_cpu(factory):
        def create(*args, **kwargs):
            if _is_cuda_device(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return create

    # At its first use `with torch.device(...)` collects the functions that it changes. Trigger this before the patch:
    # with patched functions the context does nothing (transformers' from_pretrained then leaves buffers uninitialised).
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def patch_tensor_cuda() -> None:
    """Make ``x.cuda()`` return x, for tensors and modules: loading an optimizer checkpoint calls it."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def patch_tensor_type() -> None:
    """Return ``torch.cuda.*Tensor`` from ``x.type()``, because the optimizer compares with these strings."""
    original = torch.Tensor.type

    def cuda_name(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = cuda_name


def patch_synchronize() -> None:
    """Make ``torch.cuda.synchronize`` and ``empty_cache`` do nothing: no CPU work is asynchronous.

    The pipeline schedules synchronise the device after communication.
    """
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None


def patch_streams() -> None:
    """Replace CUDA streams and events by empty classes; vLLM uses the classes in type annotations."""

    class Stream:
        def __init__(self, *args, **kwargs):
            pass

        def _return_self(self, *args, **kwargs):
            return self

        wait_stream = wait_event = synchronize = record_event = record = wait = _return_self

        def __eq__(self, other):
            return isinstance(other, Stream)

        def __hash__(self):
            return 0

    torch.cuda.Stream = type("Stream", (Stream,), {})
    torch.cuda.Event = type("Event", (Stream,), {})
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


def patch_random_state() -> None:
    """Use the CPU's random generator as the generator of the device."""
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def patch_compile() -> None:
    """Disable ``torch.compile`` (megatron-core's ``jit_fuser``): it would call a C++ compiler for a few functions."""
    import torch._dynamo

    torch._dynamo.config.disable = True


def patch_core_random() -> None:
    """Make megatron-core's RNG tracker fork the CPU's generator, and silence its warning.

    The tracker sets states through a CUDA-only path, which does not fork the generator on a CPU. It warns at every fork
    that the "CPU RNG state changed within GPU RNG context", because both generators are the same here.
    """
    import megatron.core.tensor_parallel.random as core_random

    core_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    core_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logger = logging.getLogger(core_random.__name__)
    logger.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def patch_expert_split_sizes() -> None:
    """Convert the split sizes of the all-to-all dispatcher to numbers; megatron-core does so only for GPU tensors."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def patch_uneven_collectives() -> None:
    """Implement all-gather and reduce-scatter of unequal shards, which gloo lacks and expert parallelism needs."""
    gather_equal, scatter_equal = dist.all_gather, dist.reduce_scatter

    def even(tensors) -> bool:
        return len({tensor.shape for tensor in tensors}) == 1

    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if async_op or even(tensor_list):
            return gather_equal(tensor_list, tensor, group, async_op)
        for rank, part in zip(dist.get_process_group_ranks(group), tensor_list, strict=True):
            if rank == dist.get_rank():
                part.copy_(tensor)
            dist.broadcast(part, rank, group)

    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if async_op or even(input_list):
            return scatter_equal(output, input_list, op, group, async_op)
        for rank, part in zip(dist.get_process_group_ranks(group), input_list, strict=True):
            total = part.clone()
            dist.reduce(total, rank, op, group)
            if rank == dist.get_rank():
                output.copy_(total)

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


EARLY = (
    patch_current_device,
    patch_factories,
    patch_tensor_cuda,
    patch_tensor_type,
    patch_synchronize,
    patch_streams,
    patch_random_state,
    patch_compile,
    patch_uneven_collectives,
)
LATE = (patch_core_random, patch_expert_split_sizes)  # these change megatron-core itself, after its import
_installed = False


def install() -> None:
    """Apply every patch once if this machine has no GPU. Call it before the first import of ``megatron.core``."""
    global _installed
    if _installed or _has_gpu():
        return
    _installed = True
    for patch in EARLY:
        patch()
    import megatron.core  # noqa: F401

    for patch in LATE:
        patch()
