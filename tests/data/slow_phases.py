"""A plug-in for tests: rank SLOW_RANK needs SLOW_SECONDS more for the first of each phase, and makes progress.

The phases and steps are those of SLOW_PHASES, as they begin; "reward" is the first call of the reward function in each
worker. The line "slowed: phase" is printed for each phase.
"""

import contextlib
import os
import time

from megatron_grpo.rewards.registry import register_reward
from megatron_grpo.utils import progress

_left = os.environ["SLOW_PHASES"].split(",") if os.environ["RANK"] == os.environ["SLOW_RANK"] else []


def _slow_down(phase: str) -> None:
    if phase not in _left:
        return
    _left.remove(phase)
    print(f"slowed: {phase}", flush=True)
    end = time.monotonic() + float(os.environ["SLOW_SECONDS"])
    while time.monotonic() < end:
        time.sleep(0.1)
        progress.advance()


@contextlib.contextmanager
def _slow_phase(name: str, _phase=progress.phase):
    with _phase(name):
        _slow_down(name)
        yield


def _slow_step(name: str, _step=progress.step) -> None:
    _step(name)
    _slow_down(name)


progress.phase, progress.step = _slow_phase, _slow_step


@register_reward("even_length")
def even_length(sample):
    if "reward" in _left:
        _left.remove("reward")
        time.sleep(float(os.environ["SLOW_SECONDS"]))
    return float(len(sample.completion) % 2 == 0)
