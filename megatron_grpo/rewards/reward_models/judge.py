"""What a generative judge is asked about a completion, and how its answer becomes a score.

Without a plugin --reward-model-template says what it is asked, and --reward-model-pattern where its score stands. A
judge of one's own is a class in a file of --external-plugins, named by --reward-model-plugin:

    from megatron_grpo.rewards.reward_models.judge import register_judge

    @register_judge("helpful")
    class Helpful:
        def request(self, sample):  # the body of /v1/chat/completions, but for the model's name
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

DEFAULT_PATTERN = r"Score:\s*(-?\d+(?:\.\d+)?)"
_FIELDS = ("prompt", "completion", "row")
_JINJA = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
_judges: dict[str, Callable[[], "Judge"]] = {}


class Judge(Protocol):
    """Turns a sample into a chat request, and the answer's text into a score."""

    def request(self, sample: Sample) -> dict[str, Any]:
        """The body of a request to /v1/chat/completions, but for the model's name."""
        ...

    def score(self, sample: Sample, answer: str) -> float | None:
        """The score that the answer gives, None for "not mine"; an exception is a failure of this sample."""
        ...


class NoScore(Exception):
    """A judge's answer in which there is no score."""


class TemplateJudge:
    """Asks by a Jinja template (prompt, completion, row) and takes the last match of a pattern with one group."""

    def __init__(self, template: str, pattern: str, max_tokens: int):
        self._template, self._pattern, self._max_tokens = _JINJA.from_string(template), re.compile(pattern), max_tokens

    def request(self, sample: Sample) -> dict[str, Any]:
        try:
            text = self._template.render(prompt=sample.prompt, completion=sample.completion, row=sample.row)
        except jinja2.UndefinedError as error:
            raise GrpoError(f"the template of --reward-model-template asks for what the row lacks: {error}") from error
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
            what = f"{found[-1]!r} is no number" if found else f"nothing matches {self._pattern.pattern!r}"
            raise NoScore(f"{what} in the judge's answer, which ends in {answer[-100:]!r}") from error


def register_judge(name: str) -> Callable[[Callable[[], Judge]], Callable[[], Judge]]:
    """Decorator that makes a class available as ``--reward-model-plugin MODEL=name``; a name is taken only once."""

    def register(judge: Callable[[], Judge]) -> Callable[[], Judge]:
        if name in _judges:
            raise GrpoError(f'the judge name "{name}" is taken by {_judges[name].__module__}; choose another')
        _judges[name] = judge
        return judge

    return register


def get_judge(name: str) -> Judge:
    """The judge of this name; GrpoError with those there are."""
    if name not in _judges:
        known = ", ".join(sorted(_judges)) or "none"
        raise GrpoError(
            f'--reward-model-plugin: no judge "{name}", only {known}: register it by @register_judge in a file of '
            "--external-plugins"
        )
    return _judges[name]()


def check_template(text: str) -> None:
    """GrpoError for a template that cannot be read, asks for what there is not, or leaves the completion out."""
    try:
        names = jinja2.meta.find_undeclared_variables(_JINJA.parse(text))
    except jinja2.TemplateSyntaxError as error:
        raise GrpoError(f"line {error.lineno} is not Jinja: {error.message}") from error
    unknown = sorted(names - set(_FIELDS))
    if unknown:
        raise GrpoError(f"it asks for {unknown[0]}, and there are only {', '.join(_FIELDS)}")
    if "completion" not in names:
        raise GrpoError("it does not show the completion: add {{ completion }}")


def check_pattern(pattern: str) -> None:
    """GrpoError for a pattern that cannot be read, or has not one group."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise GrpoError(f"{pattern!r} is no regular expression: {error}") from error
    if groups != 1:
        raise GrpoError(f"{pattern!r} has {groups} groups: put the score, and only that, in one (...); (?:...) groups")
