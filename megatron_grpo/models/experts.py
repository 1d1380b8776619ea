"""The experts of a mixture-of-experts layer with ``--moe-grouped-gemm``.

megatron-core's experts need a package (GroupedMLP: grouped_gemm) or launch a product for each expert (SequentialMLP;
TEGroupedMLP, Transformer Engine's). Here all experts of a rank share two stacked weights and two calls of torch's
grouped matrix product, a CUTLASS kernel for bfloat16 on CUDA and a loop inside torch elsewhere.
"""

import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu
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

from megatron_grpo.models.config import squared_relu
from megatron_grpo.utils.errors import GrpoError


class ExpertRowParallelLinear(RowParallelLinear):
    """``linear_fc2`` of megatron-core's SequentialMLP for experts with biases, without expert tensor parallelism.

    The MLP adds the bias in place. Autograd forbids this after a reduction, even over a single rank, so this layer does
    not reduce.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True  # megatron-core then reduces nothing in this layer


class GroupedExperts(MegatronModule):
    """This rank's experts: MLPs that apply the router's probabilities between their two products.

    Results, initial weights and checkpoints are those of megatron-core's SequentialMLP. The weight of ``linear_fc1`` is
    ``[E, 2 * f, h]`` (an expert's gate rows, then its up rows), the weight of ``linear_fc2`` is ``[E, h, f]``. ``E`` is
    the number of experts of this expert-parallel rank; ``f`` is this rank's shard of ``moe_ffn_hidden_size``. With
    ``config.add_bias_linear`` the biases are ``[E, 2 * f]`` and ``[E, h]``. Experts without a gate (``--squared-relu``)
    have f rows in place of 2 * f.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules=None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ):
        super().__init__(config)
        assert self.can_compute(config) and pg_collection is not None
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        # Every rank would add the whole bias of linear_fc2 to its partial sum.
        assert not config.add_bias_linear or self.tp_group.size() == 1
        hidden, ffn = config.hidden_size, divide(config.moe_ffn_hidden_size, self.tp_group.size())
        multiple = 16 // config.params_dtype.itemsize
        if hidden % multiple or ffn % multiple:
            raise GrpoError(
                f"--moe-grouped-gemm needs rows of a multiple of 16 bytes, {multiple} elements, but --hidden-size is "
                f"{hidden} and each rank's shard of --moe-ffn-hidden-size is {ffn}: leave out --moe-grouped-gemm"
            )
        self.parts = 2 if config.gated_linear_unit else 1  # of the rows of linear_fc1
        rows = self.parts * ffn
        self.linear_fc1 = GroupedLinear(config, num_local_experts, hidden, rows, partition_dim=1, stride=self.parts)
        self.linear_fc2 = GroupedLinear(config, num_local_experts, ffn, hidden, partition_dim=2, stride=1)
        if config.perform_initialization:
            # One expert after the other, as in SequentialMLP, so that the same seed gives the same weights.
            weights = self.linear_fc1.weight.detach(), self.linear_fc2.weight.detach()
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for fc1, fc2 in zip(*weights, strict=True):
                    config.init_method(fc1)
                    config.output_layer_init_method(fc2)

    @staticmethod
    def can_compute(config: TransformerConfig) -> bool:
        """Return whether these experts have all that ``config`` asks for; some of it only Transformer Engine's have."""
        gated = (F.silu, quick_gelu, fast_gelu)
        usual = config.activation_func in (gated if config.gated_linear_unit else (squared_relu,))
        usual = usual and config.moe_latent_size is None and not config.moe_apply_probs_on_input
        te = config.fp8 or config.fp4 or config.use_te_activation_func or config.fine_grained_activation_offloading
        return usual and not te and "moe_act" not in (config.recompute_modules or ())

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return the outputs ``[t, h]`` of the tokens ``[t, h]``, which are sorted by expert.

        ``tokens_per_expert`` is ``[E]`` on any device, ``permuted_probs`` ``[t]``. Under expert tensor parallelism the
        output is a partial sum, and the token dispatcher adds the partial sums.
        """
        hidden, probs = permuted_local_hidden_states, permuted_probs[:, None]
        ends = tokens_per_expert.cumsum(0).int().to(hidden.device, non_blocking=True)
        idle = (tokens_per_expert == 0).nonzero()[:, 0].to(hidden.device, non_blocking=True)
        projected = self.linear_fc1(hidden, ends, idle)
        output = self.linear_fc2(self._activate(projected, probs), ends, idle, probs)
        return output, None

    def _activate(self, projected: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Return f(gate) * (up + offset) * probability, ``[t, f]``; probabilities may be float32 in 16-bit training.

        Without a gate it is f(up) * probability.

        With ``activation_func_clamp_value`` c gate is clamped to (-inf, c] and up to [-c, c] (gpt-oss).
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
        if not config.gated_linear_unit:
            return (config.activation_func(projected) * probs).to(projected.dtype)
        gate, up = projected.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (config.activation_func(gate) * (up + config.glu_linear_offset) * probs).to(projected.dtype)

    def backward_dw(self) -> None:
        """Do nothing: the backward pass has already computed the gradients of the weights."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the shards in the format of SequentialMLP's checkpoint: one key with a leading axis of all experts."""
        if (metadata or {}).get("singleton_local_shards"):
            raise GrpoError(
                "the checkpoint has a separate key for each expert (singleton_local_shards): "
                "load it without --moe-grouped-gemm"
            )
        local, axis = self.num_local_experts, len(sharded_offsets)  # axis: the axis of the experts
        ep_rank, ep_size = self.ep_group.rank(), self.ep_group.size()
        tp_rank, tp_size = self.tp_group.rank(), self.tp_group.size()
        dp_rank = self.dp_group.rank()
        experts = [(*sharded_offsets, (axis, ep_rank * local + i, ep_size * local)) for i in range(local)]

        def build_fc1(key, stack, replica_id, flattened_range):
            # In the whole tensor of an expert the gate rows of all ranks precede the up rows.
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    half,
                    *offsets,
                    (axis + 1, part * tp_size + tp_rank, self.parts * tp_size),
                    replica_id=replica_id,
                    prepend_axis_num=axis + 1,
                )
                for offsets, expert in zip(experts, stack.detach(), strict=True)
                for part, half in enumerate(expert.chunk(self.parts))
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
        # Other implementations expect the extra state of each linear layer, although it is empty.
        for linear in ("linear_fc1", "linear_fc2"):
            for i, offsets in enumerate(experts):
                key = f"{prefix}experts.{linear}._extra_state"
                state[f"{key}{i}"] = make_sharded_object_for_checkpoint(None, key, offsets, (0, tp_rank, dp_rank))
        return state


class GroupedLinear(torch.nn.Module):
    """A linear layer of all experts of a rank: ``weight`` ``[E, out, in]``, ``bias`` ``[E, out]`` or None.

    The parameter's name ends in ".bias", so megatron-core's optimizer applies no weight decay to it.
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
        """Return x W_e^T + b_e, ``[t, out]``, or x W_e^T + p b_e with probabilities p ``[t, 1]`` (`_GroupedMatmul`)."""
        product = grouped_matmul(x, self.weight, ends, idle)
        if self.bias is None:
            return product
        # The bias of each token is selected by a matrix product, because its gradient is then summed in float32.
        token = torch.arange(len(x), device=x.device, dtype=ends.dtype)
        chosen = torch.bucketize(token, ends, right=True)[:, None] == torch.arange(len(ends), device=x.device)
        return torch.addmm(product, (chosen if probs is None else chosen * probs).to(x.dtype), self.bias)


def _parameter(config: TransformerConfig, shape: tuple, partition_dim: int, stride: int) -> torch.nn.Parameter:
    """Create a stacked parameter with the attributes that megatron-core's buffers, gradient norm and resharding use."""
    stack = torch.nn.Parameter(torch.empty(shape, device=torch.cuda.current_device(), dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(stack, True, partition_dim, stride)
    vars(stack)["allreduce"] = not has_own_ranks(config)
    return stack


def has_own_ranks(config: TransformerConfig) -> bool:
    """Return whether the gradients of experts are reduced over other ranks than those of dense layers."""
    return (
        config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, idle: torch.Tensor) -> torch.Tensor:
    """Return x W_e^T, ``[t, out]``, for the tokens of each expert: x is ``[t, in]``, W ``[E, out, in]``.

    ``ends`` int32 ``[E]`` holds the end of each expert's tokens, ``idle`` the indices of experts without tokens.
    """
    return _GroupedMatmul.apply(x, weight, ends, idle)


class _GroupedMatmul(torch.autograd.Function):
    """`grouped_matmul`."""

    @staticmethod
    def forward(ctx, x, weight, ends, idle):
        ctx.save_for_backward(x, weight, ends, idle)
        if not len(x):  # kernels refuse an empty product
            return x.new_empty(0, weight.shape[1])
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad):
        x, weight, ends, idle = ctx.saved_tensors
        if not len(x):
            return torch.zeros_like(x), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None, None, None
        grad = grad.contiguous()
        grad_x = F.grouped_mm(grad, weight, offs=ends)
        if not ctx.needs_input_grad[1]:  # frozen
            return grad_x, None, None, None
        grad_weight = F.grouped_mm(grad.T, x, offs=ends)
        # On Blackwell the kernel leaves the gradient of experts without tokens uninitialised (pytorch issue 172439).
        return grad_x, grad_weight.index_fill_(0, idle, 0), None, None
