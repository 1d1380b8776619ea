"""Rows of ``completions.jsonl`` and ``eval_completions.jsonl``: choice of completions, and the fields of each row."""

import io
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_grpo.algorithm.importance_sampling import importance_weights
from megatron_grpo.data.batch import FinishReason, Float32, RolloutBatch
from megatron_grpo.data.tokenizer import Tokenizer
from megatron_grpo.vision.encoded import data_uri
from megatron_grpo.vision.images import RowImages

TOKENS = 512  # tokens of a completion that are listed one by one; without texts and images a row has about 15 kB
PICTURES, SIDE = 8, 320  # images of a completion that are written, and the longer side of each in pixels


def chosen(advantages: Float32, count: int) -> list[tuple[int, str]]:
    """Choose at most ``count`` of the completions ``[n]``; return the position and the reason of each choice.

    Half are the ``"first"`` ones: their prompts do not depend on what was sampled. The others alternate between the
    ``"best"`` and the ``"worst"`` of the rest by advantage.
    """
    first = min(len(advantages), (count + 1) // 2)
    rest = sorted(range(first, len(advantages)), key=lambda i: -advantages[i])
    picks = [(i, "first") for i in range(first)]
    while rest and len(picks) < count:
        best = (len(picks) - first) % 2 == 0
        picks.append((rest.pop(0), "best") if best else (rest.pop(), "worst"))
    return picks


def completion_row(
    batch: RolloutBatch, i: int, picked: str, reward_names: Sequence[str], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the row of completion ``i``: texts, rewards, advantage, and its first ``TOKENS`` tokens one by one.

    ``log_probs``: old log-probabilities, of the trainer, if they were computed; then ``rollout_log_probs`` are those of
    the engine. Else ``log_probs`` are the engine's (nan if it returned none). ``token_advantages``: only if tokens of a
    completion can have different advantages. ``response_mask``: only if an environment said some of the tokens, which
    have 0.
    """
    middle, end = _bounds(batch, i)
    shown = slice(middle, min(end, middle + TOKENS))
    log_probs = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs
    row = {
        "picked": picked,
        **held_out_row(batch, i, reward_names, tokenizer),
        "advantage": 0.0 if batch.advantages is None else float(batch.advantages[i]),
        "tokens": token_texts(tokenizer, batch.tokens[shown].tolist()),
        "log_probs": np.round(log_probs[shown].astype(float), 4).tolist(),
    }
    if batch.old_log_probs is not None:
        row["rollout_log_probs"] = np.round(batch.rollout_log_probs[shown].astype(float), 4).tolist()
    if not batch.response_mask[middle:end].all():
        row["response_mask"] = batch.response_mask[shown].tolist()
    if batch.token_advantages is not None:
        row["token_advantages"] = np.round(batch.token_advantages[shown].astype(float), 4).tolist()
    return row


def held_out_row(batch: RolloutBatch, i: int, reward_names: Sequence[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the row of completion ``i`` of an evaluation: texts and rewards."""
    middle, end = _bounds(batch, i)
    return {
        "prompt": tokenizer.decode(batch.tokens[int(batch.cu_seqlens[i]) : middle].tolist()),
        "completion": tokenizer.decode(batch.tokens[middle:end].tolist()),
        "rewards": dict(zip(reward_names, batch.rewards[i].tolist(), strict=True)),
        "finish_reason": FinishReason(batch.finish_reasons[i]).name.lower(),
        "length": end - middle,
        "turns": int(batch.turns[i]),
        "row": int(batch.row_ids[i]),
    }


def bounded_tokens(args: Namespace, batch: RolloutBatch, i: int) -> dict[str, list[int]]:
    """Return ``clipped`` of completion ``i``: 1 for tokens whose rollout importance weight exceeds its bound.

    Nothing without these weights. The bounds of the ratio new/old are not here: they act in the updates, later.
    """
    if args.rollout_importance_sampling_mode is None or batch.old_log_probs is None:
        return {}
    middle, end = _bounds(batch, i)
    clipped = np.zeros(end - middle, int)
    inside = np.flatnonzero(batch.response_mask[middle:end])
    trainer, engine = (torch.tensor(x[middle + inside]) for x in (batch.old_log_probs, batch.rollout_log_probs))
    clipped[inside] = importance_weights(
        args.rollout_importance_sampling_mode,
        trainer,
        engine,
        torch.zeros(len(inside), dtype=torch.long),
        args.rollout_importance_sampling_threshold,
        args.rollout_importance_sampling_lower_bound,
    ).clipped.numpy()
    return {"clipped": clipped[:TOKENS].tolist()}


def pictures(images: RowImages | None) -> dict[str, list[str]]:
    """Return ``images`` of a row: the first PICTURES images as small JPEG data URIs, of a video its first frame."""
    if images is None or not images.sources:
        return {}
    import PIL.Image

    uris = []
    for found in images.open(PICTURES):
        image = PIL.Image.fromarray(found[0]) if isinstance(found, np.ndarray) else found.convert("RGB")
        image.thumbnail((SIDE, SIDE))
        written = io.BytesIO()
        image.save(written, "JPEG", quality=80)
        uris.append(data_uri("image/jpeg", written.getvalue()))
    return {"images": uris}


def _bounds(batch: RolloutBatch, i: int) -> tuple[int, int]:
    """Return the bounds of completion ``i``, without its prompt, among the tokens that this rank holds."""
    return int(batch.cu_seqlens[i]) + int(batch.prompt_lengths[i]), int(batch.cu_seqlens[i + 1])


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the tokens before it, special tokens included.

    A token that ends within a character (byte-level vocabularies) adds ""; the token that completes the character adds
    it. Each step decodes only the last few tokens, so the time is linear in the number of tokens.
    """
    texts: list[str] = []
    begin = shown = 0  # ids[begin:shown]: context for decoding the next tokens
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(list(ids[begin:shown]), skip_special_tokens=False)
        text = tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        begin, shown = shown, end
    return texts
