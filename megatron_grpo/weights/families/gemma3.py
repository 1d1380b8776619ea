"""Gemma 3's language models (arXiv:2503.19786): norms on query and key heads in place of Gemma 2's soft caps, and a
window in five of six layers, with a rotary base of their own.
"""

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import Family, read_rope, write_rope
from megatron_grpo.weights.families.gemma2 import ACTIVATION, FIXED, gemma_rows, read_gemma, write_gemma
from megatron_grpo.weights.families.qwen3 import HEAD_NORMS


def _read(config):
    if config.get("attn_logit_softcapping"):
        raise GrpoError("config.json has attn_logit_softcapping: no Gemma 3 has it, and transformers ignores it")
    return {
        **read_gemma(config, config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }


def _write(args):
    return {
        **write_gemma(args),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": args.final_logit_softcapping,
    }


def _read_rope(config):
    """`rope_local_base_freq` beside `rope_theta` (transformers 4), or `rope_parameters` of both kinds of layers (5)."""
    by_kind = config.get("rope_parameters") or {}
    full, local = by_kind.get("full_attention"), by_kind.get("sliding_attention")
    if not (full and local):
        local = {"rope_theta": config.get("rope_local_base_freq") or 10000}
        full = {"rope_theta": config.get("rope_theta") or 1000000, **(config.get("rope_scaling") or {})}
    windowed = read_rope({**config, "rope_scaling": None, "rope_parameters": local})
    whole = read_rope({**config, "rope_scaling": None, "rope_parameters": full})
    if windowed["rope_scaling"] or (whole["rope_scaling"] or {"rope_type": "linear"})["rope_type"] != "linear":
        raise GrpoError(
            f"config.json has rope scaling {whole['rope_scaling']} and, in layers with a window, "
            f"{windowed['rope_scaling']}: supported is 'linear' in layers without a window"
        )
    return {**whole, "rotary_base_local": windowed["rotary_base"]}


def _write_rope(args):
    keys = write_rope(args)
    local = {"rope_type": "default", "rope_theta": args.rotary_base_local}
    by_kind = {"full_attention": keys["rope_parameters"], "sliding_attention": local}
    return {**keys, "rope_local_base_freq": args.rotary_base_local, "rope_parameters": by_kind}


FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    rows=gemma_rows(*HEAD_NORMS),
    fixed={**FIXED, "qk_layernorm": True},
    read=_read,
    write=_write,
    read_rope=_read_rope,
    write_rope=_write_rope,
    activation=ACTIVATION,
)
