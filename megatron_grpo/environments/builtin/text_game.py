"""A small game of words with states: find the key in a house of nine rooms, and open the chest with it."""

import random
from collections.abc import Mapping
from typing import Any

from megatron_grpo.environments.registry import Environment, Reply, Turn, register_environment

_SIZE = 3
_WAYS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}


@register_environment("text_game")
class TextGame(Environment):
    """The row's "seed" places key, chest and player. A turn's last word is the command.

    Commands are north, south, west, east, take and open. The reward is 0.2 for the key, and 0.8 for the chest.
    """

    immediate = True

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        rooms = [[x, y] for x in range(_SIZE) for y in range(_SIZE)]
        self._at, self._key, self._chest = random.Random(str(row.get("seed", 0))).sample(rooms, 3)
        self._has_key = False
        return [{"role": "user", "content": self._look()}]

    def step(self, turn: Turn) -> Reply:
        command = (turn.text.lower().split() or [""])[-1].strip(".!\"'")
        reward = 0.0
        if command in _WAYS:
            x, y = (place + way for place, way in zip(self._at, _WAYS[command], strict=True))
            if 0 <= x < _SIZE and 0 <= y < _SIZE:
                self._at = [x, y]
        elif command == "take" and self._at == self._key and not self._has_key:
            self._has_key, reward = True, 0.2
        elif command == "open" and self._at == self._chest and self._has_key:
            return Reply(reward=0.8, done=True)
        return Reply([{"role": "user", "content": self._look()}], reward=reward)

    def snapshot(self) -> dict[str, Any]:
        """Return the state."""
        return dict(vars(self))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        vars(self).update(state)

    def _look(self) -> str:
        x, y = self._at
        ways = [name for name, (a, b) in _WAYS.items() if 0 <= x + a < _SIZE and 0 <= y + b < _SIZE]
        seen = ["a key"] * (self._at == self._key and not self._has_key) + ["a chest"] * (self._at == self._chest)
        holds = " You have the key." if self._has_key else ""
        return f"You see {' and '.join(seen) or 'nothing'}.{holds} Ways: {', '.join(ways)}."
