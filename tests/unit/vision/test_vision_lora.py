"""Adapters of a vision-language model's decoder against PEFT's on transformers' model: outputs, gradients, files."""

import pytest
from float64 import bound
from slow import slow_except
from toy_checkpoints import build, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_vision_model import batch_of, forward, inputs_of, read_all
from transformers import AutoModelForImageTextToText
from vision_models import make

from megatron_grpo.data.pack import pack_completions
from megatron_grpo.lora import files
from megatron_grpo.lora.attach import adapters, attach
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.vision.images import attach as attach_images
from megatron_grpo.weights import hf

MLP = ["gate_proj", "up_proj", "down_proj"]
DECODER = r"(model\.)?language_model\.layers\..*\."
# family; PEFT's target_modules; further settings
CASES = [
    ("qwen2_5_vl", DECODER + "(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)", {}),
    ("qwen2_5_vl", ["language_model.layers.1.self_attn.v_proj", "model.language_model.layers.0.mlp.up_proj"], {}),
    ("qwen2_5_vl", DECODER + "q_proj", {"modules_to_save": ["model.visual.merger.mlp.0"]}),
    ("internvl", DECODER + "(q_proj|v_proj|down_proj)", {"modules_to_save": ["model.multi_modal_projector.linear_2"]}),
    ("llava_onevision", DECODER + "(k_proj|gate_proj)", {"modules_to_save": ["model.multi_modal_projector.linear_1"]}),
    ("qwen3_vl", DECODER + "(q_proj|o_proj|down_proj)", {"use_dora": True}),
    ("qwen3_5", DECODER + "(q_proj|k_proj|v_proj|o_proj|in_proj_.*|out_proj|gate_proj|up_proj|down_proj)", {}),
    ("qwen3_5", DECODER + "(in_proj_qkv|out_proj)", {"modules_to_save": ["model.visual.merger.linear_fc1"]}),
    ("qwen3_5_moe", DECODER + "(q_proj|out_proj|shared_expert.down_proj)", {}),
]


def log_probs_of(model, reader, prompts, completions) -> torch.Tensor:
    """transformers' log-probabilities of completions of the prompts."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = model(**inputs_of(reader, prompt, completion)).logits[0].float().log_softmax(-1)
        found.append(logits[len(prompt.ids) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize(("shape", "targets", "more"), slow_except([CASES[2], CASES[5]], CASES))
def test_adapters_equal_pefts(world, tmp_path, shape, targets, more):
    make(tmp_path / "base", shape=shape)
    load = AutoModelForImageTextToText.from_pretrained
    base = load(tmp_path / "base", dtype=torch.float32).eval()
    peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules=targets, **more)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            assert "visual" not in name
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    peft.save_pretrained(tmp_path / "adapter")

    args = toy_args(tmp_path / "base", tokenizer_model=str(tmp_path / "base"), padded_vocab_size=264)
    args = replaced(args, explicit=frozenset())
    args = replaced(args, **files.resolve_adapter(args, tmp_path / "adapter"))
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path / "base")
    attach(args, chunks)
    files.load_adapter(args, chunks, tmp_path / "adapter")
    reader, prompts = read_all(args)
    attach_images(chunks, reader, lambda row: prompts[row].images)
    rng = np.random.default_rng(0)
    completions = [rng.integers(9, 264, size).tolist() for size in (5, 7, 3)]
    pack = pack_completions(batch_of(prompts, [0, 1, 2], completions), np.arange(3))

    output, expected = forward(model, pack)[0], log_probs_of(peft, reader, prompts, completions)
    with torch.no_grad(), peft.disable_adapter():
        without = log_probs_of(peft, reader, prompts, completions)
    assert (output - expected).abs().max() < bound(5e-5) < 1e-2 < (expected - without).abs().max()

    weights = torch.from_numpy(rng.standard_normal(len(expected))).float()
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    wanted = {
        files.module_name(args, name.removeprefix(files.PREFIX)).replace(".default", ""): parameter.grad
        for name, parameter in peft.named_parameters()
        if "lora_" in name
    }
    found = {}
    for adapter in adapters(chunks):
        for _, parameter, (weight,) in adapter._parameters_and_weights():
            (name,) = weight.hf
            found[files.module_name(args, name)] = weight.split([parameter.grad])[0]
    wanted = {name.replace("magnitude_vector.weight", "magnitude_vector"): grad for name, grad in wanted.items()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() < bound(5e-5) * max(float(gradient.norm()), 1e-2), name

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora." not in name}
    assert bool(trained) == ("modules_to_save" in more)
    files.save_adapter(args, chunks, tmp_path / "ours")
    again = PeftModel.from_pretrained(load(tmp_path / "base", dtype=torch.float32), tmp_path / "ours").eval()
    with torch.no_grad():
        assert (log_probs_of(again, reader, prompts, completions) - output).abs().max() < bound(5e-5)
    assert not [name for name, _ in again.named_parameters() if "lora_" in name and "visual" in name]


def test_all_linear(world, tmp_path):
    """`all-linear` are the layers of the decoder; PEFT makes no adapter of the tower from our files."""
    make(tmp_path / "base")
    args = toy_args(tmp_path / "base", tokenizer_model=str(tmp_path / "base"), padded_vocab_size=264)
    args = replaced(args, lora_rank=4, lora_target_modules=["all-linear"], explicit=frozenset())
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path / "base")
    attach(args, chunks)
    files.save_adapter(args, chunks, tmp_path / "ours")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    layers = [n for n, _ in PeftModel.from_pretrained(base, tmp_path / "ours").named_parameters() if "lora_A" in n]
    assert len(layers) == 4 * 7 and all("language_model.layers." in name for name in layers)
