"""The lines of ``completions.jsonl``: which completions of a rollout are kept, and what is said of each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_grpo.data.batch import FinishReason, Float32, RolloutBatch
from megatron_grpo.data.tokenizer import Tokenizer

TOKENS = 512  # of a completion that are told one by one: a line stays within some 10 kB beside its two texts


def chosen(advantages: Float32, count: int) -> list[tuple[int, str]]:
    """The positions of at most ``count`` of the completions ``[n]``, each with the reason why it was picked.

    Half are the ``"first"``, which are of the same prompts whatever was sampled; the others are by turns the ``"best"``
    and the ``"worst"`` of the rest by advantage.
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
    """What is written of completion ``i``: texts, rewards, advantage, and its first ``TOKENS`` tokens one by one.

    ``log_probs`` are those under the policy before the update where they were computed, else the engine's (nan where it
    gave none); ``token_advantages`` are there where tokens of a completion may have different ones.
    """
    start, end = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
    middle = start + int(batch.prompt_lengths[i])
    told = slice(middle, min(end, middle + TOKENS))
    log_probs = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs
    row = {
        "picked": picked,
        "prompt": tokenizer.decode(batch.tokens[start:middle].tolist()),
        "completion": tokenizer.decode(batch.tokens[middle:end].tolist()),
        "rewards": dict(zip(reward_names, batch.rewards[i].tolist(), strict=True)),
        "advantage": 0.0 if batch.advantages is None else float(batch.advantages[i]),
        "finish_reason": FinishReason(batch.finish_reasons[i]).name.lower(),
        "length": end - middle,
        "row": int(batch.row_ids[i]),
        "tokens": token_texts(tokenizer, batch.tokens[told].tolist()),
        "log_probs": np.round(log_probs[told].astype(float), 4).tolist(),
    }
    if batch.token_advantages is not None:
        row["token_advantages"] = np.round(batch.token_advantages[told].astype(float), 4).tolist()
    return row


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it, special tokens included.

    A token that ends within a character (byte-level vocabularies) adds nothing; its character comes with the token that
    completes it. Only the last tokens are decoded again for each one, so the time is linear in their number.
    """
    texts: list[str] = []
    begin = told = 0  # ids[begin:told] give the context in which the next ones are decoded
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(list(ids[begin:told]), skip_special_tokens=False)
        text = tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        begin, told = told, end
    return texts
