"""Which parts of the Hugging Face tensors the loaders of a running vLLM read on this rank.

Meta tensors go through the model's own ``load_weights``. Every operation that reads one of them, and is no view of it,
reads the elements of its argument: with tensor parallelism most copies read a part, and the loaders of experts on other
ranks read nothing. So this needs no knowledge of vLLM's fusions, and an operation that computes (a permutation, a
function, a cast) counts like a copy. No parameter is written.

Where the kernels use the parameters as they are loaded, each copy also gives the place in a parameter to which it
copies: weights can then be written there without the loaders.
"""

from collections.abc import Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.rollout.vllm.adapter import base_model
from megatron_grpo.rollout.vllm.compare import can_compare
from megatron_grpo.rollout.vllm.draft import draft_model, drafts_with
from megatron_grpo.rollout.vllm.load_weights import Weights, by_expert, can_load_in_place, name_loaders
from megatron_grpo.rollout.vllm.loading_shapes import loading_shapes
from megatron_grpo.weights.transfer_plan import Box, HfTensor, Reads


def reads(worker, tensors: Sequence[HfTensor], mtp_prefixes: Sequence[str]) -> Reads | None:
    """Return what a worker's loaders read of ``tensors``; None where this cannot be traced.

    Those are engines that quantize, and loaders that need values. ``mtp_prefixes``: as `draft.load_with_mtp`.
    """
    if not can_compare(worker):
        return None
    try:
        with base_model(worker) as model:
            found = trace(model, tensors, in_place=not mtp_prefixes and can_load_in_place(model))
        needs = found.needs
        if mtp_prefixes:
            drafting = [tensor for tensor in tensors if drafts_with(tensor.name, mtp_prefixes)]
            traced = trace(draft_model(worker), drafting).needs
            more = dict(zip((tensor.name for tensor in drafting), traced, strict=True))
            needs = [[*boxes, *more.get(t.name, [])] for boxes, t in zip(needs, tensors, strict=True)]
    except Exception as error:  # of vLLM's loaders, which may do anything with values
        print(f"vLLM's loaders cannot be traced ({error!r}): this engine rank receives whole tensors", flush=True)
        return None
    return Reads([_without_contained(boxes) for boxes in needs], found.targets)


def trace(model: Any, tensors: Iterable[HfTensor], in_place: bool = False) -> Reads:
    """Return what the loaders of a model of vLLM read of each of ``tensors``.

    ``in_place``: its kernels use the parameters as they are loaded. A tensor has targets if all that is read of it is
    copied, in its dtype, into parameters.
    """
    name_loaders(model)
    with torch.no_grad(), loading_shapes(model, contents=in_place), _Reads(model) as found:
        model.load_weights(by_expert(model, found.naming(tensors)))
    targets = found.copies if in_place else [None] * len(found.boxes)
    return Reads(found.boxes, targets)


class _Reads(TorchDispatchMode):
    """Context in which reads of the tensors of `naming` are recorded, and the model's tensors are not written."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.boxes: list[list[Box]] = []
        self.copies: list[dict[Box, list[torch.Tensor]] | None] = []  # targets of each box; None: not copies alone
        self._protected = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._sources: list[torch.Tensor] = []  # alive: no other storage gets the address of one of these
        self._numbers: dict[int, int] = {}  # storage: number of the tensor

    def naming(self, tensors: Iterable[HfTensor]) -> Weights:
        """Yield a meta tensor for each tensor."""
        for number, (name, dtype, shape) in enumerate(tensors):
            source = torch.empty(shape, dtype=dtype, device="meta")
            self._sources.append(source)
            self._numbers[_storage(source)] = number
            self.boxes.append([])
            self.copies.append({})
            yield name, source

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record the reads of the operation; run it unless it writes into the model, or takes values."""
        kwargs = kwargs or {}
        read = [tensor for tensor in _tensors((args, kwargs.values())) if self._is_source(tensor)]
        writes = func._schema.is_mutable and isinstance(args[0], torch.Tensor) and _storage(args[0]) in self._protected
        if not read:
            return args[0] if writes else func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:  # vLLM's copy of a single element
            out = 0.0
        elif writes:
            out = args[0]
        else:
            if func is torch.ops.aten._to_copy.default:
                kwargs["device"] = torch.device("meta")
            out = func(*args, **kwargs)
        if func._schema.is_mutable or not any(self._is_source(tensor) for tensor in _tensors([out])):
            copies = func is torch.ops.aten.copy_.default and writes
            for view in read:
                self._record(view, args[0] if copies else None)
        return out

    def _is_source(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and _storage(tensor) in self._numbers

    def _record(self, view: torch.Tensor, target: torch.Tensor | None) -> None:
        number = self._numbers[_storage(view)]
        box = box_of(view, self._sources[number].shape)
        if box is None:
            return
        if box not in self.boxes[number]:
            self.boxes[number].append(box)
        copies, place = self.copies[number], None
        if target is not None and target.dtype == view.dtype and not target.is_meta:
            place = _as_box(target, view, box, self._sources[number].stride())
        if copies is None or place is None or any(_overlap(box, other) for other in copies if other != box):
            self.copies[number] = None
        else:
            copies.setdefault(box, []).append(place)


def _as_box(target: torch.Tensor, view: torch.Tensor, box: Box, strides: Sequence[int]) -> torch.Tensor | None:
    """Return a copy's target with the axes of the ``box`` that is copied to it; None if a step or an axis differs.

    ``strides``: of the whole tensor, of which ``view`` has the box.
    """
    sizes = [end - first for first, end in box]
    long = [(axis, size) for axis, size in enumerate(sizes) if size > 1]
    axes = [axis for axis, size in enumerate(view.shape) if size > 1]
    same_axes = [view.shape[axis] for axis in axes] == [size for _, size in long]
    if target.shape != view.shape or not same_axes:
        return None
    if any(view.stride(mine) != strides[axis] for mine, (axis, _) in zip(axes, long, strict=True)):
        return None
    found = [1] * len(sizes)
    for mine, (axis, _) in zip(axes, long, strict=True):
        found[axis] = target.stride(mine)
    return target.detach().as_strided(sizes, found, target.storage_offset())


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _tensors(values: Iterable) -> Iterator[torch.Tensor]:
    """Yield the tensors among the values and in their lists; torch's function for any tree takes ten times as long."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | ValuesView):
            yield from _tensors(value)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def box_of(view: torch.Tensor, shape: Sequence[int]) -> Box | None:
    """Return a box of a contiguous tensor of ``shape`` that has all elements of its ``view``; None if there are none.

    It has no others if each axis of the view steps by one along an axis of the tensor.
    """
    if not view.numel():
        return None
    strides = torch.empty(tuple(shape), device="meta").stride()
    first = _coordinates(int(view.storage_offset()), strides)
    ends = [start + 1 for start in first]
    last = int(view.storage_offset())
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1 or stride == 0:
            continue
        last += (size - 1) * stride
        axis = next(axis for axis, own in enumerate(strides) if own <= stride and shape[axis] > 1)
        ends[axis] += (size - 1) * (stride // strides[axis]) if stride % strides[axis] == 0 else shape[axis]
    if all(end <= size for end, size in zip(ends, shape, strict=True)):
        return tuple(zip(first, ends, strict=True))
    return tuple(_rows(first, _coordinates(last, strides), shape))


def _coordinates(offset: int, strides: Sequence[int]) -> list[int]:
    found = []
    for stride in strides:
        found.append(offset // stride)
        offset %= stride
    return found


def _rows(first: Sequence[int], last: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the smallest box that has the elements between two in the order of the memory."""
    differs = False
    for low, high, size in zip(first, last, shape, strict=True):
        yield (0, size) if differs else (low, high + 1)
        differs |= low != high


def _without_contained(boxes: Sequence[Box]) -> list[Box]:
    """Return the boxes that lie in no other one."""

    def contains(one: Box, other: Box) -> bool:
        return all(a <= c and d <= b for (a, b), (c, d) in zip(one, other, strict=True))

    kept: list[Box] = []
    for box in boxes:
        if not any(contains(other, box) for other in kept):
            kept = [other for other in kept if not contains(box, other)] + [box]
    return kept
