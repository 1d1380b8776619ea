"""Interface of all inference engines: token ids in, token ids out, streamed as completions finish.

All ranks of a replica make the same calls in the same order. Token ids are never decoded and encoded again: the trainer
trains on the ids that the engine sampled. Under --router-replay-mode R3 the engine also returns the experts that it
chose for each token.

**The log-probability contract.** The rollout log-probability of a sampled token equals the trainer's: log
softmax(logits / --temperature), before truncation (top-k, top-p, min-p) and penalties (repetition, presence,
frequency). With ``Sampling.kept_token_ids`` both are over the tokens that truncation keeps: the engine returns these
tokens, and the trainer computes every log-probability of the batch over them. The engine returns log-probabilities only
on request. Where an engine would include truncation or penalties that the trainer cannot repeat (`engine_changes` of
rollout/arguments.py), they are not requested. They are never requested for constrained completions
(``structured_outputs``), because the engine then returns probabilities renormalised over the allowed tokens.

**The failure contract.** An engine that fails raises EngineLost. ``rollout`` and the methods that wake the engine, put
it to sleep or update its weights are collective over all ranks; they raise EngineLost on every rank if they fail on
one.
"""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.agreement import peer_has_ended
from megatron_grpo.rollout.draft_counts import DraftCounts
from megatron_grpo.utils.errors import EngineLost, GrpoError, is_out_of_memory
from megatron_grpo.vision.images import RowImages
from megatron_grpo.weights.transfer_plan import HfTensor, Reads


@dataclass(frozen=True)
class Request:
    """A request for one completion of one prompt; the completion carries the same ``id``.

    The id is unique within a rollout and has no other meaning. ``begun``, an interrupted completion of an earlier
    rollout, is continued: the engine computes its keys and values again, and returns it with the new tokens. ``seed``
    replaces the seed that follows from the rollout's (`request_seed`).
    """

    id: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    begun: "Completion | None" = None
    seed: int | None = None
    row: Mapping[str, Any] = field(default_factory=dict)  # of the data: what an environment is reset with
    sampled_before: int = 0  # tokens of the draw in earlier samples (`Completion.sample_starts`): another seed
    images: RowImages | None = None  # of the prompt, and of the environment's messages in ``begun``
    session: int | None = None  # requests with one of them continue each other [id]
    urgent: bool = False  # of an evaluation that the trainer waits for

    @property
    def begun_ids(self) -> Sequence[int]:
        """The tokens that the completion has already."""
        return self.begun.token_ids if self.begun is not None else ()

    @property
    def begun_turn_ids(self) -> Sequence[int]:
        """Those of them that the policy sampled after the environment's last ones."""
        if self.begun is None or self.begun.response_mask is None:
            return self.begun_ids
        last = max((i for i, sampled in enumerate(self.begun.response_mask) if not sampled), default=-1)
        return self.begun_ids[last + 1 :]

    def with_begun_in_prompt(self) -> "Request":
        """Return the request whose prompt includes the tokens of ``begun``, for the remaining number of tokens.

        GrpoError if the limit has become smaller than what is there.
        """
        if not self.begun_ids:
            return self
        assert self.begun is not None
        rest = self.sampling.max_tokens - self.begun.num_sampled
        if rest < 0:
            raise GrpoError(
                f"a completion that began before a resume has {self.begun.num_sampled} tokens, and may have "
                f"{self.sampling.max_tokens} now (--max-completion-length, or max_tokens of its row): give as many as "
                "before, or load only the weights with --finetune"
            )
        ids = [*self.prompt_ids, *self.begun_ids]
        return replace(self, prompt_ids=ids, sampling=replace(self.sampling, max_tokens=rest))

    def stop_word_window(self) -> int:
        """Return a number of tokens that is enough to have the longest stop word in their text; 0 without stop words.

        A token of a stop word has at least one byte of it. The margin of 4 is for tokenizers that decode the first
        token of a text differently.
        """
        return max((len(word.encode()) + 4 for word in self.sampling.stop), default=0)


def request_seed(rollout_seed: int, request_id: int, begun_tokens: int = 0) -> int:
    """Return the sampling seed of one request, 63 bits.

    It is a function of the rollout's seed, the request's id and, for a continued completion, the tokens that it has
    already. Samples therefore differ between rollouts and between requests, and do not depend on the engine replica.
    """
    entropy = [rollout_seed, request_id, *([begun_tokens] if begun_tokens else [])]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class Completion:
    """A finished or interrupted request: token ids (with the end-of-sequence token), finish reason, weight versions."""

    id: int
    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: str  # "stop", "length", "abort" for an interrupted completion, "failed" for an environment's fault
    weight_versions: Sequence[int]  # of the engine's weights at each token
    # [tokens, MoE layers, topk] of the prompt and the sampled tokens except the last, which is never routed; None
    # unless --router-replay-mode is R3
    routed_experts: npt.NDArray[np.int16] | None = None
    # [sampled tokens, top_k], -1 pads: what each token was sampled from; None unless `Sampling.kept_token_ids`
    kept_token_ids: npt.NDArray[np.int32] | None = None
    # [tokens], 0 on those that an environment said; None: the policy sampled all
    response_mask: list[int] | None = None
    # Of an episode (rollout/episodes.py); the first is None where the prompt is that of the data.
    prompt_ids: Sequence[int] | None = None
    turns: int = 1
    malformed_calls: int = 0  # of tools, in all turns
    environment_reward: float | None = None
    turn_rewards: npt.NDArray[np.float32] | None = None  # [--max-turns or more] as in `RolloutBatch`
    turn_states: npt.NDArray[np.int64] | None = None
    # Of each sample: what the environment or the agent showed, encoded; None without a vision-language model.
    shown_images: list[list[bytes]] | None = None
    messages: list[dict[str, Any]] | None = None  # on the lead rank: all, the policy's last turn at the end
    # JSON, on the lead rank: what a resumed run needs to go on with an interrupted episode.
    episode_state: dict[str, Any] | None = None
    # One draw can consist of several samples: sequences that do not see each other. Where each further one begins, with
    # its prompt (response mask 0); None where the run makes only single samples.
    sample_starts: list[int] | None = None

    @property
    def mask(self) -> list[int]:
        """``response_mask``, of ones where it is None."""
        return [1] * len(self.token_ids) if self.response_mask is None else self.response_mask

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return len(self.token_ids) if self.response_mask is None else sum(self.response_mask)

    def with_environment_tokens(self, tokens: list[int]) -> "Completion":
        """Return the completion with tokens at its end that the policy did not sample."""
        kept, version = self.kept_token_ids, self.weight_versions[-1] if self.weight_versions else 0
        if kept is not None:
            kept = np.concatenate([kept, np.full((len(tokens), kept.shape[1]), -1, np.int32)])
        return replace(
            self,
            token_ids=[*self.token_ids, *tokens],
            log_probs=None if self.log_probs is None else [*self.log_probs, *[math.nan] * len(tokens)],
            weight_versions=[*self.weight_versions, *[version] * len(tokens)],
            kept_token_ids=kept,
            response_mask=[*self.mask, *[0] * len(tokens)],
        )

    @staticmethod
    def joined(samples: "Sequence[Completion]") -> "Completion":
        """Return the samples of one draw, each with its ``prompt_ids``, as one completion after the first's prompt."""
        whole = replace(samples[0], sample_starts=[])
        for sample in samples[1:]:
            begun = whole.with_environment_tokens(list(sample.prompt_ids or ()))
            starts = [*(whole.sample_starts or ()), len(whole.token_ids)]
            shown = None if whole.shown_images is None else [*whole.shown_images, *(sample.shown_images or [[]])]
            prompt = whole.prompt_ids
            whole = replace(sample.after(begun), prompt_ids=prompt, sample_starts=starts, shown_images=shown)
        return whole

    def separated(self) -> "list[Completion]":
        """Undo `joined`."""
        starts, samples = [0, *(self.sample_starts or ())], []
        for number, (begin, end) in enumerate(zip(starts, [*starts[1:], len(self.token_ids)], strict=True)):
            prompt, shown = self.prompt_ids, self.shown_images and self.shown_images[number : number + 1]
            if begin > 0:
                sampled = next((i for i in range(begin, end) if self.mask[i]), end)
                prompt, begin = self.token_ids[begin:sampled], sampled
            part = self.part(begin, end)
            samples.append(replace(part, prompt_ids=prompt, sample_starts=None, shown_images=shown))
        return samples

    def part(self, begin: int, end: int) -> "Completion":
        """Return the completion with the tokens from ``begin`` to ``end`` alone."""
        tokens = slice(begin, end)
        mask = self.mask[tokens]
        return replace(
            self,
            token_ids=self.token_ids[tokens],
            log_probs=None if self.log_probs is None else self.log_probs[tokens],
            weight_versions=self.weight_versions[tokens],
            kept_token_ids=None if self.kept_token_ids is None else self.kept_token_ids[tokens],
            response_mask=None if all(mask) else mask,
        )

    def after(self, begun: "Completion | None") -> "Completion":
        """Return the completion of the tokens of ``begun`` and then of this one."""
        if begun is None or not begun.token_ids:
            return self
        if not self.token_ids:
            return replace(begun, finish_reason=self.finish_reason)
        log_probs, kept, masks = self.log_probs, self.kept_token_ids, (begun.response_mask, self.response_mask)
        experts = self.routed_experts
        if experts is not None and begun.weight_versions[-1] != self.weight_versions[0]:
            # A run that was resumed at new weights: the engine has chosen experts for the earlier tokens by these.
            experts = experts.copy()
            experts[: len(experts) - len(self.token_ids)] = -1
        if log_probs is not None:  # of a rollout with --mismatch-sample-rate; that of ``begun`` may have had none
            before = [math.nan] * len(begun.token_ids) if begun.log_probs is None else begun.log_probs
            log_probs = [*before, *log_probs]
        if kept is not None and begun.kept_token_ids is not None:
            kept = np.concatenate([begun.kept_token_ids, kept])
        return replace(
            self,
            token_ids=[*begun.token_ids, *self.token_ids],
            log_probs=log_probs,
            weight_versions=[*begun.weight_versions, *self.weight_versions],
            routed_experts=experts,
            kept_token_ids=kept,
            response_mask=None if masks == (None, None) else [*begun.mask, *self.mask],
        )


class Engine(Protocol):
    """What all engines have; all ranks of a replica call the methods in the same order with equal arguments."""

    replica: int | None  # None on a rank that generates nothing and waits for the others
    num_replicas: int
    is_lead: bool  # True on the one rank per replica that reports its results
    has_weights: bool  # False at the start and after --sleep-level 2: call ``update_weights`` first

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights (Hugging Face names, full tensors); later completions carry ``version``."""

    def close(self) -> None:
        """Free resources that outlive the process; the engine is unusable afterwards."""


class Submits(Protocol):
    """What completes requests."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests in the given order."""

    def poll(self) -> list[Completion]:
        """Run one engine step and return the completions that finished in it (often none)."""

    def abort(self, ids: Iterable[int]) -> None:
        """Abort requests."""


class GeneratingEngine(Engine, Submits, Protocol):
    """An engine that completes requests of this rank."""

    @property
    def cache_tokens(self) -> int | None:
        """How many tokens the engine's cache can keep when their requests have ended; None if it keeps none."""

    @property
    def places(self) -> int:
        """Requests that the engine runs at a time."""

    @property
    def engines(self) -> float:
        """How many engines share the requests: several, or a part of one, for a client of servers."""

    @property
    def drafts(self) -> DraftCounts | None:
        """Counts of this replica since the start of the newest rollout; None without drafts."""

    def rollout(self, seed: int) -> AbstractContextManager[None]:
        """Context of a rollout: samples depend only on ``seed`` and requests; restores the trainer's random state."""


class TrainersEngine(Engine, Protocol):
    """An engine as the trainer's ranks see it (training/engine_lifecycle.py), which can share their devices."""

    def wake_weights(self) -> None:
        """Allocate device memory for the weights (restored only if ``has_weights``); no-op if awake."""

    def wake_cache(self) -> None:
        """Allocate device memory for the KV cache; no-op if awake."""

    def sleep(self) -> None:
        """Free device memory for the trainer, as --sleep-level says."""

    def device_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank's part of the engine holds on the GPU, and those that `sleep` has freed.

        The second number is of memory that torch still counts as allocated.
        """


class LocalEngine(GeneratingEngine, TrainersEngine, Protocol):
    """An engine of --rollout-engine on the trainer's ranks: colocated, or a client of servers."""

    def compare_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str] | None:
        """Return one line for each tensor that differs from the engine's; None if the engine cannot compare."""


class AdapterEngine(Engine, Protocol):
    """An engine that can load a LoRA adapter beside the weights (--lora-weight-sync adapter)."""

    @property
    def has_base(self) -> bool:
        """Whether the engine has the weights below an adapter; else call ``update_weights`` before `update_adapter`."""

    def update_adapter(self, adapter: dict[str, torch.Tensor], version: int) -> None:
        """Load a LoRA adapter (format of rollout/vllm/adapter.py); completions carry ``version``."""

    def compare_adapter(self, adapter: dict[str, torch.Tensor]) -> list[str]:
        """Return one line for each tensor of an adapter that differs in one bit from the engine's."""

    def probe_adapter(self) -> list[str]:
        """Return the kinds of layers (q_proj) in which a random adapter changes no log-probability.

        Restores the adapter. Needs the KV cache.
        """


class InterruptibleEngine(GeneratingEngine, Protocol):
    """Interface of an engine whose requests can be continued later, under other weights."""

    def reads(self, tensors: Sequence[HfTensor]) -> Reads:
        """Return what this rank reads of these tensors, of which `update_weights` receives those without targets."""

    def unfinished(self) -> list[Completion]:
        """Return what `interrupt` would return; the requests go on."""

    def interrupt(self) -> list[Completion]:
        """Abort all requests and return what they have so far, with the finish reason "abort", in order of their ids.

        The tokens are those of `Request.begun` and the new ones; a request that never ran has none.
        """


class OutOfMemory:
    """What an EngineLost says when the GPU's memory is exhausted."""

    explain: Callable[[], str] = staticmethod(lambda: "")  # setup.py sets it: who holds the memory, and what helps


@contextlib.contextmanager
def lost_on_failure(action: str) -> Iterator[None]:
    """Context in which any failure but a GrpoError raises EngineLost, after printing its traceback.

    An error of another rank is not a failure of this engine and passes unchanged.
    """
    try:
        yield
    except GrpoError:
        raise
    except Exception as error:
        if peer_has_ended(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), "no message")
        explanation = OutOfMemory.explain() if is_out_of_memory(error) else ""
        if explanation:
            reason += f"\n{explanation}"
        else:
            traceback.print_exc()
        raise EngineLost(f"{action} failed on rank {dist.get_rank()}: {type(error).__name__}: {reason}") from error


def generate(
    engine: Submits,
    requests: Sequence[Request],
    further: Callable[[int], Sequence[Request] | None] = lambda under_way: (),
) -> Iterator[Completion]:
    """Yield the completions of ``requests``, and of the requests that ``further(running)`` adds, in finishing order.

    ``further`` is called after every step with the number of running requests; if it returns None, these are aborted.
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
