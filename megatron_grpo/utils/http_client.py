"""How a server is asked over HTTP, and what became of it when it does not answer."""

import json
from typing import Any

import aiohttp

PROBE_TIMEOUT = 10.0  # seconds for an answer that costs a server nothing


class Fault(Exception):
    """A request failed; ``retryable`` if it may succeed later, ``status`` is the HTTP status of the answer."""

    def __init__(self, message: str, retryable: bool = False, status: int | None = None):
        super().__init__(message)
        self.retryable, self.status = retryable, status


class Silence(Fault):
    """A server has not answered in time: it may hang, or have much to do."""

    def __init__(self, message: str):
        super().__init__(message, retryable=True)


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
                text, status, kind = await answer.text(errors="replace"), answer.status, answer.content_type
        except TimeoutError as error:
            raise Silence(f"no answer to {path} within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Fault(f"{path}: {error or type(error).__name__}", retryable=True) from error
        if status in (401, 403):
            raise Fault(f"the API key is refused: give the one that the server was started with by {self.key_flag}")
        if status >= 400:
            # A request that is wrong stays wrong; 408 and 429 are a server that has too much to do.
            retryable = status >= 500 or status in (408, 429)
            raise Fault(f"{path} answered {status}: {' '.join(text.split())[:300]}", retryable, status)
        try:
            return json.loads(text) if kind == "application/json" else text
        except ValueError as error:
            raise Fault(f"{path}: the answer is no JSON", retryable=True) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
