"""Images in the calls of agent programs: their tokens and positions (against transformers), refusals, branches."""

import base64
import io
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from slow import slow_except
from test_environment_images import SCREENS, World
from vision_models import encoded, make, odd_pictures, picture

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.environments.rendering import TurnRenderer
from megatron_grpo.rollout.agents import agents
from megatron_grpo.rollout.agents.agents import Agents
from megatron_grpo.rollout.engine import Completion, Request, generate
from megatron_grpo.vision import images
from megatron_grpo.vision.encoded import as_data_uri
from megatron_grpo.vision.images import ImageStore

PROGRAMS = '''
import json, urllib.error, urllib.request
from openai import OpenAI

def image(uri): return {"type": "image_url", "image_url": {"url": uri, "detail": "high"}}

def said(*parts, role="user"):
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}

def branches(base_url, row, **metadata):
    """Two turns, another second turn, and a conversation that has lost its beginning."""
    ask = OpenAI(base_url=base_url, api_key="any", max_retries=0).chat.completions.create
    first, second = map(image, row["uris"])
    messages = [said("You see.", role="system"), said(first, "what?")]
    answer = ask(model="policy", messages=messages).choices[0].message.model_dump(exclude_none=True)
    for parts in ("and ", second, first, "?"), ("so", second), ("no picture",):
        ask(model="policy", messages=[*messages, answer, said(*parts)])
    ask(model="policy", messages=[said(second), said("seen", image(row["uris"][0]), role="assistant"), said("well?")])
    return 1

def changes_the_past(base_url, row, **metadata):
    """The second call has another picture in the first message: it continues nothing."""
    ask = OpenAI(base_url=base_url, api_key="any", max_retries=0).chat.completions.create
    first, second = map(image, row["uris"])
    answer = ask(model="policy", messages=[said(first, "?")]).choices[0].message.model_dump(exclude_none=True)
    ask(model="policy", messages=[said(second, "?"), answer, said("more")])
    return 1

def many(base_url, row, **metadata):
    OpenAI(base_url=base_url, api_key="any", max_retries=0).chat.completions.create(
        model="policy", messages=[said(*map(image, row["uris"]))])
    return 1

def more(base_url, row, **metadata):
    """A second turn with a picture, whatever the first answer is."""
    ask = OpenAI(base_url=base_url, api_key="any", max_retries=0).chat.completions.create
    messages = [said(image(row["uris"][0]))]
    answer = ask(model="policy", messages=messages).choices[0].message.model_dump(exclude_none=True)
    ask(model="policy", messages=[*messages, answer, said(image(row["uris"][1]))])

def talks(base_url, row, **metadata):
    """A turn for each picture; every call has all earlier ones."""
    ask = OpenAI(base_url=base_url, api_key="any", max_retries=0).chat.completions.create
    messages = []
    for uri in row["uris"]:
        messages.append(said(image(uri)))
        messages.append(ask(model="policy", messages=messages).choices[0].message.model_dump(exclude_none=True))
    return 1

def forgets(base_url, row, **metadata):
    """The second call has no picture in its first message, the third one no first message."""
    ask = OpenAI(base_url=base_url, api_key="any", max_retries=0).chat.completions.create
    first, second = map(image, row["uris"])
    answer = ask(model="policy", messages=[said(first, "?")]).choices[0].message.model_dump(exclude_none=True)
    ask(model="policy", messages=[said("?"), answer, said(second)])
    ask(model="policy", messages=[answer, said(second)])
    return 1

def refused(base_url, row, **metadata):
    """The reward counts the refusals that say what row["cases"] expect."""
    found = 0
    for parts, expected in row["cases"]:
        body = {"messages": [{"role": "user", "content": parts}]}
        try:
            urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode()))
        except urllib.error.HTTPError as error:
            message = json.loads(error.read())["error"]["message"]
            found += error.code == 400 and expected in message
            print(message)
    OpenAI(base_url=base_url, api_key="any").chat.completions.create(model="policy", messages=[said("text")])
    return found
'''


class Answers:
    """An engine with one answer."""

    def __init__(self, ids):
        self.ids, self.running, self.requests, self.seen = ids, [], [], []

    def submit(self, requests):
        new = list(requests)
        self.running += new
        self.requests += new
        self.seen += [request.images and request.images.for_vllm() for request in new]

    def poll(self):
        request = self.running.pop(0)
        return [Completion(request.id, self.ids, [-1.0] * len(self.ids), "stop", [3] * len(self.ids))]

    def abort(self, ids):
        pass

    def close(self):
        pass


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    directory = tmp_path_factory.mktemp("programs")
    (directory / "picture_programs.py").write_text(PROGRAMS)
    names = ["branches", "changes_the_past", "forgets", "many", "more", "refused", "talks"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        made = EnvironmentPool([f"agent:picture_programs:{name}" for name in names], timeout=300, retries=0)
    yield made
    made.close()


class Bench(World):
    """Agents over a model's tokenizer and reader."""

    def play(self, pool, program, answer="go", sees=True, history="keep", room=4000, **row):
        args = SimpleNamespace(
            environment=f"agent:picture_programs:{program}", end_token_ids=(self.end,), on_rewritten_history=history,
            tool_role="tool", chat_template_kwargs=None, max_prompt_length=0, vocab_size=300,
            max_environment_tokens=room, model_family=self.family,
        )  # fmt: skip
        ids = [*self.tokenizer.encode(answer), self.end] if isinstance(answer, str) else answer
        renderer = TurnRenderer(self.tokenizer, [self.end])
        reader = self.reader if sees else None
        self.engine = Answers(ids)
        players = Agents(self.engine, pool, renderer, None, self.tokenizer, args, images=reader)
        try:
            request = Request(5, [1], Sampling(400, log_probs=True), row=row, images=reader and reader.of(()))
            (done,) = generate(players, [request])
        finally:
            players.close()
        return done, players.failures()

    def rendered(self, messages, pictures):
        """Return transformers' inputs for a conversation."""
        text = self.reader.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.reader.processor(text=text, images=[self.reader.of([p]).open()[0] for p in pictures])


SHAPES = ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"]


@pytest.fixture(scope="module", params=slow_except(["qwen3_vl", "internvl"], SHAPES))
def world(request, tmp_path_factory):
    return Bench(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


URIS = [as_data_uri(screen) for screen in SCREENS]
IMAGE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def test_the_tokens_are_transformers(world, pool):
    """Each sample has the tokens of the whole conversation, and the images in it."""
    done, failures = world.play(pool, "branches", uris=URIS)
    assert not failures and done.environment_reward == 1 and done.turns == 5
    begun = [
        {"role": "system", "content": [text("You see.")]},
        {"role": "user", "content": [IMAGE, text("what?")]},
        {"role": "assistant", "content": [text("go")]},
    ]
    cases = [
        ([*begun, {"role": "user", "content": [text("and "), IMAGE, IMAGE, text("?")]}], [0, 1, 0]),
        ([*begun, {"role": "user", "content": [text("so"), IMAGE]}], [0, 1]),
        ([*begun, {"role": "user", "content": [text("no picture")]}], [0]),
        (
            [
                {"role": "user", "content": [IMAGE]},
                {"role": "assistant", "content": [text("seen"), IMAGE]},
                {"role": "user", "content": [text("well?")]},
            ],
            [1, 0],
        ),
    ]
    edges = [0, *done.sample_starts, len(done.token_ids)]
    whole = [*done.prompt_ids, *done.token_ids]
    edges = [0, *(len(done.prompt_ids) + edge for edge in edges[1:])]
    assert done.shown_images == [[SCREENS[i] for i in pictures] for _, pictures in cases]
    for (begin, end), (messages, pictures) in zip(itertools.pairwise(edges), cases, strict=True):
        inputs = world.rendered(messages, [SCREENS[i] for i in pictures])
        assert whole[begin:end] == [*inputs["input_ids"][0], *world.tokenizer.encode("go"), world.end]
    # The engine gets the images of each call.
    assert [len(request.images.sources) for request in world.engine.requests] == [1, 3, 2, 1, 2]
    assert [part["type"] for part in done.messages[0]["content"]] == ["image"]
    assert not any("hash" in part for m in done.messages if isinstance(m["content"], list) for part in m["content"])
    sampled = [token for token, mask in zip(done.token_ids, done.response_mask, strict=True) if mask]
    assert world.tokenizer.decode(sampled) == "go" * 5  # the shared first answer is trained once
    assert [math.isnan(x) for x in done.log_probs] == [m == 0 for m in done.response_mask]


def test_positions_and_features_of_each_sample(qwen, pool, tmp_path):
    """M-RoPE begins anew in each sample, and its visual tokens point at its own images; against transformers."""
    model = make(tmp_path / "model", shape="qwen2_5_vl")
    done, _ = qwen.play(pool, "branches", uris=URIS)
    none = qwen.reader.of(())
    store = ImageStore(qwen.reader, lambda row: none)
    store.take_episodes({-6: (0, done.shown_images)})
    both = store.of(-6)
    assert both.sources == tuple(SCREENS)  # each once
    prompt = len(done.prompt_ids)
    whole = np.array([*done.prompt_ids, *done.token_ids])
    starts = [prompt + start for start in done.sample_starts]
    positions, index = both.layout(whole.tolist(), starts)
    first = np.cumsum([0, *both.tokens])
    for number, (begin, end) in enumerate(itertools.pairwise([0, *starts, len(whole)])):
        chosen = both.samples[number]
        ids = torch.from_numpy(whole[begin:end])[None]
        grids = torch.tensor([both.grids[i] for i in chosen])
        visual = ids == both.token
        expected, _ = model.model.get_rope_index(ids, mm_token_type_ids=visual.int(), image_grid_thw=grids)
        assert np.array_equal(positions[begin:end].T, expected[:, 0].numpy())
        own = index[begin:end]
        assert own[own >= 0].tolist() == [t for i in chosen for t in range(first[i], first[i + 1])]
        assert np.array_equal(own >= 0, visual[0].numpy())


def test_another_past_is_another_tree(qwen, pool):
    done, _ = qwen.play(pool, "changes_the_past", uris=URIS)
    assert done.shown_images == [[SCREENS[0]], [SCREENS[1]]] and len(done.sample_starts) == 1


def test_a_forgotten_picture_is_another_tree(qwen, pool):
    done, failures = qwen.play(pool, "forgets", uris=URIS)
    assert done.shown_images == [[SCREENS[0]], [SCREENS[1]], [SCREENS[1]]] and not failures


def test_each_picture_is_decoded_and_sent_to_the_ranks_once(qwen, pool, monkeypatch):
    """By the check of the call and the engine together, whatever the number of turns that show it."""
    pictures = [picture(56, 56, 100 + i) for i in range(6)]
    shown = [*pictures, pictures[0]]
    decoded, sent = [], []
    decode, of_lead = images.decoded, agents.of_lead
    monkeypatch.setattr(images, "decoded", lambda source, number: decoded.append(source) or decode(source, number))
    monkeypatch.setattr(agents, "of_lead", lambda news, group: sent.append(json.dumps(news)) or of_lead(news, group))
    done, failures = qwen.play(pool, "talks", uris=[as_data_uri(p) for p in shown])
    assert not failures and done.shown_images == [shown] and done.turns == 7
    assert [request.images.sources for request in qwen.engine.requests] == [
        tuple(shown[:turns]) for turns in range(1, 8)
    ]
    assert sorted(decoded) == sorted(pictures)
    assert [" ".join(sent).count(base64.b64encode(p).decode()) for p in pictures] == [1] * 6
    for found, expected in zip(qwen.engine.seen[-1]["image"], shown, strict=True):
        assert np.array_equal(found, Image.open(io.BytesIO(expected)))


def test_forty_pictures(qwen, pool):
    pictures = [picture(28 + 28 * (i % 3), 56, i) for i in range(40)]
    done, failures = qwen.play(pool, "many", uris=[as_data_uri(p) for p in pictures])
    assert not failures and done.shown_images == [pictures]
    assert done.prompt_ids.count(qwen.reader.of(()).token) == sum(qwen.reader.of(pictures).tokens)


def test_odd_pictures(qwen, pool):
    """Their pixels reach the engine."""
    odd = list(odd_pictures().values())
    uris = [f"data:image;base64,{base64.b64encode(data).decode()}" for data, _ in odd]
    done, failures = qwen.play(pool, "many", uris=uris)
    assert not failures and done.shown_images == [[data for data, _ in odd]]
    for found, (_, expected) in zip(qwen.engine.seen[0]["image"], odd, strict=True):
        assert np.array_equal(found, expected)


def test_pictures_count_at_the_limits(qwen, pool):
    done, failures = qwen.play(pool, "many", uris=[as_data_uri(picture(280, 280))] * 20, room=60)
    assert done.finish_reason == "failed" and not done.token_ids and done.shown_images == [[]]
    whole, _ = qwen.play(pool, "more", uris=URIS)
    added = whole.response_mask.count(0)  # with the second picture
    done, failures = qwen.play(pool, "more", uris=URIS, room=len(whole.prompt_ids) + added - 1)
    assert not failures
    assert done.finish_reason == "length" and done.turns == 1 and done.shown_images == [[SCREENS[0]]]


@pytest.mark.parametrize("history", ["keep", "split"])
def test_no_picture_follows_a_sampled_image_token(qwen, pool, history):
    """vLLM would put the picture in its place."""
    answer = [*qwen.tokenizer.encode("a"), qwen.reader.of(()).token, qwen.end]
    done, failures = qwen.play(pool, "more", answer=answer, uris=URIS, history=history)
    assert done.finish_reason == "length" and done.turns == 1 and not failures
    assert done.shown_images == [[SCREENS[0]]]


def white(side):
    """Return an encoded square of one bit for each pixel."""
    file = io.BytesIO()
    Image.new("1", (side, side), 1).save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_hundred_megapixels(qwen, pool):
    """A large picture is scaled down, as the processor says; a larger one is refused by Pillow."""
    done, failures = qwen.play(pool, "many", uris=[as_data_uri(white(10000))])
    most = qwen.reader.processor.image_processor.size["longest_edge"] // 28**2
    assert not failures and 0 < done.prompt_ids.count(qwen.reader.of(()).token) <= most
    uri = f"data:image/png;base64,{base64.b64encode(white(14000)).decode()}"
    done, _ = qwen.play(pool, "refused", cases=[(broken(uri), "image 1 cannot be read: DecompressionBombError")])
    assert done.environment_reward == 1


def broken(url):
    return [{"type": "image_url", "image_url": {"url": url}}]


FLOATS = encoded(Image.new("F", (30, 30)), "TIFF")
CASES = [
    (broken("https://example.com/a.png"), "downloads nothing"),
    (broken("file:///etc/passwd"), "reads no files"),
    (broken("a.png"), "is no data URI"),
    ([{"type": "image_url", "image_url": "https://example.com/a.png"}], "downloads nothing"),
    ([{"type": "image_url", "image_url": {}}], "malformed"),
    ([{"type": "image_url"}], "is no data URI"),
    (broken("data:image/png;base64,@@@@"), "not valid base64"),
    (broken("data:image/png;base64,"), "image 1 cannot be read: 0 bytes"),
    (broken("data:image/png,abc"), "image 1 cannot be read"),
    (broken("data:image/png;base64,AAAA"), "image 1 cannot be read"),
    (broken("data:image/svg+xml;base64,PHN2Zy8+"), "image 1 cannot be read"),
    (broken(as_data_uri(picture(40, 40))[:-400]), "image 1 cannot be read"),
    ([*broken(URIS[0]), *broken("data:image/png;base64,AAAA")], "image 2 cannot be read"),
    (broken(as_data_uri(picture(1, 400))), "image 1 of 1 x 400 pixels: absolute aspect ratio"),
    (broken(as_data_uri(picture(20000, 10))), "image 1 of 20000 x 10 pixels: absolute aspect ratio"),
    (broken(f"data:;base64,{base64.b64encode(FLOATS).decode()}"), "image 1 has pixels of 32 bits (mode F)"),
    ([{"type": "input_audio", "input_audio": {"data": "AAAA"}}], "a part of the type 'input_audio'"),
    ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "a part of the type 'video_url'"),
    ([text("<|image_pad|>"), *broken(URIS[0])], "a text contains the token"),
]


def test_refusals(qwen, pool):
    """Each is one HTTP error with its reason; the run goes on."""
    done, failures = qwen.play(pool, "refused", cases=CASES)
    assert done.environment_reward == len(CASES) and not failures and done.shown_images == [[]]


def test_a_model_without_a_vision_tower(qwen, pool):
    cases = [(broken(URIS[0]), f"model family {qwen.family} takes texts only")]
    done, _ = qwen.play(pool, "refused", sees=False, cases=cases)
    assert done.environment_reward == 1 and done.shown_images is None
