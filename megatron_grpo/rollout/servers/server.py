"""One inference server: what is known of it, and how it is asked; what a kind of server says is in its subclass.

vllm/server.py and sglang/server.py have these; pool.py makes a pool of them.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.utils.http_client import Client, Fault

_RUN = uuid.uuid4().hex[:12]


class Signs(NamedTuple):
    """What a look at a server shows: ``process`` changes when it is started anew, ``progress`` when it generates (None
    if it keeps that to itself).
    """

    process: str
    progress: float | None


class Server(Client, ABC):
    """One server and what is known of it; everything it is asked raises Fault when it does not do it."""

    tensor_parallel_size: int = 1
    version: int | None = None  # of its weights; None when it has none of ours, and then it must not generate
    process: str = ""  # the one that was given them
    lost: str | None = None  # why it was given up, until the next weight sync
    in_flight: int = 0  # completions
    failures: int = 0  # in a row; above 0 it gets no requests until a look at it has gone well
    next_look: float = 0.0
    alive: float = 0.0  # time of the last sign of life
    progress: float | None = None

    @abstractmethod
    async def check(self) -> None:
        """Raise Fault, with its cure, when this server cannot serve this run."""

    @abstractmethod
    async def look(self, timeout: float) -> Signs:
        """Who is there, and how far it has come."""

    @abstractmethod
    async def generate(self, requests: Sequence[Request], seed: int) -> list[Completion]:
        """Completions of requests with one prompt and one ``Sampling``."""

    @abstractmethod
    async def load_weights(self, directory: str, timeout: float) -> None:
        """Take the weights in the safetensors files of ``directory``; `weights_are` comes next."""

    @abstractmethod
    async def weights_are(self, version: int) -> None:
        """Finish an update: nothing that was computed with the old weights is left, and the server has the version."""

    async def call_if_able(self, method: str, path: str, body: dict | None, timeout: float) -> Any:
        """As ``call``; None from a server that does not know this, or cannot do it where it runs."""
        try:
            return await self.call(method, path, body, timeout)
        except Fault as fault:
            if fault.passing:
                raise
            return None

    async def wake(self, part: str) -> None:
        """Take the device's memory for ``"weights"`` or ``"kv_cache"`` back; nothing where it has it."""

    async def sleep(self) -> None:
        """Leave the device's memory to the trainer."""

    async def checksums(self) -> dict[str, str] | None:
        """A checksum of each tensor as it lies in the server's memory; None where servers of this kind do not tell."""
        return None

    def check_end(self, request: Request, ids: list[int], reason: str, vocab_size: int, eos_id: int) -> None:
        """Raise Fault for a completion that did not end as its ``Sampling`` says."""
        sampling = request.sampling
        if reason not in ("stop", "length") or not ids:
            raise Fault(f"it ended a completion after {len(ids)} tokens for {reason!r}", passing=True)
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise Fault(f"it sampled token {max(ids)} of a vocabulary of {vocab_size}: start it with the same model")
        if reason == "length" and len(ids) != sampling.max_tokens:
            raise Fault(
                f"it cut a completion at {len(ids)} of {sampling.max_tokens} tokens: start it for longer ones, and "
                "without the model's generation_config.json"
            )
        if reason == "stop" and not sampling.stop and ids[-1] != eos_id:
            raise Fault(
                f"it ended a completion at token {ids[-1]}, not at the end of sequence ({eos_id}): start it without "
                "the model's generation_config.json"
            )


def sampling_parameters(sampling: Sampling, eos_id: int) -> dict[str, Any]:
    """What vLLM's and SGLang's servers are told alike of how to sample; the names of the rest differ."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": [] if sampling.ignore_eos else [eos_id],
    }


def weight_tag(version: int) -> str:
    """What a server is told to call the weights of this run; a fresh server, or another run, calls them otherwise."""
    return f"{_RUN}:{version}"
