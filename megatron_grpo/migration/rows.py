"""Row of the table of flag names, the settings of a script, and the conversions of values.

A conversion is a function of (value, settings) with the words of the documentation. It returns the value of our flag: a
string, a list of strings for a flag with several values, True for a switch, or None if our script is not to have the
flag. It raises ``Undecided`` if a person must choose, and ``Different`` if the run here behaves otherwise.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Converted = str | list[str] | bool | None


class Undecided(Exception):
    """The value has no single equivalent; the message says between what a person must choose."""


class Different(Exception):
    """The value has an effect that a run here does not have; the message says what a run does instead."""


def key_of(name: str) -> str:
    """Return the key of a setting: the name without hyphens or plus signs in front, with underscores."""
    return name.lstrip("-+").replace("-", "_")


def number(value: float) -> str:
    """Return a number as text: without a fraction where it is an integer."""
    return str(int(value)) if value == int(value) else repr(value)


def truth(value: Any) -> bool:
    """Return the meaning of a switch's value: a flag without a value is on."""
    return str(value).strip().lower() in ("true", "1", "yes", "on", "")


class Settings:
    """What a script of another system sets: values by key, and the processes of its launch.

    A value is a string, or a list of strings.
    """

    def __init__(self, values: Mapping[str, Any], gpus_per_node: int = 8, nnodes: int = 1) -> None:
        self.values = dict(values)
        self.gpus_per_node = gpus_per_node
        self.nnodes = nnodes

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all nodes."""
        return self.gpus_per_node * self.nnodes

    def given(self, name: str) -> bool:
        """Return whether the script sets this name to anything but null."""
        return self.text(name).lower() not in ("", "none", "null")

    def text(self, name: str, default: str = "") -> str:
        """Return the value of a name as text."""
        value = self.values.get(key_of(name), default)
        return " ".join(value) if isinstance(value, list) else str(value)

    def true(self, name: str, default: bool = False) -> bool:
        """Return whether a switch is on."""
        key = key_of(name)
        return truth(self.text(key)) if key in self.values else default

    def number(self, name: str, default: float) -> float:
        """Return the value of a name as a number; raises Undecided for anything else."""
        return parse_number(self.text(name), name) if self.given(name) else default

    def largest(self, *names: str) -> float:
        """Return the largest given value of these names, or 1."""
        return max(self.number(name, 1) for name in names)


def parse_number(text: str, name: str = "this value") -> float:
    """Return the number in ``text``; raises Undecided if it is none, such as a variable that the script lacks."""
    try:
        return float(text)
    except ValueError:
        raise Undecided(f"{name} is {text!r}, which is not a number here: compute it by hand") from None


def is_off(value: Any, *same: str) -> bool:
    """Return whether a value switches its setting off (false, null, nothing), or equals one of ``same``."""
    text = (" ".join(value) if isinstance(value, list) else str(value)).strip("'\" ").lower()
    if text in ("", "null", "none", "~", "false", "[]", "{}", *same):
        return True
    with contextlib.suppress(ValueError):
        return any(float(text) == float(other) for other in same)
    return False


class Conversion(NamedTuple):
    """How a value of theirs becomes a value of ours, in words and as a function.

    ``kind`` is the section of the documentation for rows without a flag of ours.
    """

    words: str
    apply: Callable[[Any, Settings], Converted]
    kind: str = ""  # "decide" or "differs"


class Row(NamedTuple):
    """One flag of another system: its name there, our flag (None: nothing to set), the conversion and a note in words.

    A name that ends in * stands for all settings that begin so and have no row of their own.
    """

    theirs: str
    ours: str | None
    convert: Conversion | None = None  # None: the same value
    note: str = ""


class System(NamedTuple):
    """A system: its name, where its names are from, the rows, and what its scripts leave unsaid.

    ``implied`` has (our flag, value, reason) for values that its scripts do not mention and that differ from our
    defaults; a value of None is not printed. ``decide`` returns what a person decides in any case. ``hands_on`` names
    systems whose settings it accepts, too. ``differences`` returns what a run here does otherwise, apart from rows that
    say so of a value. ``fields`` begin the names of settings that end in a flag of megatron-core. ``resumes`` returns
    whether a start resumes from the directory of --save.
    """

    name: str
    sources: str
    rows: tuple[Row, ...]
    implied: tuple[tuple[str, Callable[[Settings], Converted], str], ...]
    decide: Callable[[Settings], list[str]]
    hands_on: tuple[str, ...] = ()
    differences: Callable[[Settings], list[str]] = lambda settings: []
    fields: tuple[str, ...] = ()
    resumes: Callable[[Settings], bool] = lambda settings: True


def constant(value: Converted) -> Callable[[Settings], Converted]:
    """Return a function of the settings that always returns this value."""
    return lambda settings: value


def _same(value: Any, settings: Settings) -> Converted:
    if isinstance(value, list):
        return [str(item) for item in value] or None
    return None if str(value).strip().lower() in ("", "none", "null", "~") else str(value)


SAME = Conversion("", _same)
SWITCH = Conversion("a switch: given if true", lambda value, settings: True if truth(value) else None)
SWITCH_IF_FALSE = Conversion("a switch: given if false", lambda value, settings: None if truth(value) else True)
WORDS = Conversion("the same values, separated by blanks", lambda value, settings: words(value))
SEQUENCE = Conversion("left out if it is -1 or null", lambda value, settings: _positive(value))


def words(value: Any) -> list[str] | None:
    """Return the items of a list, or of text such as ``['a','b']``, ``[a,b]`` or ``a b``."""
    if not isinstance(value, list):
        value = str(value).strip().strip("[]").replace(",", " ").split()
    items = [str(item).strip("'\" ") for item in value]
    return [item for item in items if item and item != "null"] or None


def _positive(value: Any) -> Converted:
    text = _same(value, Settings({}))
    return None if text is None or parse_number(str(text)) <= 0 else text


def scaled(words_: str, factor: Callable[[Settings], float], round_up: bool = False) -> Conversion:
    """Return the conversion "value x factor"; values of at most 0 and null are left out."""

    def apply(value: Any, settings: Settings) -> Converted:
        if not Settings({"value": value}).given("value"):
            return None
        size = parse_number(str(value)) * factor(settings)
        return None if size <= 0 else number(math.ceil(size) if round_up else size)

    return Conversion(words_, apply)


def upper_bound(condition: str, cispo: Callable[[Settings], bool]) -> Conversion:
    """Return the conversion of the upper clip: 1 + value with CISPO, which ``condition`` names, else the value."""

    def apply(value: Any, settings: Settings) -> Converted:
        clip = _same(value, settings)
        return number(round(1 + parse_number(str(clip)), 10)) if clip and cispo(settings) else clip

    return Conversion(f"with {condition}: 1 + value, the bound of the ratio itself", apply)


def computed(words_: str, function: Callable[[Settings], float]) -> Conversion:
    """Return the conversion to a number that depends on several settings; 0 and less are left out."""

    def apply(value: Any, settings: Settings) -> Converted:
        size = function(settings)
        if size > 0 and size != int(size):
            raise Undecided(f"{words_} is {size:g} and not an integer")
        return None if size <= 0 else number(size)

    return Conversion(words_, apply)


def choice(values: Mapping[str, str | None], otherwise: str = "") -> Conversion:
    """Return the conversion of names; a value of None is left out, a name that is missing is for a person to decide."""
    shown = "; ".join(f"{theirs} → {ours or 'nothing'}" for theirs, ours in values.items())

    def apply(value: Any, settings: Settings) -> Converted:
        name = str(value).strip("'\"").lower()
        if name not in values:
            raise Undecided(f"there is no {name!r} here{': ' * bool(otherwise)}{otherwise}")
        return values[name]

    return Conversion(shown, apply)


def only_if(condition: str, holds: Callable[[Settings], bool], conversion: Conversion = SAME) -> Conversion:
    """Return the conversion where ``holds``, else nothing; ``condition`` completes "only ..."."""
    joined = f"{conversion.words}{'; ' * bool(conversion.words)}only {condition}"
    return conversion._replace(
        words=joined, apply=lambda value, settings: conversion.apply(value, settings) if holds(settings) else None
    )


def unless(name: str, conversion: Conversion = SAME) -> Conversion:
    """Return the conversion where the script does not give ``name``, which has precedence there."""
    return only_if(f"without {name}", lambda settings: not settings.given(name), conversion)


def fixed(value: str) -> Conversion:
    """Return the conversion of a switch of theirs to a value of ours."""
    return Conversion(f"true → {value}", lambda theirs, settings: value if truth(theirs) else None)


def switch_for(name: str) -> Conversion:
    """Return the conversion of a setting with several values to a switch of ours: given for the value ``name``."""
    return Conversion(f"{name} → the switch", lambda theirs, settings: True if str(theirs) == name else None)


def ask(question: str, *same: str, off: bool = True) -> Conversion:
    """Return the conversion of a value that a person must translate.

    Values of ``same`` need nothing, nor, unless ``off`` is false, those that switch the setting off.
    """

    def apply(value: Any, settings: Settings) -> Converted:
        if off and is_off(value, "-1", *same):
            return None
        shown = " ".join(value) if isinstance(value, list) else str(value)
        raise Undecided(f"{question} (there: {shown})")

    return Conversion(question, apply, "decide")


def differs(behaviour: str, *same: str) -> Conversion:
    """Return the conversion of a value that changes what a run does; those of ``same``, and off, do not."""

    def apply(value: Any, settings: Settings) -> Converted:
        if is_off(value, *same):
            return None
        raise Different(behaviour)

    return Conversion(behaviour, apply, "differs")


OTHER_CHECKPOINTS = (
    "checkpoints of another system do not load here: export the weights as a Hugging Face directory, for --load-hf"
)
RESUME = ask(OTHER_CHECKPOINTS, "true")
ENGINE_RANKS = "engines on GPUs of their own: --rollout-ranks N, with --max-staleness: docs/asynchronous.md"
TURNS = "write it as an --environment or as a program of --agent: docs/environments.md"
LORA_PAGE = "--lora-rank, --lora-alpha and --lora-target-modules, with Hugging Face's names: docs/lora.md"


def rank(name: str, default: str, on: Callable[[Settings], bool]) -> Conversion:
    """Return the conversion of a switch of adapters to their rank: ``name`` holds it, or it is ``default``."""
    return Conversion(
        f"{name}, or {default}",
        lambda value, settings: (settings.text(name, default) or default) if on(settings) else None,
    )


REGISTER = "--external-plugins: register it with @register_reward, docs/rewards.md"
ADAPT = "--reward-adapter NAME=FILE.py:FUNCTION runs it unchanged, with NAME in --reward-funcs: docs/rewards.md"


def rewards(values: Mapping[str, str], others: str = REGISTER) -> Conversion:
    """Return the conversion of names of rewards; ``others`` says what to do with a function that is missing."""
    shown = "; ".join(f"{theirs} → {ours}" for theirs, ours in values.items())

    def apply(value: Any, settings: Settings) -> Converted:
        names = [name.rpartition(".")[2] for name in words(value) or []]
        own = [name for name in names if name not in values]
        if own:
            raise Undecided(f"{', '.join(own)} is not a reward here; {others}")
        return [values[name] for name in names] or None

    return Conversion(shown, apply)


def multiple_of(updates: Callable[[Settings], float]) -> Conversion:
    """Return the conversion of an interval in updates: rounded up to whole rollouts, as our intervals must be."""

    def apply(value: Any, settings: Settings) -> Converted:
        if not Settings({"value": value}).given("value") or parse_number(str(value)) <= 0:
            return None
        steps = max(1, round(updates(settings)))
        return number(math.ceil(parse_number(str(value)) / steps) * steps)

    return Conversion("updates, as there, rounded up to whole rollouts", apply)


OF_DELAYED = "a setting of --fp8-recipe delayed, which is refused: docs/fp8.md"


def fp8_rows(
    fp8: str, recipe: str, param: str, condition: str = "", on: Callable[[Settings], bool] = lambda settings: True
) -> tuple[Row, ...]:
    """Return the rows of the format, the recipe and 8-bit parameters, by their names there.

    ``on``, with ``condition`` in words: whether the format has an effect.
    """
    off: dict[str, str | None] = {"null": None, "none": None, "false": None}
    formats = choice({"e4m3": "e4m3", "hybrid": "hybrid"} | off)._replace(words="e4m3 or hybrid")
    recipes = choice(
        {"blockwise": "blockwise", "tensorwise": "tensorwise"}, "--fp8-recipe blockwise or tensorwise: docs/fp8.md"
    )._replace(words="blockwise or tensorwise")

    def in_fp8(settings: Settings) -> bool:
        return on(settings) and settings.text(fp8).strip("'\"").lower() in ("e4m3", "hybrid")

    note = "on Hopper GPUs; the recipe is blockwise unless given"
    return (
        Row(fp8, "--fp8-format", only_if(condition, on, formats) if condition else formats, note),
        Row(recipe, "--fp8-recipe", only_if(condition or f"with {fp8.rpartition('.')[2]}", in_fp8, recipes)),
        Row(param, None, None, "parameters stay in bf16, and are quantized before each product"),
    )


def more_fp8_rows(prefix: str, separator: str) -> tuple[Row, ...]:
    """Return the rows of megatron-core's other settings of FP8, as flags or as fields of its configuration."""

    def name(words_: str) -> str:
        return prefix + words_.replace("_", separator)

    in_bf16 = only_if("with first_last_layers_bf16", lambda s: s.true(name("first_last_layers_bf16")))
    delayed = ("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo")
    padding = ("moe_router_padding_for_fp8", "moe_router_padding_for_quantization")
    return (
        *(Row(name(setting), None, None, OF_DELAYED) for setting in delayed),
        Row(name("first_last_layers_bf16"), "--first-last-layers-bf16", SWITCH),
        Row(name("num_layers_at_start_in_bf16"), "--num-layers-at-start-in-bf16", in_bf16),
        Row(name("num_layers_at_end_in_bf16"), "--num-layers-at-end-in-bf16", in_bf16),
        *(Row(name(setting), None, None, "Transformer Engine pads the tokens of each expert") for setting in padding),
    )


ON = Conversion("a switch", lambda value, settings: True)
DISPATCHER = choice({"alltoall": "alltoall", "allgather": "allgather"}, "packs go through alltoall or allgather")
NO_DEEPEP = "only the dispatchers alltoall and allgather are supported"
