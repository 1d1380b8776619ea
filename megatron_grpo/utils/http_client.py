"""HTTP client for inference servers and reward models, and the exceptions of failed requests."""

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from functools import wraps
from typing import Any, Concatenate

import aiohttp

PROBE_TIMEOUT = 10.0  # seconds, for requests without work for the server
# Bytes of an event, which is one line. vLLM's first event repeats the prompt: a million token ids are 8 MB. The last
# one can have experts: 32,768 tokens of 48 layers with 8 experts of 512 are 32 MB.
_LONGEST_LINE = 2**28

NEWEST: ContextVar[tuple[str, Any]] = ContextVar("NEWEST", default=("", None))  # (path, answer) in this task


class Fault(Exception):
    """A failed request; ``retryable`` if it may succeed later, ``status`` is the HTTP status or None."""

    def __init__(self, message: str, retryable: bool = False, status: int | None = None):
        super().__init__(message)
        self.retryable, self.status = retryable, status


class RequestTimeout(Fault):
    """A time-out of a request: the server may hang or be overloaded."""

    def __init__(self, message: str):
        super().__init__(message, retryable=True)


class Client:
    """An HTTP client of one server."""

    key_flag: str  # the flag that gives the API key

    def __init__(self, url: str, api_key: str | None):
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None  # aiohttp needs a running event loop to create it

    async def call(self, method: str, path: str, body: dict | None = None, timeout: float | None = None) -> Any:
        """Send a request and return the answer: parsed JSON for the content type JSON, else text.

        ``timeout`` is in seconds; None waits without limit. Raises Fault for an HTTP error or a lost connection, and
        RequestTimeout after the time-out.
        """
        try:
            async with self._answer(method, path, body, timeout) as answer:
                text, status, kind = await answer.text(errors="replace"), answer.status, answer.content_type
        except TimeoutError as error:
            raise RequestTimeout(f"no answer to {path} within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Fault(f"{path}: {error or type(error).__name__}", retryable=True) from error
        self._check_status(path, status, text)
        try:
            value = json.loads(text) if kind == "application/json" else text
        except ValueError as error:
            raise Fault(f"{path}: the answer is not valid JSON", retryable=True) from error
        NEWEST.set((path, value))
        return value

    async def events(self, path: str, body: dict) -> AsyncIterator[Any]:
        """Send a request and yield each JSON value of its server-sent events as it arrives; raises Fault as `call`."""
        try:
            async with self._answer("POST", path, body, None) as answer:
                if answer.status >= 400:
                    self._check_status(path, answer.status, await answer.text(errors="replace"))
                async for line in _lines(answer.content):
                    data = line.strip().removeprefix(b"data:").strip()
                    if data and data != b"[DONE]":
                        yield json.loads(data)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Fault(f"{path}: {error or type(error).__name__}", retryable=True) from error

    def _answer(self, method: str, path: str, body: dict | None, timeout: float | None):
        if self._session is None:
            # Servers close idle connections after 5 seconds. Close them earlier, so that no request meets a closed one.
            connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connections)
        limit = aiohttp.ClientTimeout(total=timeout)
        return self._session.request(method, self.url + path, json=body, timeout=limit)

    def _check_status(self, path: str, status: int, text: str) -> None:
        """Raise Fault for an HTTP error."""
        if status in (401, 403):
            raise Fault(f"the server refuses the API key: give the key of the server's {self.key_flag}")
        if status >= 400:
            # A repeated request has the same client error (4xx), except 408 and 429, which report an overloaded server.
            retryable = status >= 500 or status in (408, 429)
            raise Fault(f"{path} answered {status}: {' '.join(text.split())[:300]}", retryable, status)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of an answer; ValueError for a line of more than `_LONGEST_LINE` bytes.

    aiohttp's own iterator appends piece to piece: 64 MiB take 6 s.
    """
    pieces: list[bytes] = []
    size = 0
    async for piece in content.iter_any():
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*pieces, end])
            pieces, size = [], 0
        pieces.append(rest)
        size += len(rest)
        if size > _LONGEST_LINE:
            raise ValueError(f"a line has more than {_LONGEST_LINE} bytes")
    yield b"".join(pieces)


def reads_answers[C: Client, **P, R](
    function: Callable[Concatenate[C, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, R]]:
    """Return a function of a client that raises a retryable Fault for an answer of another form than it expects.

    While a server restarts, a gateway or another program can answer at its address.
    """

    @wraps(function)
    async def read(client: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await function(client, *args, **kwargs)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            path, answer = NEWEST.get()
            text = " ".join(str(answer).split())[:300]
            reason = f"not as an inference server does ({type(error).__name__}: {error})"
            raise Fault(f"{path} answered {text}, {reason}", retryable=True) from error

    return read
