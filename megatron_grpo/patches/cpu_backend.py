"""The CPU layer: names of torch and megatron-core that are replaced so that megatron-core runs on a CPU with gloo.

megatron-core hard-codes CUDA in several places. Each patch below is one function with its reason, which returns what
takes the place of its names. On a machine without a GPU ``install`` applies the patches before ``megatron.core`` is
imported; on a GPU this module does nothing. Gloo supports all-to-all, bf16, coalescing and collectives over equal
shards without a patch.
"""

import contextlib
import functools
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.utils._device

from megatron_grpo.patches import megatron_core as core
from megatron_grpo.patches.replacement import Replacement
from megatron_grpo.utils.device import CPU

_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided full full_like linspace ones ones_like rand randint randn tensor "
    "zeros zeros_like"
).split()

ENTRIES: list[Replacement] = []


def in_place_of(*names: str | Replacement) -> Callable:
    """Return a decorator: it makes a patch of a function that gets the names' objects and returns those in their place.

    A name of torch becomes an entry; its reason is the first sentence of the function's documentation.
    """

    def patch_of(function: Callable) -> Callable[[], None]:
        why = " ".join((function.__doc__ or "").partition("\n\n")[0].split())
        entries = [name if isinstance(name, Replacement) else _torch_entry(name, why) for name in names]
        ENTRIES.extend(entries)

        @functools.wraps(function)
        def patch() -> None:
            values = function(*(entry.original() for entry in entries))
            for entry, value in zip(entries, values, strict=True):
                entry.install(value)

        return patch

    return patch_of


def _torch_entry(target: str, why: str) -> Replacement:
    proof = "tests/unit/utils/test_cpu_backend.py::test_patch"
    return Replacement(target, None, why, by="megatron_grpo/patches/cpu_backend.py", proof=proof, needed="a CPU")


def _is_cuda_device(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


@in_place_of("torch.cuda:current_device")
def patch_current_device(_):
    """Return the CPU from ``torch.cuda.current_device()``, on which megatron-core places buffers."""
    return [lambda: CPU]


@in_place_of(*(f"torch:{name}" for name in _FACTORIES))
def patch_factories(*factories):
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
    return map(on_cpu, factories)


@in_place_of("torch:Tensor.cuda", "torch.nn:Module.cuda")
def patch_tensor_cuda(*_):
    """Make ``x.cuda()`` return x, for tensors and modules: loading an optimizer checkpoint calls it."""
    return [lambda self, *args, **kwargs: self] * 2


@in_place_of("torch:Tensor.type")
def patch_tensor_type(original):
    """Return ``torch.cuda.*Tensor`` from ``x.type()``, because the optimizer compares with these strings."""

    def cuda_name(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return [cuda_name]


@in_place_of("torch.cuda:synchronize", "torch.cuda:empty_cache")
def patch_synchronize(*_):
    """Make ``torch.cuda.synchronize`` and ``empty_cache`` do nothing: no CPU work is asynchronous.

    The pipeline schedules synchronise the device after communication.
    """
    return [lambda *args, **kwargs: None, lambda: None]


@in_place_of(
    *(f"torch.cuda:{name}" for name in ("Stream", "Event", "current_stream", "default_stream", "stream")),
)
def patch_streams(*_):
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

    def current(*args, **kwargs):
        return Stream()

    return [
        type("Stream", (Stream,), {}),
        type("Event", (Stream,), {}),
        current,
        current,
        lambda stream: contextlib.nullcontext(),
    ]


@in_place_of(
    "torch.cuda:manual_seed", "torch.cuda:get_rng_state", "torch.cuda.random:get_rng_state", "torch.cuda:set_rng_state"
)
def patch_random_state(*_):
    """Use the CPU's random generator as the generator of the device."""

    def get(*args, **kwargs):
        return torch.get_rng_state()

    return [torch.manual_seed, get, get, lambda state, *args, **kwargs: torch.set_rng_state(state)]


@in_place_of("torch._dynamo.config:disable")
def patch_compile(_):
    """Disable ``torch.compile`` (megatron-core's ``jit_fuser``): it would call a C++ compiler for a few functions."""
    return [True]


@in_place_of(core.GET_RANDOM_STATE, core.SET_RANDOM_STATE)
def patch_core_random(*_):
    """Make megatron-core's RNG tracker fork the CPU's generator, and silence its warning.

    The tracker sets states through a CUDA-only path, which does not fork the generator on a CPU. It warns at every fork
    that the "CPU RNG state changed within GPU RNG context", because both generators are the same here.
    """
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    return [lambda *args, **kwargs: torch.get_rng_state(), lambda state, *args, **kwargs: torch.set_rng_state(state)]


@in_place_of(core.SPLIT_SIZES)
def patch_expert_split_sizes(_):
    """Convert the split sizes of the all-to-all dispatcher to numbers; megatron-core does so only for GPU tensors."""

    def to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return [to_cpu]


@in_place_of("torch.distributed:all_gather", "torch.distributed:reduce_scatter")
def patch_uneven_collectives(gather_equal, scatter_equal):
    """Implement all-gather and reduce-scatter of unequal shards, which gloo lacks and expert parallelism needs."""

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

    return [all_gather, reduce_scatter]


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
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    for patch in EARLY:
        patch()
    import megatron.core  # noqa: F401

    for patch in LATE:
        patch()
