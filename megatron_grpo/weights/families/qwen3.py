"""Qwen3 (dense): RMSNorm on every query and key head, no biases, head size of its own."""

from megatron_grpo.weights.families.common import DENSE, Family, refuse_bias, refuse_sliding_window
from megatron_grpo.weights.layout import Row, grouped_qkv, stacked, vocabulary

_MCORE = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

ROWS = (
    Row("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vocab hidden"}, vocabulary, axis=0),
    Row(_MCORE + "input_layernorm.weight", {_HF + "input_layernorm.weight": "hidden"}),
    Row(
        _MCORE + "self_attention.linear_qkv.weight",
        {
            _HF + "self_attn.q_proj.weight": "q hidden",
            _HF + "self_attn.k_proj.weight": "kv hidden",
            _HF + "self_attn.v_proj.weight": "kv hidden",
        },
        grouped_qkv,
        axis=0,
    ),
    Row(_MCORE + "self_attention.q_layernorm.weight", {_HF + "self_attn.q_norm.weight": "head"}),
    Row(_MCORE + "self_attention.k_layernorm.weight", {_HF + "self_attn.k_norm.weight": "head"}),
    Row(_MCORE + "self_attention.linear_proj.weight", {_HF + "self_attn.o_proj.weight": "hidden q"}, axis=1),
    Row(_MCORE + "pre_mlp_layernorm.weight", {_HF + "post_attention_layernorm.weight": "hidden"}),
    Row(
        _MCORE + "mlp.linear_fc1.weight",
        {_HF + "mlp.gate_proj.weight": "ffn hidden", _HF + "mlp.up_proj.weight": "ffn hidden"},
        stacked,
        axis=0,
    ),
    Row(_MCORE + "mlp.linear_fc2.weight", {_HF + "mlp.down_proj.weight": "hidden ffn"}, axis=1),
    Row("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"}),
    Row("output_layer.weight", {"lm_head.weight": "vocab hidden"}, vocabulary, axis=0, untied=True),
)


def _read(config):
    refuse_bias(config, "attention_bias")
    refuse_sliding_window(config)
    return {"kv_channels": config.get("head_dim") or 128}  # 128: transformers' default


def _write(args):
    return {"head_dim": args.kv_channels, "attention_bias": False, "use_sliding_window": False, "sliding_window": None}


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    rows=ROWS,
    fixed={**DENSE, "qk_layernorm": True, "add_qkv_bias": False},
    read=_read,
    write=_write,
)
