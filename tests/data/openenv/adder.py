"""An OpenEnv server whose environment has one tool; it runs in a virtual environment with openenv."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Adder(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("adder")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(mcp)
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **rest):
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **rest):
        raise ValueError("only tools")

    @property
    def state(self):
        return self._state


app = create_app(Adder, CallToolAction, CallToolObservation, env_name="adder", max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
