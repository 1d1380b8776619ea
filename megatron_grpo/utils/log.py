"""Messages of a run on standard output: the logger ``megatron_grpo``, which a program can give more handlers.

A message of the whole run is that of rank 0 (``print_rank_0``). What happened on one rank begins with its number
(``log``). --log-level is for the messages of libraries, and hides none of these.
"""

import logging
import sys

from tqdm import tqdm

from megatron_grpo.utils.launch import rank


class _Terminal(logging.Handler):
    """Writes to standard output, without breaking a progress bar there."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is not None:  # None without a terminal, as under pythonw or redirect_stdout(None)
            tqdm.write(self.format(record))
            sys.stdout.flush()  # output to a pipe is buffered


_LOGGER = logging.getLogger("megatron_grpo")
_LOGGER.propagate = False  # the root's handler writes to standard error
_LOGGER.addHandler(_Terminal())


def log(message: str) -> None:
    """Log ``message``, with the number of this rank in front."""
    _to_handlers(logging.WARNING, f"[rank {rank()}] {message}")


def print_rank_0(message: str) -> None:
    """Log ``message`` on rank 0 only."""
    if rank() == 0:
        _to_handlers(logging.INFO, message)


def _to_handlers(level: int, message: str) -> None:
    """Give a message to every handler, even if a plug-in or a library has switched existing loggers off.

    ``logging.config`` does so by default, and ``logging.disable`` for all.
    """
    _LOGGER.callHandlers(_LOGGER.makeRecord(_LOGGER.name, level, __file__, 0, message, (), None))
