"""Process groups of a second layout beside the policy's."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Iterator

from megatron.core import parallel_state

from megatron_grpo.parallel.initialize import initialize_model_parallel


class Layout:
    """megatron-core's process groups for other sizes than the policy's; they are in force only while it is entered."""

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
        """Within, ``megatron.core.parallel_state`` answers for this layout."""
        outer = _globals()
        vars(parallel_state).update(self._state)
        try:
            yield
        finally:
            self._state = _globals()  # buffers are made, and the virtual stage is set, in use
            vars(parallel_state).update(outer)


def _globals() -> dict[str, object]:
    """The state of megatron-core's module, which has no object for it: what its functions look into."""
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", name)}
