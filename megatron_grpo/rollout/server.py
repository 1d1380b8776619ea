"""One inference server: what is known of it, and how it is asked; what a kind of server says is in its subclass.

vllm_server.py and sglang_server.py have these; servers.py makes a pool of them.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from megatron_grpo.rollout.engine import Completion, Request, Sampling

PROBE_TIMEOUT = 10.0  # seconds for an answer that costs a server nothing
_RUN = uuid.uuid4().hex[:12]


class Fault(Exception):
    """A server did not do what it was asked; ``passing`` when it may the next time."""

    def __init__(self, message: str, passing: bool = False):
        super().__init__(message)
        self.passing = passing


class Silence(Fault):
    """A server has not answered in time: it may hang, or have much to do."""

    def __init__(self, message: str):
        super().__init__(message, passing=True)


class Signs(NamedTuple):
    """What a look at a server shows: ``process`` changes when it is started anew, ``progress`` when it generates (None
    if it keeps that to itself).
    """

    process: str
    progress: float | None


class Client:
    """An address that is asked over HTTP."""

    key_flag: str  # where its API key comes from

    def __init__(self, url: str, api_key: str | None):
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None  # made within the event loop, as it must be

    async def call(self, method: str, path: str, body: dict | None = None, timeout: float | None = None) -> Any:
        """The answer to a request, its JSON (its text if it is none)."""
        if self._session is None:
            # Servers close connections that were idle for 5 seconds: be first.
            connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connections)
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as answer:
                text, status, kind = await answer.text(), answer.status, answer.content_type
        except TimeoutError as error:
            raise Silence(f"no answer to {path} within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Fault(f"{path}: {error or type(error).__name__}", passing=True) from error
        if status in (401, 403):
            raise Fault(f"the API key is refused: give the one that the server was started with by {self.key_flag}")
        if status >= 400:
            # A request that is wrong stays wrong; 408 and 429 are a server that has too much to do.
            passing = status >= 500 or status in (408, 429)
            raise Fault(f"{path} answered {status}: {' '.join(text.split())[:300]}", passing)
        try:
            return json.loads(text) if kind == "application/json" else text
        except ValueError as error:
            raise Fault(f"{path}: the answer is no JSON", passing=True) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


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
    async def load_weights(self, directory: str, version: int, timeout: float) -> None:
        """Take the weights in the safetensors files of ``directory``, and forget what was cached of the old ones."""

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
        # The tokenizer's end of sequence and no other, whatever the server's generation_config.json says.
        "ignore_eos": True,
        "stop_token_ids": [] if sampling.ignore_eos else [eos_id],
    }


def weight_tag(version: int) -> str:
    """What a server is told to call the weights of this run; a fresh server, or another run, calls them otherwise."""
    return f"{_RUN}:{version}"
