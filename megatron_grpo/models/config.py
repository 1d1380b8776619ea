"""megatron-core's ``TransformerConfig`` and other values derived from the model arguments."""

from argparse import Namespace
from collections.abc import Callable

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
        "hetereogenous_dist_checkpoint": bool(args.gemma4_config),  # layers differ in their parameters
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


def _activation(args: Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation function of the MLP, or of the gate of a gated MLP."""
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


def linear_layers(args: Namespace) -> list[bool]:
    """Return for each decoder layer whether it has a gated delta net in the place of attention.

    By --linear-attention-freq: an integer n stands for attention in every n-th layer; a list has 1 (delta net) or 0 for
    each layer.
    """
    if not args.experimental_attention_variant:
        return [False] * args.num_layers
    if isinstance(args.linear_attention_freq, int):
        return [layer % args.linear_attention_freq != 0 for layer in range(1, args.num_layers + 1)]
    return [bool(layer) for layer in args.linear_attention_freq]


def delta_net_state_bytes(args: Namespace) -> int:
    """Return the bytes that a gated delta net keeps of a sequence: the convolution's last inputs, the float32 state."""
    keys, values = args.linear_num_key_heads, args.linear_num_value_heads
    channels = 2 * keys * args.linear_key_head_dim + values * args.linear_value_head_dim
    state = values * args.linear_key_head_dim * args.linear_value_head_dim
    return (args.linear_conv_kernel_dim - 1) * channels * params_dtype(args).itemsize + 4 * state
