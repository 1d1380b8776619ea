"""The table of flag names: rows of every system, and the answer to one of their names."""

from collections import defaultdict
from functools import cache

from megatron_grpo.migration import ms_swift, nemo_rl, oumi, roll, slime, trl, verl
from megatron_grpo.migration.rows import Row, System, key_of

MODULES = (ms_swift, verl, trl, slime, roll, nemo_rl, oumi)
_MOST_DOTTED = 3
SYSTEMS: dict[str, System] = {module.SYSTEM.name: module.SYSTEM for module in MODULES}


@cache
def _rows_by_key() -> dict[str, list[tuple[str, Row]]]:
    rows = defaultdict(list)
    for system in SYSTEMS.values():
        for row in system.rows:
            rows[key_of(row.theirs)].append((system.name, row))
    return dict(rows)


def rows_of(system: System) -> dict[str, list[Row]]:
    """Return the rows of a system, and of those whose settings it hands on, by the key of their name."""
    rows = defaultdict(list)
    for owner in (system, *(SYSTEMS[name] for name in system.hands_on)):
        for row in owner.rows:
            rows[key_of(row.theirs)].append(row)
    return dict(rows)


def row_key_of(key: str, rows: dict[str, list[Row]]) -> str | None:
    """Return the key of the rows about a setting: its own, or the longest that ends in * and covers it, or None."""
    if key in rows:
        return key
    covering = (name for name in rows if name.endswith("*") and key.startswith(name[:-1]))
    return max(covering, key=len, default=None)


def answer(name: str) -> str | None:
    """Return one line about a name of another system: our flag, with the change of unit; None if no system has it.

    A name of several words that no system has may be the last part of dotted ones, if these are at most `_MOST_DOTTED`.
    """
    key = key_of(name)
    rows = _rows_by_key().get(key, [])
    if not rows and "." not in key and "_" in key:
        dotted = [pair for other, pairs in _rows_by_key().items() if other.endswith(f".{key}") for pair in pairs]
        rows = dotted if len(dotted) <= _MOST_DOTTED else []
    systems: dict[tuple[str, str], list[str]] = defaultdict(list)
    for system, row in rows:
        theirs = name if key_of(row.theirs) == key else row.theirs
        if system not in systems[theirs, _about(row)]:
            systems[theirs, _about(row)].append(system)
    lines = [f"{_possessive(names)} {theirs} {about}" for (theirs, about), names in systems.items()]
    return "; ".join(lines) or None


def _possessive(names: list[str]) -> str:
    return " and ".join(f"{name}'s" for name in names)


def _about(row: Row) -> str:
    """Return the predicate of the sentence about a row: "is --lr here (...)" or "has no counterpart: ..."."""
    change = row.convert.words if row.convert else ""
    if row.ours:
        details = "; ".join(text for text in (change, row.note) if text)
        return f"is {row.ours} here" + (f" ({details})" if details else "")
    return f"has no counterpart: {row.note or change}"
