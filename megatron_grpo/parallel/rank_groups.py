"""Process groups of a second parallel configuration beside the policy's."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Iterator

from megatron.core import parallel_state

from megatron_grpo.parallel.initialize import initialize_model_parallel


class RankGroups:
    """megatron-core's process groups for other sizes than the policy's, in force only within `entered`."""

    def __init__(self, args: Namespace):
        outer = _globals()
        vars(parallel_state).update(dict.fromkeys(outer), _HYBRID_DP_CP_GROUPS={})
        try:
            initialize_model_parallel(args)
        finally:
            self._state = _globals()
            vars(parallel_state).update(outer)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which ``megatron.core.parallel_state`` returns these groups."""
        outer = _globals()
        vars(parallel_state).update(self._state)
        try:
            yield
        finally:
            self._state = _globals()  # buffers are made, and the virtual stage is set, in use
            vars(parallel_state).update(outer)


def _globals() -> dict[str, object]:
    """The state of megatron-core's module, which has no object for it: its module-level variables."""
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", name)}
