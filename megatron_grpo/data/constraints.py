"""Compilation of a constraint of completions with the libraries that vLLM uses, so that start-up finds one that fails.

vLLM takes xgrammar, and llguidance for what xgrammar refuses. A constraint is valid if one of them compiles it.
"""

import functools
import importlib.util
import json
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 64  # objects and arrays in a JSON schema: vLLM's limit


def compile_error(kind: str, content: Any) -> str | None:
    """Return the reason why vLLM cannot compile a constraint; None if it can, or if neither library is installed.

    ``kind`` is "regex", "json" (a schema, or its text) or "grammar" (Lark or EBNF); any list of choices is valid.
    """
    if kind == "choice":
        return None
    return _compile_error(kind, content if isinstance(content, str) else json.dumps(content))


@functools.lru_cache(maxsize=4096)  # the rows of a data set share few constraints
def _compile_error(kind: str, text: str) -> str | None:
    if "\0" in text:
        return "it has a NUL character"
    if kind == "json" and _depth(json.loads(text)) > _MAX_DEPTH:
        return f"the schema is nested more than {_MAX_DEPTH} levels deep"
    errors = []
    for library, check in (("llguidance", _check_llguidance), ("xgrammar", _check_xgrammar)):  # the faster one first
        if importlib.util.find_spec(library) is not None:
            error = check(kind, text)
            if error is None:
                return None
            errors.append(f"{library}: {' '.join(error.split())}")
    return "; ".join(errors) or None


def _check_llguidance(kind: str, text: str) -> str | None:
    from llguidance import LLMatcher  # comes with vLLM; only constraints need it

    build: dict[str, Callable[[str], str]] = {
        "regex": LLMatcher.grammar_from_regex,
        "json": LLMatcher.grammar_from_json_schema,
        "grammar": LLMatcher.grammar_from_lark,
    }
    return LLMatcher.validate_grammar(build[kind](text)) or None


def _check_xgrammar(kind: str, text: str) -> str | None:
    from xgrammar import Grammar  # comes with vLLM; only constraints need it

    build: dict[str, Callable[[str], object]] = {
        "regex": Grammar.from_regex,
        "json": Grammar.from_json_schema,
        "grammar": Grammar.from_ebnf,
    }
    try:
        build[kind](text)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return None


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(_depth, inside), default=0)
