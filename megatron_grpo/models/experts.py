"""The experts of a mixture-of-experts layer for the ``local`` layer spec with ``--moe-grouped-gemm``.

megatron-core's own need a package (GroupedMLP: grouped_gemm; TEGroupedMLP: Transformer Engine) or run one expert after
the other (SequentialMLP). Here all experts of a rank share two stacked weights and two calls of torch's grouped matrix
product, a CUTLASS kernel for bfloat16 on CUDA and a loop inside torch elsewhere.
"""

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from megatron_grpo.errors import GrpoError


class GroupedExperts(MegatronModule):
    """This rank's experts: SwiGLU without bias, scaled by the router's probabilities between the two products.

    Gives the results, the initial weights and the checkpoints of megatron-core's SequentialMLP. ``weight1`` is
    ``[E, 2 * f, h]`` (an expert's gate rows, then its up rows) and ``weight2`` ``[E, h, f]``, where ``E`` are the
    experts of this expert-parallel rank and ``f`` is this rank's part of ``moe_ffn_hidden_size``.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules=None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        assert config.gated_linear_unit and config.activation_func is F.silu and not config.add_bias_linear
        assert config.activation_func_clamp_value is None and config.glu_linear_offset == 0
        assert config.moe_latent_size is None and not config.moe_apply_probs_on_input
        assert not config.fp8 and not config.fp4 and "moe_act" not in (config.recompute_modules or ())
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        hidden, ffn = config.hidden_size, divide(config.moe_ffn_hidden_size, self.tp_group.size())
        multiple = 16 // config.params_dtype.itemsize
        if hidden % multiple or ffn % multiple:
            raise GrpoError(
                f"the grouped matrix product wants rows of a multiple of 16 bytes, {multiple} elements, but the hidden "
                f"size is {hidden} and each rank's part of --moe-ffn-hidden-size {ffn}: leave out --moe-grouped-gemm"
            )
        self.weight1 = self._parameter(2 * ffn, hidden, partition_dim=1, stride=2)
        self.weight2 = self._parameter(hidden, ffn, partition_dim=2, stride=1)
        if config.perform_initialization:
            # One expert after the other, as in SequentialMLP: the same seed gives the same weights.
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for fc1, fc2 in zip(self.weight1.detach(), self.weight2.detach(), strict=True):
                    config.init_method(fc1)
                    config.output_layer_init_method(fc2)

    def _parameter(self, rows: int, columns: int, partition_dim: int, stride: int) -> torch.nn.Parameter:
        """A stacked weight with the marks that megatron-core's buffers, gradient norm and resharding look for."""
        weight = torch.nn.Parameter(
            torch.empty(
                self.num_local_experts,
                rows,
                columns,
                device=torch.cuda.current_device(),
                dtype=self.config.params_dtype,
            )
        )
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
        weight.allreduce = self.config.expert_model_parallel_size == 1
        return weight

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Outputs ``[t, h]`` of the tokens ``[t, h]`` sorted by expert, ``tokens_per_expert`` ``[E]`` on any device,
        probabilities ``[t]``.

        Under expert tensor parallelism the output is a partial sum, which the token dispatcher adds up.
        """
        device = permuted_local_hidden_states.device
        ends = tokens_per_expert.cumsum(0).int().to(device, non_blocking=True)
        idle = (tokens_per_expert == 0).nonzero()[:, 0].to(device, non_blocking=True)
        projected = _GroupedLinear.apply(permuted_local_hidden_states, self.weight1, ends, idle)
        activated = self._activate(projected, permuted_probs[:, None])
        return _GroupedLinear.apply(activated, self.weight2, ends, idle), None

    def _activate(self, projected: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up * probability, ``[t, f]``; router probabilities may be float32 where the rest is not."""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(projected, None, probs, self.config.activation_func_fp8_input_store)
        gate, up = projected.chunk(2, dim=-1)
        return (F.silu(gate) * up * probs).to(projected.dtype)

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

        def build_fc1(key, weight, replica_id, flattened_range):
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
                for offsets, expert in zip(experts, weight.detach(), strict=True)
                for first, half in zip((0, tp_size), expert.chunk(2), strict=True)
            ]

        def merge_fc1(halves):
            return torch.cat(halves).view(local, -1, halves[0].shape[-1])

        names = [f"{prefix}experts.linear_fc{i}" for i in (1, 2)]
        fc1 = ShardedTensorFactory(f"{names[0]}.weight", self.weight1, build_fc1, merge_fc1, (0, 0, dp_rank))
        fc2 = ShardedTensor.from_rank_offsets(
            f"{names[1]}.weight",
            self.weight2,
            *sharded_offsets,
            (axis, ep_rank, ep_size),
            (axis + 2, tp_rank, tp_size),
            replica_id=(0, 0, dp_rank),
            prepend_axis_num=axis,
        )
        # Other implementations look for each linear layer's extra state, though it holds nothing.
        extra = {
            f"{name}._extra_state{i}": make_sharded_object_for_checkpoint(
                None, f"{name}._extra_state", offsets, (0, tp_rank, dp_rank)
            )
            for name in names
            for i, offsets in enumerate(experts)
        }
        return {f"{prefix}weight1": fc1, f"{prefix}weight2": fc2} | extra


class _GroupedLinear(torch.autograd.Function):
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
