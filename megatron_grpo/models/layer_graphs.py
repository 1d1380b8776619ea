"""CUDA graphs of a model's layers (``--cuda-graphs``): one launch for their forward pass, one for their backward pass.

Without them the host launches some forty kernels for each layer and micro-batch, and a GPU that is quicker than that
waits. A graph repeats kernels at fixed addresses with fixed sizes. Each pack is therefore padded to a `Size`, of which
a run has few, and copied to the graph's input. A size that comes again is recorded; the first pack of a size runs
without a graph, which also compiles what is to be compiled.

The backward graph adds the gradients of the weights to DDP's buffers, layer by layer, as DDP's hooks do.

Memory: the activations of the largest size stay reserved between updates. The graphs of all sizes share them, because a
forward pass is always followed by its backward pass: there is no pipeline.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_grpo.models.self_attention import rotation_of_pack
from megatron_grpo.utils.device import to_device

LIMIT = 16  # sizes that are recorded at a time


@dataclass(frozen=True)
class Size:
    """Shape of a padded pack: tokens, sequences, and the length up to which the attention kernel looks."""

    tokens: int
    sequences: int
    longest: int

    @classmethod
    def of(cls, tokens: int, sequences: int, longest: int) -> "Size":
        """Return the size for a pack: at most 1/16 more tokens."""
        padded, longest = _rounded(tokens, 32), _rounded(longest, 4)
        sequences += -(-(padded - tokens) // longest)
        return cls(padded, -(-sequences // 16) * 16, longest)

    def offsets(self, cu_seqlens: np.ndarray) -> np.ndarray:
        """Return the offsets ``[sequences + 1]``: those of the pack, then sequences of padding, then empty ones."""
        padding = np.arange(cu_seqlens[-1], self.tokens, self.longest)[1:]
        rest = self.sequences + 1 - len(cu_seqlens) - len(padding)
        return np.concatenate([cu_seqlens, padding, np.full(rest, self.tokens)]).astype(np.int32)


def _rounded(number: int, parts: int) -> int:
    """Round up to a multiple of 1/parts of the largest power of two that is not above ``number``."""
    unit = max(1, 2 ** (number.bit_length() - 1) // parts)
    return -(-number // unit) * unit


@dataclass
class StaticPack(PackedSeqParams):
    """A pack at fixed addresses; ``rotation`` are its cosines and sines (`rotation_of_pack`)."""

    rotation: tuple[torch.Tensor, torch.Tensor] | None = None


class LayerGraphs:
    """Replays the layers of a pack whose size is recorded; in place of ``TransformerBlock.forward``.

    ``reserved`` are the bytes of the graphs' memory that torch counts as free.
    """

    reserved = 0

    def __init__(self, model: Any):
        self._model, self._decoder, self._plain = model, model.decoder, model.decoder.forward
        self._seen: set[Size] = set()
        self._recorded: OrderedDict[Size, _Recorded] = OrderedDict()
        self._pool: Any = None

    def __call__(self, hidden_states, attention_mask, rotary_pos_emb=None, packed_seq_params=None, **more):
        """Return the output ``[t, 1, h]`` of the layers and the final norm."""
        plain = not torch.is_grad_enabled() or packed_seq_params is None
        if not plain:
            offsets = packed_seq_params.cu_seqlens_q_padded.numpy()
            size = Size.of(len(hidden_states), len(offsets) - 1, packed_seq_params.max_seqlen_q)
            plain = size not in self._seen
            self._seen.add(size)
        if plain:
            inputs = {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
            return self._plain(hidden_states, attention_mask, **inputs, **more)
        rotation = rotation_of_pack(
            hidden_states, packed_seq_params, rotary_pos_emb, self._decoder.config, self._decoder.pg_collection.cp
        )
        recorded = self._of_size(size, hidden_states, rotation)
        recorded.set_pack(offsets, rotation)
        # The input of adapters needs no gradient. Because of the second tensor autograd still calls the backward pass.
        return _Replay.apply(hidden_states, torch.empty(0, requires_grad=True), recorded)

    def _of_size(self, size: Size, hidden_states: torch.Tensor, rotation: tuple) -> "_Recorded":
        """Return the graphs of this size; they are recorded (again) if there are none at the weights' addresses."""
        recorded = self._recorded.pop(size, None)
        if recorded is None or recorded.moved():
            while len(self._recorded) >= LIMIT:
                self._recorded.popitem(last=False)
            if self._pool is None and hidden_states.is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
            recorded = _Recorded(self._model, size, hidden_states, rotation, self._pool)
            self.reserved = _free_in_pool(self._pool)
        self._recorded[size] = recorded
        return recorded


def layer_graphs(chunk: torch.nn.Module) -> list[LayerGraphs]:
    """Return the graphs of a model's chunk with --cuda-graphs."""
    forwards = (getattr(module, "forward", None) for module in chunk.modules())
    return [forward for forward in forwards if isinstance(forward, LayerGraphs)]


def _free_in_pool(pool: Any) -> int:
    """Return the bytes of the blocks in a pool of graphs in which no tensor lies at the moment."""
    if pool is None:
        return 0
    segments = (segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


class _Recorded:
    """Forward and backward graph of one size, with their inputs and outputs."""

    def __init__(self, model, size: Size, hidden: torch.Tensor, rotation: tuple, pool: Any):
        self._size = size
        self._pending = False  # whether a backward pass has to follow
        self._hidden = hidden.new_zeros(size.tokens, *hidden.shape[1:]).requires_grad_(hidden.requires_grad)
        self._grad_output = torch.zeros_like(self._hidden, requires_grad=False)
        cu_seqlens = torch.from_numpy(size.offsets(np.zeros(1, np.int32)))
        on_device = cu_seqlens.to(hidden.device, copy=True)
        self._pack = StaticPack(
            qkv_format="thd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=size.longest,
            max_seqlen_kv=size.longest,
            rotation=(self._room(rotation[0]), self._room(rotation[1])),
        )
        passes: list[tuple] = []

        def forward() -> torch.Tensor:
            with _own_leaves(model):
                passes[:] = _forward(model.decoder, self._hidden, self._pack)
            return passes[-1][1].detach()

        forward()  # compiles what is to be compiled; all gradients of the backward pass are 0
        _backward(passes, self._grad_output)
        self._output, self._forward = record(forward, pool)
        trained = [leaf.weight for _, _, leaves in passes for leaf in leaves]
        self._tensors = [*model.decoder.parameters(), *trained, *(weight.main_grad for weight in trained)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._grad_hidden, self._backward = record(lambda: _backward(passes, self._grad_output), pool)

    def _room(self, of_tokens: torch.Tensor) -> torch.Tensor:
        return of_tokens.new_zeros(self._size.tokens, *of_tokens.shape[1:])

    def moved(self) -> bool:
        """Return whether the weights or their gradients have other addresses than in the graphs."""
        return [tensor.data_ptr() for tensor in self._tensors] != self._addresses

    def set_pack(self, cu_seqlens: np.ndarray, rotation: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Set the next pack: its offsets ``[s + 1]``, cosines and sines ``[t, 1, 1, channels]``."""
        offsets = torch.from_numpy(self._size.offsets(cu_seqlens))
        self._pack.cu_seqlens_q.copy_(to_device(offsets, self._pack.cu_seqlens_q.device))
        self._pack.cu_seqlens_q_padded = self._pack.cu_seqlens_kv_padded = offsets
        assert self._pack.rotation is not None
        for own, part in zip(self._pack.rotation, rotation, strict=True):
            own[: len(part)].copy_(part)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output ``[t, 1, h]``, which the next call overwrites."""
        assert not self._pending, "a second forward pass before the backward pass of the first"
        self._pending = True
        _fill(self._hidden.detach(), hidden)
        self._forward()
        return self._output[: len(hidden)]

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of the input, which the next call overwrites; None if it needs none."""
        self._pending = False
        _fill(self._grad_output, grad)
        self._backward()
        return None if self._grad_hidden is None else self._grad_hidden[: len(grad)]


def record(function: Callable, pool: Any) -> tuple[Any, Callable[[], None]]:
    """Record the kernels that ``function`` launches; return its result and the call that runs them again."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads of the process, such as NCCL's watchdog, call CUDA meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return result, graph.replay


def _fill(static: torch.Tensor, values: torch.Tensor) -> None:
    static[: len(values)].copy_(values)
    static[len(values) :].zero_()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, anchor, recorded: _Recorded):
        ctx.recorded = recorded
        return recorded.forward(hidden)

    @staticmethod
    def backward(ctx, grad):
        return ctx.recorded.backward(grad), None, None


def _forward(decoder, hidden: torch.Tensor, pack: StaticPack) -> list[tuple]:
    """Return (input, output, leaves of trained weights) of each layer and of the final norm; the inputs are cut off."""
    passes: list[tuple] = []
    assert pack.rotation is not None
    for module in [*decoder.layers, *filter(None, [decoder.final_layernorm])]:
        if passes:
            hidden = passes[-1][1].detach().requires_grad_()
        if module is decoder.final_layernorm:
            output = module(hidden)
        else:
            output, _ = module(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=pack.rotation[0], packed_seq_params=pack
            )
        passes.append((hidden, output, _trained(output, hidden)))
    return passes


@contextmanager
def _own_leaves(model: torch.nn.Module) -> Iterator[None]:
    """Put a leaf of autograd on the same memory in place of each trained weight.

    A weight's own leaf belongs to the default stream, where DDP made it and which cannot be recorded.
    """
    places = [
        (module._parameters, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.requires_grad
    ]
    leaves = {}
    for parameters, name, weight in places:
        if weight not in leaves:
            leaves[weight] = torch.nn.Parameter(weight.detach())
            leaves[weight].__dict__.update(weight.__dict__ | {"weight": weight})
        parameters[name] = leaves[weight]
    try:
        yield
    finally:
        for parameters, name, weight in places:
            parameters[name] = weight


def _trained(output: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves that ``output`` depends on; those of adapters are not in the layer."""
    nodes: list[Any] = [output.grad_fn]
    found, seen = [], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and node.variable is not hidden:
            found.append(node.variable)
        nodes += [follower for follower, _ in node.next_functions]
    return found


def _backward(passes: list[tuple], grad: torch.Tensor | None) -> torch.Tensor | None:
    """Add the gradients of the weights to DDP's buffers; return that of the first input. Empties ``passes``."""
    while passes:
        hidden, output, leaves = passes.pop()
        inputs = [hidden] if hidden.requires_grad else []
        grads = torch.autograd.grad(output, [*inputs, *leaves], grad)
        for leaf, own in zip(leaves, grads[len(inputs) :], strict=True):
            if not leaf.grad_added_to_main_grad:  # by --gradient-accumulation-fusion
                leaf.main_grad.add_(own)
        grad = grads[0] if inputs else None
    return grad
