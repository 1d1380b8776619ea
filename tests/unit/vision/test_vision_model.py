"""A pack of rows with two, no and one images against transformers: positions, logits and gradients."""

import json
import math

import pytest
from float64 import bound
from slow import slow_except
from toy_checkpoints import build, same_bits, tensors_of, toy_args, verify_hf

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from vision_models import forward, make, picture

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.estimate.throughput import TowerFlops
from megatron_grpo.rollout.collect import with_images
from megatron_grpo.training import train_step
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.images import ImageReader, attach
from megatron_grpo.vision.kinds import merged
from megatron_grpo.weights import families, hf, model_weights
from megatron_grpo.weights.stream import describe, stream_hf

ROWS = [
    {"images": [picture(84, 56, 1), picture(100, 150, 2)], "prompt": "<image>and<image>?"},
    {"prompt": "no picture"},
    {"images": [picture(140, 61, 3)], "prompt": "what is it?"},
]


def read_all(args, rows=ROWS) -> tuple[ImageReader, list[Prompt]]:
    tokenizer = HuggingFaceTokenizer(args.tokenizer_model)
    reader, prompts = ImageReader(args, tokenizer.special_tokens), []
    for number, row in enumerate(rows):
        messages, images = reader.read(row, [{"role": "user", "content": row["prompt"]}], None)
        ids = images.expand(tokenizer.apply_chat_template(messages))
        prompts.append(Prompt(number, ids, row, f"row {number}", images=images))
    return reader, prompts


def batch_of(prompts, order, completions) -> RolloutBatch:
    batch = RolloutBatch.from_completions(
        prompts=[prompts[p].ids for p in order],
        completions=completions,
        log_probs=[None] * len(order),
        weight_version=0,
        group_ids=order,
        row_ids=[prompts[p].id for p in order],
        sample_ids=range(len(order)),
        finish_reasons=[FinishReason.STOP] * len(order),
    )
    return with_images(batch, lambda row: prompts[row].images, prompts[0].images.mrope)


def inputs_of(reader, prompt, completion) -> dict:
    """transformers' inputs for one prompt and completion, by its own processor."""
    images = prompt.images.open()
    if not prompt.images.mrope:  # InternVL, LLaVA-OneVision: the processor expands the text, too
        text = reader.processor.tokenizer.decode(prompt.images.collapse(prompt.ids))
        found = reader.processor(text=text, images=images or None, return_tensors="pt")
        assert found["input_ids"][0].tolist() == prompt.ids
        found["input_ids"] = torch.tensor([prompt.ids + completion])
        return {name: value for name, value in found.items() if name != "attention_mask"}
    ids = torch.tensor([prompt.ids + completion])
    kind = (ids == prompt.images.token).int()
    kind[:, len(prompt.ids) :] = 0
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kind}
    if images:
        found |= reader.processor.image_processor(images=images, return_tensors="pt")
    return found


def test_the_tower_on_a_device(world, tmp_path):
    """Buffers stay where they were moved, in float32, when the weights are cast afterwards, as for a GPU."""
    make(tmp_path)
    (model,) = build(toy_args(tmp_path, padded_vocab_size=264))
    tower = model.vision
    tower.to("meta").bfloat16()
    buffers = dict(tower.tower.named_buffers())
    assert buffers and {(buffer.device.type, buffer.dtype) for buffer in buffers.values()} == {("meta", torch.float32)}
    assert {weight.dtype for weight in tower.parameters()} == {torch.bfloat16}


SHAPES = "qwen2_5_vl, qwen2_5_vl tied, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, internvl, llava_onevision"


@pytest.fixture(params=slow_except(["qwen2_5_vl", "internvl"], SHAPES.split(", ")))
def made(request, world, tmp_path):
    shape, *tied = request.param.split()
    theirs = make(tmp_path, bool(tied), shape=shape)
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    reader, prompts = read_all(args)
    attach(chunks, reader, lambda row: prompts[row].images)
    return theirs, model, reader, prompts


def test_flops_are_those_that_torch_counts(made):
    _, model, reader, prompts = made
    flops, tower = TowerFlops(reader._args), 0.0
    for images in (prompts[0].images, prompts[2].images):
        with FlopCounterMode(display=False) as counted, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model.vision._see(model.vision.tower, *reader.pixels(images))
        assert flops.forward(images.grids) == counted.get_total_flops()
        tower += counted.get_total_flops()
    assert flops.update([*prompts[0].images.grids, *prompts[2].images.grids]) == pytest.approx(3 * tower / 1e12)
    grids = [*prompts[0].images.grids, *prompts[2].images.grids]
    projector = flops.per_token * sum(merged(reader._args, grid) for grid in grids)
    flops = TowerFlops(replaced(reader._args, freeze_vision_tower=True))
    assert flops.update([*prompts[0].images.grids, *prompts[2].images.grids]) == pytest.approx(
        (tower + 2 * projector) / 1e12
    )


def test_log_probs_and_gradients_equal_transformers(made):
    theirs, model, reader, prompts = made
    rng = np.random.default_rng(0)
    order = [0, 1, 2, 0]  # the last completion shares its images with the first
    completions = [rng.integers(9, 264, size).tolist() for size in (5, 7, 3, 6)]
    if prompts[0].images.mrope:  # transformers' other families would search an image for it
        completions[1][2] = prompts[0].images.token  # a sampled image token is text
    batch = batch_of(prompts, order, completions)
    batch.validate()
    pack = pack_completions(batch, np.arange(4))
    assert pack.images.keys == [0, 2]
    output = forward(model, pack)
    expected = []
    for p, completion in zip(order, completions, strict=True):
        given = inputs_of(reader, prompts[p], completion)
        if prompts[p].images.mrope:
            positions, _ = theirs.model.get_rope_index(**{k: v for k, v in given.items() if k != "pixel_values"})
            ours, _ = prompts[p].images.layout(prompts[p].ids + completion)
            assert np.array_equal(positions[:, 0].numpy().T, ours)
        logits = theirs(**given).logits[0].float().log_softmax(-1)
        begin = len(prompts[p].ids)
        expected.append(logits[begin - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0])
    expected = torch.cat(expected)
    assert expected.std() > 0.5
    assert (output[0] - expected).abs().max() < bound(5e-5)

    weights = torch.from_numpy(rng.standard_normal(len(expected))).float()
    (output[0] * weights).sum().backward()
    (expected * weights).sum().backward()
    compared = {
        "vision.tower." + name.removeprefix("model.").removeprefix("visual."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if name.startswith(
            ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.image_newline")
        )
        and "post_layernorm" not in name  # LLaVA-OneVision's features are those before it
    }
    compared["embedding.word_embeddings.weight"] = theirs.get_input_embeddings().weight.grad
    ours = dict(model.named_parameters())
    assert compared.keys() <= ours.keys() and len(compared) > 30
    for name, gradient in compared.items():
        # A bias of all keys moves all scores of a softmax alike: its gradient is zero.
        assert gradient.abs().max() > 1e-4 or name.endswith("k_proj.bias")
        assert (ours[name].grad - gradient).norm() < bound(5e-5) * max(float(gradient.norm()), 1e-2), name


def test_gradients_come_in_one_order(made):
    """Data-parallel ranks reduce them as they come. Those of a pack without images are zeros."""
    _, model, _, prompts = made
    tower = {name: weight for name, weight in model.vision.tower.named_parameters() if weight.requires_grad}
    orders, sizes = [], []
    for row in (0, 1):
        order: list[str] = []
        hooks = [
            weight.register_post_accumulate_grad_hook(lambda _, name=name, order=order: order.append(name))
            for name, weight in tower.items()
        ]
        forward(model, pack_completions(batch_of(prompts, [row], [[30, 31]]), np.arange(1)))[0].sum().backward()
        orders.append(order)
        sizes.append(sum(float(tower[name].grad.abs().sum()) for name in order))
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    assert orders[0] == orders[1] and set(orders[0]) == tower.keys()
    assert sizes[0] > 0 and sizes[1] == 0


def test_the_tower_is_gathered_without_images(world, tmp_path):
    """In three updates, between which log-probabilities are computed: its weights move with weight decay alone."""
    make(tmp_path)
    flags = dict.fromkeys(["use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"], True)
    rates = {"lr": 0.1, "weight_decay": 0.1, "train_iters": 3, "lr_decay_style": "constant"}
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264, **flags, **rates)
    args = replaced(args, ddp_bucket_size=500, explicit=frozenset())
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    (model,), optimizer, scheduler = train_step.setup_optimizer(args, chunks)
    _, prompts = read_all(args)
    pack = pack_completions(batch_of(prompts, [1], [[30, 31]]), np.arange(1))
    weight = model.module.vision.tower.blocks[0].attn.qkv.weight
    before = weight.detach().clone()
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        forward(model, pack)[0].sum().backward()
        model.finish_grad_sync()
        optimizer.step()
        scheduler.step(increment=1)
        with torch.no_grad():
            forward(model, pack)
    assert torch.allclose(weight, before * (1 - 0.1 * 0.1) ** 3)


def test_weights_there_and_back_bit_for_bit(world, tmp_path):
    """HF -> Megatron -> HF, from the published layout of config.json (flat) and from transformers' (nested)."""
    make(tmp_path / "nested", tied=True)
    args = toy_args(tmp_path / "nested", tokenizer_model=str(tmp_path / "nested"), padded_vocab_size=264)
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path / "nested")
    hf.save_hf(chunks, args, tmp_path / "flat", tokenizer_dir=tmp_path / "nested")
    assert verify_hf(chunks, args, tmp_path / "flat") == len(tensors_of(tmp_path / "nested"))
    before, after = tensors_of(tmp_path / "nested"), tensors_of(tmp_path / "flat")
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    flat = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert "text_config" not in flat and flat["rope_scaling"]["type"] == "mrope"
    again = families.for_hf_config(flat).args_from_hf(flat)
    assert again == {name: getattr(args, name) for name in again}
    assert (tmp_path / "flat" / "processor_config.json").exists()
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "flat")
    assert same_bits(theirs.model.visual.merger.mlp[2].weight, before["visual.merger.mlp.2.weight"])


IN_TILES = ["internvl", "llava_onevision", "llava_onevision tied"]


@pytest.mark.parametrize("shape", slow_except(IN_TILES[2:], IN_TILES))
def test_families_in_tiles_there_and_back_bit_for_bit(world, tmp_path, shape):
    """HF -> Megatron -> HF; transformers reads the export, and has equal greedy answers."""
    shape, *tied = shape.split()
    theirs = make(tmp_path / "first", bool(tied), shape=shape)
    args = toy_args(tmp_path / "first", tokenizer_model=str(tmp_path / "first"), padded_vocab_size=264)
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path / "first")
    hf.save_hf(chunks, args, tmp_path / "second", tokenizer_dir=tmp_path / "first")
    before, after = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "second")
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    again = families.for_hf_config(config).args_from_hf(config)
    assert again == {name: getattr(args, name) for name in again}
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "second").eval()
    reader, prompts = read_all(args)
    given = inputs_of(reader, prompts[0], [])
    answers = [model.generate(**given, max_new_tokens=8, do_sample=False) for model in (theirs, exported)]
    assert answers[0].equal(answers[1])


@pytest.mark.slow
def test_the_published_shape_of_internvl(world, tmp_path):
    """InternVL3-1B-hf: names and shapes equal those of transformers' model; the size is the one published, 938M.

    Fields of the tower: transformers' defaults, with the bias of its attention; of the decoder: Qwen2.5-0.5B's, untied.
    """
    decoder = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    decoder |= {"num_key_value_heads": 2, "vocab_size": 151674, "rope_theta": 1000000.0}
    with torch.device("meta"):
        config = InternVLConfig(
            vision_config={"attention_bias": True},
            text_config={"model_type": "qwen2", **decoder},
            architectures=["InternVLForConditionalGeneration"],
            tie_word_embeddings=False,
        )
        theirs = InternVLForConditionalGeneration(config)
    (tmp_path / "config.json").write_text(config.to_json_string())
    args = toy_args(tmp_path, padded_vocab_size=151674)
    ours = {name: shape for weight in model_weights.table(args) for name, shape in weight.hf.items()}
    shapes = {
        name.replace("model.language_model.", "language_model.model.")
        .replace("lm_head.", "language_model.lm_head.")
        .removeprefix("model."): tuple(tensor.shape)
        for name, tensor in theirs.named_parameters()
    }
    assert ours == shapes and round(sum(map(math.prod, ours.values())) / 1e6) == 938


def test_the_published_shape_of_llava_onevision(world, tmp_path):
    """llava-onevision-qwen2-0.5b-ov-hf: names and shapes equal those of transformers' model and of published files.

    The tower and the sizes of images are transformers' defaults, the decoder is Qwen2-0.5B with the vocabulary that the
    conversion to transformers' layout pads to 152,000. Published files leave defaults of the decoder out.
    """
    decoder = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    decoder |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 152000, "rope_theta": 1000000.0}
    decoder |= {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32768}
    tower = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 384}
    tower |= {"num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False}
    with torch.device("meta"):
        config = LlavaOnevisionConfig(text_config=dict(decoder), vision_config=dict(tower))
        theirs = LlavaOnevisionForConditionalGeneration(config)
    published = {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "model_type": "llava_onevision",
        "image_token_index": 151646,
        "video_token_index": 151647,
        "image_grid_pinpoints": config.image_grid_pinpoints,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "use_image_newline_parameter": True,
        "text_config": decoder,
        "vision_config": tower,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    args = toy_args(tmp_path, padded_vocab_size=152000)
    default = config.text_config
    assert (args.norm_epsilon, args.max_position_embeddings) == (default.rms_norm_eps, default.max_position_embeddings)
    ours = {name: shape for weight in model_weights.table(args) for name, shape in weight.hf.items()}
    shapes = {
        name.removeprefix("model.")
        .replace("language_model.", "language_model.model.")
        .replace("vision_tower.", "vision_tower.vision_model."): tuple(tensor.shape)
        for name, tensor in theirs.named_parameters()
    }
    assert ours == shapes and round(sum(map(math.prod, ours.values())) / 1e6) == 894


PUBLISHED = {  # config.json of Qwen/Qwen2.5-VL-3B-Instruct, as in public repositories that carry it
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def test_the_published_shape(world, tmp_path):
    """Names and shapes of all weights equal those of transformers' model (on the meta device)."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    args = toy_args(tmp_path, padded_vocab_size=151936)
    assert args.mrope_section == [16, 24, 24] and args.rope_scaling is None and args.kv_channels == 128
    ours = {name: shape for weight in model_weights.table(args) for name, shape in weight.hf.items()}
    with torch.device("meta"):
        config = Qwen2_5_VLConfig(**PUBLISHED)
        theirs = Qwen2_5_VLForConditionalGeneration(config)
    shapes = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tuple(tensor.shape)
        for name, tensor in theirs.named_parameters()
    }
    assert ours == shapes and sum(map(math.prod, ours.values())) == 3_754_622_976


@pytest.mark.parametrize("frozen", slow_except(["both"], ["tower", "projector", "both"]))
def test_frozen_parts(world, tmp_path, frozen):
    make(tmp_path)
    flags = {"freeze_vision_tower": frozen != "projector", "freeze_projector": frozen != "tower"}
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264, **flags)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    reader, prompts = read_all(args)
    attach(chunks, reader, lambda row: prompts[row].images)
    for order in ([0, 1], [1]):  # with images, without
        model.zero_grad()
        pack = pack_completions(batch_of(prompts, order, [[9, 10]] * len(order)), np.arange(len(order)))
        forward(model, pack)[0].sum().backward()
        for name, parameter in model.vision.tower.named_parameters():
            trains = frozen == ("tower" if name.startswith("merger.") else "projector")
            assert (parameter.grad is not None) == trains, name
            assert not trains or bool(parameter.grad.abs().sum()) == (0 in order)
    whole, sent = dict(stream_hf(chunks, args)), dict(stream_hf(chunks, args, only_trained=True))
    assert {name for name in whole if name not in sent} == {
        name
        for name in whole
        if name.startswith("visual.") and frozen != ("tower" if name.startswith("visual.merger.") else "projector")
    }
    assert all(tensor.equal(whole[name]) for name, tensor in sent.items())
    assert [part.name for part in describe(args, only_trained=True)] == list(sent)


def test_files_of_transformers_5(world, tmp_path):
    """transformers 5 writes shorter names of LLaVA-OneVision's tower than the published ones."""
    theirs = make(tmp_path / "published", shape="llava_onevision")
    theirs.save_pretrained(tmp_path / "written", max_shard_size="400KB")
    assert "vision_tower.post_layernorm.bias" in tensors_of(tmp_path / "written")
    args = toy_args(tmp_path / "written", padded_vocab_size=264)
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path / "written")
    assert verify_hf(chunks, args, tmp_path / "published") == len(tensors_of(tmp_path / "published"))


REFUSED = {
    "another aspect ratio, which vLLM would not read": ({"vision_aspect_ratio": "anyres_max_4"}, "anyres_max_9"),
    "features of an inner layer": ({"vision_feature_layer": -2}, "vision_feature_layer -2"),
    "a tower of CLIP": ({"vision_config": {"model_type": "clip_vision_model"}}, "siglip_vision_model"),
    "a pooling head": ({"vision_config": {"vision_use_head": True}}, "vision_use_head True"),
    "no sizes": ({"image_grid_pinpoints": None}, "lacks image_grid_pinpoints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_settings_of_llava_onevision(tmp_path, case):
    change, message = REFUSED[case]
    make(tmp_path, shape="llava_onevision")
    config = json.loads((tmp_path / "config.json").read_text())
    family = families.for_hf_config(config)
    family.args_from_hf(config)
    with pytest.raises(GrpoError, match=message):
        family.args_from_hf({**config, **change})


def test_sizes_of_another_processor_are_refused(world, tmp_path):
    make(tmp_path, shape="llava_onevision")
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264)
    args.vision_config["image_grid_pinpoints"] = [[28, 28]]
    with pytest.raises(GrpoError, match=r"(?s)image 1 is cut into tiles.*image_grid_pinpoints \[\[28, 28\]\]"):
        read_all(args)


def test_a_template_of_parts_shows_plain_texts(tmp_path):
    """The template has no branch for a text: it would drop it without an error."""
    make(tmp_path, shape="llava_onevision")
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert "hello" in tokenizer.render_chat(parts)
    assert tokenizer.render_chat([{"role": "user", "content": "hello"}]) == tokenizer.render_chat(parts)
