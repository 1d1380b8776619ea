"""Sampling of next tokens from logits, with vLLM's definitions and order of steps (vllm/v1/sample/sampler.py).

    penalties, temperature, min-p, top-k, top-p, and a draw from the remaining tokens

The log-probability of the drawn token is computed after the temperature and before min-p, top-k and top-p. A greedy
request (temperature 0) selects the most likely token after penalties, with its log-probability at temperature 1.
"""

from collections.abc import Sequence

import torch

from megatron_grpo.data.sampling_params import Sampling

_SETTINGS = "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty".split()


def sample(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens int64 ``[n]``, their log-probabilities float32 ``[n]``) from logits float32 ``[n, vocabulary]``.

    ``samplings``, ``prompts`` and ``outputs`` have one entry per row; only penalties read the ids.
    """
    # Steps that no row requests are skipped; the settings are on the host, so this needs no synchronisation.
    requested = {name: [getattr(sampling, name) for sampling in samplings] for name in _SETTINGS}
    columns = torch.tensor(list(requested.values())).to(logits.device, non_blocking=True)[:, :, None]
    temperature, top_k, top_p, min_p, repetition, presence, frequency = columns
    if any(set(requested[name]) - {off} for name, off in zip(_SETTINGS[4:], (1.0, 0.0, 0.0), strict=True)):
        logits = penalize(logits, prompts, outputs, repetition, presence, frequency)
    greedy = temperature == 0
    scaled = logits / temperature.masked_fill(greedy, 1.0)
    log_p = scaled.log_softmax(-1)
    if all(value == 0 for value in requested["temperature"]):
        tokens = logits.argmax(-1)
    else:
        kept = scaled
        if any(requested["min_p"]):
            kept = keep_min_p(kept, min_p)
        if set(requested["top_k"]) - {-1}:
            kept = keep_top_k(kept, top_k.long(), max(requested["top_k"]))
        if set(requested["top_p"]) - {1.0}:
            kept = keep_top_p(kept, top_p)
        # argmax of p / e, with e exponential, is a draw from p (Gumbel's trick), without a copy of p to the host.
        probabilities = kept.softmax(-1)
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        tokens = torch.where(greedy[:, 0], logits.argmax(-1), (probabilities / noise).argmax(-1))
    return tokens, log_p.gather(-1, tokens[:, None])[:, 0]


def penalize(logits, prompts, outputs, repetition, presence, frequency) -> torch.Tensor:
    """Return the logits after penalties.

    A positive logit of a token in prompt or output is divided by ``repetition``, another one is multiplied by it
    (arXiv:1909.05858). The logit of a token in the output is lowered by ``presence``, and by ``frequency`` times the
    token's count (OpenAI's API).
    """
    counts = _counts(outputs, logits)
    there = (counts > 0) | (_counts(prompts, logits) > 0)
    logits = torch.where(there, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def _counts(ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    """Return the count of each token in each row, with the shape of ``logits``."""
    rows = torch.tensor([row for row, tokens in enumerate(ids) for _ in tokens], dtype=torch.long)
    columns = torch.tensor([token for tokens in ids for token in tokens], dtype=torch.long)
    places = (rows * logits.shape[1] + columns).to(logits.device, non_blocking=True)
    return (
        torch.zeros_like(logits)
        .view(-1)
        .scatter_add_(0, places, torch.ones_like(places, dtype=logits.dtype))
        .view(logits.shape)
    )


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the logits with -inf for tokens less likely than ``min_p`` times the most likely token."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), float("-inf"))


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor, largest: int) -> torch.Tensor:
    """Return the logits with -inf for all but the ``top_k`` largest and ties with the last of them.

    A ``top_k`` of -1 keeps all logits. ``largest`` is the maximum of ``top_k``.
    """
    top_k = top_k.clamp(max=logits.shape[1])
    bound = logits.topk(min(largest, logits.shape[1])).values.gather(-1, top_k.clamp(min=1) - 1)
    return logits.masked_fill((logits < bound) & (top_k > 0), float("-inf"))


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the logits with -inf for all but the most likely tokens that together reach probability ``top_p``.

    At least one token is kept.
    """
    ordered, order = logits.sort(-1)
    below = ordered.softmax(-1).cumsum(-1) <= 1 - top_p  # sum from the least likely token up, as vLLM does
    below[:, -1] = False
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(below, float("-inf")))
