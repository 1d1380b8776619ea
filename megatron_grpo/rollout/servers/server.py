"""State and requests of one inference server, for vllm/server.py and sglang/server.py."""

import base64
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.draft_counts import DraftCounts
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.routed_experts import of_moe_layers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.http_client import Client, Fault

_RUN_ID = uuid.uuid4().hex[:12]


class Status(NamedTuple):
    """Status of a server: ``process`` changes at a restart, ``progress`` during generation (None if unknown)."""

    process: str
    progress: float | None
    drafts: DraftCounts | None = None  # since the process began; None without drafts


@dataclass
class Streamed:
    """A request whose tokens arrive one by one, and what has arrived of them."""

    request: Request
    version: int = -1  # of the weights that sample the next token
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    log_probs: list[float] = field(default_factory=list)
    routed_experts: npt.NDArray[np.int16] | None = None  # they arrive with the last token

    def completion(self, reason: str = "abort") -> Completion:
        """Return the tokens of ``request.begun`` and those that have arrived."""
        log_probs = list(self.log_probs) if self.request.sampling.log_probs else None
        new = Completion(self.request.id, list(self.ids), log_probs, reason, list(self.versions), self.routed_experts)
        return new.after(self.request.begun)

    def drop(self) -> None:
        """Drop what has arrived."""
        self.ids, self.versions, self.log_probs = [], [], []

    def continued(self) -> Request:
        """Return the request for what is missing."""
        return replace(self.request, begun=self.completion()) if self.ids else self.request


class Server(Client, ABC):
    """One inference server with its state; every request raises Fault if it fails."""

    # Attributes that `check`, `refresh` and a weight update set in one process, and other processes take from it.
    shared: tuple[str, ...] = ("version", "process", "exclusion_reason", "cache_tokens")

    tensor_parallel_size: int = 1
    version: int | None = None  # of the weights; None: the server lacks this run's weights and must not generate
    process: str = ""  # the server process that holds the weights
    exclusion_reason: str | None = None  # excluded until the next weight sync; None: not excluded
    in_flight: int = 0  # completions
    failures: int = 0  # consecutive; above 0, the server receives no requests until a probe succeeds
    next_probe: float = 0.0  # time of the next probe
    last_progress: float = 0.0  # time of the last answer with progress
    progress: float | None = None
    drafts: DraftCounts | None = None  # of the newest status
    cache_tokens: int | None = None  # that its cache can keep; None if it keeps none, or does not say
    probed: float = 0.0  # time at which the newest probe began
    confirmed: float = 0.0  # time at which the newest probe that found ``process`` began

    @abstractmethod
    async def check(self) -> None:
        """Raise Fault, with the flag to change, if this server cannot serve this run; resume it if it is paused."""

    @abstractmethod
    async def status(self, timeout: float) -> Status:
        """Return the server's process and progress."""

    @abstractmethod
    async def generate(self, requests: Sequence[Request], seed: int) -> list[Completion]:
        """Return completions of requests that share a prompt and a ``Sampling``."""

    async def stream(self, streamed: Streamed, seed: int) -> Completion:
        """Return the completion of a request; add its tokens to ``streamed`` as they arrive."""
        raise NotImplementedError

    @abstractmethod
    async def load_weights(self, directory: str, timeout: float) -> None:
        """Load the safetensors files of ``directory``; call `finish_update` next."""

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Finish a weight update: drop caches of the old weights and set the version."""

    async def pause(self) -> None:
        """Let running requests wait until `resume` or `check`, with their keys and values."""
        raise NotImplementedError

    async def resume(self) -> None:
        """Let the requests go on that `pause` has stopped."""
        raise NotImplementedError

    async def call_if_able(self, method: str, path: str, body: dict | None, timeout: float) -> Any:
        """Return the answer of ``call``; None if the server does not support the request."""
        try:
            return await self.call(method, path, body, timeout)
        except Fault as fault:
            if fault.retryable:
                raise
            return None

    async def wake(self, part: str) -> None:
        """Allocate device memory for ``"weights"`` or ``"kv_cache"``; no-op if allocated."""

    async def sleep(self) -> None:
        """Free device memory for the trainer."""

    async def checksums(self) -> dict[str, str] | None:
        """Return a checksum of each tensor in the server's memory; None if the server cannot compute them."""
        return None

    def check_end(self, request: Request, ids: list[int], reason: str, vocab_size: int) -> None:
        """Raise Fault if the end of a completion contradicts its ``Sampling``."""
        sampling = request.sampling
        if reason not in ("stop", "length") or not ids:
            raise Fault(f"it ended a completion of {len(ids)} tokens with the reason {reason!r}", retryable=True)
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise Fault(
                f"it sampled token {max(ids)}, outside the vocabulary of {vocab_size}: start it with the same model"
            )
        if reason == "length" and len(ids) != sampling.max_tokens:
            raise Fault(
                f"it cut a completion at {len(ids)} of {sampling.max_tokens} tokens: start it with a longer "
                "limit, and without the model's generation_config.json"
            )
        if reason == "stop" and not sampling.stop and ids[-1] not in sampling.stop_token_ids:
            raise Fault(
                f"it ended a completion at token {ids[-1]}, which is none of the end tokens "
                f"{list(sampling.stop_token_ids)}: start it without the model's generation_config.json, or add the "
                "token with --stop-token-ids"
            )


def check_experts(args, returned: bool, drafts: str | None) -> None:
    """Raise Fault, with --router-replay-mode R3, for a server that does not return the experts of its tokens.

    ``drafts`` is its method of speculative decoding.
    """
    if args.router_replay_mode != "R3":
        return
    if not returned:
        raise Fault("it does not return the experts of its tokens: start it with --enable-return-routed-experts")
    if drafts:
        raise Fault(f"it drafts ({drafts}), and R3 has not been checked with drafts: start it without, or give R2")


def routed_experts(
    args, encoded: str | None, tokens: int, decoded: Callable[[bytes], npt.NDArray[np.integer]]
) -> npt.NDArray[np.int16]:
    """Return ``Completion.routed_experts`` from a server's base64; Fault if they are not of ``tokens`` routed tokens.

    ``decoded`` returns ``[tokens, layers, topk]``, or the same numbers flat.
    """
    if encoded is None:
        raise Fault("its answer has no routed_experts: start it with --enable-return-routed-experts")
    try:
        return of_moe_layers(args, decoded(base64.b64decode(encoded)), tokens)
    except GrpoError as error:
        raise Fault(str(error)) from error


def sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters with the same names in vLLM and SGLang servers."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def refuse_quantized(quantization: str | None) -> None:
    """Raise Fault for a server with a quantized model: the trainer sends weights that are not quantized."""
    if quantization:
        raise Fault(
            f"its model is quantized ({quantization}), and the trainer's weights are not: start it without "
            "--quantization, on a directory in bf16 (tools/checkpoint/convert.py writes one from a quantized model)"
        )


def tagged_version(tag: str) -> int | None:
    """Return the version of the weights that have a `weight_tag`; None if this process has not named them."""
    run, _, version = tag.partition(":")
    return int(version) if run == _RUN_ID else None


def weight_tag(version: int) -> str:
    """Return the name of this run's weights of ``version``; other runs and restarted servers have other names."""
    return f"{_RUN_ID}:{version}"
