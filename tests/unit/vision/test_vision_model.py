"""A pack of rows with two, no and one images against transformers: positions, logits and gradients."""

import pytest
from toy_checkpoints import build, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import numpy as np
import torch
from vision_models import make, picture

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.models.gpt import packed_seq_params
from megatron_grpo.rollout.collect import with_images
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.vision.images import ImageReader, attach
from megatron_grpo.weights import hf

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
    return with_images(batch, [prompts[p] for p in order])


def inputs_of(reader, prompt, completion) -> dict:
    """transformers' inputs for one prompt and completion, by its own processor."""
    images = prompt.images.open()
    ids = torch.tensor([prompt.ids + completion])
    kind = (ids == prompt.images.token).int()
    kind[:, len(prompt.ids) :] = 0
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kind}
    if images:
        found |= reader.processor.image_processor(images=images, return_tensors="pt")
    return found


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def made(request, world, tmp_path):
    theirs = make(tmp_path, request.param)
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    reader, prompts = read_all(args)
    attach(chunks, reader, lambda row: prompts[row].images)
    return theirs, model, reader, prompts


def forward(model, pack) -> torch.Tensor:
    arrays = {name: torch.from_numpy(array) for name, array in pack.device_arrays().items()}
    return model(
        arrays["tokens"][None],
        arrays["position_ids"][None],
        attention_mask=None,
        labels=arrays["labels"][None],
        packed_seq_params=packed_seq_params(torch.from_numpy(pack.cu_seqlens), pack.max_seqlen, "local"),
        rope_positions=arrays["rope_positions"],
        images=pack.images,
    )


def test_log_probs_and_gradients_equal_transformers(made):
    theirs, model, reader, prompts = made
    rng = np.random.default_rng(0)
    order = [0, 1, 2, 0]  # the last completion shares its images with the first
    completions = [rng.integers(9, 264, size).tolist() for size in (5, 7, 3, 6)]
    completions[1][2] = prompts[0].images.token  # a sampled image token is text
    batch = batch_of(prompts, order, completions)
    batch.validate()
    pack = pack_completions(batch, np.arange(4))
    assert pack.images.rows == [0, 2]
    output = forward(model, pack)
    expected = []
    for p, completion in zip(order, completions, strict=True):
        given = inputs_of(reader, prompts[p], completion)
        positions, _ = theirs.model.get_rope_index(**{k: v for k, v in given.items() if k != "pixel_values"})
        ours, _ = prompts[p].images.layout(prompts[p].ids, len(prompts[p].ids) + len(completion))
        assert np.array_equal(positions[:, 0].numpy().T, ours)
        logits = theirs(**given).logits[0].float().log_softmax(-1)
        begin = len(prompts[p].ids)
        expected.append(logits[begin - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0])
    expected = torch.cat(expected)
    assert expected.std() > 0.5
    assert (output[0] - expected).abs().max() < 1e-4

    weights = torch.from_numpy(rng.standard_normal(len(expected))).float()
    (output[0] * weights).sum().backward()
    (expected * weights).sum().backward()
    compared = {
        "vision.tower." + name.removeprefix("model.visual."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if name.startswith("model.visual.")
    }
    compared["embedding.word_embeddings.weight"] = theirs.get_input_embeddings().weight.grad
    ours = dict(model.named_parameters())
    assert compared.keys() <= ours.keys() and len(compared) > 30
    for name, gradient in compared.items():
        assert gradient.abs().max() > 1e-4
        assert (ours[name].grad - gradient).abs().max() < 1e-4 * max(1.0, float(gradient.abs().max())), name
