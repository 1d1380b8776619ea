"""Videos of data rows: prompts, positions, log-probabilities and gradients against transformers; bad videos."""

import base64
import io
import json

import pytest
from toy_checkpoints import build, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import numpy as np
import torch
from PIL import Image
from vision_models import make, picture

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.models.gpt import packed_seq_params
from megatron_grpo.rollout.collect import with_images
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.images import ImageReader, attach
from megatron_grpo.weights import hf

SIZE = 84, 112


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def frames(count: int, seed: int = 0) -> list[bytes]:
    return [picture(*SIZE, 100 * seed + number) for number in range(count)]


def user(content, **more) -> dict:
    return {"prompt": [{"role": "user", "content": content}], **more}


def uris(count: int, seed: int = 0) -> list[str]:
    return [uri(frame) for frame in frames(count, seed)]


ROWS = [
    user("what happens?", videos=[{"frames": uris(4), "fps": 4}]),
    user("nothing to see"),
    user("what is it?", images=[uri(picture(140, 61, 3))]),
    user(
        "<video>, <image>, <video>", videos=[{"frames": uris(3, 1), "fps": 8}, uris(2, 2)], images=[uri(frames(1)[0])]
    ),
]
FPS = {0: [4.0], 3: [8.0, 2.0]}  # 2 without a rate


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def made(request, world, tmp_path):
    theirs = make(tmp_path, shape=request.param)
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264)
    return theirs, args, tmp_path


def dataset_of(args, directory, *rows, **changes) -> PromptDataset:
    vars(args).update(changes)
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = HuggingFaceTokenizer(args.tokenizer_model)
    reader = ImageReader(args, tokenizer.special_tokens)
    return PromptDataset([directory / "train.jsonl"], tokenizer, args, images=reader)


def theirs_of(processor, row, number, completion) -> dict:
    """transformers' inputs for a row and a completion, by its own processor."""
    parts = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    text = row["prompt"][0]["content"]
    if "<" not in text:
        text = "<video>" * len(row.get("videos", [])) + "<image>" * len(row.get("images", [])) + text
    text = text.replace("<image>", parts["image"]).replace("<video>", parts["video"])
    text = processor.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )

    def decoded(values) -> list:
        return [Image.open(io.BytesIO(base64.b64decode(value.partition(",")[2]))).convert("RGB") for value in values]

    images = decoded(row.get("images", []))
    videos = [np.stack(decoded(v["frames"] if isinstance(v, dict) else v)) for v in row.get("videos", [])]
    metadata = [
        {"total_num_frames": len(video), "fps": fps, "frames_indices": list(range(len(video)))}
        for video, fps in zip(videos, FPS.get(number, []), strict=True)
    ]
    more = {"videos": videos, "video_metadata": metadata, "do_sample_frames": False} if videos else {}
    found = dict(processor(text=[text], images=images or None, return_tensors="pt", **more))
    prompt = found["input_ids"][0].tolist()
    found["input_ids"] = torch.tensor([prompt + completion])
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["mm_token_type_ids"] = torch.cat(
        [found["mm_token_type_ids"], torch.zeros(1, len(completion), dtype=torch.long)], 1
    )
    found.pop("video_metadata", None)
    return prompt, found


def forward(model, pack) -> torch.Tensor:
    arrays = {name: torch.from_numpy(array) for name, array in pack.device_arrays().items()}
    return model(
        arrays["tokens"][None],
        arrays["position_ids"][None],
        attention_mask=None,
        labels=arrays["labels"][None],
        packed_seq_params=packed_seq_params(torch.from_numpy(pack.cu_seqlens), pack.max_seqlen, "local"),
        rope_positions=arrays.get("rope_positions"),
        images=pack.images,
    )


def test_log_probs_and_gradients_equal_transformers(made):
    """A pack of rows with a video, nothing, an image, and two videos with an image between them."""
    theirs, args, directory = made
    data = dataset_of(args, directory, *ROWS, max_prompt_length=None)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, directory)
    attach(chunks, data.images, data.images_of)
    rng, prompts = np.random.default_rng(0), list(data)
    completions = [rng.integers(9, 264, size).tolist() for size in (5, 7, 3, 6)]
    completions[1][2:4] = prompts[0].images.video_token, prompts[0].images.token  # sampled ones are text
    batch = RolloutBatch.from_completions(
        prompts=[prompt.ids for prompt in prompts],
        completions=completions,
        log_probs=[None] * 4,
        weight_version=0,
        group_ids=range(4),
        row_ids=range(4),
        sample_ids=range(4),
        finish_reasons=[FinishReason.STOP] * 4,
    )
    batch = with_images(batch, data.images_of, True)
    batch.validate()
    pack = pack_completions(batch, np.arange(4))
    assert pack.images.keys == [0, 2, 3]
    output, expected = forward(model, pack), []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids, given = theirs_of(data.images.processor, ROWS[number], number, completion)
        assert prompt.ids == ids
        assert prompt.images.expand(prompt.images.collapse(ids + completion)[: -len(completion)]) == ids
        shapes = {name: value for name, value in given.items() if not name.startswith("pixel_values")}
        positions, _ = theirs.model.get_rope_index(**shapes)
        assert np.array_equal(positions[:, 0].numpy().T, prompt.images.layout(ids + completion)[0])
        logits = theirs(**given).logits[0].float().log_softmax(-1)
        expected.append(logits[len(ids) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0])
    expected = torch.cat(expected)
    assert expected.std() > 0.5 and (output[0] - expected).abs().max() < 1e-4

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
        assert (ours[name].grad - gradient).abs().max() < 1e-4 * max(1.0, float(gradient.abs().max())), name
