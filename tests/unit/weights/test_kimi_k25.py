"""Kimi-K2.5's language model: read from files with a vision part, in 4 bits too, and exported as DeepSeek-V3."""

import json

import pytest
from float64 import gap
from toy_checkpoints import (
    EPSILON,
    SHAPES,
    VOCAB,
    build,
    from_files,
    logits,
    same_bits,
    tensors_of,
    toy_args,
)

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from instruct_models import published
from safetensors.torch import save_file
from transformers import DeepseekV3ForCausalLM, Kimi_K25Config, Kimi_K25ForConditionalGeneration

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import families, hf
from megatron_grpo.weights.families.mla import set_latent_epsilon

GROUP = 16
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True, "group_size": GROUP, "actorder": None}
SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}
IDS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(directory with the names of the published files, logits of transformers' model)."""
    directory = tmp_path_factory.mktemp("kimi")
    text = {**SHAPES["deepseek_v3"], "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
    text |= {"num_attention_heads": 8, "max_position_embeddings": 128, "model_type": "kimi_k2"}
    text |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1}
    text |= {"architectures": ["DeepseekV3ForCausalLM"], "tie_word_embeddings": False}
    text |= {"hidden_act": "silu", "rms_norm_eps": EPSILON, "rope_theta": 50000.0, "norm_topk_prob": True}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(17)
    config = Kimi_K25Config(
        text_config=dict(text),
        vision_config={**vision, "pos_emb_height": 4, "pos_emb_width": 4},
        tie_word_embeddings=False,
    )
    model = Kimi_K25ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    set_latent_epsilon(model, config.text_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.1 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape))
        expected = model(IDS[None]).logits[0]
    model.save_pretrained(directory)
    # transformers undoes its renaming of the vision tower's blocks in the language model, too, and that of the
    # projector in part.
    tensors = {
        n.replace("language_model.model.blocks.", "language_model.model.layers.").removeprefix("model."): t
        for n, t in tensors_of(directory).items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    for shard in directory.glob("model-*.safetensors"):
        shard.unlink()
    written = json.loads((directory / "config.json").read_text())
    # As published: the language model's type is Kimi's own, and its keys are DeepSeek's.
    written |= {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (directory / "config.json").write_text(json.dumps(written))
    return directory, expected


def language(directory):
    """Return the tensors of the language model by DeepSeek-V3's names."""
    tensors = tensors_of(directory)
    assert any(name.startswith("vision_tower.") for name in tensors)
    return {n.removeprefix("language_model."): t for n, t in tensors.items() if n.startswith("language_model.")}


def test_the_language_model_is_read_and_exported_as_deepseek_v3(world, toy, tmp_path):
    directory, expected = toy
    args = toy_args(directory)
    assert args.model_family == "deepseek_v3" and not args.vision_config
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, directory)
    assert expected.std() > 0.5
    assert gap(logits(model, IDS)[:, :VOCAB], expected) < 1e-5
    hf.save_hf(chunks, args, tmp_path / "out", tokenizer_dir=directory)
    before, after = language(directory), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    again = from_files(tmp_path / "out", attn_implementation="eager")
    assert type(again) is DeepseekV3ForCausalLM
    with torch.no_grad():
        assert (again(IDS[None]).logits[0] - expected).abs().max() < 1e-5


def quantized(directory, target):
    """Store the routed experts as 4-bit integers; return all tensors of the language model, dequantized."""
    tensors, whole = {}, {}
    for name, tensor in tensors_of(directory).items():
        plain = name.removeprefix("language_model.")
        if ".experts." not in name:
            tensors[name] = whole[plain] = tensor
            continue
        scales = tensor.unflatten(1, (-1, GROUP)).abs().amax(2) / 7.5
        q = (tensor.unflatten(1, (-1, GROUP)) / scales[:, :, None]).round().clamp(-8, 7).flatten(1).to(torch.int8)
        tensors[f"{name}_packed"], tensors[f"{name}_scale"] = pack_to_int32(q, 4), scales
        tensors[f"{name}_shape"] = torch.tensor(q.shape)
        back = unpack_from_int32(tensors[f"{name}_packed"], 4, q.shape)  # compressed-tensors' own
        whole[plain] = (back.float().unflatten(1, (-1, GROUP)) * scales[:, :, None]).flatten(1)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["quantization_config"] = SETTINGS
    (target / "config.json").write_text(json.dumps(config))
    return {name: tensor for name, tensor in whole.items() if not name.startswith(("vision_tower", "mm_projector"))}


def test_experts_in_4_bits(world, toy, tmp_path, capsys):
    whole = quantized(toy[0], tmp_path / "int4")
    args = toy_args(tmp_path / "int4")
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path / "int4")
    assert "weights in int4 in groups of 16 are dequantized" in capsys.readouterr().out
    hf.save_hf(chunks, args, tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    assert whole.keys() == after.keys() and all(torch.equal(whole[name], after[name]) for name in whole)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    source = hf.open_weights(tmp_path / "int4")
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert source.shape(name) == whole[name].shape
    for rows, columns in ((slice(3, 9), slice(None)), (slice(None), slice(13, 50)), (slice(31, 32), slice(16, 17))):
        assert torch.equal(source.read(name, (rows, columns)), whole[name][rows, columns])
    (source.dir / "model.safetensors").unlink()
    broken = {f"{name}_packed": torch.zeros(2, 4, dtype=torch.int32), f"{name}_scale": torch.ones(2, 3)}
    save_file({f"language_model.{key}": value for key, value in broken.items()}, source.dir / "model.safetensors")
    with pytest.raises(GrpoError, match=r"weight_scale has shape \(2, 3\), but .* of shape \(2, 32\) has groups of 16"):
        hf.open_weights(tmp_path / "int4").dtype(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type 'llama': only 'kimi_k2'"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quant_method 'modelopt'; supported are"),
        (
            {"quantization_config": {**SETTINGS, "config_groups": {"g": {"weights": {**INT4, "symmetric": False}}}}},
            "pack-quantized' with weights .*'symmetric': False",
        ),
    ],
)
def test_what_is_refused(change, message):
    config = {**published("Kimi-K2.5", "config.json"), **change}
    with pytest.raises(GrpoError, match=message):
        families.for_hf_config(config).args_from_hf(config)
