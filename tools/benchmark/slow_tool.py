"""Environments that answer every turn with the same words: after a second (slow_tool), or at once (quick_tool)."""

import asyncio

from megatron_grpo.environments.registry import Environment, Reply, Turn, register_environment


@register_environment("quick_tool")
class QuickTool(Environment):
    """A tool that takes no time; like other tools, its answers are taken when they come."""

    seconds = 0.0

    async def step(self, turn: Turn) -> Reply:
        """Answer a turn."""
        await asyncio.sleep(self.seconds)
        return Reply([{"role": "user", "content": "Go on."}], reward=float(sum(turn.token_ids) % 2))


@register_environment("slow_tool")
class SlowTool(QuickTool):
    """A tool that takes a second."""

    seconds = 1.0
