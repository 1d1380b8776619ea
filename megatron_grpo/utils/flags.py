"""Declaration of a command-line flag: its name, kind, default and help."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST = 2**31 - 1  # largest 32-bit integer
PATH = "path"  # kind of a flag that names a file or a directory
TEXT = "text"  # kind of a flag with a text that may be empty


@dataclass(frozen=True)
class Number:
    """Kind of a flag with a number: its type and range; ``above``: the lowest value itself is excluded."""

    type: Callable[[str], Any]
    low: float
    high: float
    above: bool = False

    def contains(self, value: float) -> bool:
        """Return whether a value lies in the range."""
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        low, high = (str(x) if isinstance(x, int) else f"{x:g}" for x in (self.low, self.high))
        return f"must be greater than {low} and at most {high}" if self.above else f"must lie between {low} and {high}"


def count_to(high: int) -> Number:
    """Return the kind of a flag with a count of at least one and at most ``high``."""
    return Number(int, 0, high, above=True)


COUNT = count_to(MOST)
COUNT_OR_0 = Number(int, 0, MOST)
POSITIVE = Number(float, 0, 1e9, above=True)
NOT_NEGATIVE = Number(float, 0, 1e9)
REAL = Number(float, -1e9, 1e9)
SHARE = Number(float, 0, 1)
POSITIVE_SHARE = Number(float, 0, 1, above=True)
SECONDS = Number(float, 0, 1e7, above=True)
SECONDS_OR_0 = Number(float, 0, 1e7)


class Flag(NamedTuple):
    """A flag with the range of its values.

    A kind is int, float or str; bool for a switch; [str] or [float] for one or more values; a tuple of strings for a
    choice; dict for a JSON object. This project's own flags have a `Number` in place of int and float, PATH in place of
    str where a file or directory is named, and TEXT where an empty text has a meaning. Brackets in a help text: the
    value if the flag is not given.
    """

    name: str  # with hyphens: --foo-alpha
    kind: Any
    default: Any
    help: str
    positive: bool = False  # the value must be greater than 0
    within: tuple[float, float] | None = None  # smallest and largest value

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments, and the parameter of functions that read the flag."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def values(self) -> Any:
        """The kind, with ``positive`` and ``within`` as a `Number`."""
        if self.kind not in (int, float):
            return self.kind
        low, high = self.within or (0 if self.positive else -MOST, MOST)
        return Number(self.kind, low, high, above=self.positive and low == 0)


# A row of a table of flags: a Flag, or a plain tuple of its first four fields.
FlagRow = Flag | tuple[str, Any, Any, str]
