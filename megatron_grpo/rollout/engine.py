"""What every inference engine promises: token ids in, token ids out, streamed as completions finish.

An engine is driven by all ranks of one replica in step. Ids are never decoded and encoded again: what the engine
sampled is what is trained on. Under --router-replay-mode R3 a mixture of experts also tells which experts it chose for
each token.

**The log-probability contract.** What the engine returns for a sampled token is what the trainer computes for it: log
softmax(logits / --temperature), before any truncation (top-k, top-p, min-p) and any penalty (repetition, presence,
frequency), which change what is sampled and nothing else. They are returned only when asked for. At temperature 1 an
engine can always give them; at any other vLLM gives them only where nothing but the temperature is applied, and
rollout/arguments.py refuses the rest. Of a constrained request (``structured_outputs``) they are never asked for: the
engine samples from, and tells, the probabilities of what the constraint leaves, which are not the policy's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_grpo.data.sampling_params import Sampling


@dataclass(frozen=True)
class Request:
    """One completion to be made of one prompt; ``id`` is the caller's and comes back with the completion."""

    id: int
    prompt_ids: Sequence[int]
    sampling: Sampling


def request_seed(rollout_seed: int, request_id: int) -> int:
    """Sampling seed of one request, 63 bits: a function of the rollout's seed and the request's number alone.

    Samples then differ from rollout to rollout and from request to request, and do not depend on the engine replica
    that makes them.
    """
    return int(np.random.SeedSequence([rollout_seed, request_id]).generate_state(1, np.uint64)[0] >> np.uint64(1))


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

    replica: int | None  # None on a rank that makes no completions: it waits for those of other ranks
    num_replicas: int
    is_lead: bool  # whether this rank speaks for its replica
    has_weights: bool  # False at the start and after a sleep that drops them: then ``update_weights`` comes first

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

    def compare_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str] | None:
        """A line for each tensor that the engine does not hold as it is here; None if it cannot tell."""

    def wake_weights(self) -> None:
        """Take the device's memory for weights back (their content only if ``has_weights``); nothing if awake."""

    def wake_cache(self) -> None:
        """Take the device's memory for the KV cache back; nothing if awake."""

    def sleep(self) -> None:
        """Leave the device's memory to the trainer, as far as --sleep-level says."""

    def close(self) -> None:
        """Free what outlives the process; the engine is of no use afterwards."""


def generate(
    engine: Engine,
    requests: Sequence[Request],
    further: Callable[[int], Sequence[Request] | None] = lambda under_way: (),
) -> Iterator[Completion]:
    """Completions of all ``requests`` in the order in which they finish, and of what ``further(under way)`` adds.

    When that is None there are enough: what is under way is aborted.
    """
    engine.submit(requests)
    under_way = {request.id for request in requests}
    while under_way:
        for completion in engine.poll():
            under_way.remove(completion.id)
            yield completion
        more = further(len(under_way))
        if more is None:
            engine.abort(sorted(under_way))
            return
        engine.submit(more)
        under_way |= {request.id for request in more}
