"""Which completions are written, and what is said of them."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.observability import completion_log
from megatron_grpo.observability.completion_log import bounded_tokens, chosen, completion_row, pictures, token_texts
from megatron_grpo.vision import images as row_images
from megatron_grpo.vision.images import RowImages

VIDEO = np.zeros((2, 20, 40, 3), np.uint8)
VIDEO[0, :, :, 2] = 255


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is a special token."""

    def decode(self, ids, skip_special_tokens=True):
        parts, run = [], []
        for i in [*ids, None]:
            if i is not None and i < 256:
                run.append(i)
                continue
            parts.append(bytes(run).decode(errors="replace"))
            run = []
            if i == 256 and not skip_special_tokens:
                parts.append("<eos>")
        return "".join(parts)


def test_half_are_the_first_and_half_the_best_and_worst_of_the_rest():
    advantages = np.array([9.0, 0.0, 1.0, -3.0, 2.0, -1.0, 3.0], np.float32)
    assert chosen(advantages, 6) == [(0, "first"), (1, "first"), (2, "first"), (6, "best"), (3, "worst"), (4, "best")]
    assert chosen(advantages, 1) == [(0, "first")]
    assert chosen(advantages, 0) == []
    assert sorted(i for i, _ in chosen(advantages, 99)) == list(range(7))
    assert chosen(np.zeros(0, np.float32), 8) == []


@given(st.lists(st.floats(-5, 5, width=32), max_size=30), st.integers(0, 40))
def test_no_completion_is_chosen_twice(advantages, count):
    picks = chosen(np.array(advantages, np.float32), count)
    assert len({i for i, _ in picks}) == len(picks) == min(count, len(advantages))
    rest = [advantages[i] for i in range(len(advantages)) if i not in {i for i, _ in picks}]
    assert all(advantages[i] >= max(rest) for i, why in picks if why == "best" and rest)
    assert all(advantages[i] <= min(rest) for i, why in picks if why == "worst" and rest)


def test_a_character_of_several_tokens_comes_with_its_last():
    ids = [*"aé".encode(), 256, *"一".encode()]
    assert token_texts(Bytes(), ids) == ["a", "", "é", "<eos>", "", "", "一"]
    assert token_texts(Bytes(), list("一".encode()[:2])) == ["", "\N{REPLACEMENT CHARACTER}"]  # cut within it
    assert token_texts(Bytes(), []) == []


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}"), max_size=40))
def test_the_texts_of_tokens_make_the_whole_text(text):
    ids = list(text.encode())
    assert "".join(token_texts(Bytes(), ids)) == text
    assert len(token_texts(Bytes(), ids)) == len(ids)


def batch(completions, log_probs):
    built = RolloutBatch.from_completions(
        prompts=[list(b"1+1=")] * len(completions),
        completions=[list(text.encode()) + [256] for text in completions],
        log_probs=log_probs,
        weight_version=3,
        group_ids=[0] * len(completions),
        row_ids=[7] * len(completions),
        sample_ids=list(range(len(completions))),
        finish_reasons=[FinishReason.STOP] * len(completions),
    )
    built.rewards = np.array([[1.0, 0.25]] * len(completions), np.float32)
    built.advantages = np.linspace(-1, 1, len(completions), dtype=np.float32)
    return built


def test_what_is_said_of_a_completion():
    rollout = batch(["2", "33"], [[-0.5, -0.25], [-1.00006, -2, -3]])
    row = completion_row(rollout, 1, "best", ["f1", "f2"], Bytes())
    assert row == {
        "picked": "best",
        "prompt": "1+1=",
        "completion": "33",
        "rewards": {"f1": 1.0, "f2": 0.25},
        "advantage": 1.0,
        "finish_reason": "stop",
        "length": 3,
        "turns": 1,
        "row": 7,
        "tokens": ["3", "3", "<eos>"],
        "log_probs": [-1.0001, -2.0, -3.0],
    }
    rollout.token_advantages = np.arange(len(rollout.tokens), dtype=np.float32)  # prompts of 4, completions of 2 and 3
    assert completion_row(rollout, 1, "best", ["f1", "f2"], Bytes())["token_advantages"] == [10.0, 11.0, 12.0]
    rollout.old_log_probs = np.full(len(rollout.tokens), -0.125, np.float32)  # the trainer's own go before the engine's
    row = completion_row(rollout, 0, "first", ["f1", "f2"], Bytes())
    assert row["log_probs"] == [-0.125, -0.125] and row["rollout_log_probs"] == [-0.5, -0.25]


def test_tokens_beyond_the_bound_of_the_importance_weights_are_marked():
    """r = exp(old - rollout) is e, 1 and e^0.5 with a bound of 2: only the first is beyond it; 0 where not sampled."""
    rollout = batch(["22"], [[-2.0, -1.0, -1.0]])
    names = ("mode", "threshold", "lower_bound")
    args = SimpleNamespace(**dict(zip((f"rollout_importance_sampling_{n}" for n in names), ("token_mask", 2.0, None))))
    assert bounded_tokens(args, rollout, 0) == {}
    rollout.old_log_probs = np.array([np.nan] * 4 + [-1.0, -1.0, -0.5], np.float32)
    assert bounded_tokens(args, rollout, 0) == {"clipped": [1, 0, 0]}
    rollout.response_mask[4] = 0
    assert bounded_tokens(args, rollout, 0) == {"clipped": [0, 0, 0]}
    args.rollout_importance_sampling_mode = None
    assert bounded_tokens(args, rollout, 0) == {}


def test_images_are_small_pictures():
    images = SimpleNamespace(sources=(1, 2), open=lambda most: [PIL.Image.new("RGB", (900, 300), "red"), VIDEO])
    assert pictures(None) == {} and pictures(SimpleNamespace(sources=())) == {}
    shown = [
        PIL.Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/jpeg;base64,"))))
        for uri in pictures(images)["images"]
    ]
    assert [picture.size for picture in shown] == [(320, 107), (40, 20)]
    assert shown[0].getpixel((100, 50))[0] > 240 and shown[1].getpixel((5, 5))[2] > 240  # red; blue, the first frame


def test_no_more_images_are_decoded_than_are_shown(monkeypatch):
    decoded = []
    monkeypatch.setattr(
        row_images, "opened", lambda source, number: decoded.append(source) or PIL.Image.new("L", (9, 9))
    )
    images = RowImages(tuple(b"%d" % i for i in range(40)), (), (), 0, 1, 0)
    assert len(pictures(images)["images"]) == len(decoded) == 8
    assert len(images.open()) == 40


def test_an_episode_has_its_mask():
    rollout = batch(["2", "33"], [[-0.5, -0.25], [-1.0, -2, -3]])
    rollout.response_mask[-2] = 0
    rows = [completion_row(rollout, i, "first", ["f1", "f2"], Bytes()) for i in range(2)]
    assert "response_mask" not in rows[0] and rows[1]["response_mask"] == [1, 0, 1]


def test_long_completions_are_told_in_part(monkeypatch):
    monkeypatch.setattr(completion_log, "TOKENS", 3)
    row = completion_row(batch(["12345"], [None]), 0, "first", ["f1", "f2"], Bytes())
    assert row["tokens"] == ["1", "2", "3"] and row["completion"] == "12345" and row["length"] == 6
    assert row["log_probs"] == pytest.approx([np.nan] * 3, nan_ok=True)
