"""The Countdown numbers game with several tries: a wrong answer gets a hint, and the policy tries again."""

from collections.abc import Mapping
from typing import Any

from megatron_grpo.environments.registry import Environment, Reply, Turn, register_environment
from megatron_grpo.rewards.builtin.countdown import countdown
from megatron_grpo.rewards.registry import Sample


@register_environment("countdown_game")
class CountdownGame(Environment):
    """Rows as of the reward function ``countdown``: "nums" and "target". The reward is 1 for a right answer."""

    immediate = True

    def reset(self, row: Mapping[str, Any]) -> None:
        self._row = dict(row)

    def step(self, turn: Turn) -> Reply:
        if countdown(Sample("", turn.text, self._row)):
            return Reply(reward=1.0, done=True)
        numbers = ", ".join(map(str, self._row["nums"]))
        hint = f"That is not {self._row['target']} from the numbers {numbers}, each used once. Try again."
        return Reply([{"role": "user", "content": hint}], reward=0.0)
