"""Messages of a run on standard output: the logger ``megatron_grpo``, which a program can give more handlers.

A message of the whole run is that of rank 0 (``print_rank_0``). What happened on one rank begins with its number
(``log``). --log-level is for the messages of libraries, and hides none of these.
"""

import logging
import os
import sys

from tqdm import tqdm


def rank() -> int:
    """Return the rank that torchrun gave this process, 0 without torchrun; needs no process group."""
    return int(os.environ.get("RANK", "0"))


class _Terminal(logging.Handler):
    """Writes to standard output, without breaking a progress bar there."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is not None:  # None without a terminal, as under pythonw or redirect_stdout(None)
            tqdm.write(self.format(record))
            sys.stdout.flush()  # output to a pipe is buffered


_LOGGER = logging.getLogger("megatron_grpo")
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False  # the root's handler writes to standard error
_LOGGER.addHandler(_Terminal())


def log(message: str) -> None:
    """Log ``message``, with the number of this rank in front."""
    _LOGGER.warning(f"[rank {rank()}] {message}")


def print_rank_0(message: str) -> None:
    """Log ``message`` on rank 0 only."""
    if rank() == 0:
        _LOGGER.info(message)
