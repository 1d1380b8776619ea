"""The message of a check that fails, for programs that return it to their test."""

from collections.abc import Callable

from megatron_grpo.utils.errors import GrpoError


def says(check: Callable[[], object]) -> str | None:
    """Return the message with which a check fails; None if it passes."""
    try:
        check()
    except GrpoError as error:
        return str(error)
    return None
