"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, with the config.json keys of GLM-4.5."""

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import COMMON, Family, decoder_mappings, need
from megatron_grpo.weights.families.deepseek_v3 import (
    MTP_MAPPINGS,
    SIGMOID_ROUTER,
    read_sigmoid_moe,
    write_sigmoid_moe,
)
from megatron_grpo.weights.families.mla import ATTENTION, FIXED, read_mla, read_mla_rope, write_mla, write_mla_rope
from megatron_grpo.weights.families.moe import MLP

# Supported values of keys that are written, and of keys of DeepSeek's code that vLLM and transformers ignore here.
_WRITTEN = {"topk_method": "noaux_tc", "norm_topk_prob": True, "rope_interleave": True}
_SUPPORTED = {**_WRITTEN, "scoring_func": "sigmoid", "moe_layer_freq": 1}


def _layer_types(layers: int, first: int) -> list[str]:
    """Return transformers' name of each layer's MLP; the `first` layers are dense."""
    return ["dense" if layer < first else "sparse" for layer in range(layers)]


def _read(config):
    layers, first = need(config, "num_hidden_layers"), need(config, "first_k_dense_replace")
    types = config.get("mlp_layer_types") or _layer_types(layers, 1)  # transformers' default
    if types != _layer_types(layers, first):
        raise GrpoError(
            f"config.json has first_k_dense_replace {first}, which vLLM reads, and mlp_layer_types {types}, which "
            f"transformers reads (default: 'dense', then 'sparse'): make them agree"
        )
    return {**read_mla(config), **read_sigmoid_moe(config, _SUPPORTED)}


def _write(args):
    moe = write_sigmoid_moe(args)
    types = _layer_types(args.num_layers, moe["first_k_dense_replace"])
    return {**write_mla(args), **moe, **_WRITTEN, "mlp_layer_types": types}


FAMILY = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    mappings=decoder_mappings(ATTENTION, MLP),
    fixed={**COMMON, **FIXED, **SIGMOID_ROUTER},
    read=_read,
    write=_write,
    read_rope=read_mla_rope,
    write_rope=write_mla_rope,
    mtp_mappings=MTP_MAPPINGS,
    defaults={"first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 20, "q_lora_rank": 768},
)
