"""Samples of one completion with images of their own, in the model: log-probabilities and gradients of transformers."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from slow import slow_except
from toy_checkpoints import build, toy_args
from vision_models import forward, make, picture

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.rollout.collect import shown_images, with_images
from megatron_grpo.vision.encoded import joined
from megatron_grpo.vision.images import ImageReader, attach
from megatron_grpo.weights import hf

PICTURES = [picture(84, 56, 1), picture(60, 112, 2), picture(140, 61, 3)]
# The pictures of each sample of the first completion; the second one has the row's prompt without a picture.
SAMPLES = [[0, 1], [1], [], [2, 0, 2]]


SHAPES = ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"]


@pytest.mark.parametrize("shape", slow_except(["qwen3_vl", "internvl"], SHAPES))
def test_log_probs_and_gradients_equal_transformers(world, tmp_path, shape):
    theirs = make(tmp_path, shape=shape)
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264)
    reader = ImageReader(args, HuggingFaceTokenizer(tmp_path).special_tokens)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    none = reader.of(())
    store = attach(chunks, reader, lambda row: none)

    rng, ids, mask, starts, expected = np.random.default_rng(0), [], [], [], []
    for number, chosen in enumerate([*SAMPLES, []]):
        content = [*({"type": "image"} for _ in chosen), {"type": "text", "text": f"sample {number}"}]
        text = reader.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        pictures = [Image.open(io.BytesIO(PICTURES[i])).convert("RGB") for i in chosen]
        given = dict(reader.processor(text=[text], images=pictures or None, return_tensors="pt"))
        prompt, spoken = given["input_ids"][0].tolist(), rng.integers(9, 256, 4).tolist()
        given["input_ids"] = torch.tensor([prompt + spoken])
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = (given["input_ids"] == none.token).long()
        logits = theirs(**given).logits[0].float().log_softmax(-1)
        expected.append(logits[len(prompt) - 1 : -1].gather(1, torch.tensor(spoken)[:, None])[:, 0])
        starts.append(len(ids))
        ids += prompt + spoken
        mask += [0] * len(prompt) + [1] * len(spoken)
    expected = torch.cat(expected)

    first, second = starts[1], starts[4]  # where the first prompt's completion ends, and the second completion
    begin = first - 4
    batch = RolloutBatch.from_completions(
        prompts=[ids[:begin], ids[second:-4]],
        completions=[ids[begin:second], ids[-4:]],
        log_probs=[None] * 2,
        weight_version=0,
        group_ids=[0, 0],
        row_ids=[0, 0],
        sample_ids=[0, 1],
        finish_reasons=[FinishReason.STOP] * 2,
        response_masks=[mask[begin:second], None],
        sample_starts=[[start - begin for start in starts[1:4]], []],
        images=[joined([[PICTURES[i] for i in chosen] for chosen in SAMPLES]), joined(())],
    )
    store.take_episodes(shown_images(batch))
    batch = with_images(batch, store.of, bool(args.mrope_section))
    batch.validate()
    output = forward(model, pack_completions(batch, [1, 0]))
    order = torch.tensor([*range(16, 20), *range(16)])
    assert expected.std() > 0.5 and (output[0] - expected[order]).abs().max() < 1e-4
    weights = torch.from_numpy(rng.standard_normal(20)).float()
    (output[0] * weights[order]).sum().backward()
    (expected * weights).sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters() if name.startswith("vision.")}
    assert ours and all(grad is not None for name, grad in ours.items() if "post_layernorm" not in name)
    norms = [
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]).norm() for m in (model, theirs)
    ]
    assert norms[0] == pytest.approx(norms[1].item(), rel=1e-4)
