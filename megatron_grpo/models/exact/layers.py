"""Modules of a dense layer that compute by the kernels of this folder, with gradients of their own.

Each is a module of the ``local`` layers with another forward pass. The backward passes are those of the ``local``
layers: gradients need not be equal bit for bit, and their products stay as fast as they are.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_grpo.data.pack import SharedPrompts
from megatron_grpo.models.attention import FlashPackedAttention, PackedAttention
from megatron_grpo.models.attention_kernels import FlashAttention4, Kernel
from megatron_grpo.models.norm import RMSNorm, take_residual
from megatron_grpo.models.rope import frequencies, host_offsets, rows_of_pack
from megatron_grpo.models.self_attention import PackedSelfAttention
from megatron_grpo.models.shared_prompts import SharedPack
from megatron_grpo.models.weight_gradients import add_product, placeholder
from megatron_grpo.parallel.param_gather import wait_for_weights
from megatron_grpo.utils.device import to_device


def use_exact_modules(layer: ModuleSpec, rotation: Callable[[torch.device], torch.Tensor]) -> None:
    """Give the specification of a dense layer the modules of this file; ``rotation`` returns `rotation_table`."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = ExactBranchNorm
    attention = parts.self_attention
    attention.module = _self_attention(rotation)
    names = attention.submodules
    names.linear_qkv, names.linear_proj = ExactColumnLinear, ExactRowLinear
    of_flash = names.core_attention is FlashPackedAttention
    names.core_attention = ExactFlashAttention if of_flash else ExactAttention
    if names.q_layernorm is RMSNorm:
        names.q_layernorm = names.k_layernorm = ExactNorm
    mlp = parts.mlp.keywords["submodules"]
    mlp.linear_fc1, mlp.linear_fc2 = ExactColumnLinear, ExactRowLinear
    parts.mlp = type(parts.mlp)(ExactMLP.as_mlp_submodule, submodules=mlp)


def rotation_of(args: Namespace) -> Callable[[torch.device], torch.Tensor]:
    """Return the function that returns the table of `kernels.rotate` for the positions of a model, on a device."""
    inv_freq, factor = frequencies(args, args.rotary_base, args.rope_scaling)
    of_model = tuple(inv_freq.tolist()), args.max_position_embeddings, factor
    return lambda device: _rotation_table(*of_model, device, torch.is_inference_mode_enabled())


@cache
def _rotation_table(
    inv_freq: tuple[float, ...], positions: int, factor: float, device: torch.device, inference: bool
) -> torch.Tensor:
    """Return one table for all layers and virtual pipeline stages: 131,072 positions take 64 MiB.

    vLLM has one of its own, because autograd refuses tensors that ``inference`` mode has made.
    """
    from megatron_grpo.models.exact import kernels

    of_channels = torch.tensor(inv_freq, dtype=torch.float32, device="cpu")
    return kernels.rotation_table(of_channels, positions, factor, device)


class _Linear(torch.autograd.Function):
    """``apply(x, weight, bias, main_grad, group, sliced)``: `kernels.linear`, and its gradient by torch's products.

    With ``main_grad`` the gradient of ``weight`` is added to it (`weight_gradients`). ``group``: tensor-parallel ranks
    that hold other columns; the gradient of ``x`` is summed over them. ``sliced``: each rank has a slice of the tokens
    ``x``, which are gathered in each pass and not kept.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, group, sliced):
        from megatron_grpo.models.exact import kernels  # Triton exists with a GPU only

        ctx.save_for_backward(x, weight)
        ctx.options = main_grad, group, sliced
        return kernels.linear(_gathered(x, group) if sliced else x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        main_grad, group, sliced = ctx.options
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = under_way = None
        if of_x:
            grad_x, under_way = _summed((flat @ weight).view(*grad.shape[:-1], -1), group, sliced)
        if of_weight:
            whole = _gathered(x, group) if sliced else x
            whole = whole.reshape(-1, whole.shape[-1])
            if main_grad is None:
                grad_weight = flat.T @ whole
            else:
                add_product(main_grad, flat, whole)
                grad_weight = placeholder(weight)
        if under_way is not None:
            under_way.wait()
        return grad_x, grad_weight, flat.sum(0) if of_bias else None, None, None, None


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens ``[t, ...]`` of ``group``; each of its n ranks has a slice ``x`` ``[t / n, ...]``."""
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _summed(grad: torch.Tensor, group: dist.ProcessGroup | None, sliced: bool) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to sum ``grad`` ``[t, ...]`` over ``group``; returns the result, this rank's tokens of it if ``sliced``."""
    if group is None:
        return grad, None
    if not sliced:
        return grad, dist.all_reduce(grad, group=group, async_op=True)
    own = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
    return own, dist.reduce_scatter_tensor(own, grad, group=group, async_op=True)


def _product(
    input,
    weight,
    bias=None,
    gradient_accumulation_fusion=False,
    allreduce_dgrad=False,
    sequence_parallel=False,
    tp_group=None,
    **_,
):
    """Return the product of a tensor-parallel rank, given the arguments of megatron-core's function."""
    fused = gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled()
    group = tp_group if allreduce_dgrad or sequence_parallel else None
    return _Linear.apply(input, weight, bias, weight.main_grad if fused else None, group, sequence_parallel)


class ExactColumnLinear(ColumnParallelLinear):
    """megatron-core's linear layer with the forward pass of `kernels.linear`."""

    _forward_impl = staticmethod(_product)


class ExactRowLinear(RowParallelLinear):
    """megatron-core's linear layer with the forward pass of `kernels.linear`."""

    _forward_impl = staticmethod(_product)


class ExactNorm(RMSNorm):
    """`RMSNorm` with the forward pass of `kernels.rms_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = vars(x).pop("normed", None)
        if normed is not None and normed.requires_grad == torch.is_grad_enabled():
            return normed
        if not torch.is_grad_enabled():
            from megatron_grpo.models.exact import kernels

            return kernels.rms_norm(x, self.weight, self.eps)[0]
        from megatron_grpo.models.exact.gradients import Norm

        out, again = Norm.apply(x, self.weight, self.eps)
        if self.before_branch:
            vars(x)["for_residual"] = again
        return out


class ExactBranchNorm(ExactNorm):
    """`BranchNorm` with the forward pass of `kernels.rms_norm`."""

    before_branch = True


def norm_with_addition(decoder: TransformerBlock) -> None:
    """Let the residual additions of a pipeline stage compute the norms that follow them, too.

    A recomputed layer has a graph of its own, to which the norm of the next layer does not belong.
    """
    layers = list(decoder.layers)
    across = decoder.config.recompute_granularity != "full"
    following = [layer.input_layernorm for layer in layers[1:]] + [decoder.final_layernorm]
    for layer, norm in zip(layers, following, strict=False):  # a stage may have no layers
        layer.self_attn_bda = _with_norm(layer.self_attn_bda, layer.pre_mlp_layernorm)
        if norm is not None and across:
            layer.mlp_bda = _with_norm(layer.mlp_bda, norm)


def _with_norm(addition: Callable, norm: ExactNorm) -> Callable:
    """Return `bias_dropout_add` that leaves the result of ``norm`` with the sum, from where its module takes it."""

    def build(training: bool, fused: bool) -> Callable:
        usual = addition(training, fused)

        def add(output_and_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float):
            output, bias = output_and_bias
            if bias is not None or dropout or residual.dtype != output.dtype:
                return usual(output_and_bias, residual, dropout)
            residual = take_residual(residual)
            wait_for_weights(norm)
            if output.requires_grad:
                from megatron_grpo.models.exact.gradients import AddAndNorm

                normed, total = AddAndNorm.apply(output, residual, norm.weight, norm.eps)
            else:  # megatron-core enables gradients for the addition, also in a pass without them
                from megatron_grpo.models.exact import kernels

                with torch.no_grad():
                    normed, total, _ = kernels.add_and_norm(output, residual, norm.weight, norm.eps)
            vars(total)["normed"] = normed
            return total

        return add

    return build


class ExactMLP(MLP):
    """megatron-core's gated MLP with the activation of `kernels.silu_and_mul`."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any):
        from megatron_grpo.models.exact.gradients import SiluAndMul

        gate_and_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(SiluAndMul.apply(gate_and_up))


def _self_attention(rotation: Callable[[torch.device], torch.Tensor]) -> type[PackedSelfAttention]:
    """Return a self-attention that rotates by `kernels.rotate`."""

    class ExactSelfAttention(PackedSelfAttention):
        """`PackedSelfAttention` with the norms and rotations of the kernels of this folder."""

        def get_query_key_value_tensors(self, hidden_states, key_value_states=None, **more):
            """Return rotated queries ``[t, 1, heads, d]``, rotated keys and values ``[t, 1, groups, d]``."""
            from megatron_grpo.models.exact.gradients import Heads

            assert self._rotation is not None, "every batch is packed"
            freqs, packed = self._rotation
            projected, _ = self.linear_qkv(hidden_states)
            heads = projected.view(
                len(projected), self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
            )
            positions = positions_of(packed, projected, freqs, self.pg_collection.cp)
            wait_for_weights(self.q_layernorm, self.k_layernorm)
            norms = self.q_layernorm, self.k_layernorm
            weights = [norm.weight if isinstance(norm, ExactNorm) else None for norm in norms]
            eps = self.q_layernorm.eps if isinstance(self.q_layernorm, ExactNorm) else 0.0
            parts = Heads.apply(heads, *weights, positions, rotation(projected.device), eps, 0.0)
            return tuple(part[:, None] for part in parts)

    return ExactSelfAttention


def positions_of(packed, tokens: torch.Tensor, freqs: torch.Tensor, cp_group) -> torch.Tensor:
    """Return the position of each token of a pack in its sequence, int64 ``[t]``."""
    if isinstance(packed, SharedPack):
        return packed.position_ids
    return rows_of_pack(tokens, host_offsets(packed), freqs, cp_group)


class ExactAttention(PackedAttention):
    """`PackedAttention` with the forward pass of `kernels.attention`."""

    def _kernel(self, pack, cp_size, cp_rank, where, scale):
        shared = pack.shared if isinstance(pack, SharedPack) else None
        offsets = tuple(host_offsets(pack).tolist())
        usual = super()._kernel(pack, cp_size, cp_rank, where, scale)
        return _ExactKernel(*key_rows(offsets, where, shared), scale, usual)


class ExactFlashAttention(ExactAttention):
    """`ExactAttention` with gradients by the kernels of FlashAttention 4."""

    gpu_kernel = FlashAttention4


class _ExactKernel:
    """`Kernel` that computes the output by `kernels.attention`, and gradients by another one from output and lse."""

    def __init__(self, starts: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float, usual: Kernel):
        self._pages, self._scale, self._usual = (starts, lengths, table, 1), scale, usual

    def forward(self, q, k, v):
        from megatron_grpo.models.exact import kernels

        return kernels.attention(q, k[:, None], v[:, None], kernels.Pages(*self._pages), self._scale)

    def backward(self, grad, q, k, v, out, lse):
        return self._usual.backward(grad, q, k, v, out, lse)


@lru_cache(maxsize=2)  # the layers of a micro-batch share the result
def key_rows(
    offsets: tuple[int, ...], device: torch.device, shared: SharedPrompts | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``starts``, ``lengths`` and ``table`` of `kernels.Pages` with blocks of one token, the rows of a pack.

    The device makes the table: with a sequence of 32,768 tokens among 1,000 short ones it takes 123 MiB. Its rows go on
    behind the keys of their sequences, where nothing is read.
    """
    starts = np.array(offsets, np.int32)
    cu_keys = starts if shared is None else shared.cu_keys.astype(np.int32)
    lengths = np.diff(cu_keys)
    starts_, first, lengths_ = (to_device(torch.from_numpy(a), device) for a in (starts, cu_keys[:-1], lengths))
    table = first[:, None] + torch.arange(max(1, lengths.max(initial=0)), dtype=torch.int32, device=device)
    if shared is not None and len(shared.keys):
        keys = to_device(torch.from_numpy(shared.keys.astype(np.int32)), device)
        table = keys.index_select(0, table.clamp_(max=len(keys) - 1).view(-1)).view(table.shape)
    return starts_, lengths_, table
