"""Generative judges: the request about a completion, and the score in the answer.

Without a plug-in, --reward-model-template is the template of the request and --reward-model-pattern finds the score in
the answer. A custom judge is a class in a file of --external-plugins; --reward-model-plugin gives its name:

    from megatron_grpo.rewards.reward_models.judge import register_judge

    @register_judge("helpful")
    class Helpful:
        def request(self, sample):  # body of /v1/chat/completions without "model"
            return {"messages": [{"role": "user", "content": f"Is this helpful? {sample.completion}"}], "max_tokens": 1}

        def score(self, sample, answer):
            return 1.0 if answer.strip() == "yes" else 0.0
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

import jinja2
import jinja2.meta
import jinja2.sandbox

from megatron_grpo.rewards.registry import Sample
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import check_known

DEFAULT_PATTERN = r"Score:\s*(-?\d+(?:\.\d+)?)"
_FIELDS = ("prompt", "completion", "row")
_JINJA = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
_judges: dict[str, Callable[[], "Judge"]] = {}


class Judge(Protocol):
    """Interface of judges: a sample becomes a chat request, and the text of the answer becomes a score."""

    def request(self, sample: Sample) -> dict[str, Any]:
        """Return the body of a request to /v1/chat/completions, without "model"."""
        ...

    def score(self, sample: Sample, answer: str) -> float | None:
        """Return the score of the answer, or None for "not scored"; an exception is a failure of this sample."""
        ...


class NoScore(Exception):
    """An answer of a judge without a score."""


class TemplateJudge:
    """A judge with a Jinja template of the request (prompt, completion, row); the score is the pattern's last match."""

    def __init__(self, template: str, pattern: str, max_tokens: int):
        self._template, self._pattern, self._max_tokens = _JINJA.from_string(template), re.compile(pattern), max_tokens

    def request(self, sample: Sample) -> dict[str, Any]:
        try:
            text = self._template.render(prompt=sample.prompt, completion=sample.completion, row=sample.row)
        except jinja2.UndefinedError as error:
            raise GrpoError(f"--reward-model-template: the row lacks a value of the template: {error}") from error
        return {
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
        }

    def score(self, sample: Sample, answer: str) -> float:
        found = self._pattern.findall(answer)
        try:
            return float(found[-1])
        except (IndexError, ValueError) as error:
            what = f"{found[-1]!r} is not a number" if found else f"no match of {self._pattern.pattern!r}"
            raise NoScore(f"{what} in the judge's answer, which ends in {answer[-100:]!r}") from error


def register_judge(name: str) -> Callable[[Callable[[], Judge]], Callable[[], Judge]]:
    """Decorator: make a class available as ``--reward-model-plugin MODEL=name``; each name can be registered once."""

    def register(judge: Callable[[], Judge]) -> Callable[[], Judge]:
        if name in _judges:
            raise GrpoError(
                f'the judge name "{name}" is already registered by {_judges[name].__module__}: choose another name'
            )
        _judges[name] = judge
        return judge

    return register


def get_judge(name: str) -> Judge:
    """Return an instance of the judge with this name; GrpoError with all known names if there is none."""
    cure = "Register it by @register_judge in a file of --external-plugins"
    check_known("--reward-model-plugin: unknown judge", name, _judges, cure)
    return _judges[name]()


def check_template(text: str) -> None:
    """Check a template; GrpoError for a syntax error, an unknown variable, or a missing {{ completion }}."""
    try:
        names = jinja2.meta.find_undeclared_variables(_JINJA.parse(text))
    except jinja2.TemplateSyntaxError as error:
        raise GrpoError(f"line {error.lineno} is not valid Jinja: {error.message}") from error
    unknown = sorted(names - set(_FIELDS))
    if unknown:
        raise GrpoError(f"unknown variable {unknown[0]}: the variables are {', '.join(_FIELDS)}")
    if "completion" not in names:
        raise GrpoError("the template does not contain the completion: add {{ completion }}")


def check_pattern(pattern: str) -> None:
    """Check a pattern; GrpoError if it is not a regular expression, or does not have exactly one group."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise GrpoError(f"{pattern!r} is not a regular expression: {error}") from error
    if groups != 1:
        raise GrpoError(
            f"{pattern!r} has {groups} groups: put only the score in a group (...), and use (?:...) elsewhere"
        )
