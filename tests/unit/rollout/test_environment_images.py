"""Images that environments show: their forms, their places among the tokens (against transformers), limits, records."""

import base64
import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from slow import slow_except
from test_episodes import Said, Script
from toy_checkpoints import toy_args
from vision_models import FORGETFUL, encoded, make, picture

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.environments.registry import _registry, get_environment
from megatron_grpo.environments.rendering import TurnRenderer
from megatron_grpo.environments.worker import _messages
from megatron_grpo.rollout.collect import shown_images
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.episodes import Episodes
from megatron_grpo.rollout.servers.jobs import _same_job
from megatron_grpo.rollout.unfinished import Group, from_arrays, to_arrays
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.encoded import as_data_uri, divided, joined
from megatron_grpo.vision.images import ImageReader, ImageStore

SCREENS = [picture(56, 84, 5), picture(112, 60, 6)]


def says(*images: bytes, text: str = "and?") -> list[dict]:
    """An environment's message, as it leaves its process."""
    parts = [{"type": "image", "image": image} for image in images]
    return _messages([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])


class Speaker(Script):
    """An engine whose turns all end by themselves."""

    def poll(self):
        return [replace(completion, finish_reason="stop") for completion in super().poll()]


class World:
    """A model's tokenizer and reader of images, and episodes over scripted turns and answers."""

    def __init__(self, directory, shape):
        make(directory, shape=shape)
        args = toy_args(directory, tokenizer_model=str(directory), padded_vocab_size=272)
        self.family = args.model_family
        self.tokenizer = HuggingFaceTokenizer(str(directory))
        self.reader = ImageReader(args, self.tokenizer.special_tokens)
        (self.end,) = self.tokenizer.encode("<|im_end|>")

    def run(self, turns, answers, images=(), sees=True, reset=(), **given):
        """Return the completion of one episode whose row has ``images``; ``reset``: its first messages."""
        flags = {"environment": "calculator", "prompt_key": None, "system_prompt": None, "end_token_ids": (self.end,)}
        flags |= {
            "max_turns": 5,
            "max_environment_tokens": 500,
            "max_prompt_length": 300,
            "on_rewritten_history": "keep",
            "tool_role": "tool",
        }
        flags |= {"chat_template_kwargs": None, "model_family": self.family}
        row = {"messages": [{"role": "user", "content": "play"}], "images": list(images), "number": 0}
        prompt, found = self.reader.read(row, row["messages"], None)
        ids = found.expand(self.tokenizer.apply_chat_template(prompt))
        renderer = TurnRenderer(self.tokenizer, [self.end])
        spoken = [[*self.tokenizer.encode(turn), self.end] if isinstance(turn, str) else turn for turn in turns]
        engine, pool = Speaker({0: spoken}), Said({0: [{"messages": reset}, *answers]})
        parts = engine, pool, renderer, None, self.tokenizer, SimpleNamespace(**flags | given)
        episodes = Episodes(*parts, images=self.reader if sees else None)
        request = Request(0, ids, Sampling(400), row=row, images=found if sees else None)
        (completion,) = generate(episodes, [request])
        self.failures = episodes.failures()
        return completion


SHAPES = ["qwen2_5_vl", "internvl", "llava_onevision"]


@pytest.fixture(scope="module", params=slow_except(SHAPES[:2], SHAPES))
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp(request.param), request.param)


def test_the_tokens_are_transformers(world):
    """Prompt, turns and screenshots are the tokens of transformers' processor for the whole conversation."""
    own = picture(84, 56, 1)
    answers = [{"messages": says(SCREENS[0])}, {"messages": says(*SCREENS, text="both")}, {"done": True}]
    done = world.run(["go", "left", "stop"], answers, images=[own])
    image, text = {"type": "image"}, lambda words: {"type": "text", "text": words}
    conversation = [
        {"role": "user", "content": [image, text("play")]},
        {"role": "assistant", "content": [text("go")]},
        {"role": "user", "content": [image, text("and?")]},
        {"role": "assistant", "content": [text("left")]},
        {"role": "user", "content": [image, image, text("both")]},
    ]
    processor, shown = world.reader.processor, [own, SCREENS[0], *SCREENS]
    rendered = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    pictures = [Image.open(io.BytesIO(data)) for data in shown]
    expected = [*processor(text=rendered, images=pictures)["input_ids"][0], *world.tokenizer.encode("stop"), world.end]
    assert [*done.prompt_ids, *done.token_ids] == expected
    assert done.finish_reason == "stop" and done.shown_images == [[SCREENS[0], *SCREENS]]
    sampled = [token for token, mask in zip(done.token_ids, done.response_mask, strict=True) if mask]
    assert world.tokenizer.decode(sampled) == "goleftstop"
    # What the conversation shows to rewards and ledgers has a place for each image.
    assert [part["type"] for part in done.messages[4]["content"]] == ["image", "image", "text"]


def test_image_tokens_count_at_the_limit(world):
    """The second screenshot does not fit, and is left out."""
    answers = [{"messages": says(SCREENS[0])}, {"messages": says(SCREENS[0])}]
    whole = world.run(["a", "b", "c"], [*answers, {"done": True}])
    of_both = whole.response_mask.count(0)
    done = world.run(["a", "b"], answers, max_environment_tokens=of_both - 1)
    assert (done.finish_reason, done.turns, done.shown_images) == ("length", 2, [[SCREENS[0]]])
    assert done.response_mask.count(0) == of_both / 2


def test_a_screenshot_cannot_follow_a_sampled_image_token(world):
    """The engine would put the image in the place of that token: the episode ends; a text can follow."""
    (token,) = {world.reader.of([picture(56, 56)]).token}
    spoken = [[9, token, world.end], "b"]
    done = world.run(spoken, [{"messages": says(SCREENS[0]), "reward": 1.0}])
    assert (done.finish_reason, done.turns, done.shown_images, done.environment_reward) == ("length", 1, [[]], 1.0)
    done = world.run(spoken, [{"messages": says(text="more")}, {"done": True}])
    assert (done.finish_reason, done.turns) == ("stop", 2)


def test_answers_differ_by_their_images(world):
    """States of turns (gigpo): screenshots of one size have the same tokens."""
    others = [picture(56, 84, 7), SCREENS[0]]
    states = [
        world.run(["a", "b"], [{"messages": says(image)}, {"done": True}]).turn_states[1]
        for image in (SCREENS[0], *others)
    ]
    assert states[0] == states[2] != states[1]


def test_a_reset_with_images(world):
    """Its messages are part of the prompt, and its images of the first turn's; a prompt that is too long fails."""
    done = world.run(["a", "b"], [{"messages": says(SCREENS[1])}, {"done": True}], reset=says(SCREENS[0]))
    assert done.shown_images == [SCREENS] and done.prompt_ids[-1] != world.end
    images = world.reader.of(SCREENS[:1])
    assert list(done.prompt_ids).count(images.token) == images.tokens[0]
    failed = world.run([], [], reset=says(SCREENS[0]), max_prompt_length=len(done.prompt_ids) - 1)
    assert failed.finish_reason == "failed" and "more than --max-prompt-length" in world.failures[0]


def test_too_wide_a_screenshot(world):
    """Qwen's processor refuses it: a fault of the episode. The others scale it to a tile."""
    done = world.run(["a", "b"], [{"messages": says(picture(20000, 10))}, {"done": True}])
    if world.family == "qwen2_5_vl":
        assert done.finish_reason == "failed" and "20000 x 10 pixels: absolute aspect ratio" in world.failures[0]
    else:
        assert done.finish_reason == "stop" and not world.failures


def test_a_template_without_images_in_the_systems_message(tmp_path):
    """A fault of the episode with the reason, also of the same picture twice in a message."""
    world = World(tmp_path, "qwen2_5_vl")
    message = {"role": "system", "content": says(SCREENS[0], SCREENS[0])[0]["content"]}
    done = world.run(["a"], [{"done": True}], reset=[message])
    assert done.shown_images == [[SCREENS[0]] * 2] and not world.failures
    template = world.tokenizer._tokenizer.chat_template
    whole = "{% if message['content'] is string %}"
    dropping = "{% if message['role'] == 'system' %}rules<|im_end|>{% elif message['content'] is string %}"
    world.tokenizer._tokenizer.chat_template = template.replace(whole, dropping)
    done = world.run(["a"], [{"done": True}], reset=[message])
    assert done.finish_reason == "failed" and "the chat template drops images" in world.failures[0]


def test_texts_in_place_of_images(world):
    """A text with the model's image token has no image: the episode fails, and says why."""
    name = world.reader._texts["image"]
    done = world.run(["a"], [{"messages": says(SCREENS[0], text=f"two {name}")}])
    assert done.finish_reason == "failed" and "a text contains the token" in world.failures[0]


def test_servers_get_rows_with_other_images_apart(world):
    """Two images of one size have the same tokens: their completions are not of one prompt."""
    images = [world.reader.of([picture(56, 84, seed)]) for seed in (1, 2)]
    ids = [5, *[images[0].token] * images[0].tokens[0]]
    first, same, other = (Request(0, ids, Sampling(4, temperature=1.0), images=images[i]) for i in (0, 0, 1))
    assert _same_job(first, same) and not _same_job(first, other)


def test_a_model_without_a_vision_tower(world):
    done = world.run(["a"], [{"messages": says(SCREENS[0])}], sees=False)
    assert done.finish_reason == "failed" and "train a vision-language model" in world.failures[0]


def test_groups_keep_their_images(world):
    """In the arrays of a ledger and of a checkpoint."""
    prompt = Prompt(0, [5, 6], {}, "row")
    made = world.run(["a", "b"], [{"messages": says(*SCREENS)}, {"done": True}])
    without = world.run(["a"], [{"done": True}])
    group = Group(prompt, 0, (made, without, None))
    (again,) = from_arrays(to_arrays({3: group}), lambda row, ids: prompt).values()
    assert [c and c.shown_images for c in again.completions] == [[SCREENS], [[]], None]


def test_batches_keep_their_images():
    """`select` and `concatenate` move the bytes with their completions."""
    shown = [[], [b"abc", b""], [b"d" * 300]]
    batch = RolloutBatch.from_completions(
        [[1]] * 3, [[2]] * 3, [None] * 3, 0, [0, 1, 2], [7, 7, 8], [4, 5, 6], [FinishReason.STOP] * 3,
        images=[joined([images]) for images in shown],
    )  # fmt: skip
    assert batch.image_keys.tolist() == [7, -6, -7]
    turned = RolloutBatch.concatenate([batch.select([2]), batch.select([1, 0])])
    turned.validate()
    assert shown_images(turned) == {-7: (8, [shown[2]]), -6: (7, [shown[1]])}
    assert shown_images(turned.sorted_by_sample()) == {-6: (7, [shown[1]]), -7: (8, [shown[2]])}
    assert np.array_equal(turned.sorted_by_sample().image_bytes, batch.image_bytes)


def test_the_forms_of_an_image(tmp_path):
    """Paths, bytes and data URIs keep their bytes; a PIL image becomes a PNG file without loss."""
    (tmp_path / "a.png").write_bytes(SCREENS[0])
    uri = "data:image/png;base64," + base64.b64encode(SCREENS[0]).decode()
    for value in (str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", SCREENS[0], uri, {"bytes": SCREENS[0]}):
        assert as_data_uri(value) == uri
    decoded = Image.open(io.BytesIO(SCREENS[0]))
    data = base64.b64decode(as_data_uri(decoded).partition("base64,")[2])
    assert Image.open(io.BytesIO(data)).tobytes() == decoded.tobytes()
    for part in ({"type": "image_url", "image_url": {"url": uri}}, {"type": "image", "path": str(tmp_path / "a.png")}):
        (message,) = _messages([{"role": "user", "content": [part]}])
        assert message["content"] == [{"type": "image", "image": uri}]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I;16B"])
def test_pil_images_of_all_modes(mode):
    """PNG has no CMYK and others; white stays white."""
    white = Image.new("RGB", (30, 20), "white")
    image = Image.new(mode, white.size, 65535) if "16" in mode else white.convert(mode)
    data = base64.b64decode(as_data_uri(image).partition("base64,")[2])
    with Image.open(io.BytesIO(data)) as found:
        assert found.mode == "RGB" and np.array_equal(found, white)


WRONG = {
    "damaged": (SCREENS[0][:200], "cannot be read"),
    "a damaged PIL image": (Image.open(io.BytesIO(SCREENS[0][:400])), "the environment cannot be read: OSError"),
    "in no format": (b"GIF? no", "the environment cannot be read: 7 bytes in no format"),
    "of 32 bits": (Image.new("F", (30, 30)), r"the environment has pixels of 32 bits \(mode F\)"),
    "a file of 32 bits": (encoded(Image.new("I", (30, 30)), "TIFF"), r"environment has pixels of 32 bits \(mode I\)"),
    "no file": ("none.png", r"environment \(none.png\) cannot be read: .*No such file"),
    "a URL": ("https://example.org/a.png", "download it first"),
    "no image": (7, "expected a path, bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_images(case):
    value, message = WRONG[case]
    with pytest.raises(GrpoError, match=message):
        _messages([{"role": "user", "content": [{"type": "image", "image": value}]}])


@pytest.mark.parametrize("content", [None, 3, [{"type": "audio", "audio": "a.wav"}], [{"type": "image"}], ["text"]])
def test_wrong_contents(content):
    with pytest.raises(TypeError, match="returned"):
        _messages([{"role": "user", "content": content}])


def test_the_images_of_samples():
    """As one array: each image is in it once."""
    for samples in [[]], [[], []], [[b"abc", b""]], [[b"a" * 99, b"b"], [b"b", b"a" * 99, b"b"], [], [b"c"]]:
        array = joined(samples)
        assert divided(array) == samples and array.tobytes().count(b"a" * 99) <= 1


def test_split_episodes(tmp_path):
    """A sample that the template begins anew has all images so far; its tokens are transformers'."""
    world = World(tmp_path, "qwen2_5_vl")
    world.tokenizer._tokenizer.chat_template = world.tokenizer._tokenizer.chat_template.replace(*FORGETFUL)
    own = picture(84, 56, 1)
    answers = [{"messages": says(SCREENS[0])}, {"messages": says(*SCREENS, text="both")}, {"done": True}]
    given = {"images": [own], "on_rewritten_history": "split", "max_environment_tokens": 2000}
    done = world.run(["go", "x", "stop"], answers, **given)
    # "go" is rendered as "g", and "x" as it was sampled.
    assert done.shown_images == [[], [SCREENS[0], *SCREENS]] and len(done.sample_starts) == 1
    image, text = {"type": "image"}, lambda words: {"type": "text", "text": words}
    conversation = [
        {"role": "user", "content": [image, text("play")]},
        {"role": "assistant", "content": "g"},
        {"role": "user", "content": [image, text("and?")]},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [image, image, text("both")]},
    ]
    processor = world.reader.processor
    rendered = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    pictures = [Image.open(io.BytesIO(data)) for data in (own, SCREENS[0], *SCREENS)]
    expected = [*processor(text=rendered, images=pictures)["input_ids"][0], *world.tokenizer.encode("stop"), world.end]
    (start,) = done.sample_starts
    assert done.token_ids[start:] == expected
    first, second = done.separated()
    assert (first.shown_images, second.shown_images) == ([[]], [[SCREENS[0], *SCREENS]])

    # A token of an image that the policy sampled has no image in the rendering.
    sampled = [*world.tokenizer.encode("ab"), world.reader.of(()).token, world.end]
    done = world.run([sampled], [{"messages": says(text="more")}], **given)
    assert (done.finish_reason, done.turns, done.shown_images) == ("length", 1, [[]]) and not world.failures


def test_the_store_has_the_images_of_each_sample(world):
    """Behind those of the row, and each once."""
    row = world.reader.of([picture(84, 56, 1)])
    store = ImageStore(world.reader, lambda number: row)
    store.take_episodes({-3: (7, [[], SCREENS[:1], [*SCREENS, SCREENS[0]]])})
    assert store.of(-3).sources == (row.sources[0], *SCREENS)
    assert store.of(-3).samples == ((0,), (0, 1), (0, 1, 2, 1))
    assert store.of(7) is store.of_episode(7) is row
    # An agent shows the images of a row itself; the probe of an engine has them.
    store = ImageStore(world.reader, lambda number: row, with_rows=False)
    store.take_episodes({-3: (7, [SCREENS[:1]])})
    assert store.of(-3).sources == (SCREENS[0],) and store.of_episode(-3) is store.of(-3)
    assert store.of_episode(7).sources == () and store.of(7) is row


def shows(*frames: bytes, **more) -> list[dict]:
    """An environment's message with a video, as it leaves its process."""
    return _messages([{"role": "user", "content": [{"type": "video", "video": list(frames), **more}]}])


FRAMES = [picture(56, 84, seed) for seed in (11, 12, 13)]


@pytest.fixture
def showing_videos(monkeypatch):
    """The environment of `World.run` says that it shows videos."""
    monkeypatch.setitem(_registry, "calculator", replace(get_environment("calculator"), videos=True))


@pytest.mark.parametrize("shape", ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_videos_of_environments(tmp_path, showing_videos, shape):
    """Their tokens are transformers' for the whole conversation; ledgers and checkpoints hold frames and rate."""
    world = World(tmp_path, shape)
    answers = [{"messages": shows(*FRAMES, fps=4)}, {"messages": says(SCREENS[0])}, {"done": True}]
    done = world.run(["go", "on", "stop"], answers, max_environment_tokens=900)
    assert not world.failures and done.messages[2]["content"] == [{"type": "video"}]
    part, text = lambda kind: {"type": kind}, lambda words: {"type": "text", "text": words}
    conversation = [
        {"role": "user", "content": [text("play")]},
        {"role": "assistant", "content": [text("go")]},
        {"role": "user", "content": [part("video")]},
        {"role": "assistant", "content": [text("on")]},
        {"role": "user", "content": [part("image"), text("and?")]},
    ]
    processor = world.reader.processor
    rendered = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    video = np.stack([np.asarray(Image.open(io.BytesIO(frame))) for frame in FRAMES])
    metadata = {"total_num_frames": 3, "fps": 4.0, "frames_indices": [0, 1, 2]}
    inputs = processor(text=[rendered], images=[Image.open(io.BytesIO(SCREENS[0]))], videos=[video],
                       video_metadata=[metadata], do_sample_frames=False, return_tensors="pt")  # fmt: skip
    expected = [*inputs["input_ids"][0].tolist(), *world.tokenizer.encode("stop"), world.end]
    if shape == "internvl":  # vLLM has the token for videos in them, transformers that for images
        (video_token,) = world.tokenizer.encode(processor.video_token)
        places = [i for i, token in enumerate(expected) if token == processor.image_token_id]
        for place in places[: len(FRAMES) * processor.image_seq_length]:
            expected[place] = video_token
    assert [*done.prompt_ids, *done.token_ids] == expected
    none = world.reader.of(())
    store = ImageStore(world.reader, lambda row: none)
    store.take_episodes({-1: (0, divided(joined(done.shown_images)))})
    shown, image = store.of(-1).sources
    assert (shown.frames, shown.fps, image) == (tuple(FRAMES), 4.0, SCREENS[0])


def test_refused_videos(world, showing_videos, monkeypatch):
    for part, reason in [
        ({"fps": 0}, "the fps 0"),
        ({"fps": "2"}, "the fps '2'"),
        ({"video": []}, r"not .*its frames"),
        ({"video": "a.mp4"}, r"not .*its frames"),
    ]:
        with pytest.raises(TypeError, match=reason):
            shows(FRAMES[0], **part)
    with pytest.raises(GrpoError, match="an image of the environment cannot be read"):
        shows(FRAMES[0], b"")
    sizes = shows(FRAMES[0], SCREENS[1])
    done = world.run(["go"], [{"messages": sizes}])
    assert done.finish_reason == "failed" and "give frames of one size" in world.failures[0]
    monkeypatch.undo()
    done = world.run(["go"], [{"messages": shows(*FRAMES)}])
    assert done.finish_reason == "failed" and "`videos = True` in its class" in world.failures[0]
