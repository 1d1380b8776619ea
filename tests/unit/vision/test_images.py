"""Images of data rows: where they may stand, how many tokens they become, and every way in which they can be wrong."""

import base64
import io
import json
import random

import numpy as np
import pytest
from good_args import MODEL, RUN
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vision_models import encoded, make, odd_pictures, picture

from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.images import ImageReader, RowImages
from megatron_grpo.vision.kinds import mrope_positions
from megatron_grpo.weights import families
from tools.data import check

RED = picture(84, 56, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make(directory)
    config = json.loads((directory / "config.json").read_text())
    return directory, families.for_hf_config(config).args_from_hf(config)


def arguments(model, **changes):
    directory, architecture = model
    args = parse_args((MODEL + RUN).split())
    return replaced(args, **{**architecture, "tokenizer_model": str(directory), "max_prompt_length": None, **changes})


@pytest.fixture
def dataset(model, tmp_path):
    """Makes the data set of these rows, whose files are in tmp_path."""
    tokenizer = HuggingFaceTokenizer(str(model[0]))
    plain = ImageReader(arguments(model), tokenizer.special_tokens)

    def of(*rows, **changes) -> PromptDataset:
        args = arguments(model, **changes)
        (tmp_path / "red.png").write_bytes(RED)
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sized = changes.keys() & {"min_image_pixels", "max_image_pixels"}
        reader = ImageReader(args, tokenizer.special_tokens) if sized else plain
        return PromptDataset([tmp_path / "train.jsonl"], tokenizer, args, images=reader)

    return of


def user(content, **more):
    return {"messages": [{"role": "user", "content": content}], **more}


URI = "data:image/png;base64," + base64.b64encode(RED).decode()
GOOD = {
    "a column, no place: before the text": user("what?", images=["red.png"]),
    "a column of one image": user("what?", image="red.png"),
    "a place": user("<image>what?", images=["red.png"]),
    "an object with a path": user("<image>what?", images=[{"path": "red.png", "bytes": None}]),
    "a data URI": user("<image>what?", images=[URI]),
    "parts, images in the column": user([{"type": "image"}, {"type": "text", "text": "what?"}], images=["red.png"]),
    "a part with its image": user([{"type": "image", "image": "red.png"}, {"type": "text", "text": "what?"}]),
    "OpenAI's part": user([{"type": "image_url", "image_url": {"url": URI}}, {"type": "text", "text": "what?"}]),
    "a prompt": {"prompt": [{"role": "user", "content": "<image>what?"}], "images": ["red.png"]},
}


def test_all_ways_to_give_an_image_are_one_prompt(dataset, model):
    prompts = list(dataset(*GOOD.values()))
    assert all(prompt.ids == prompts[0].ids for prompt in prompts)
    assert all(len(prompt.images.open()) == 1 for prompt in prompts)
    tokens, token = prompts[0].images.tokens, prompts[0].images.token
    assert prompts[0].images.grids == ((1, 4, 6),) and tokens == (6,) and prompts[0].ids.count(token) == 6
    processor = ImageReader(arguments(model), HuggingFaceTokenizer(str(model[0])).special_tokens).processor
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    theirs = processor(text=[text], images=[Image.open(io.BytesIO(RED))])["input_ids"][0]
    assert prompts[0].ids == list(theirs)


def test_the_check_of_files_reads_images_and_videos(model, tmp_path, capsys):
    (tmp_path / "red.png").write_bytes(RED)
    video = [["red.png", "red.png"]]
    rows = [user("what?", images=["red.png"]), user("<image>", images=[]), user("<video>", videos=video)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--load-hf {model[0]} --train-data-path {tmp_path}/a.jsonl --max-prompt-length 99"
    assert check.main(flags.split()) == 1
    out, err = capsys.readouterr()
    assert "a.jsonl:2: " in err and "a.jsonl:1: " not in err and "a.jsonl:3: " not in err
    assert "2 good rows, 1 bad" in out and "its prompt: " in out and "what?" in out.split("its prompt: ")[1]


def test_rewards_get_no_encoded_images(dataset):
    """Paths stay in the row; bytes and data URIs, of which a reward would get a copy for each completion, do not."""
    path, uri = dataset(user("?", images=["red.png"], answer="1"), user("?", images=[URI], answer="1"))
    assert path.row["images"] == ["red.png"] and "images" not in uri.row and uri.row["answer"] == "1"


def test_text_rows_and_string_prompts(dataset):
    text, string = dataset(user("nothing to see"), {"prompt": "<image> is", "images": ["red.png"]})
    assert text.images.sources == () and text.images.collapse(text.ids) == text.ids
    assert string.ids.count(string.images.token) == 6 and len(string.images.collapse(string.ids)) == len(string.ids) - 5


def test_images_turn_and_lose_their_transparency(dataset, tmp_path):
    noise = Image.open(io.BytesIO(picture(84, 56, 2)))
    exif = Image.Exif()
    exif[0x0112] = 6
    noise.save(tmp_path / "turned.jpg", exif=exif)
    noise.convert("RGBA").save(tmp_path / "clear.png")
    noise.convert("L").save(tmp_path / "grey.png")
    turned, clear, grey = dataset(*(user("?", images=[name]) for name in ("turned.jpg", "clear.png", "grey.png")))
    assert turned.images.grids == ((1, 6, 4),) and turned.images.open()[0].size == (56, 84)
    assert {prompt.images.open()[0].mode for prompt in (clear, grey)} == {"RGB"}


def test_odd_pictures(dataset, model, tmp_path):
    """Twice in the system's message: their pixels, and the tokens of transformers' processor."""
    odd = odd_pictures()
    for name, (data, _) in odd.items():
        (tmp_path / name).write_bytes(data)
    places = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "see"}]
    conversation = [{"role": "system", "content": places}, {"role": "user", "content": "what?"}]
    found = dataset(*({"messages": conversation, "images": [name, name]} for name in odd))
    processor = ImageReader(arguments(model), HuggingFaceTokenizer(str(model[0])).special_tokens).processor
    text = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    for prompt, (name, (_, pixels)) in zip(found, odd.items(), strict=True):
        images = [Image.fromarray(pixels.astype(np.uint8))] * 2
        assert prompt.ids == list(processor(text=[text], images=images)["input_ids"][0]), name
        assert all(np.array_equal(image, pixels) for image in prompt.images.open()), name


def test_flags_bound_the_pixels(dataset):
    def grid(**flags):
        return next(iter(dataset(user("?", images=["red.png"]), **flags))).images.grids[0]

    assert grid(max_image_pixels=28 * 28) == (1, 2, 2)
    assert grid(min_image_pixels=16 * 28 * 28, max_image_pixels=99 * 28 * 28) == (
        1,
        8,
        10,
    )  # 56 x 84 pixels times 1.63, in steps of 28


def cut(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def damaged(seed: int) -> str:
    """A picture with bytes overwritten in the middle of its pixels, which a CRC covers."""
    rng, data = random.Random(seed), bytearray(picture(84, 56, seed))
    place = rng.randrange(60, len(data) - 200)
    data[place : place + 4] = bytes(byte ^ 255 for byte in data[place : place + 4])
    return cut(bytes(data))


FLOATS = Image.fromarray(np.ones((60, 60), np.float32))
BAD = {
    "images.0 a number": (user("<image>", images=[3]), "expected a path, bytes"),
    "images.0 empty": (user("<image>", images=[""]), "expected a path, bytes"),
    "an object without an image": (user("<image>", images=[{"name": "x"}]), "expected a path, bytes"),
    "null": (user("<image>", images=[None]), "expected a path, bytes"),
    "a missing file": (user("<image>", images=["gone.png"]), "No such file"),
    "a directory": (user("<image>", images=["."]), "directory"),
    "a URL": (user("<image>", images=["https://host/x.png"]), "local files only"),
    "a URL in a part": (user([{"type": "image", "url": "http://host/x.png"}]), "local files only"),
    "s3": (user("<image>", images=["s3://bucket/x.png"]), "local files only"),
    "not base64": (user("<image>", images=["data:image/png;base64,@@@"]), "not valid base64"),
    "a data URI without data": (user("<image>", images=["data:image/png,xx"]), "cannot"),
    "no image": (user("<image>", images=[cut(b"GIF? no")]), "in no format of images"),
    "text": (user("<image>", images=[cut(b"<svg></svg>")]), "in no format of images"),
    "empty bytes": (user("<image>", images=["data:image/png;base64,"]), "cannot"),
    "too narrow": (user("<image>", images=[cut(picture(1000, 4, 1))]), "aspect ratio"),
    "too wide": (
        user("<image>", images=[cut(picture(20000, 10))]),
        "image 1 of 20000 x 10 pixels: absolute aspect ratio must be smaller than 200",
    ),
    "32 bits": (user("<image>", images=[cut(encoded(FLOATS, "TIFF"))]), "image 1 has pixels of 32 bits (mode F)"),
    "one place, no image": (user("<image> what?"), "0 images"),
    "two places, one image": (user("<image><image>", images=["red.png"]), "2 places"),
    "one place, two images": (user("<image>", images=["red.png"] * 2), "2 images"),
    "a part without an image": (user([{"type": "image"}, {"type": "text", "text": "?"}]), "0 images"),
    "an unknown part": (user([{"type": "picture"}]), '"text", "image", "video" or "image_url"'),
    "a part that is a string": (user(["what?"]), '"text", "image", "video" or "image_url"'),
    "a text part without text": (user([{"type": "text"}]), "must be a string"),
    "an empty text part": (user([{"type": "text", "text": " "}]), "is empty"),
    "the model's token in the text": (user("<|image_pad|>what?", images=["red.png"]), "image tokens"),
    "the model's token without an image": (user("<|image_pad|>what?"), "image tokens"),
    "a string without a place": ({"prompt": "what?", "images": ["red.png"]}, "0 places"),
    "no user's message": (
        {"prompt": [{"role": "system", "content": "see"}], "images": ["red.png"]},
        "no user message",
    ),
    "a video file": (user("what?", videos=["x.mp4"]), "no such file"),
    "sound": (user("what?", audio=["x.wav"]), '"audio" is not empty'),
    **{f"cut after {n} bytes": (user("<image>", images=[cut(RED[:n])]), "cannot") for n in (8, 20, 40, 100, 1000)},
    **{f"damaged {n}": (user("<image>", images=[damaged(n)]), "cannot be read") for n in range(16)},
}


def test_every_bad_image_is_named(dataset):
    """Each of the bad rows with its line and reason; with --bad-rows skip the good ones stay."""
    assert len(BAD) >= 50
    for name, (row, reason) in BAD.items():
        with pytest.raises(GrpoError) as refused:
            dataset(user("good", images=["red.png"]), row)
        assert "train.jsonl:2: " in str(refused.value) and reason in str(refused.value), (name, str(refused.value))
    rows = [row for bad, _ in BAD.values() for row in (bad, user("good", images=["red.png"]))]
    kept = list(dataset(*rows, bad_rows="skip"))
    assert len(kept) == len(BAD) and all(prompt.ids == kept[0].ids for prompt in kept)


def test_a_long_prompt_with_images_is_not_cut(dataset):
    with pytest.raises(GrpoError, match="with images"):
        dataset(user("what?", images=["red.png"]), max_prompt_length=20, truncation_strategy="left")


def test_a_tokenizer_of_another_model_is_refused(model, tiny_models):
    with pytest.raises(GrpoError, match="cannot read the processor"):
        ImageReader(arguments(model, tokenizer_model=tiny_models["qwen3"]), {})
    with pytest.raises(GrpoError, match="no special token"):
        ImageReader(arguments(model), {"<|image|>": 99})


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 4)), max_size=4), st.integers(0, 5))
def test_expanding_and_positions(parts, rest):
    """Against the definition, token by token; `collapse` is the inverse of `expand`."""
    ids, grids, expected, at = [], [], [], 0
    for text, rows, columns in parts:
        ids += [7] * text + [6]
        grids.append((1, 2 * rows, 2 * columns))
        expected += [(at + k,) * 3 for k in range(text)]
        at += text
        expected += [(at, at + row, at + column) for row in range(rows) for column in range(columns)]
        at += max(rows, columns)
    ids += [7] * rest
    expected += [(at + k,) * 3 for k in range(rest + 2)]
    counts = tuple(rows * columns for _, rows, columns in grids for rows, columns in [(rows // 2, columns // 2)])
    images = RowImages((b"",) * len(grids), tuple(grids), tuple((6,) * count for count in counts), 6, 2, 9)
    prompt = images.expand(ids)
    sampled = [*prompt, 6, 8]  # a sampled image token is text
    assert images.collapse(sampled) == [*ids, 6, 8]
    positions, index = images.layout(sampled)
    assert positions.tolist() == [list(triple) for triple in expected]
    assert (index >= 0).sum() == sum(counts) and np.array_equal(index[index >= 0], np.arange(sum(counts)))
    assert np.array_equal(mrope_positions(index, grids, 2), positions)
