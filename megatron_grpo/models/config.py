"""megatron-core's ``TransformerConfig`` and other values derived from the model arguments."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_grpo.parallel.arguments import has_packed_attention
from megatron_grpo.utils.core_flags import core_config


def params_dtype(args: Namespace) -> torch.dtype:
    """Return the dtype of parameters and activations, from --bf16 and --fp16 (default: float32)."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def transformer_config_from_args(args: Namespace) -> TransformerConfig:
    """Build megatron-core's ``TransformerConfig``, or its subclass for multi-latent attention.

    Raises GrpoError with megatron-core's message for a combination that it refuses.
    """
    dtype = params_dtype(args)
    derived = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "gated_linear_unit": args.swiglu or args.geglu or args.quick_geglu,
        "activation_func": _activation(args),
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        # The allgather dispatcher needs equally many tokens on each rank: its packs are padded to one length.
        # What Gemma 4's stages pass on (models/gemma4.py) is wider than the hidden states.
        "variable_seq_lengths": args.pipeline_model_parallel_size > 1
        and (args.moe_token_dispatcher_type != "allgather" or bool(args.gemma4_config)),
        "hetereogenous_dist_checkpoint": bool(args.gemma4_config or args.hybrid_layer_pattern),  # layers differ
        "deallocate_pipeline_outputs": True,
        "cuda_graph_modules": [],  # no graphs; megatron-core's default does the same with a warning
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "moe_enable_routing_replay": args.router_replay_mode != "disabled",
        # Multi-token-prediction layers give the policy no gradient, and their own norm clips their gradients: a clip by
        # one norm of all would make the policy's step smaller.
        "mtp_detach_heads": True,
    }
    if has_packed_attention(args):
        # Other backends are Transformer Engine's: megatron-core would check its environment variables.
        derived["attention_backend"] = AttnBackend.auto
    if not args.multi_latent_attention:
        return core_config(TransformerConfig, args, **derived)
    return core_config(
        MLATransformerConfig, args, **derived, rotary_base=args.rotary_base, rotary_percent=args.rotary_percent
    )


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0)^2; megatron-core's function would be compiled, which needs a C++ compiler."""
    return F.relu(x).square()


def _activation(args: Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation function of the MLP, or of the gate of a gated MLP."""
    if args.squared_relu:
        return squared_relu
    if args.swiglu:
        return F.silu
    if args.quick_geglu:
        return quick_gelu
    # --geglu is the tanh approximation, which fused kernels compute under F.gelu's name.
    fused = args.bias_activation_fusion or args.use_te_activation_func
    return fast_gelu if args.geglu and not fused else F.gelu


def trains_mtp(config: TransformerConfig) -> bool:
    """Return whether multi-token-prediction layers are trained."""
    return bool(config.mtp_num_layers) and config.mtp_loss_scaling_factor > 0


def moe_layers(args: Namespace) -> list[bool]:
    """Return for each decoder layer whether it has experts, from --moe-layer-freq.

    An integer n stands for every n-th layer from the first; a list has one entry for each layer.
    """
    if isinstance(args.moe_layer_freq, int):
        return [layer % args.moe_layer_freq == 0 for layer in range(args.num_layers)]
    return [bool(layer) for layer in args.moe_layer_freq]


MAMBA_CONVOLUTION = 4  # inputs that Mamba's convolution reads, as in megatron-core's mixer and in published models
MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"  # letters of --hybrid-layer-pattern, as in Megatron-LM


def recurrent_layers(args: Namespace) -> list[bool]:
    """Return for each decoder layer whether it is recurrent: a gated delta net in the place of attention, or Mamba-2.

    By --hybrid-layer-pattern, or by --linear-attention-freq: an integer n stands for attention in every n-th layer; a
    list has 1 (delta net) or 0 for each layer.
    """
    if args.hybrid_layer_pattern:
        return [kind == MAMBA for kind in args.hybrid_layer_pattern]
    if not args.experimental_attention_variant:
        return [False] * args.num_layers
    if isinstance(args.linear_attention_freq, int):
        return [layer % args.linear_attention_freq != 0 for layer in range(1, args.num_layers + 1)]
    return [bool(layer) for layer in args.linear_attention_freq]


def has_recurrence(args: Namespace) -> bool:
    """Return whether some layers of the model are recurrent."""
    return MAMBA in (args.hybrid_layer_pattern or "") or bool(args.experimental_attention_variant)


def attention_layers(args: Namespace) -> list[bool]:
    """Return for each decoder layer whether it has attention."""
    if args.hybrid_layer_pattern:
        return [kind == ATTENTION for kind in args.hybrid_layer_pattern]
    return [not recurrent for recurrent in recurrent_layers(args)]


def mlp_layers(args: Namespace) -> list[bool]:
    """Return for each decoder layer whether it has an MLP, or experts."""
    if args.hybrid_layer_pattern:
        return [kind in (MLP, EXPERTS) for kind in args.hybrid_layer_pattern]
    return [True] * args.num_layers


class RecurrentSizes(NamedTuple):
    """Sizes of a recurrent layer, of all tensor-parallel ranks together (models/recurrence.py)."""

    groups: int  # a
    heads: int  # a * r
    key: int  # d_k
    value: int  # d_v
    scalars: int  # of each head in the projection
    width: int  # inputs that the convolution reads

    @property
    def mixed(self) -> int:
        """Return the channels of the convolution."""
        return 2 * self.groups * self.key + self.heads * self.value


def delta_net_sizes(config: Any) -> RecurrentSizes:
    """Return the sizes of a gated delta net from arguments, or from megatron-core's configuration."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    return RecurrentSizes(keys, values, key, value, scalars=2, width=config.linear_conv_kernel_dim)


def mamba_sizes(config: Any) -> RecurrentSizes:
    """Return the sizes of a Mamba-2 layer from arguments, or from megatron-core's configuration."""
    groups, heads = config.mamba_num_groups, config.mamba_num_heads
    return RecurrentSizes(groups, heads, config.mamba_state_dim, config.mamba_head_dim, 1, MAMBA_CONVOLUTION)


def recurrent_sizes(args: Namespace) -> RecurrentSizes:
    """Return the sizes of the recurrent layers of a model that has some."""
    return mamba_sizes(args) if args.hybrid_layer_pattern else delta_net_sizes(args)


def recurrent_state_bytes(args: Namespace) -> int:
    """Return the bytes that a recurrent layer keeps of a sequence: the convolution's last inputs, the float32 state."""
    sizes = recurrent_sizes(args)
    inputs = (sizes.width - 1) * sizes.mixed * params_dtype(args).itemsize
    return inputs + 4 * sizes.heads * sizes.key * sizes.value
