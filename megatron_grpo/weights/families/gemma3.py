"""Gemma 3, language model only (arXiv:2503.19786).

Differences from Gemma 2: norms on query and key heads instead of soft caps; sliding windows in five of six layers,
which have a separate rotary base.
"""

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import Family, read_rope, write_rope
from megatron_grpo.weights.families.gemma2 import ACTIVATION, FIXED, gemma_mappings, read_gemma, write_gemma
from megatron_grpo.weights.families.qwen3 import HEAD_NORMS


def _read(config):
    if config.get("attn_logit_softcapping"):
        raise GrpoError(
            "config.json has attn_logit_softcapping, which transformers ignores for Gemma 3: remove the key"
        )
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
    """Read `rope_theta` and `rope_local_base_freq` (transformers 4), or `rope_parameters` per kind of layer (5)."""
    by_kind = config.get("rope_parameters") or {}
    full, local = by_kind.get("full_attention"), by_kind.get("sliding_attention")
    if not (full and local):
        full, local = {}, {}
    scaling = config.get("rope_scaling") or {}
    if "type" in scaling and "rope_type" not in scaling:
        raise GrpoError(f"config.json has rope_scaling {scaling}, whose type transformers ignores: name it rope_type")
    full = {**full, **scaling}  # transformers lets rope_scaling win
    local = {"rope_theta": config["rope_local_base_freq"], **local}
    windowed = read_rope({**config, "rope_scaling": None, "rope_parameters": local})
    whole = read_rope({**config, "rope_scaling": None, "rope_parameters": full})
    if windowed["rope_scaling"] or (whole["rope_scaling"] or {"rope_type": "linear"})["rope_type"] != "linear":
        raise GrpoError(
            f"config.json has rope scaling {whole['rope_scaling']} and, in layers with a window, "
            f"{windowed['rope_scaling']}: only 'linear' in layers without a window is supported"
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
    mappings=gemma_mappings(*HEAD_NORMS),
    fixed={**FIXED, "qk_layernorm": True},
    read=_read,
    write=_write,
    read_rope=_read_rope,
    write_rope=_write_rope,
    activation=ACTIVATION,
    defaults={"num_key_value_heads": 4, "rope_theta": 1000000, "rope_local_base_freq": 10000},
)
