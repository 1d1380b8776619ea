"""Python for the policy: one tool, ``python``, which runs a program in the sandbox of the reward function ``code``."""

import asyncio
import functools
import threading

from megatron_grpo.environments import threads
from megatron_grpo.environments.registry import register_tools
from megatron_grpo.environments.tools import ToolError
from megatron_grpo.rewards.sandbox.sandbox import Limits, Sandbox, sandbox

_LONGEST = 4000  # characters of the output
_of_thread = threading.local()


async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. Every call starts a new one: nothing stays from the call before.
    """
    result = await asyncio.get_running_loop().run_in_executor(_sandboxes(), _run, code)
    if "fault" in result:
        raise ToolError(result["fault"])
    printed = result["stdout"]
    return printed if len(printed) <= _LONGEST else f"{printed[:_LONGEST]} ... ({len(printed)} characters)"


@functools.cache
def _sandboxes() -> threads.Threads:
    """Return the threads that run programs, each in a sandbox of its own (--environment-sandboxes)."""
    kind = sandbox(strict=True).kind
    return threads.Threads(threads.sizes.sandboxes, initializer=lambda: setattr(_of_thread, "box", Sandbox(kind)))


def _run(code: str) -> dict[str, str]:
    (result,) = _of_thread.box.run(code, [{"stdin": ""}], Limits())
    return result


register_tools("python", [python])
