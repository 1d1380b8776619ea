"""What every inference engine promises: token ids in, token ids out, streamed as completions finish.

An engine is driven by all ranks of one replica in step. Ids are never decoded and encoded again: what the engine
sampled is what is trained on. Log-probabilities are those of the sampling distribution after the temperature and
before any truncation (top-k, top-p, min-p), the same that the trainer computes; they are returned only when asked
for. Under --router-replay-mode R3 a mixture of experts also tells which experts it chose for each token.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled. ``temperature`` 0 is greedy; ``top_k`` -1 and ``top_p`` 1 and ``min_p`` 0 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    log_probs: bool = False


@dataclass(frozen=True)
class Request:
    """One completion to be made of one prompt; ``id`` is the caller's and comes back with the completion."""

    id: int
    prompt_ids: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """What became of a request: ids (an end-of-sequence token included), why it ended, and under which weights."""

    id: int
    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: str  # "stop" or "length"
    weight_version: int
    # [tokens, MoE layers, topk] of the prompt and of the sampled tokens but the last, which was never routed; None
    # unless --router-replay-mode is R3
    routed_experts: npt.NDArray[np.int16] | None = None


class Engine(Protocol):
    """A replica of the policy that generates; its ranks call every method in the same order with the same arguments."""

    replica: int
    num_replicas: int
    is_lead: bool  # whether this rank speaks for its replica

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; they are sampled in the order given."""

    def poll(self) -> list[Completion]:
        """Advance by one step and return the completions that finished in it (often none)."""

    def abort(self, ids: Iterable[int]) -> None:
        """Drop requests that are no longer wanted."""

    def rollout(self, seed: int) -> AbstractContextManager[None]:
        """Within, samples depend on ``seed`` and the requests alone, and the trainer's random state is kept."""

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights (Hugging Face names, full tensors) and stamp what is generated from now on with
        ``version``.
        """

    def close(self) -> None:
        """Free what outlives the process; the engine is of no use afterwards."""

    def health(self) -> str | None:
        """None while the engine can serve, else what is wrong with it."""


def generate(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
    """Completions of all ``requests`` in the order in which they finish."""
    engine.submit(requests)
    waiting = len(requests)
    while waiting:
        for completion in engine.poll():
            waiting -= 1
            yield completion
