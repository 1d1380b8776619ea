"""Process groups of a second parallel configuration beside the policy's."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Iterator

from megatron.core import parallel_state

from megatron_grpo.parallel.initialize import initialize_model_parallel


class RankGroups:
    """megatron-core's process groups for other parallel sizes than the policy's, active only within `entered`."""

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
        """Activate these groups: within the context ``megatron.core.parallel_state`` returns them."""
        outer = _globals()
        vars(parallel_state).update(self._state)
        try:
            yield
        finally:
            self._state = _globals()  # a forward pass creates buffers and sets the virtual stage
            vars(parallel_state).update(outer)


def _globals() -> dict[str, object]:
    """Return the module-level variables that hold the state of ``megatron.core.parallel_state``."""
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", name)}
