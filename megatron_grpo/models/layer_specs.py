"""Layer specifications: Transformer Engine's modules, or megatron-core's with some modules of this package."""

from argparse import Namespace
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_grpo.models import gemma4, weight_gradients
from megatron_grpo.models.attention import FlashPackedAttention, PackedAttention
from megatron_grpo.models.config import mlp_layers, recurrent_layers
from megatron_grpo.models.delta_net import GatedDeltaNet
from megatron_grpo.models.exact import layers as exact
from megatron_grpo.models.experts import ExpertRowParallelLinear, GroupedExperts
from megatron_grpo.models.mamba import MambaMixer
from megatron_grpo.models.mtp import FurtherTokensLayer
from megatron_grpo.models.norm import AllHeadsNorm, BranchNorm, RMSNorm, take_residual, with_post_layernorm
from megatron_grpo.models.recurrence import recurrent_spec
from megatron_grpo.models.rope import rotate_pack
from megatron_grpo.models.router import Router
from megatron_grpo.models.self_attention import PackedSelfAttention
from megatron_grpo.models.shared_prompts import RopeOfPack
from megatron_grpo.models.two_ropes import with_two_ropes
from megatron_grpo.parallel.arguments import has_packed_attention, query_groups, uses_flash_attention_4
from megatron_grpo.patches import megatron_core as core

# Names in a layer of the local spec -> Transformer Engine's names. Transformer Engine fuses a norm into the next linear
# layer. Checkpoints always have Transformer Engine's names, so that either implementation can load them.
_FUSED_INPUT_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_FUSED_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_FUSED_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _copy_storage(to: torch.Tensor, source: torch.Tensor) -> None:
    """Give the freed storage of ``to`` the recomputed values.

    In place of a function that megatron-core compiles at its first use: that needs a C++ compiler on every host, and a
    rank that is killed meanwhile leaves a lock for which all later runs wait.
    """
    to.untyped_storage().resize_(source.untyped_storage().nbytes())
    to.untyped_storage().copy_(source.untyped_storage())


def _replace_names(config: TransformerConfig) -> None:
    """Replace what the layers of a model call in megatron-core."""
    core.ROPE_OF_PACK.install(rotate_pack)
    core.STORAGE_OF_RECOMPUTED.install(SimpleNamespace(share_storage=_copy_storage))
    if config.multi_latent_attention:
        core.LATENT_LINEAR.install(Linear)
    if config.gradient_accumulation_fusion:
        weight_gradients.install()
    if config.bias_activation_fusion and torch.cuda.is_available():
        from megatron_grpo.models.gpu_kernels import replace_swiglu_gradient  # Triton exists with a GPU only

        replace_swiglu_gradient()


class LatentAttention(MLASelfAttention):
    """megatron-core's latent attention with the norms and projections that the specification names.

    megatron-core chooses them itself when ``qk_layernorm`` is set. It then adds a norm to queries without a latent
    vector (``q_lora_rank`` None), which DeepSeek-V2-Lite does not have, and fails without Transformer Engine.
    """

    rotary_pos_emb: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = RopeOfPack(self.rotary_pos_emb)

    def _resolve_qk_norm_config(self, submodules):
        return vars(submodules)


def bias_dropout_add(training: bool, fused: bool) -> Callable:
    """Return the function that adds a module's (output, bias) to the residual; its third argument is the dropout.

    Without bias and dropout (most families; dropout is refused) it is one addition. With --bias-dropout-fusion
    megatron-core would call a compiled function for it, which costs the host ten times as much.
    """
    with_bias = get_bias_dropout_add(training, fused)

    def add(output_and_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float):
        output, bias = output_and_bias
        residual = take_residual(residual)
        if bias is None and not dropout:
            return residual.to(output.dtype) + output
        return with_bias(output_and_bias, residual, dropout)

    return add


def decoder_spec(config: TransformerConfig, args: Namespace, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the specification of this (virtual) pipeline stage: its layers and the final norm."""
    _replace_names(config)
    layers = _layers(config, args)
    if args.gemma4_config:
        layers = gemma4.layer_specs(args, layers)
    if config.pipeline_model_parallel_layout is not None:
        own = config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage)
        layers = [layers[i] for i in own]
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        layers = layers[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    if args.gemma4_config:
        layers = gemma4.end_stage(layers)
    norm = exact.ExactNorm if args.exact_log_probs else _norm(args.transformer_impl)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def mtp_spec(config: TransformerConfig, args: Namespace, vp_stage: int | None):
    """Return the specification of the multi-token-prediction layers, or None on stages without them.

    Each has a transformer layer like the last one of the decoder.
    """
    if not config.mtp_num_layers:
        return None
    last = _layers(config, args)[-1]
    spec = get_gpt_mtp_block_spec(config, last, args.transformer_impl == "transformer_engine", vp_stage=vp_stage)
    for layer in () if spec is None else spec.layer_specs:
        layer.module = FurtherTokensLayer
        if args.transformer_impl == "local":
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = RMSNorm
    return spec


def _norm(transformer_impl: str) -> type:
    if transformer_impl == "local":
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _layers(config: TransformerConfig, args: Namespace) -> list[ModuleSpec]:
    """Return the specification of every decoder layer of the whole model."""
    use_te = args.transformer_impl == "transformer_engine"
    softmax = copy(config)
    softmax.experimental_attention_variant = None  # megatron-core's function knows attention only
    layers = get_gpt_decoder_layer_specs(softmax, use_te, normalization=config.normalization)
    kinds = {id(layer): layer for layer in layers}  # the list repeats two objects: a dense layer and an MoE layer
    for layer in kinds.values():
        if not use_te:
            _use_local_modules(config, layer)
        attention = layer.submodules.self_attention
        if not config.multi_latent_attention:
            attention.module = PackedSelfAttention
            if config.qk_layernorm:  # Transformer Engine's norms take the host several times as long
                attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
        if has_packed_attention(args):  # Transformer Engine has no sinks in packs before version 2.12, and no soft caps
            flash = uses_flash_attention_4(args)
            attention.submodules.core_attention = FlashPackedAttention if flash else PackedAttention
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = bias_dropout_add
        _add_family_modules(args, layer)
        mlp = _submodules(layer.submodules.mlp)
        if isinstance(mlp, MoESubmodules):
            mlp.router = Router
            if "layernorm" not in (config.recompute_modules or ()):  # only Transformer Engine's norm can be recomputed
                layer.submodules.pre_mlp_layernorm = BranchNorm
            if config.moe_grouped_gemm and GroupedExperts.can_compute(config):
                mlp.experts = GroupedExperts
            elif config.add_bias_linear and not use_te:
                _submodules(mlp.experts).linear_fc2 = ExpertRowParallelLinear
        if args.exact_log_probs:
            exact.use_exact_modules(layer, exact.rotation_of(args))
    recurrent, mlp = recurrent_layers(args), mlp_layers(args)
    layers = [_with_recurrence(args, layer) if recurrent[i] else layer for i, layer in enumerate(layers)]
    return [_of_one_branch(layer, mlp[i]) if args.hybrid_layer_pattern else layer for i, layer in enumerate(layers)]


def _of_one_branch(layer: ModuleSpec, mlp: bool) -> ModuleSpec:
    """Return a copy of a layer's specification with its MLP alone, or with what stands before the MLP alone."""
    if mlp:
        parts = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
    else:
        parts = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    return replace(layer, submodules=replace(layer.submodules, **parts))


def _with_recurrence(args: Namespace, layer: ModuleSpec) -> ModuleSpec:
    """Return a copy of a layer's specification with a gated delta net or Mamba-2 in the place of attention."""
    kind = MambaMixer if args.hybrid_layer_pattern else GatedDeltaNet
    linears = layer.submodules.self_attention.submodules
    names = {
        name: fused
        for name, fused in layer.submodules.sharded_state_dict_keys_map.items()
        if name not in _FUSED_INPUT_NORM
    }
    parts = replace(
        layer.submodules,
        self_attention=recurrent_spec(kind, linears.linear_qkv, linears.linear_proj),
        sharded_state_dict_keys_map=names,
    )
    return replace(layer, submodules=parts)


def _submodules(spec: Any) -> Any:
    """Return the submodules of an MLP or of experts, an argument of the partial that builds them."""
    return spec.keywords["submodules"]


def _add_family_modules(args: Namespace, layer: ModuleSpec) -> None:
    """Add the modules that only some model families have to a layer of either implementation."""
    attention, mlp = layer.submodules.self_attention, _submodules(layer.submodules.mlp)
    if args.multi_latent_attention:
        attention.module = LatentAttention
    if args.sandwich_norm:
        norm = _norm(args.transformer_impl)
        attention.submodules.linear_proj = with_post_layernorm(attention.submodules.linear_proj, norm)
        if not isinstance(mlp, MoESubmodules):  # Gemma 4's mixtures have a norm of their own
            mlp.linear_fc2 = with_post_layernorm(mlp.linear_fc2, norm)
    if args.qk_layernorm_across_heads:
        attention.submodules.q_layernorm = partial(AllHeadsNorm, heads=args.num_attention_heads)
        attention.submodules.k_layernorm = partial(AllHeadsNorm, heads=query_groups(args))
    if args.rotary_base_local:
        attention.module = with_two_ropes(attention.module)
    if args.attn_logit_softcapping:
        attention.submodules.core_attention = partial(PackedAttention, softcap=args.attn_logit_softcapping)


def _use_local_modules(config: TransformerConfig, layer: ModuleSpec) -> None:
    """Replace norm and attention of a layer of the local spec by the modules of this package."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = BranchNorm
    attention = parts.self_attention.submodules
    names: dict[str, str] = {}
    if config.multi_latent_attention:
        names |= _FUSED_LATENT_NORMS
        # Replicated on every rank, as in Transformer Engine's spec: megatron-core's split projection would lose the
        # gradient of the keys' rotary channels, which all heads share.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        if config.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
    else:
        names |= _FUSED_INPUT_NORM
    if not isinstance(_submodules(parts.mlp), MoESubmodules):
        names |= _FUSED_MLP_NORM
    parts.sharded_state_dict_keys_map = names
