"""Qwen2 and Qwen2.5 (dense): bias on query, key and value, none elsewhere."""

from megatron_grpo.errors import GrpoError
from megatron_grpo.weights.families.common import DENSE, Family, head_dim, refuse_sliding_window
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
    Row(
        _MCORE + "self_attention.linear_qkv.bias",
        {
            _HF + "self_attn.q_proj.bias": "q",
            _HF + "self_attn.k_proj.bias": "kv",
            _HF + "self_attn.v_proj.bias": "kv",
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
    refuse_sliding_window(config)
    return {"kv_channels": head_dim(config)}


def _write(args):
    if args.kv_channels * args.num_attention_heads != args.hidden_size:
        raise GrpoError(
            f"model family qwen2 has heads of hidden_size / num_attention_heads channels: kv_channels "
            f"({args.kv_channels}) times num_attention_heads ({args.num_attention_heads}) is not hidden_size "
            f"({args.hidden_size})"
        )
    return {"use_sliding_window": False, "sliding_window": None}


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    rows=ROWS,
    fixed={**DENSE, "qk_layernorm": False, "add_qkv_bias": True},
    read=_read,
    write=_write,
)
