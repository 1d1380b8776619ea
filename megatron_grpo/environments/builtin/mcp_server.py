"""Tools of an MCP server (https://modelcontextprotocol.io), by the package mcp: on stdin and stdout, or behind a URL.

Each environment worker starts one server with its first call, and another one after the server has ended or hangs. To
a URL it connects by the transport "streamable HTTP". All episodes of the worker share the server.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megatron_grpo.environments.tools import ToolError
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import require

_START_LIMIT = 60.0  # s
_ANSWER_LIMIT = 2.0  # s for the answer to a ping; the worker waits longer for a call that it has cancelled
_URLS = ("http://", "https://")


def mcp_tools(
    *command: str, headers: Mapping[str, str] | None = None, env: Mapping[str, str] | None = None
) -> list[Callable]:
    """Return the tools of the server that ``command`` starts, or of the one at a URL, for `register_tools`.

    ``headers`` are those of requests to a URL, such as Authorization. A server that is started gets the environment
    variables ``env``, and of this process only those without secrets that programs need, such as PATH and HOME.
    GrpoError without the package mcp, or if the server does not list its tools.
    """
    require("a tool of an MCP server", "mcp")
    if env is not None and command[0].startswith(_URLS):
        raise GrpoError(
            f"mcp_tools({command[0]!r}, env=..): a server behind a URL has its own environment: leave env out"
        )
    server = _Server(command, headers, env)
    try:
        described = asyncio.run(asyncio.wait_for(server.described(), _START_LIMIT))
    except TimeoutError as error:
        raise GrpoError(f"the MCP server {' '.join(command)} lists no tools within {_START_LIMIT:g} s") from error
    except Exception as error:  # of the program, or of the protocol
        raise GrpoError(f"the MCP server {' '.join(command)} lists no tools: {_first(error)}") from error
    return [_function(server, tool) for tool in described]


def _function(server: "_Server", described: dict[str, Any]) -> Callable:
    """Return a tool of the server as a function that has its name and its JSON schema."""

    name = described["name"]

    async def call(**arguments: Any) -> str:
        return await server.call(name, arguments)

    about = {"name": name, "description": described.get("description") or "", "parameters": described["inputSchema"]}
    call.__name__ = name
    call.schema = {"type": "function", "function": about}  # type: ignore[attr-defined]
    return call


class _Server:
    """The server of one process."""

    def __init__(
        self,
        command: Sequence[str],
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ):
        self._command, self._headers, self._env = command, headers, env
        self._session: asyncio.Future | None = None
        self._lost = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        from mcp import ClientSession

        async with self._streams() as (read, write, *_), ClientSession(read, write) as session:
            await session.initialize()
            yield session

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        program, *arguments = self._command
        if program.startswith(_URLS):
            from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

            headers = dict(self._headers or {})
            async with (
                create_mcp_http_client(headers=headers) as client,
                streamable_http_client(program, http_client=client) as streams,
            ):
                yield streams
        else:
            from mcp import StdioServerParameters, stdio_client

            env = None if self._env is None else dict(self._env)  # in addition to the package's own few
            async with stdio_client(StdioServerParameters(command=program, args=arguments, env=env)) as streams:
                yield streams

    async def described(self) -> list[dict[str, Any]]:
        """Return the protocol's descriptions of all tools, by a server that ends then."""
        from mcp.types import PaginatedRequestParams

        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        async with self._connected() as session:
            while True:
                given = {"params": PaginatedRequestParams(cursor=cursor)} if cursor else {}
                page = _of_protocol(await session.list_tools(**given))
                tools += page["tools"]
                cursor = page.get("nextCursor")
                if not cursor:
                    return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result; ToolError for what the server calls an error."""
        if self._session is None:
            self._session, self._lost = asyncio.get_running_loop().create_future(), asyncio.Event()
            task = asyncio.create_task(self._hold(self._session, self._lost))  # the task that enters also leaves
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        waited, lost = self._session, self._lost
        session = await asyncio.shield(waited)
        try:
            result = _of_protocol(await session.call_tool(name, arguments))
        except (Exception, asyncio.CancelledError) as error:  # cancelled at --environment-timeout
            if await _answers(session):  # the other calls of the session go on
                if isinstance(error, _error_of_server()):
                    raise ToolError(error.error.message) from error
                raise
            lost.set()  # the next call starts the server again
            if self._session is waited:
                self._session = None
            if isinstance(error, asyncio.CancelledError):
                raise
            raise ConnectionError(f"the MCP server {' '.join(self._command)}: {_first(error)}") from error
        texts = [block["text"] if block["type"] == "text" else json.dumps(block) for block in result["content"]]
        if result.get("isError"):
            raise ToolError("\n".join(texts))
        return "\n".join(texts)

    async def _hold(self, ready: asyncio.Future, lost: asyncio.Event) -> None:
        try:
            # A call that is cancelled while the server starts leaves the start to the next call: the limit ends it.
            async with asyncio.timeout(_START_LIMIT) as limit, self._connected() as session:
                limit.reschedule(None)
                ready.set_result(session)
                await lost.wait()
        except Exception as error:
            if not ready.done():
                self._session = None
                ready.set_exception(ConnectionError(f"the MCP server does not start: {_first(error)}"))


async def _answers(session: Any) -> bool:
    """Return whether the server answers a ping; the protocol demands that of every server."""
    try:
        await asyncio.wait_for(session.send_ping(), _ANSWER_LIMIT)
    except Exception:  # the errors of a lost connection are those of the transport
        return False
    return True


def _error_of_server() -> Any:
    """Return the class of JSON-RPC errors: its name differs between versions 1 and 2 of the package."""
    import mcp

    return mcp.MCPError if hasattr(mcp, "MCPError") else mcp.McpError  # type: ignore[attr-defined]


def _of_protocol(answer: Any) -> dict[str, Any]:
    """Return an answer with the protocol's names: Python's names differ between versions 1 and 2 of the package."""
    return answer.model_dump(by_alias=True, mode="json", exclude_none=True)


def _first(error: BaseException) -> str:
    """Return the first line of an error; of a group of errors, that of its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0]
