"""The HTTP client with long lines: a server's event is one line, whatever its length."""

import asyncio
import json

import pytest
from aiohttp import web

from megatron_grpo.utils import http_client
from megatron_grpo.utils.http_client import Client, Fault


async def events_of(lines):
    """Return what the client reads of a local server that sends these lines in pieces."""

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in lines:
            for begin in range(0, len(line), 100_000):
                await response.write(line[begin : begin + 100_000])
        return response

    application = web.Application()
    application.router.add_post("/stream", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    client = Client(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", None)
    try:
        return [event async for event in client.events("/stream", {})]
    finally:
        await client.close()
        await runner.cleanup()


def test_an_event_of_megabytes_is_read():
    """The first event of a continued request repeats its prompt: 80,000 token ids are above aiohttp's 512 KiB."""
    prompts = [list(range(100_000, 100_000 + count)) for count in (80_000, 1_000_000, 3)]
    lines = [f"data: {json.dumps({'prompt_token_ids': prompt})}\n\n".encode() for prompt in prompts]
    assert len(lines[1]) > 7 * 2**20
    read = asyncio.run(asyncio.wait_for(events_of([*lines, b"data: [DONE]\n\n"]), 60))
    assert [event["prompt_token_ids"] for event in read] == prompts


def test_a_longer_line_is_a_fault_of_the_request(monkeypatch):
    monkeypatch.setattr(http_client, "_LONGEST_LINE", 2**20)
    with pytest.raises(Fault, match="/stream: "):
        asyncio.run(asyncio.wait_for(events_of([b'data: "' + b"x" * 2**21 + b'"\n\n']), 60))
