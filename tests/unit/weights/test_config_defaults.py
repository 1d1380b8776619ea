"""Keys that a config.json leaves out: their values are those of transformers' configuration classes, or a refusal.

vLLM reads config.json with these classes, too.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
from huggingface_hub.errors import StrictDataclassError
from slow import FEW, slow_except
from test_weights_families import CLASSES, CONFIGS
from transformers import (
    AutoConfig,
    InternVLConfig,
    LlavaOnevisionConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.kinds import KINDS
from megatron_grpo.weights import families

# Not read in the same way: the identity of a family; and the layers of multi-token prediction, which transformers'
# models do not have, so that files without the key hold none.
EXCEPT = {"architectures", "model_type", "quantization_config", "num_nextn_predict_layers"}
# Of every class of transformers, whatever the model; by default these are not left out.
OF_EVERY_CLASS = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings", "dtype"}
TEXT = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 64, "num_key_value_heads": 4, "max_position_embeddings": 4096, "hidden_act": "silu"}
TEXT |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [16, 24, 24]}
INTERLEAVED = {"head_dim": 128, "rope_parameters": {**MROPE, "mrope_section": [24, 20, 20], "mrope_interleaved": True}}
PARTIAL = {"head_dim": 256, "rope_parameters": {**MROPE, "mrope_section": [11, 11, 10], "mrope_interleaved": True}}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TOKENS = {"image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 5, "vision_end_token_id": 6}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
LLAVA = {"image_token_index": 7, "video_token_index": 8, "image_grid_pinpoints": [[384, 384]], "vision_config": SIGLIP}
VISION: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, {"text_config": {**TEXT, "rope_parameters": MROPE}, **TOKENS}),
    "qwen3_vl": (Qwen3VLConfig, {"text_config": {**TEXT, **INTERLEAVED}, **TOKENS}),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, {"text_config": {**TEXT, **INTERLEAVED, **EXPERTS}, **TOKENS}),
    "qwen3_5": (Qwen3_5Config, {"text_config": {**TEXT, **PARTIAL}, **TOKENS}),
    "qwen3_5_moe": (Qwen3_5MoeConfig, {"text_config": {**TEXT, **PARTIAL, **EXPERTS}, **TOKENS}),
    "internvl": (InternVLConfig, {"text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": 7}),
    "llava_onevision": (LlavaOnevisionConfig, {"text_config": {"model_type": "qwen2", **TEXT}, **LLAVA}),
}


def whole(cls, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return a config.json with all keys that transformers would add."""
    found = json.loads(cls.from_dict(copy.deepcopy(config)).to_json_string(use_diff=False))
    found.pop("time_step_limit", None)  # Nemotron-H's infinity, in a spelling that transformers refuses
    return {**found, "architectures": [architecture]}


def paths(config: dict[str, Any], start: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key, also those within parts."""
    for key, value in config.items():
        if key not in EXCEPT and (ranks.thorough or key not in OF_EVERY_CLASS):
            yield (*start, key)
            if isinstance(value, dict):
                yield from paths(value, (*start, key))


def without(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    found = copy.deepcopy(config)
    part = found
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return found


def check(cls, config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Leave out each key in turn; return the keys without which the config.json is read."""
    read, wrong = [], {}
    for path in paths(config):
        shorter = without(config, path)
        try:
            ours = families.for_hf_config(shorter).args_from_hf(shorter)
        except GrpoError:
            continue  # a key that we do not guess
        try:
            full = whole(cls, shorter, config["architectures"][0])
        except (StrictDataclassError, KeyError):  # transformers refuses it; KeyError: a rotary parameter is missing
            continue
        theirs = families.for_hf_config(full).args_from_hf(full)
        read.append(path)
        if path == ("tie_word_embeddings",) and config["model_type"] == "internvl":
            continue  # the key in text_config, which the engine reads, is there
        for dest in ours.keys() | theirs.keys():
            mine, right = ours.get(dest), theirs.get(dest)
            if dest == "vision_config" and mine:  # of the keys that are read outside transformers' module
                keys = KINDS[config["model_type"]].defaults
                mine, right = ({key: side["vision_config"].get(key) for key in keys} for side in (mine, right))
                mine |= {"ratio": ours[dest].get("downsample_ratio")}
                right |= {"ratio": theirs[dest].get("downsample_ratio")}
            if mine != right:
                wrong[path, dest] = mine, right
    assert not wrong
    return read


# The sizes of the second have no ratio by which a missing key could be guessed.
CHANGES = [pytest.param({}, marks=pytest.mark.slow, id="published"), pytest.param({"hidden_size": 6144}, id="wider")]


FEW_CONFIGS = [*FEW, "gpt_oss", "qwen3_next", "minimax_m2", "llama", "glm4_moe", "nemotron_h"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", slow_except(FEW_CONFIGS, CONFIGS))
def test_missing_keys_of_text_models(name, change):
    config = {**CONFIGS[name], **({} if name == "phi3" else change)}  # its LongRoPE has a factor for each channel
    assert check(CLASSES[name], config)
    read = check(CLASSES[name], whole(CLASSES[name], config, config["architectures"][0]))
    if name not in ("deepseek_v2", "deepseek_v3"):
        assert ("num_key_value_heads",) in read


@pytest.mark.parametrize("name", slow_except(["qwen3_vl"], VISION))
def test_missing_keys_of_vision_models(name):
    cls, config = VISION[name]
    full = whole(cls, {"model_type": name, **config}, families.FAMILIES[name].architecture)
    read = check(cls, full)
    assert {("text_config", "num_key_value_heads"), ("vision_config", "hidden_size")} <= set(read)
    if KINDS[name].mrope:
        assert ("text_config", "rope_parameters", "rope_theta") in read


@pytest.mark.slow
def test_missing_keys_of_the_published_layout_of_qwen2_5_vl():
    """Its config.json has the decoder's keys at the top."""
    cls, config = VISION["qwen2_5_vl"]
    full = whole(cls, {"model_type": "qwen2_5_vl", **config}, "Qwen2_5_VLForConditionalGeneration")
    text = full.pop("text_config")
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    text = {key: value for key, value in text.items() if key not in ("model_type", "rope_parameters", "layer_types")}
    flat = {**text, **full, "rope_theta": 5000.0, "rope_scaling": rope}
    assert ("rope_theta",) in check(cls, flat)


@pytest.mark.parametrize(("name", "theta"), [("qwen2_5_vl", 1000000), ("qwen3_vl", 500000), ("qwen3_vl_moe", 500000)])
def test_the_rotary_base_of_a_vision_model_is_its_familys(name, theta):
    """As transformers' classes name it (default_theta)."""
    cls, config = VISION[name]
    config = whole(cls, {"model_type": name, **config}, families.FAMILIES[name].architecture)
    del config["text_config"]["rope_parameters"]["rope_theta"]
    assert families.FAMILIES[name].args_from_hf(config)["rotary_base"] == theta
    assert AutoConfig.for_model(name).text_config.default_theta == theta


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaling_with_m_rope_is_refused_for_config_json(kind):
    cls, config = VISION["qwen2_5_vl"]
    scaling = {"type": kind, "factor": 4.0, "mrope_section": [16, 24, 24]}
    scaling |= {"original_max_position_embeddings": 32768} if kind == "yarn" else {}
    config = whole(cls, {"model_type": "qwen2_5_vl", **config}, "Qwen2_5_VLForConditionalGeneration")
    del config["text_config"]["rope_parameters"]
    config["text_config"]["rope_scaling"] = scaling
    with pytest.raises(GrpoError, match=r"config.json has mrope_section and rope scaling .*remove the scaling"):
        families.FAMILIES["qwen2_5_vl"].args_from_hf(config)
