"""LoRA adapters in a vLLM of these processes: loaded from memory, read back from every slot, and probed.

An adapter is a dictionary of full tensors with PEFT's names without its prefix: ``….q_proj.lora_A.weight`` ``[r, in]``
and ``….q_proj.lora_B.weight`` ``[out, r]``. The scale (alpha / r) is already in B.

vLLM wraps each layer that can have an adapter. The wrapper holds the slots: A and B of every part of the layer (query,
key and value are one layer of three parts), this tensor-parallel rank's shard of them, padded with zeros to
max_lora_rank. This program uses one slot. Requests name the adapter by a number (the slot) and by a name (vLLM keys
its prefix cache by it), so a new name for every version keeps old cache entries apart.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.utils.errors import GrpoError

PROBE_LENGTH, PROBE_TOKENS = 16, 4  # tokens of the prompt that probes the adapter, and of its completion
PROBE_DIFFERENCE = 1e-3  # nats; a random adapter changes log-probabilities by far more
Adapter = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]  # A [r, in] and B [out, r]
SLOT = 1  # vLLM's number of the only adapter
A, B = ".lora_A.weight", ".lora_B.weight"


def slot_rank(rank: int) -> int:
    """Return the smallest rank of vLLM's slots that holds ``rank``; GrpoError above the largest one."""
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    if rank > ranks[-1]:
        raise GrpoError(
            f"--lora-rank is {rank}, but the largest rank of vLLM's adapters is {ranks[-1]}: give --lora-weight-sync "
            "merged, or a smaller rank"
        )
    return next(larger for larger in ranks if larger >= rank)


def lora_options(rank: int, modules: Iterable[str]) -> dict:
    """Return vLLM's options for one adapter of ``rank`` on ``modules`` (Hugging Face names of linear layers)."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": slot_rank(rank),
        "lora_target_modules": sorted({module.rpartition(".")[2] for module in modules}),  # no others have slots
    }


def pairs_of(adapter: Adapter) -> dict[str, Pair]:
    """Return {module: (A, B)} of an adapter."""
    modules = [name.removesuffix(A) for name in adapter if name.endswith(A)]
    return {module: (adapter[module + A], adapter[module + B]) for module in modules}


@contextlib.contextmanager
def base_model(worker) -> Iterator[torch.nn.Module]:
    """Context with the worker's model without vLLM's adapter wrappers, as its weight loaders expect it."""
    model, manager = worker.model_runner.get_model(), _manager(worker)
    wrappers = {} if manager is None else manager.modules  # an empty manager counts as false
    try:
        for name, wrapper in wrappers.items():
            _replace(model, name, wrapper.base_layer)
        yield model
    finally:
        for name, wrapper in wrappers.items():
            _replace(model, name, wrapper)


def load_adapter(worker, adapter: Adapter) -> None:
    """Put ``adapter`` into a worker's slot in place of the last one; GrpoError if a layer has no slot.

    vLLM loads the first one without a B of zeros. If it is then where this module expects it, bit by bit, later ones
    are copied there at once: vLLM takes four kernels for each matrix.
    """
    manager = _manager(worker)
    slots, shapes = _slots_of(manager), [(name, tensor.shape) for name, tensor in adapter.items()]
    if slots.proven == shapes and list(manager.lora_index_to_id) == [SLOT]:
        _, held, sent, _ = slots.beside(adapter)
        torch._foreach_copy_(held, sent)
    else:
        _load_with_vllm(manager, adapter)
        # A B of zeros, as at the start, would equal the slot of any other layer.
        moved = all(bool(tensor.any()) for name, tensor in adapter.items() if name.endswith(B))
        slots.proven = shapes if moved and not compare_adapter(worker, adapter) else None
    # vLLM skips the preparation of its kernels for a batch like the last one, but sleep level 2 has dropped it.
    manager._last_mapping = None


def _load_with_vllm(manager, adapter: Adapter) -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    pairs = _renamed(manager, pairs_of(adapter))
    _check_slots(manager, pairs)
    rank = max(len(a) for a, _ in pairs.values())
    layers = {module: LoRALayerWeights(module, len(a), len(a), a, b) for module, (a, b) in pairs.items()}  # scale 1
    held: Any = LoRAModel(SLOT, rank, layers)
    manager.remove_adapter(SLOT)
    manager.add_adapter(held)
    manager.activate_adapter(SLOT)
    # The tensors may be views of the trainer's parameters. A later activation must fail, not copy what they hold then.
    held.loras = None


def compare_adapter(worker, adapter: Adapter) -> list[str]:
    """Return one line for each A or B in a worker's slots that differs in one bit from ``adapter``.

    The shards of this rank are computed here and not by vLLM's loading functions. Unused parts and ranks of a slot must
    be zero.
    """
    manager = _manager(worker)
    if list(manager.lora_index_to_id) != [SLOT]:
        return [f"vLLM's slot holds the adapter {manager.lora_index_to_id[0]} instead of {SLOT}"]
    names, held, sent, without = _slots_of(manager).beside(adapter)
    lines = [f"{module}: vLLM has no slot for it" for module in without]
    # One comparison, so that a GPU is waited for once and not for every tensor.
    if not torch.equal(_bits(held), _bits(sent)):
        lines += [
            f"{name}: {count:,} of its elements differ"
            for name, a, b in zip(names, held, sent, strict=True)
            if (count := int((_bits([a]) != _bits([b])).sum()))
        ]
    return lines


def read_slots(worker) -> list[Tensor]:
    """Return copies of a worker's slots."""
    return [slot.clone() for slot in _slots_of(_manager(worker)).all()]


def restore_slots(worker, copies: list[Tensor]) -> bool:
    """Write `read_slots`' copies back; return whether the slots then hold the same bits."""
    slots = _slots_of(_manager(worker)).all()
    torch._foreach_copy_(slots, copies)
    return torch.equal(_bits(slots), _bits(copies))


def kinds(names: Iterable[str]) -> list[str]:
    """Return the last words of the modules' names, such as q_proj, for names of an adapter's tensors."""
    return list(dict.fromkeys(name.split(".")[-3] for name in names))


def random_adapter(like: Adapter, kind: str | None, device: torch.device) -> Adapter:
    """Return an adapter with the shapes of ``like``: random in the modules of ``kind``, 0 in all others.

    With entries of variance 1 / in and 1 / r, the change of a layer's output is as large as its normalized input.
    """
    generator = torch.Generator().manual_seed(0)
    drawn: dict[tuple, Tensor] = {}  # all layers share one draw
    made = {}
    for name, tensor in like.items():
        if name.split(".")[-3] != kind:
            made[name] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
            continue
        key = (name.split(".")[-2], *tensor.shape)
        if key not in drawn:
            numbers = torch.randn(tensor.shape, generator=generator) / tensor.shape[1] ** 0.5
            drawn[key] = numbers.to(device, tensor.dtype)
        made[name] = drawn[key]
    return made


def probe_request(vocab_size: int, longest: int) -> Request:
    """Return the greedy request that probes an adapter, of at most ``longest`` tokens with its completion."""
    length = max(1, min(PROBE_LENGTH, longest - PROBE_TOKENS))
    ids = [(7 * place + 1) % vocab_size for place in range(length)]
    return Request(0, ids, Sampling(min(PROBE_TOKENS, longest - length), temperature=0, log_probs=True))


def differ(one: Completion, other: Completion) -> bool:
    """Return whether two completions differ by more than rounding."""
    gap = np.abs(np.subtract(one.log_probs, other.log_probs))  # type: ignore[arg-type]
    return one.token_ids != other.token_ids or not gap.max() <= PROBE_DIFFERENCE


def _manager(worker):
    """Return vLLM's manager of slots; None in an engine without adapters."""
    lora = getattr(worker.model_runner, "lora_manager", None)
    return None if lora is None else lora._adapter_manager


def _renamed(manager, pairs: dict[str, Pair]) -> dict[str, Pair]:
    """Return the pairs under vLLM's names of the modules, before vLLM fuses them."""
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return pairs
    # 0.32 and 0.26 name the mapper without the fusions differently.
    mapper = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
    rename = mapper()._map_name
    return {rename(f"{module}.weight").removesuffix(".weight"): pair for module, pair in pairs.items()}


def _check_slots(manager, pairs: dict[str, Pair]) -> None:
    parts = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    if missing := sorted(pairs.keys() - parts):
        raise GrpoError(
            f"vLLM has no adapter slot for {missing[0]} ({len(missing)} such layers): give --lora-weight-sync merged"
        )


def _shards(layer, pairs: list[Pair | None]) -> list[Pair | None]:
    """Return this tensor-parallel rank's shards of the pairs of a layer's parts.

    Column-parallel layers hold rows of B and the whole A, row-parallel ones columns of A and the whole B.
    """
    from vllm.model_executor.layers import linear

    if layer.tp_size == 1 and len(pairs) > 1:
        return pairs
    rank, size = layer.tp_rank, layer.tp_size
    if isinstance(layer, linear.RowParallelLinear):
        columns = slice(rank * layer.input_size_per_partition, (rank + 1) * layer.input_size_per_partition)
        return [pair and (pair[0][:, columns], pair[1]) for pair in pairs]
    if isinstance(layer, linear.QKVParallelLinear):
        shared = rank // layer.num_kv_head_replicas  # ranks that share key and value heads
        queries, keys = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        places, rows = [rank, shared, shared], [queries, keys, keys]
        whole = [layer.total_num_heads * layer.head_size, *[layer.total_num_kv_heads * layer.head_size] * 2]
    elif isinstance(layer, linear.MergedColumnParallelLinear):
        whole = list(layer.output_sizes)
        places, rows = [rank] * len(whole), [number // size for number in whole]
    elif isinstance(layer, linear.ColumnParallelLinear):
        whole, places, rows = [layer.output_size], [rank], [layer.output_size // size]
    else:
        return pairs  # replicated
    spans = [slice(place * number, (place + 1) * number) for place, number in zip(places, rows, strict=True)]
    if len(pairs) == 1 < len(spans) and pairs[0]:  # a model whose Hugging Face layer is fused, too
        a, b = pairs[0]
        return [(a, torch.cat([part[span] for part, span in zip(b.split(whole), spans, strict=True)]))]
    return [pair and (pair[0], pair[1][span]) for pair, span in zip(pairs, spans, strict=False)]


class _Slots:
    """The slots of a worker, which never move. Finding them takes longer than comparing them."""

    def __init__(self, manager):
        self._manager = manager
        self.proven: list | None = None  # names and shapes of an adapter that vLLM has put where `beside` expects it
        # (layer without its wrapper, [(name of the part, slot of A, slot of B), ...]) for every wrapped layer
        self._layers: list[tuple] = []
        for name, wrapper in manager.modules.items():
            parts = manager.packed_modules.get(name, [name])
            slots = zip(parts, wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True)
            self._layers.append((wrapper.base_layer, [(part, a[0, 0], b[0, 0]) for part, a, b in slots]))
        self._modules: dict[str, str] = {}  # vLLM's names -> those of an adapter's modules

    def all(self) -> list[Tensor]:
        """Return the slots."""
        return [slot for _, parts in self._layers for _, *slots in parts for slot in slots]

    def beside(self, adapter: Adapter) -> tuple[list[str], list[Tensor], list[Tensor], list[str]]:
        """Return (names, slots, what each slot is to hold of the adapter, modules without a slot)."""
        names: list[str] = []
        held: list[Tensor] = []
        sent: list[Tensor] = []
        pairs = pairs_of(adapter)
        if set(self._modules.values()) != pairs.keys():
            self._modules = dict(zip(_renamed(self._manager, pairs), pairs, strict=True))
        for layer, parts in self._layers:
            shards = _shards(layer, [pairs.pop(self._modules.get(part, ""), None) for part, *_ in parts])
            for (part, *slots), pair in zip(parts, shards, strict=True):
                names += part + A, part + B
                held += slots
                sent += map(_padded, pair or (None, None), slots)
        return names, held, sent, list(pairs)


@functools.lru_cache(1)
def _slots_of(manager) -> _Slots:
    return _Slots(manager)


def _padded(tensor: Tensor | None, slot: Tensor) -> Tensor:
    """Return a tensor as a slot of this shape holds it: padded with zeros to the slot's rank, in its dtype."""
    if tensor is None:
        return torch.zeros_like(slot)
    tensor = tensor.to(slot.dtype)
    if tensor.shape == slot.shape:
        return tensor
    rows, columns = (wide - here for wide, here in zip(slot.shape, tensor.shape, strict=True))
    return F.pad(tensor, (0, columns, 0, rows))


def _bits(tensors: list[Tensor]) -> Tensor:
    """Return the tensors' elements as one vector of integers."""
    whole = torch._utils._flatten_dense_tensors(tensors)
    return whole.view({2: torch.int16, 4: torch.int32}[whole.element_size()])


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
