"""The experts of a mixture-of-experts layer for the ``local`` layer spec with ``--moe-grouped-gemm``.

megatron-core's own need a package (GroupedMLP: grouped_gemm; TEGroupedMLP: Transformer Engine) or run one expert after
the other (SequentialMLP). Here all experts of a rank share two stacked weights and two calls of torch's grouped matrix
product, a CUTLASS kernel for bfloat16 on CUDA and a loop inside torch elsewhere.
"""

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from megatron_grpo.utils.errors import GrpoError


class ExpertRowParallelLinear(RowParallelLinear):
    """``linear_fc2`` of megatron-core's SequentialMLP where experts have biases, without expert tensor parallelism.

    The MLP adds the bias in place, and autograd forbids that behind a reduction, though it be one over a single rank.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True  # megatron-core's word for: reduce nothing here


class GroupedExperts(MegatronModule):
    """This rank's experts: a gated linear unit, scaled by the router's probabilities between the two products.

    Gives the results, the initial weights and the checkpoints of megatron-core's SequentialMLP. The weight of
    ``linear_fc1`` is ``[E, 2 * f, h]`` (an expert's gate rows, then its up rows) and that of ``linear_fc2``
    ``[E, h, f]``, where ``E`` are the experts of this expert-parallel rank and ``f`` is this rank's part of
    ``moe_ffn_hidden_size``; with ``config.add_bias_linear`` their biases are ``[E, 2 * f]`` and ``[E, h]``.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules=None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        assert config.gated_linear_unit and config.activation_func in (F.silu, quick_gelu)
        assert config.moe_latent_size is None and not config.moe_apply_probs_on_input
        assert not config.fp8 and not config.fp4 and "moe_act" not in (config.recompute_modules or ())
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        # Every rank would add the whole bias of linear_fc2 to its partial sum.
        assert not config.add_bias_linear or self.tp_group.size() == 1
        hidden, ffn = config.hidden_size, divide(config.moe_ffn_hidden_size, self.tp_group.size())
        multiple = 16 // config.params_dtype.itemsize
        if hidden % multiple or ffn % multiple:
            raise GrpoError(
                f"the grouped matrix product wants rows of a multiple of 16 bytes, {multiple} elements, but the hidden "
                f"size is {hidden} and each rank's part of --moe-ffn-hidden-size {ffn}: leave out --moe-grouped-gemm"
            )
        self.linear_fc1 = GroupedLinear(config, num_local_experts, hidden, 2 * ffn, partition_dim=1, stride=2)
        self.linear_fc2 = GroupedLinear(config, num_local_experts, ffn, hidden, partition_dim=2, stride=1)
        if config.perform_initialization:
            # One expert after the other, as in SequentialMLP: the same seed gives the same weights.
            weights = self.linear_fc1.weight.detach(), self.linear_fc2.weight.detach()
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for fc1, fc2 in zip(*weights, strict=True):
                    config.init_method(fc1)
                    config.output_layer_init_method(fc2)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Outputs ``[t, h]`` of the tokens ``[t, h]`` sorted by expert, ``tokens_per_expert`` ``[E]`` on any device,
        probabilities ``[t]``.

        Under expert tensor parallelism the output is a partial sum, which the token dispatcher adds up.
        """
        hidden, probs = permuted_local_hidden_states, permuted_probs[:, None]
        ends = tokens_per_expert.cumsum(0).int().to(hidden.device, non_blocking=True)
        idle = (tokens_per_expert == 0).nonzero()[:, 0].to(hidden.device, non_blocking=True)
        projected = self.linear_fc1(hidden, ends, idle)
        output = self.linear_fc2(self._activate(projected, probs), ends, idle, probs)
        return output, None

    def _activate(self, projected: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """f(gate) * (up + offset) * probability, ``[t, f]``; router probabilities may be float32 where the rest is not.

        With ``activation_func_clamp_value`` c the gate is cut off above c and up beyond -c and c (gpt-oss).
        """
        config = self.config
        if config.bias_activation_fusion and config.activation_func is F.silu:
            return weighted_bias_swiglu_impl(projected, None, probs, config.activation_func_fp8_input_store)
        if config.bias_activation_fusion:
            return weighted_bias_quick_geglu_impl(
                projected,
                None,
                probs,
                config.activation_func_fp8_input_store,
                config.glu_linear_offset,
                config.activation_func_clamp_value,
            )
        gate, up = projected.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (config.activation_func(gate) * (up + config.glu_linear_offset) * probs).to(projected.dtype)

    def backward_dw(self) -> None:
        """Nothing is left to do: the weights' gradients come with the backward pass."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The tensors of SequentialMLP's checkpoint: one key for all experts, with an axis for them in front."""
        if (metadata or {}).get("singleton_local_shards"):
            raise GrpoError(
                "the checkpoint has keys of their own for each expert (singleton_local_shards): "
                "load it without --moe-grouped-gemm"
            )
        local, axis = self.num_local_experts, len(sharded_offsets)  # axis: that of the experts
        ep_rank, ep_size = self.ep_group.rank(), self.ep_group.size()
        tp_rank, tp_size = self.tp_group.rank(), self.tp_group.size()
        dp_rank = self.dp_group.rank()
        experts = [(*sharded_offsets, (axis, ep_rank * local + i, ep_size * local)) for i in range(local)]

        def build_fc1(key, stack, replica_id, flattened_range):
            # Of all ranks' gate and up rows, each expert's gates come first.
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    half,
                    *offsets,
                    (axis + 1, first + tp_rank, 2 * tp_size),
                    replica_id=replica_id,
                    prepend_axis_num=axis + 1,
                )
                for offsets, expert in zip(experts, stack.detach(), strict=True)
                for first, half in zip((0, tp_size), expert.chunk(2), strict=True)
            ]

        def merge_fc1(halves):
            return torch.cat(halves).view(local, -1, *halves[0].shape[1:])

        state: ShardedStateDict = {}
        for name, stack in self.named_parameters():
            key, replica_id = f"{prefix}experts.{name}", (0, 0, dp_rank)
            if name.startswith("linear_fc1"):
                state[prefix + name] = ShardedTensorFactory(key, stack, build_fc1, merge_fc1, replica_id)
                continue
            columns = [(axis + 2, tp_rank, tp_size)] if name.endswith("weight") else []
            state[prefix + name] = ShardedTensor.from_rank_offsets(
                key,
                stack,
                *sharded_offsets,
                (axis, ep_rank, ep_size),
                *columns,
                replica_id=replica_id,
                prepend_axis_num=axis,
            )
        # Other implementations look for each linear layer's extra state, though it holds nothing.
        for linear in ("linear_fc1", "linear_fc2"):
            for i, offsets in enumerate(experts):
                key = f"{prefix}experts.{linear}._extra_state"
                state[f"{key}{i}"] = make_sharded_object_for_checkpoint(None, key, offsets, (0, tp_rank, dp_rank))
        return state


class GroupedLinear(torch.nn.Module):
    """A linear layer of each of a rank's experts: ``weight`` ``[E, out, in]``, ``bias`` ``[E, out]`` or None.

    The bias has a name that ends in ".bias", by which megatron-core's optimizer leaves out weight decay.
    """

    def __init__(
        self, config: TransformerConfig, experts: int, inputs: int, outputs: int, partition_dim: int, stride: int
    ):
        super().__init__()
        self.weight = _parameter(config, (experts, outputs, inputs), partition_dim, stride)
        self.register_parameter("bias", None)
        if config.add_bias_linear:
            self.bias = _parameter(config, (experts, outputs), 1, stride)
            if config.perform_initialization:
                torch.nn.init.zeros_(self.bias)

    def forward(
        self, x: torch.Tensor, ends: torch.Tensor, idle: torch.Tensor, probs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W_e^T + b_e, ``[t, out]``, or with probabilities p ``[t, 1]`` x W_e^T + p b_e; see `_GroupedMatmul`."""
        product = _GroupedMatmul.apply(x, self.weight, ends, idle)
        if self.bias is None:
            return product
        # As a matrix product the choice of each token's bias has a gradient that is summed up in float32.
        token = torch.arange(len(x), device=x.device, dtype=ends.dtype)
        chosen = torch.bucketize(token, ends, right=True)[:, None] == torch.arange(len(ends), device=x.device)
        return torch.addmm(product, (chosen if probs is None else chosen * probs).to(x.dtype), self.bias)


def _parameter(config: TransformerConfig, shape: tuple, partition_dim: int, stride: int) -> torch.nn.Parameter:
    """A stack with the marks that megatron-core's buffers, gradient norm and resharding look for."""
    stack = torch.nn.Parameter(torch.empty(shape, device=torch.cuda.current_device(), dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(stack, True, partition_dim, stride)
    stack.allreduce = config.expert_model_parallel_size == 1
    return stack


class _GroupedMatmul(torch.autograd.Function):
    """y = x W_e^T for the tokens of each expert: x ``[t, in]``, W ``[E, out, in]``, ``ends`` int32 ``[E]`` where each
    expert's tokens end, ``idle`` the experts without tokens.
    """

    @staticmethod
    def forward(ctx, x, weight, ends, idle):
        ctx.save_for_backward(x, weight, ends, idle)
        if not len(x):  # no kernel is asked for a product of nothing
            return x.new_empty(0, weight.shape[1])
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad):
        x, weight, ends, idle = ctx.saved_tensors
        if not len(x):
            return torch.zeros_like(x), torch.zeros_like(weight), None, None
        grad = grad.contiguous()
        grad_x = F.grouped_mm(grad, weight, offs=ends)
        grad_weight = F.grouped_mm(grad.T, x, offs=ends)
        # On Blackwell the kernel leaves what was in memory where there are no tokens (pytorch issue 172439).
        return grad_x, grad_weight.index_fill_(0, idle, 0), None, None
