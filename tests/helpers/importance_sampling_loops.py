"""Reference implementation of rollout importance weights with plain loops."""

import itertools
import math

import numpy as np
import pytest
import torch

from megatron_grpo.algorithm.importance_sampling import importance_weights


def weights_by_loops(mode, trainer, engine, response_mask, cu_seqlens, high, low=None) -> tuple[list[float], float]:
    """Return (weights, clipped share) by the formulas, one token at a time."""
    weights, outside, tokens = [1.0] * len(response_mask), 0, 0
    for begin, end in itertools.pairwise(cu_seqlens):
        spoken = [k for k in range(begin, end) if response_mask[k]]
        r = {k: math.exp(min(max(float(trainer[k]) - float(engine[k]), -20.0), 20.0)) for k in spoken}
        for k in spoken:
            mean = math.prod(x ** (1 / len(spoken)) for x in r.values())
            within = {
                "token_truncate": r[k] <= high,
                "token_mask": r[k] <= high,
                "sequence_truncate": mean <= high,
                "sequence_mask": mean <= high,
                "icepop": low is not None and low <= r[k] <= high,
            }[mode]
            kept = mean if mode == "sequence_truncate" else r[k]
            weights[k] = kept if within else high if mode.endswith("truncate") else 0.0
            outside += not within
            tokens += 1
    return weights, outside / tokens


def check_against_loops(mode, trainer, engine, response_mask, cu_seqlens, high, low=None) -> float:
    """Compare one mode with the loops, on the tokens in the loss; return the clipped share of them."""
    in_loss = response_mask == 1
    completion = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))[in_loss]
    tokens = (torch.from_numpy(values[in_loss]).double() for values in (trainer, engine))
    result = importance_weights(mode, *tokens, torch.from_numpy(completion), high, low)
    weights, clipped = weights_by_loops(mode, trainer, engine, response_mask, cu_seqlens, high, low)
    np.testing.assert_allclose(result.weights, np.array(weights)[in_loss], rtol=1e-12)
    assert float(result.clipped.double().mean()) == pytest.approx(clipped)
    return clipped
