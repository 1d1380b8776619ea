"""Python for the policy: one tool, ``python``, which runs a program in the sandbox of the reward function ``code``."""

import threading

from megatron_grpo.environments.registry import register_tools
from megatron_grpo.environments.tools import ToolError
from megatron_grpo.rewards.sandbox.sandbox import Limits, sandbox

_LONGEST = 4000  # characters of the output
_lock = threading.Lock()  # the sandbox runs one program at a time


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. Every call starts a new one: nothing stays from the call before.
    """
    with _lock:
        (result,) = sandbox(strict=True).run(code, [{"stdin": ""}], Limits())
    if "fault" in result:
        raise ToolError(result["fault"])
    printed = result["stdout"]
    return printed if len(printed) <= _LONGEST else f"{printed[:_LONGEST]} ... ({len(printed)} characters)"


register_tools("python", [python])
