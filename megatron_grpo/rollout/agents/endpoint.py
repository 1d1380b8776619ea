"""An OpenAI-compatible HTTP endpoint on loopback, whose calls the rollout answers.

It has /v1/chat/completions, /v1/completions (both also as streams) and /v1/models. It runs in a thread of the engine's
lead rank. A session has a secret part of the URL, and every run of its program one more:
http://127.0.0.1:PORT/SESSION/RUN/v1. Calls wait in a queue until the rollout takes them, however long an engine sleeps.
"""

import asyncio
import json
import queue
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megatron_grpo.utils.errors import GrpoError

_LARGEST = 2**26  # bytes of a request


@dataclass(eq=False)
class Call:
    """A request of an agent program, which waits for `Endpoint.answer` or `Endpoint.refuse`."""

    session: str
    run: str
    body: dict[str, Any]
    chat: bool  # /v1/chat/completions, else /v1/completions
    future: asyncio.Future = field(repr=False)

    @property
    def abandoned(self) -> bool:
        """Whether the client has gone."""
        return self.future.cancelled()


class Endpoint:
    """The server; its methods are called from the rollout's thread."""

    def __init__(self) -> None:
        self._sessions: set[str] = set()
        self._calls: queue.Queue[Call] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._address: str | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="agents' endpoint", daemon=True)
        self._thread.start()
        started.wait()
        if self._address is None:
            raise GrpoError("--agent: no port of 127.0.0.1 can be opened for the agents' endpoint")

    def open(self) -> tuple[str, str]:
        """Return (session, URL without the run's part and /v1) of a new session."""
        session = secrets.token_urlsafe(18)
        self._sessions.add(session)
        return session, f"{self._address}/{session}"

    def close(self, session: str) -> None:
        """End a session: its later calls are refused."""
        self._sessions.discard(session)

    def calls(self, wait: float = 0.0) -> list[Call]:
        """Return the calls that have come, after up to ``wait`` seconds if there is none."""
        found = []
        try:
            found.append(self._calls.get(timeout=wait) if wait else self._calls.get_nowait())
            while True:
                found.append(self._calls.get_nowait())
        except queue.Empty:
            return found

    def answer(self, call: Call, choice: dict[str, Any], usage: tuple[int, int]) -> None:
        """Answer a call with OpenAI's ``choice``; ``usage`` are the tokens of prompt and answer."""
        self._loop.call_soon_threadsafe(_set, call.future, (200, _body(call, choice, usage)))

    def refuse(self, call: Call, message: str, code: str = "invalid_request_error", status: int = 400) -> None:
        """Answer a call with an error."""
        error = {"error": {"message": message, "type": code, "code": code, "param": None}}
        self._loop.call_soon_threadsafe(_set, call.future, (status, error))

    def shut_down(self) -> None:
        """Close the connections and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            self._thread.join()

    async def _stop(self) -> None:
        await self._runner.cleanup()
        self._loop.stop()

    # ---- the server's thread

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
        finally:
            started.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(client_max_size=_LARGEST)
        at = "/{session}/{run}/v1"
        app.router.add_post(f"{at}/chat/completions", self._take)
        app.router.add_post(f"{at}/completions", self._take)
        app.router.add_get(f"{at}/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        session, run = request.match_info["session"], request.match_info["run"]
        if session not in self._sessions:
            error = {"message": "this session has ended", "type": "not_found", "code": "not_found"}
            return web.json_response({"error": error}, status=404)
        try:
            body = await request.json()
        except ValueError as broken:
            return web.json_response({"error": {"message": f"no JSON: {broken}", "type": "invalid"}}, status=400)
        if not isinstance(body, dict):
            return web.json_response({"error": {"message": "not a JSON object", "type": "invalid"}}, status=400)
        call = Call(session, run, body, request.path.endswith("/chat/completions"), self._loop.create_future())
        self._calls.put(call)
        status, answer = await call.future
        if status == 200 and body.get("stream"):
            return await _stream(request, call, answer)
        return web.json_response(answer, status=status)


def _set(future: asyncio.Future, value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _body(call: Call, choice: dict[str, Any], usage: tuple[int, int]) -> dict[str, Any]:
    kind = "chat.completion" if call.chat else "text_completion"
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    head = {"id": f"call-{secrets.token_hex(8)}", "object": kind, "created": int(time.time())}
    return head | {"model": call.body.get("model", "policy"), "choices": [choice], "usage": counts}


async def _stream(request: web.Request, call: Call, answer: dict[str, Any]) -> web.StreamResponse:
    """Send a whole answer in the form of a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    choice = answer["choices"][0]
    head = {key: answer[key] for key in ("id", "created", "model")}
    if call.chat:
        head["object"] = "chat.completion.chunk"
        calls = [{"index": number} | one for number, one in enumerate(choice["message"].get("tool_calls") or ())]
        delta = {"role": "assistant", "content": choice["message"]["content"]} | (
            {"tool_calls": calls} if calls else {}
        )
        parts = [{"index": 0, "delta": delta, "finish_reason": None}]
        parts += [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]
    else:
        head["object"], parts = "text_completion", [choice]
    chunks = [head | {"choices": [part]} for part in parts]
    if (call.body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": answer["usage"]})
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
