"""The policy model: megatron-core's ``GPTModel`` whose last stage answers with log-probabilities and entropies."""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.arguments import transformer_config_from_args
from megatron_grpo.data.batch import IGNORED_LABEL
from megatron_grpo.models.attention import PackedAttention
from megatron_grpo.models.head import vocab_parallel_log_probs
from megatron_grpo.models.norm import RMSNorm


class PolicyModel(GPTModel):
    """A GPT that returns, for every labelled token of a pack, its log-probability and the entropy there."""

    temperature = 1.0
    vocab_size_without_padding: int

    def _postprocess(self, hidden_states, labels=None, **kwargs):
        """Last stage with labels: (log_probs [l], entropies [l]) of the l positions whose label is not
        ``IGNORED_LABEL``.

        The prompt's positions never reach the vocabulary: on long prompts this saves most of the head's work.
        """
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **kwargs)
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        kept = (labels[0] != IGNORED_LABEL).nonzero()[:, 0]
        return vocab_parallel_log_probs(
            hidden[:, 0].index_select(0, kept),
            weight,
            labels[0].index_select(0, kept),
            self.temperature,
            self.vocab_size_without_padding,
            parallel_state.get_tensor_model_parallel_group(),
        )


def model_provider(args, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> PolicyModel:
    """This pipeline stage's part of the policy, randomly initialised, as ``args`` describe it."""
    config = transformer_config_from_args(args)
    model = PolicyModel(
        config,
        _layer_spec(config, args.transformer_impl, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        vp_stage=vp_stage,
    )
    model.temperature = args.temperature
    model.vocab_size_without_padding = args.vocab_size
    return model


def _layer_spec(
    config: TransformerConfig, transformer_impl: str, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers, or megatron-core's own with our norm and packed attention in their places."""
    if transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=RMSNorm
    )


def packed_seq_params(cu_seqlens: torch.Tensor, max_seqlen: int, transformer_impl: str) -> PackedSeqParams:
    """megatron-core's description of a pack from ``cu_seqlens`` (int32 ``[n + 1]``, on the host)."""
    from megatron_grpo.cpu_backend import device

    on_device = cu_seqlens.to(device(), non_blocking=True)
    # megatron-core's unfused rope reads the padded offsets as numbers in every layer: on the host no kernel stalls.
    for_rope = on_device if transformer_impl == "transformer_engine" else cu_seqlens
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        cu_seqlens_q_padded=for_rope,
        cu_seqlens_kv_padded=for_rope,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
