"""Declaration of a command-line flag."""

from typing import Any, NamedTuple


class Flag(NamedTuple):
    """A flag with the range of its values.

    A kind is int, float or str; bool for a switch; [str] or [float] for one or more values; a tuple of strings for a
    choice; dict for a JSON object. Brackets in a help text: the value if the flag is not given.
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


# A row of a table of flags: a Flag, or a plain tuple of its first four fields.
FlagRow = Flag | tuple[str, Any, Any, str]
