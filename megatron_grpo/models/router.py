"""The router of a mixture of experts: megatron-core's, with losses and counts that do not depend on packs and ranks.

Below, p_i(x) are the scores of token x, normalized over the E experts, K is --moe-router-topk, n_i is the number of
tokens with expert i among their K largest scores, and T the number of tokens. Padding is no token. Each loss is
E sum_i f_i P_i with f_i = n_i / (K T) and P_i = sum_x p_i(x) / T (arXiv:2101.03961, section 2.2). They differ in the
tokens:

    aux_loss         those of a micro-batch; the mean over the update's micro-batches that have tokens
    seq_aux_loss     those of a sequence (arXiv:2412.19437, equations 17 to 20); the mean over the update's sequences
    global_aux_loss  those of the update (arXiv:2501.11873, section 3)

The gradient flows through P only, so a micro-batch adds its own part of the sum over x, with frequencies that are
already known: those of its own sequences, or those that `balancing.begin_update` has counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.data.pack import Pack
from megatron_grpo.models.router_replay import Replay, recomputing
from megatron_grpo.parallel.context_parallel import sharing_ranks
from megatron_grpo.parallel.sequence_parallel import own_tokens
from megatron_grpo.parallel.zigzag import Int64, zigzag
from megatron_grpo.utils.device import device, to_device


@dataclass(frozen=True)
class PackTokens:
    """The tokens of a micro-batch that this rank routes."""

    sequences: torch.Tensor  # [t], the number of each token's sequence in the pack
    further: torch.Tensor  # [t], how many tokens of its sequence follow each token; -1 for padding
    num_sequences: int
    degree: int  # context-parallel ranks that hold the pack
    # With shared prompts a token counts once for each sequence of the model that has it, [t] times; and pairs [p] of a
    # sequence of the model, and a sequence of the pack that is a part of it.
    times: torch.Tensor | None = None
    paths: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, config: TransformerConfig, pack: Pack) -> "PackTokens":
        """Return those of a pack, on the device."""
        offsets = pack.cu_seqlens.astype(np.int64)
        places = own_tokens(config, zigzag(offsets, pack.cp_size, pack.cp_rank))
        sequences = np.searchsorted(offsets, places, "right") - 1
        lengths, position_ids, shared = pack.real_lengths, places - offsets[sequences], pack.shared_prompts
        counts: tuple[Int64, ...] = ()
        if shared is not None:
            lengths, position_ids = shared.path_lengths, shared.position_ids[places]
            of_leaves, nodes = shared.paths()
            counts = np.bincount(nodes, minlength=len(shared.parent))[sequences], of_leaves, nodes
        further = np.maximum(lengths[sequences] - 1 - position_ids, -1)
        arrays = [to_device(torch.from_numpy(values), device()) for values in (sequences, further, *counts)]
        of_tokens, behind, *of_paths = arrays
        times, paths = (of_paths[0], (of_paths[1], of_paths[2])) if of_paths else (None, None)
        return cls(of_tokens, behind, len(offsets) - 1, pack.cp_size, times, paths)

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` ``[t, ...]`` times the number of sequences of the model that have each token."""
        return values if self.times is None else values * self.times.view(-1, *[1] * (values.dim() - 1))

    def of_sequences(self, counts: torch.Tensor) -> torch.Tensor:
        """Return ``counts`` ``[s, E]`` of the pack's sequences as sums ``[n, E]`` over the model's sequences."""
        if self.paths is None:
            return counts
        of_leaves, nodes = self.paths
        return counts.new_zeros(self.num_sequences, counts.shape[1]).index_add(0, of_leaves, counts[nodes])

    def of_pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Return ``weights`` ``[n, E]`` of the model's sequences, added up ``[s, E]`` in the sequences of the pack."""
        if self.paths is None:
            return weights
        of_leaves, nodes = self.paths
        return weights.new_zeros(self.num_sequences, weights.shape[1]).index_add(0, nodes, weights[of_leaves])


@dataclass(frozen=True)
class UpdateSize:
    """What the losses of an update are averaged over, for the decoder and for each multi-token-prediction layer.

    The n-th of these layers routes the tokens that at least n tokens of their sequence follow.
    """

    tokens: list[int]  # [1 + layers]
    sequences: list[int]  # [1 + layers], those with such tokens
    micro_batches: int  # those with tokens
    scale: int  # micro-batches x data-parallel size, by which megatron-core divides the gradient


class Router(TopKRouter):
    """megatron-core's router with its own losses and counts, and a quicker ``--moe-router-dtype fp32``.

    megatron-core's losses depend on the packs, its counts are buffers that are cast to 16 bits, its count of tokens per
    expert fails with a padding mask, and its list of replay records keeps them alive after the model is freed.
    """

    router_replay: Any  # megatron-core's or ours

    def __init__(self, config: TransformerConfig, pg_collection=None, **more: Any):
        super().__init__(config, pg_collection, **more)
        if config.moe_enable_routing_replay:
            RouterReplay.global_router_replay_instances.remove(self.router_replay)
            self.router_replay = Replay(config)
        # Not buffers: nothing casts, offloads or mixes them with those of another model.
        for name in "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps":
            if name in self._buffers:
                delattr(self, name)
        self.global_tokens_per_expert = self.ga_steps = None
        experts = config.num_moe_experts
        self.local_tokens_per_expert = torch.zeros(experts, dtype=torch.int64, device=device())
        self.tokens_of_update = torch.zeros_like(self.local_tokens_per_expert)  # of the last update, on this rank
        self.balance_loss = torch.zeros((), device=device())  # of the present update without coefficients, on this rank
        self.frozen_expert_bias = True  # for megatron-core, which would move it before the update is judged
        self.counted: torch.Tensor | None = None  # int64 [E], while `balancing.begin_update` counts
        self.frequencies: torch.Tensor | None = None  # float32 [E], f_i of the update for global_aux_loss
        self.update: UpdateSize | None = None
        self.pack: PackTokens | None = None  # of the present forward pass
        self._next: PackTokens | None = None  # set before it
        self._adapter: Callable[..., torch.Tensor] | None = None
        self._to_recompute: list[PackTokens] = []

    @property
    def depth(self) -> int:
        """How many further tokens a token needs to be routed: the number of a multi-token-prediction layer, else 0."""
        return self.layer_number if self.is_mtp_layer else 0

    def next_micro_batch(self, pack: PackTokens) -> None:
        """Set the tokens of the next forward pass, and of its recomputation."""
        self._next = pack
        if torch.is_grad_enabled():
            self._to_recompute.append(pack)

    def end_of_pass(self) -> None:
        """Forget the tokens of a pass."""
        self._next = self.pack = None
        self._to_recompute.clear()

    def gating(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[..., E]`` of the tokens ``x`` ``[..., h]``."""
        logits = self._own_logits(x)
        return logits if self._adapter is None else self._adapter(x, logits, self.bias)

    def set_adapter(self, adapter: Callable[..., torch.Tensor]) -> None:
        """Have ``adapter`` return the logits, from the router's input, its own logits and its bias."""
        self._adapter = adapter

    def _own_logits(self, x: torch.Tensor) -> torch.Tensor:
        bf16 = x.dtype == self.weight.dtype == torch.bfloat16
        if not bf16 or self.config.moe_router_dtype != "fp32" or self.weight.device != x.device:
            return super().gating(x)
        logits = Float32Logits.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias.float()

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Extend megatron-core's method by the padding of multi-token-prediction layers, and by `counted`."""
        self.pack = self._to_recompute.pop(0) if self._next is not None and recomputing() else self._next
        if self.pack is not None:
            padding_mask = self.pack.further < self.depth
        if self.counted is not None:
            flat = logits.view(-1, self.config.num_moe_experts)
            chosen, _ = compute_routing_scores_for_aux_loss(
                flat, self.topk, self.score_function, self.config.moe_router_fusion, padding_mask
            )
            self.counted += self._times(chosen).sum(0)
        return super().routing(logits, padding_mask)

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        """Count the tokens of the experts, once for each micro-batch of an update.

        A forward pass that is recomputed later has no gradients.
        """
        if self.enable_expert_bias and torch.is_grad_enabled():
            chosen = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += self._times(chosen).sum(0)

    def _times(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.pack is None else self.pack.counted(values)

    def _apply_aux_loss(self, probs, scores_for_aux_loss, routing_map, with_padding_mask=False):
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        assert self.update is not None
        counts = self._times(routing_map).sum(0)
        dist.all_reduce(counts, group=self.tp_cp_group)
        tokens = counts.sum().clamp(min=1) / self.topk  # not 0 in a pack of padding
        weights = counts * (self.config.num_moe_experts / self.topk) / tokens.square()
        total = (self._times(scores_for_aux_loss).sum(0) * weights).sum()
        return self._attach(probs, coefficient, total * (self.update.scale / max(self.update.micro_batches, 1)))

    def _apply_seq_aux_loss(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask=False):
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        assert self.pack is not None and self.update is not None
        counts = routing_map.new_zeros(self.pack.num_sequences, self.config.num_moe_experts, dtype=torch.int32)
        counts.index_add_(0, self.pack.sequences, routing_map.int())
        for group in self.tp_group, sharing_ranks(self.pack.degree):
            if group is not None and group.size() > 1:
                dist.all_reduce(counts, group=group)
        counts = self.pack.of_sequences(counts)
        tokens = counts.sum(1, keepdim=True).clamp(min=1) / self.topk
        weights = self.pack.of_pack(counts * (self.config.num_moe_experts / self.topk) / tokens.square())
        total = (scores_for_aux_loss * weights.index_select(0, self.pack.sequences)).sum()
        scaled = total * (self.update.scale / max(self.update.sequences[self.depth], 1))
        return self._attach(probs, coefficient, scaled)

    def _apply_global_aux_loss(self, probs, scores_for_aux_loss, routing_map, with_padding_mask=False):
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        assert self.update is not None and self.frequencies is not None
        total = self.config.num_moe_experts * (self._times(scores_for_aux_loss).sum(0) * self.frequencies).sum()
        scaled = total * (self.update.scale / max(self.update.tokens[self.depth], 1))
        return self._attach(probs, coefficient, scaled)

    def _attach(self, probs: torch.Tensor, coefficient: float, loss: torch.Tensor) -> torch.Tensor:
        """Return ``probs`` with the gradient of ``coefficient * loss``, of which each rank has a summand."""
        self.balance_loss += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, coefficient * loss)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``logits`` ``[t, E]`` with the gradient of the z-loss: the mean over the update's tokens x of
        (log sum_i exp logits_i(x))^2 (arXiv:2202.08906, equation 5).
        """
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        assert self.update is not None and padding_mask is not None
        squares = self._times(torch.logsumexp(logits.float(), -1).square())
        total = squares.masked_fill(padding_mask, 0.0).sum()
        scaled = total * (coefficient * self.update.scale / max(self.update.tokens[self.depth], 1))
        return MoEAuxLossAutoScaler.apply(logits, scaled)


class Float32Logits(torch.autograd.Function):
    """The float32 logits ``[t, E]`` of ``x`` ``[t, h]`` and ``weight`` ``[E, h]``, both bf16.

    megatron-core copies ``x`` to float32 and multiplies without tensor cores. A product of two bf16 numbers is exact in
    float32, in which tensor cores add: the logits are 2e-6 from float64's (8,192 tokens of 2,048 channels, an H200).
    The float32 gradient enters the products as the sum of two bf16 numbers, which keep 16 of its 24 bits; the results
    are rounded to bf16, 8 bits.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _product(x, weight.T)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        high = grad.bfloat16()
        halves = torch.cat([high, (grad - high).bfloat16()], dim=1)
        grad_x = halves @ torch.cat([weight, weight]) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:  # frozen
            return grad_x, None
        return grad_x, _product(halves.T, x).view(2, *weight.shape).sum(0).bfloat16()


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the float32 product of two bf16 matrices."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
