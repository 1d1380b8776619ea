"""Videos of data rows: prompts, positions, log-probabilities and gradients against transformers; bad videos."""

import base64
import io
import json
import re
import sys
from types import SimpleNamespace

import pytest
from float64 import bound
from slow import slow_except
from toy_checkpoints import build, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import numpy as np
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from vision_models import forward, make, picture

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer, check_vocabulary
from megatron_grpo.estimate.throughput import TowerFlops
from megatron_grpo.rollout.collect import with_images
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.images import ImageReader, attach
from megatron_grpo.vision.kinds import mrope_positions
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
# LLaVA-OneVision's template shows images before videos, and both before the text.
LLAVA_ROWS = [*ROWS[:3], {**ROWS[3], **user("<image><video><video>, ")}]


SHAPES = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "internvl", "llava_onevision"]


@pytest.fixture(params=slow_except(["qwen3_vl", "internvl"], SHAPES))
def made(request, world, tmp_path):
    theirs = make(tmp_path, shape=request.param)
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=272)
    return theirs, args, tmp_path


def rows_of(args) -> list[dict]:
    return LLAVA_ROWS if args.model_family == "llava_onevision" else ROWS


def dataset_of(args, directory, *rows, **changes) -> PromptDataset:
    args = replaced(args, **changes)
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = HuggingFaceTokenizer(args.tokenizer_model)
    reader = ImageReader(args, tokenizer.special_tokens)
    return PromptDataset([directory / "train.jsonl"], tokenizer, args, images=reader)


def decoded(values) -> list:
    return [Image.open(io.BytesIO(base64.b64decode(value.partition(",")[2]))).convert("RGB") for value in values]


def decoded_videos(row) -> list:
    return [np.stack(decoded(v["frames"] if isinstance(v, dict) else v)) for v in row.get("videos", [])]


def theirs_in_tiles(theirs, processor, row, completion) -> tuple[list[int], dict]:
    """transformers' prompt and its inputs with a completion, of a family whose processor makes tiles.

    Its processors take no videos of different lengths together: each image and video is one call.
    """
    images, videos = iter(decoded(row.get("images", []))), iter(decoded_videos(row))
    content = row["prompt"][0]["content"]
    if "<" not in content:
        content = "<video>" * len(row.get("videos", [])) + "<image>" * len(row.get("images", [])) + content
    parts = [
        {"type": part[1:-1]} if part in ("<image>", "<video>") else {"type": "text", "text": part}
        for part in filter(None, re.split("(<image>|<video>)", content))
    ]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    video_token = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
    internvl = not hasattr(theirs.model, "image_newline")
    ids, of_vllm, tiles, found = list[int](), list[int](), [], {"image": [], "video": []}
    for part in filter(None, re.split(f"({processor.image_token}|{processor.video_token})", text)):
        if part == processor.image_token:
            inputs = processor(text=part, images=[next(images)], return_tensors="pt")
            if not internvl:
                found["image"] += theirs.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).pooler_output
        elif part == processor.video_token:
            inputs = processor(text=part, videos=[next(videos)], return_tensors="pt")
            if not internvl:
                found["video"] += theirs.model.get_video_features(inputs["pixel_values_videos"]).pooler_output
        else:
            inputs = processor.tokenizer(part, return_tensors="pt")
        own = inputs["input_ids"][0].tolist()
        ids += own
        # transformers' InternVL has the image's token in videos, too.
        replaced = part == processor.video_token and internvl
        of_vllm += [video_token if replaced and token == processor.image_token_id else token for token in own]
        tiles += [inputs["pixel_values"]] if internvl and "pixel_values" in inputs else []
    given = {"input_ids": torch.tensor([ids + completion])}
    if tiles:
        given["pixel_values"] = torch.cat(tiles)
    seen = {medium: torch.cat(rows) for medium, rows in found.items() if rows}
    if seen:
        given["mm_encoder_outputs"] = {
            medium: SimpleNamespace(pooler_output=[rows] if medium == "image" else rows[None])
            for medium, rows in seen.items()
        }
    return of_vllm, given


def theirs_of(processor, row, number, completion) -> tuple[list[int], dict]:
    """transformers' prompt and its inputs with a completion, by its own processor."""
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

    images, videos = decoded(row.get("images", [])), decoded_videos(row)
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


VISION = "model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.image_newline"


def test_log_probs_and_gradients_equal_transformers(made):
    """A pack of rows with a video, nothing, an image, and two videos with an image between them."""
    theirs, args, directory = made
    rows = rows_of(args)
    data = dataset_of(args, directory, *rows, max_prompt_length=None)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, directory)
    attach(chunks, data.images, data.images_of)
    rng, prompts = np.random.default_rng(0), list(data)
    completions = [rng.integers(9, 264, size).tolist() for size in (5, 7, 3, 6)]
    mrope = prompts[0].images.mrope
    if mrope:  # transformers' other families would search an image or a video for them
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
    batch = with_images(batch, data.images_of, mrope)
    batch.validate()
    pack = pack_completions(batch, np.arange(4))
    assert pack.images.keys == [0, 2, 3]
    output, expected = forward(model, pack), []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if mrope:
            ids, given = theirs_of(data.images.processor, rows[number], number, completion)
        else:
            ids, given = theirs_in_tiles(theirs, data.images.processor, rows[number], completion)
        assert prompt.ids == ids
        assert prompt.images.expand(prompt.images.collapse(ids + completion)[: -len(completion)]) == ids
        if mrope:
            shapes = {name: value for name, value in given.items() if not name.startswith("pixel_values")}
            positions, _ = theirs.model.get_rope_index(**shapes)
            assert np.array_equal(positions[:, 0].numpy().T, prompt.images.layout(ids + completion)[0])
        logits = theirs(**given).logits[0].float().log_softmax(-1)
        expected.append(logits[len(ids) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0])
    expected = torch.cat(expected)
    assert expected.std() > 0.5 and (output[0] - expected).abs().max() < bound(5e-5)

    weights = torch.from_numpy(rng.standard_normal(len(expected))).float()
    (output[0] * weights).sum().backward()
    (expected * weights).sum().backward()
    compared = {
        "vision.tower." + name.removeprefix("model.").removeprefix("visual."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if name.startswith(VISION) and "post_layernorm" not in name  # LLaVA-OneVision's features are those before it
    }
    compared["embedding.word_embeddings.weight"] = theirs.get_input_embeddings().weight.grad
    ours = dict(model.named_parameters())
    assert compared.keys() <= ours.keys() and len(compared) > 30
    for name, gradient in compared.items():
        own = ours[name].grad[: len(gradient)]  # without the padded rows of the embedding
        assert (own - gradient).norm() < bound(5e-5) * max(float(gradient.norm()), 1e-2), name


def test_flops_are_those_that_torch_counts(made):
    _, args, directory = made
    data = dataset_of(args, directory, rows_of(args)[3], max_prompt_length=None)
    (model,), images = build(args), data[0].images
    pixels, grids = data.images.pixels(images)
    with FlopCounterMode(display=False) as counted, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.vision._see(model.vision.tower, pixels, grids)
    assert TowerFlops(args).forward(images.grids) == counted.get_total_flops()


@pytest.fixture
def args(world, tmp_path):
    make(tmp_path)
    return toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264, max_prompt_length=None)


def test_all_ways_to_give_a_video_are_one_prompt(args, tmp_path):
    names = ["a.png", "b.png", "c.png"]
    for name, frame in zip(names, frames(3), strict=True):
        (tmp_path / name).write_bytes(frame)
    part = {"type": "text", "text": "what?"}
    prompts = list(
        dataset_of(
            args,
            tmp_path,
            user("what?", videos=[names]),
            user("what?", video=names),
            user("<video>what?", videos=[{"frames": [{"path": name, "bytes": None} for name in names], "fps": 2}]),
            user("<video>what?", video=uris(3)),
            user([{"type": "video"}, part], videos=[names]),
            user([{"type": "video", "video": names}, part]),
            user([{"type": "video", "video": names, "fps": 2.0}, part]),
            user([{"type": "video", "frames": names, "fps": 2}, part]),
            {"prompt": [{"role": "user", "content": "what?"}], "videos": [names], "images": []},
        )
    )
    assert all(prompt.ids == prompts[0].ids for prompt in prompts)
    assert {prompt.images.steps for prompt in prompts} == {(4.0,)}  # a second, of 4 positions, for two frames
    (shown,) = prompts[0].images.open()
    assert shown.tolist() == [np.asarray(Image.open(tmp_path / name)).tolist() for name in names]
    assert prompts[1].row["video"] == names and "video" not in prompts[3].row  # rewards get no encoded frames
    (string,) = dataset_of(args, tmp_path, {"prompt": "<video> is", "videos": [names]})
    assert string.ids.count(string.images.video_token) == prompts[0].images.tokens[0]
    (text,) = dataset_of(args, tmp_path, user("the tag <video> of HTML"))
    assert not text.images.sources and "<video>" in HuggingFaceTokenizer(args.tokenizer_model).decode(text.ids)


def test_frames_of_a_file(args, tmp_path, monkeypatch):
    """Two of a second's ten frames, and their times, as from a list of these frames."""
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(tmp_path / "a.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 10.0, SIZE)
    for frame in frames(30):
        writer.write(cv2.cvtColor(np.asarray(Image.open(io.BytesIO(frame))), cv2.COLOR_RGB2BGR))
    writer.release()
    reader, shown = cv2.VideoCapture(str(tmp_path / "a.avi")), []
    for number in range(30):
        shown.append(tmp_path / f"{number}.png")
        cv2.imwrite(str(shown[-1]), reader.read()[1])
    indices = [0, 6, 12, 17, 23, 29]  # 30 frames of 3 seconds: 6, from 0 to 29
    listed = {"frames": [str(shown[i]) for i in indices], "fps": 2}
    file, frames_of_it = dataset_of(args, tmp_path, user("what?", video="a.avi"), user("what?", videos=[listed]))
    assert file.ids == frames_of_it.ids and file.images.grids == ((3, 8, 6),) == frames_of_it.images.grids
    assert file.images.open()[0].tolist() == frames_of_it.images.open()[0].tolist()
    assert file.images.sources[0].metadata()["frames_indices"] == indices
    (four,) = dataset_of(args, tmp_path, user("what?", videos=[{"path": "a.avi", "fps": 0.1}]))
    assert four.images.sources[0].indices == (0, 10, 19, 29)  # at least four
    part = {"type": "video", "path": "a.avi", "fps": 0.1}
    (in_part,) = dataset_of(args, tmp_path, user([part, {"type": "text", "text": "what?"}]))
    assert in_part.ids == four.ids
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(
        GrpoError, match=r"jsonl:1: video 1 .*a\.avi\), a video file, needs .*: pip install opencv-.* give the list"
    ):
        dataset_of(args, tmp_path, user("what?", video="a.avi"))


SMALL = uri(picture(56, 56))
BAD = {
    "a missing file": (["x.mp4"], "there is no such file"),
    "a file that is no video": (["config.json"], "OpenCV finds no frames; give the list of its frames"),
    "a URL of a file": ("https://host/x.mp4", "video 1 is at https://host/x.mp4"),
    "bytes of a file": (["data:video/mp4;base64,AAAA"], "video 1 is the bytes of a file: give its path, or the list"),
    "an object without a video": ([{"name": "x"}], "expected a path"),
    "no frames": ([[]], "video 1 has no frames"),
    "no frames in an object": ([{"frames": []}], "video 1 has no frames"),
    "a number": ([[uris(1)[0], 3]], "frame 2 of video 1 is '3': expected a path, bytes"),
    "null": ([[None]], "frame 1 of video 1"),
    "a URL": ([["https://host/x.png"]], "frame 1 of video 1 is at https://host/x.png"),
    "a missing frame": ([[*uris(1), "gone.png"]], "video 1, frame 2"),
    "a damaged frame": ([[*uris(1), uri(frames(1)[0][:400])]], "video 1, frame 2 cannot be read"),
    "frames of two sizes": ([[*uris(1), SMALL]], "frame 2 has 56 x 56 pixels, and frame 1 has 84 x 112"),
    "too narrow": ([[uri(picture(1000, 4))] * 2], "video 1 has frames of 1000 x 4 pixels"),
    "three rows": (
        [[uri(picture(60, 3))] * 2],
        "video 1 has frames of 60 x 3 pixels, and the processor would read rows",
    ),
    "no rate": ([{"frames": uris(2), "fps": 0}], '"fps" of video 1 is 0'),
    "a rate that is a text": ([{"frames": uris(2), "fps": "2"}], "\"fps\" of video 1 is '2'"),
    "two videos, one place": ([uris(2)] * 2, 'the row has 2 videos in its column "videos"'),
    "no video, one place": ([], "the row has 0 videos"),
}


@pytest.mark.parametrize("name", slow_except(list(BAD)[::3], BAD))
def test_every_bad_video_is_named(args, tmp_path, name):
    videos, reason = BAD[name]
    with pytest.raises(GrpoError) as refused:
        dataset_of(args, tmp_path, user("good", videos=[uris(2)]), user("<video>what?", videos=videos))
    assert "train.jsonl:2: " in str(refused.value) and reason in str(refused.value)


def test_other_refusals(args, tmp_path):
    row = user("what?", videos=[uris(2)])
    with pytest.raises(GrpoError, match=r"jsonl:1: .*a video file, and a server takes the frames"):
        dataset_of(args, tmp_path, user("what?", videos=["a.mp4"]), vllm_mode="server")
    args = replaced(args, vllm_mode="colocate")
    with pytest.raises(GrpoError, match=r"jsonl:1: .*more than --max-prompt-length 40"):
        dataset_of(args, tmp_path, row, max_prompt_length=40)
    with pytest.raises(GrpoError, match=r"jsonl:1: .*0 images and 0 videos|jsonl:1: .*token"):
        dataset_of(args, tmp_path, user("<|video_pad|>"), max_prompt_length=None)


def test_a_single_frame_is_too_short_for_qwen3_vl(world, tmp_path):
    make(tmp_path, shape="qwen3_vl")
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264, max_prompt_length=None)
    with pytest.raises(GrpoError, match=r"jsonl:1: video 1 has 1 frames of 84 x 112 pixels"):
        dataset_of(args, tmp_path, user("what?", videos=[uris(1)]))


@pytest.mark.parametrize("shape", ["internvl", "llava_onevision"])
def test_frames_that_the_processor_would_change(world, tmp_path, shape):
    make(tmp_path, shape=shape)
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=272, max_prompt_length=None)
    row, file = user("what?", videos=[uris(2)]), tmp_path / "processor_config.json"
    config = json.loads(file.read_text())
    for key, value, reason in [
        ("size", {"height": 42, "width": 42}, "video 1 has frames that the processor scales to .*42"),
        ("do_sample_frames", True, "set do_sample_frames to false"),
    ]:
        changed = {**config, "video_processor": {**config["video_processor"], key: value}}
        file.write_text(json.dumps(changed))
        with pytest.raises(GrpoError, match=f"jsonl:1: .*{reason}"):
            dataset_of(args, tmp_path, row)


def test_an_embedding_without_a_row_for_videos(world, tmp_path):
    """As in the published files, InternVL's token for videos is the first one behind the vocabulary of the model."""
    make(tmp_path, shape="internvl")
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264, max_prompt_length=None)
    tokenizer = HuggingFaceTokenizer(args.tokenizer_model)
    assert (tokenizer.vocab_size, args.vocab_size) == (265, 264)
    check_vocabulary(tokenizer, 264, ImageReader(args, tokenizer.special_tokens).tokens)
    with pytest.raises(GrpoError, match="265 entries"):
        check_vocabulary(tokenizer, 264)
    with pytest.raises(GrpoError, match="token 264, and the embedding has 264 rows: raise --make-vocab-size-div"):
        dataset_of(args, tmp_path, user("what?", videos=[uris(2)]))


def test_llava_onevision_shows_images_first(world, tmp_path):
    make(tmp_path, shape="llava_onevision")
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264, max_prompt_length=None)
    with pytest.raises(GrpoError, match=r"jsonl:1: .*1 images and 1 videos.* in another order"):
        dataset_of(args, tmp_path, user("<video><image>", videos=[uris(2)], images=uris(1)))


def test_videos_of_llava_onevision_for_servers(world, tmp_path):
    make(tmp_path, shape="llava_onevision")
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264, vllm_mode="server")
    with pytest.raises(GrpoError, match="jsonl:1: video 1 cannot go to a server"):
        dataset_of(args, tmp_path, user("what?", videos=[uris(2)]))


def test_text_goes_on_behind_the_time_of_a_long_video():
    """By hand, from the rule of the papers; transformers 5 would go on with 2, which a frame has."""
    index = np.array([-1, 0, 1, 2, 3, -1, -1])
    found = mrope_positions(index, [(4, 2, 2)], 2, [1.5])
    times = [1, 2, 4, 5]  # 1 + 0, 1.5, 3.0 and 4.5, rounded down
    assert found.tolist() == [[0] * 3, *([time, 1, 1] for time in times), [6] * 3, [7] * 3]
