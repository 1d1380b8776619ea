"""config.json <-> arguments: published configurations, transformers' own classes, and refusals."""

from argparse import Namespace

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from megatron_grpo.errors import GrpoError
from megatron_grpo.weights import families

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
CONFIGS = {"qwen3": QWEN3_06B, "qwen2": QWEN25_05B, "llama": LLAMA31_8B}
CLASSES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}


def test_published_configurations_become_megatron_arguments():
    qwen3 = families.for_hf_config(QWEN3_06B).args_from_hf(QWEN3_06B)
    assert qwen3 == {
        "model_family": "qwen3",
        "num_layers": 28,
        "hidden_size": 1024,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 16,
        "group_query_attention": True,
        "num_query_groups": 8,
        "kv_channels": 128,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "position_embedding_type": "rope",
        "rotary_base": 1000000,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "untie_embeddings_and_output_weights": False,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    qwen2 = families.for_hf_config(QWEN25_05B).args_from_hf(QWEN25_05B)
    assert (qwen2["add_qkv_bias"], qwen2["qk_layernorm"], qwen2["kv_channels"]) == (True, False, 64)
    llama = families.for_hf_config(LLAMA31_8B).args_from_hf(LLAMA31_8B)
    assert (llama["use_rope_scaling"], llama["rope_scaling_factor"], llama["rotary_base"]) == (True, 8.0, 500000)
    assert (llama["untie_embeddings_and_output_weights"], llama["kv_channels"]) == (True, 128)


@pytest.mark.parametrize("name", CONFIGS)
def test_both_spellings_of_rope_give_the_same_arguments(name):
    """transformers 5 writes rope_parameters in place of rope_theta and rope_scaling."""
    new = CLASSES[name].from_dict(dict(CONFIGS[name])).to_dict()
    assert "rope_parameters" in new and "rope_theta" not in new
    family = families.for_hf_config(CONFIGS[name])
    assert family.args_from_hf(new) == family.args_from_hf(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_arguments_become_the_configuration_again(name):
    family = families.for_hf_config(CONFIGS[name])
    arguments = family.args_from_hf(CONFIGS[name])
    args = Namespace(**{"rope_scaling_factor": 8.0, **arguments})
    assert families.for_args(args) is family
    written = family.hf_from_args(args)
    assert family.args_from_hf(written) == arguments
    ours, theirs = (CLASSES[name].from_dict(dict(c)).to_dict() for c in (written, CONFIGS[name]))
    for key in ("bos_token_id", "eos_token_id", "dtype", "max_window_layers"):  # not the model's arguments
        ours.pop(key, None), theirs.pop(key, None)
    assert ours == theirs
    # What knows only one of the two spellings finds it.
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == arguments["rotary_base"]


def test_model_type_serves_where_there_are_no_architectures():
    assert families.for_hf_config({"model_type": "llama"}).name == "llama"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*not supported.*Qwen3ForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "ForSequenceClassification"),
        ({"model_type": "bert"}, "model_type 'bert'"),
    ],
)
def test_unknown_architectures_are_refused_by_name(config, message):
    with pytest.raises(GrpoError, match=message):
        families.for_hf_config(config)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias true"),
        ("llama", {"attention_bias": True}, "attention_bias true"),
        ("llama", {"mlp_bias": True}, "mlp_bias true"),
        ("qwen3", {"hidden_size": None}, "lacks 'hidden_size'"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}, "sliding_window 64"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, "sliding_window 32768"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling of type 'dynamic'"),
        ("llama", {"rope_scaling": {**LLAMA31_8B["rope_scaling"], "low_freq_factor": 2.0}}, "low_freq_factor 2.0"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_scaling": None, "rope_parameters": {"full_attention": {}}}, "each kind of layer"),
    ],
)
def test_what_the_model_would_not_be_is_refused(name, change, message):
    config = {**CONFIGS[name], **change}
    with pytest.raises(GrpoError, match=message):
        families.for_hf_config(config).args_from_hf(config)


def test_a_window_that_no_layer_uses_is_accepted():
    config = {**QWEN25_05B, "use_sliding_window": True, "max_window_layers": 24}
    assert "sliding_attention" not in Qwen2Config.from_dict(dict(config)).layer_types
    families.for_hf_config(config).args_from_hf(config)


def test_arguments_outside_the_family_are_refused():
    args = Namespace(**families.FAMILIES["qwen3"].args_from_hf(QWEN3_06B))
    args.qk_layernorm = False
    with pytest.raises(GrpoError, match="qwen3 has qk_layernorm = True"):
        families.for_args(args).hf_from_args(args)
    args.model_family = "gpt5"
    with pytest.raises(GrpoError, match="'gpt5': give one of llama, qwen2, qwen3"):
        families.for_args(args)
    args = Namespace(**families.FAMILIES["qwen2"].args_from_hf(QWEN25_05B))
    args.kv_channels = 128
    with pytest.raises(GrpoError, match=r"kv_channels \(128\) times num_attention_heads \(14\)"):
        families.for_args(args).hf_from_args(args)
