"""Routing of rows to reward functions and to teachers by their column data_source."""

from collections.abc import Collection
from typing import Any

from megatron_grpo.utils.errors import GrpoError


def reward_routes(routing: list[str] | None, functions: list[str]) -> dict[str, list[str]]:
    """Parse --reward-routing to {source: names of reward functions}.

    Raises GrpoError for a value that is not SOURCE=NAME,NAME or has a name that is not in --reward-funcs.
    """
    routes: dict[str, list[str]] = {}
    for word in routing or []:
        source, equals, listed = word.partition("=")
        names = listed.split(",")
        if not source or not equals or source in routes:
            raise GrpoError(f"--reward-routing {word}: expected SOURCE=NAME,NAME, each source once")
        unknown = [name for name in names if name not in functions]
        if unknown:
            raise GrpoError(
                f'--reward-routing {word}: "{unknown[0]}" is not among --reward-funcs {" ".join(functions)}'
            )
        routes[source] = names
    unused = [name for name in functions if routes and not any(name in names for names in routes.values())]
    if unused:
        raise GrpoError(
            f"--reward-routing sends no source to {unused[0]}: leave it out of --reward-funcs, or route a source to it"
        )
    return routes


def teacher_routes(flag: str, words: list[str] | None) -> dict[str | None, str]:
    """Parse --teacher-load-hf or --teacher-server to {source: directory or URL}; of one teacher the source is None.

    Raises GrpoError for several teachers that are not SOURCE=PLACE, each source once.
    """
    routes: dict[str | None, str] = {}
    for word in words or []:
        source, equals, place = word.partition("=")
        named = bool(source and equals and place) and "/" not in source
        key = source if named else None
        if key in routes or (not named and len(words or []) > 1):
            raise GrpoError(
                f"{flag} {word}: with several teachers give SOURCE={'URL' if 'server' in flag else 'DIR'}, "
                "each data_source once"
            )
        routes[key] = place if named else word
    return routes


def check_source(flag: str, routes: Collection[str], row: dict[str, Any]) -> None:
    """Refuse a row with a "data_source" that has no route among the ``routes`` of a flag; none: every row passes."""
    source = row.get("data_source")
    if routes and not (isinstance(source, str) and source in routes):
        raise GrpoError(f'{flag} has no "data_source" {source!r:.200}, only {", ".join(routes)}')
