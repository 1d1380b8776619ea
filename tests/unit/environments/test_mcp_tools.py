"""Tools of an MCP server of the package mcp, which the tests start: results, mistakes, and a server that ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from megatron_grpo.environments.builtin.mcp_server import mcp_tools
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.environments.registry import ToolCall, Turn, tool_schema
from megatron_grpo.environments.tools import ToolEnvironment
from megatron_grpo.utils.errors import GrpoError

MCP = next((package.version for package in metadata.distributions(name="mcp")), "0")  # its import takes 3 s
pytestmark = pytest.mark.skipif(int(MCP.partition(".")[0]) < 2, reason="needs mcp 2")

SERVER = """
import os, sys
from mcp import MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def process() -> str:
    return str(os.getpid())

@server.tool()
def authorization(context: Context) -> str:
    request = context.request_context.request
    return request.headers["authorization"] if request else ""

@server.tool()
def variables() -> str:
    return " ".join(sorted(os.environ))

@server.tool()
def fail() -> str:
    raise ToolError("no such page")

@server.tool()
def refuse() -> str:
    raise MCPError(-32602, "no city of this name")

@server.tool()
async def hang(fifo: str) -> str:
    return open(fifo).read()  # in the event loop: the server answers nothing

if len(sys.argv) > 1:
    server.run(transport="streamable-http", port=int(sys.argv[1]))
else:
    server.run()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return str(file)


@pytest.fixture(scope="module")
def tools(server):
    return mcp_tools(sys.executable, server)


def test_schemas(tools):
    schemas = [tool_schema(tool) for tool in tools]
    assert [schema["function"]["name"] for schema in schemas] == [
        "add",
        "process",
        "authorization",
        "variables",
        "fail",
        "refuse",
        "hang",
    ]
    add = schemas[0]["function"]
    assert add["description"] == "Add two numbers." and add["parameters"]["required"] == ["a", "b"]
    assert add["parameters"]["properties"]["a"]["type"] == "integer"


def test_calls(tools):
    environment = ToolEnvironment(tools)

    async def said(*calls):
        turn = Turn("", [ToolCall(name, arguments, str(i)) for i, (name, arguments) in enumerate(calls)])
        return [message["content"] for message in (await environment.step(turn)).messages]

    async def all_calls():
        assert await said(("add", {"a": 1984, "b": 2267})) == ["4251"]
        wrong, failed = await said(("add", {"a": "x", "b": 1}), ("fail", {}))
        assert wrong.startswith("error: ") and "valid integer" in wrong
        assert failed.startswith("error: ") and "no such page" in failed
        (first,) = await said(("process", {}))
        # A JSON-RPC error is an answer (https://www.jsonrpc.org/specification#error_object), no lost connection.
        refused, again = await said(("refuse", {}), ("process", {}))
        assert refused == "error: no city of this name"
        assert first == again and int(first) != os.getpid()  # one server for all calls
        os.kill(int(first), signal.SIGKILL)
        with pytest.raises(ConnectionError, match=r"the MCP server .*server\.py"):
            await said(("process", {}))
        (other,) = await said(("process", {}))  # the retry of the pool
        assert int(other) != int(first)
        return int(other)

    process = asyncio.run(asyncio.wait_for(all_calls(), 60))
    assert not Path(f"/proc/{process}").exists()  # it has ended with the loop


def answer_of(pool):
    while not (answers := pool.poll(1.0)):
        pass
    return answers[0]


@pytest.mark.slow
def test_a_server_that_hangs_is_replaced(server, tmp_path):
    """A call blocks the server's event loop until its file is opened, which nothing does: the next episode goes on."""
    os.mkfifo(tmp_path / "fifo")
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from megatron_grpo.environments.builtin import mcp_server\n"
        "from megatron_grpo.environments.registry import register_tools\n"
        "mcp_server._ANSWER_LIMIT = 0.5\n"
        f"tools = mcp_server.mcp_tools({sys.executable!r}, {server!r})\n"
        "register_tools('mcp_that_hangs', tools)\n"
    )
    pool = EnvironmentPool(["mcp_that_hangs"], [plugin], timeout=10.0, retries=0)
    try:
        processes = []
        for key in range(2):
            pool.begin(key, "mcp_that_hangs", {})
            assert answer_of(pool).error is None
            pool.step(key, Turn("", [ToolCall("process", {}, "0")]))
            answer = answer_of(pool)
            assert answer.error is None
            processes.append(answer.messages[0]["content"])
            if not key:
                pool.step(key, Turn("", [ToolCall("hang", {"fifo": str(tmp_path / "fifo")}, "1")]))
                assert "took longer than 10 s" in answer_of(pool).error
    finally:
        pool.close()
    assert processes[0] != processes[1]


@pytest.mark.slow
def test_a_server_gets_no_keys(server, monkeypatch):
    """The specification's client passes on what POSIX programs need; the user adds what the server needs."""
    monkeypatch.setenv("SHOP_API_KEY", "secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    expected = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"} & os.environ.keys()

    def variables(**given):
        tools = mcp_tools(sys.executable, server, **given)
        turn = Turn("", [ToolCall("variables", {}, "0")])
        (message,) = asyncio.run(asyncio.wait_for(ToolEnvironment(tools).step(turn), 60)).messages
        return {name for name in message["content"].split() if name != "LC_CTYPE"}  # Python's own

    assert variables() == expected
    assert variables(env={"SHOP_API_KEY": "x"}) == expected | {"SHOP_API_KEY"}
    with pytest.raises(GrpoError, match="a server behind a URL has its own environment: leave env out"):
        mcp_tools("https://shop.example/mcp", env={})


@pytest.mark.slow
def test_a_server_behind_a_url(server):
    """Its calls, and what is said while it does not run; a server that has started again is found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(GrpoError, match=f"the MCP server {url} lists no tools"):
        mcp_tools(url)

    def start():
        process = subprocess.Popen([sys.executable, server, str(port)])
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    return process
            assert process.poll() is None
            time.sleep(0.01)

    async def call(environment, name, arguments):
        turn = Turn("", [ToolCall(name, arguments, "0")])
        (message,) = (await asyncio.wait_for(environment.step(turn), 60)).messages
        return message["content"]

    async def all_calls(first):
        environment = ToolEnvironment(mcp)
        assert await call(environment, "add", {"a": 1984, "b": 2267}) == "4251"
        assert "no such page" in await call(environment, "fail", {})
        assert await call(environment, "authorization", {}) == "Bearer x"
        assert int(await call(environment, "process", {})) == first.pid
        first.kill()
        first.wait()
        with pytest.raises(ConnectionError, match="the MCP server"):
            await call(environment, "process", {})
        other = start()
        try:
            assert int(await call(environment, "process", {})) == other.pid
        finally:
            other.kill()
            other.wait()

    first = start()
    try:
        mcp = mcp_tools(url, headers={"Authorization": "Bearer x"})
        asyncio.run(all_calls(first))
    finally:
        first.kill()
        first.wait()


@pytest.mark.slow
def test_a_worker_ends_its_server(server, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from megatron_grpo.environments.builtin.mcp_server import mcp_tools\n"
        "from megatron_grpo.environments.registry import register_tools\n"
        f"register_tools('mcp_of_test', mcp_tools({sys.executable!r}, {server!r}))\n"
    )
    pool = EnvironmentPool(["mcp_of_test"], [plugin])

    pool.begin(0, "mcp_of_test", {})
    assert answer_of(pool).error is None
    pool.step(0, Turn("", [ToolCall("process", {}, "0")]))
    process = Path("/proc") / answer_of(pool).messages[0]["content"]
    assert process.exists()
    pool.close()
    deadline = time.monotonic() + 60
    while process.exists():  # its input has ended
        assert time.monotonic() < deadline
        time.sleep(0.01)


PAGES = """
import json, sys

def tool(name):
    return {"name": name, "inputSchema": {"type": "object"}}

pages = {None: {"tools": [tool("a")], "nextCursor": "x"}, "x": {"tools": [tool("b"), tool("c")], "nextCursor": "y"}}
pages["y"] = {"tools": [tool("d")]}
for line in sys.stdin:
    asked = json.loads(line)
    result = {}
    if asked["method"] == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "pages", "version": "1"}
    elif asked["method"] == "tools/list":
        result = pages[(asked.get("params") or {}).get("cursor")]
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def test_all_pages_of_tools():
    """A server of the specification's messages, without the package, lists its tools in three pages."""
    assert [tool.__name__ for tool in mcp_tools(sys.executable, "-c", PAGES)] == ["a", "b", "c", "d"]


def test_a_program_that_is_no_server_is_refused():
    with pytest.raises(GrpoError, match=r"the MCP server /bin/false lists no tools"):
        mcp_tools("/bin/false")
    with pytest.raises(GrpoError, match=r"the MCP server /no/such/program lists no tools: FileNotFoundError"):
        mcp_tools("/no/such/program")
