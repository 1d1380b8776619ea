"""Llama 2, 3, 3.1, 3.2, 3.3 (dense): separate query, key and value, no biases, Llama 3.1's rope scaling."""

from megatron_grpo.weights.families.common import DENSE, Family, head_dim, refuse_bias
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
    refuse_bias(config, "attention_bias", "mlp_bias")
    return {"kv_channels": head_dim(config)}


def _write(args):
    return {"head_dim": args.kv_channels, "attention_bias": False, "mlp_bias": False}


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    rows=ROWS,
    fixed={**DENSE, "qk_layernorm": False, "add_qkv_bias": False},
    read=_read,
    write=_write,
)
