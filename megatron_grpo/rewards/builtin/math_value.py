r"""Values of mathematical answers, and whether two of them are equal.

The parser of math-verify (latex2sympy) reads one expression, equation or inequality. This module takes apart what
expressions are in (tuples, sets, lists, matrices, units, congruences, number bases) and compares. A text that the
parser reads in part only is not a value: it equals the same text alone.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
from antlr4 import CommonTokenStream, InputStream, Token
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.antlr_parser import PSLexer, PSParser
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And

from megatron_grpo.rewards.builtin.math_text import normal_form
from megatron_grpo.rewards.builtin.units import Unit, is_word, names_unit, read_unit

_DIGITS = 50  # of numerical values
_EPSILON = sympy.Rational(1, 10**30)  # relative difference of two values that are equal, computed with 50 digits
_ROUNDED_DIGITS = 6  # a decimal with as many significant digits may be the rounding of an exact value
_MAX_LENGTH = 2000  # characters of an answer; longer ones are not read
_MAX_WORDS = 6  # of a text that can be a gold answer
_MAX_DOUBLE_SIGNS = 4  # in an expression, which has two values for each
_LARGEST_EXPONENT = 10**5  # sympy computes powers of whole numbers digit by digit


@dataclass(frozen=True)
class Text:
    """Words, a choice, or a text that the parser does not read as a whole."""

    text: str


@dataclass(frozen=True)
class Items:
    """Values in an order that counts ("(": tuple or interval) or does not ("{": set; "": list without brackets)."""

    brackets: str
    items: tuple[Any, ...]
    has_ellipsis: bool = False


@dataclass(frozen=True)
class Union:
    r"""Sets with \cup between them, or inequalities with "or" between them."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class MatrixOf:
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Named:
    """A value after its name, such as x = 5, a_n = 2n + 1 or "area = 12"."""

    name: str
    value: Any


@dataclass(frozen=True)
class Evaluated(Named):
    """A number after an expression, such as m + n = 113: an equation for a gold answer that is one, else the number."""


@dataclass(frozen=True)
class Letters:
    """Letters alone: a word for a gold answer that is one, else a product of variables."""

    text: str
    product: Any


@dataclass(frozen=True)
class Choice:
    """A letter, and the value of the text after it."""

    letter: str
    text: Any = None


@dataclass(frozen=True)
class Quantity:
    """A number with a unit; `expression` is its value if the unit can also be variables, as in 5 m."""

    value: Any
    unit: Unit
    expression: Any = None


@dataclass(frozen=True)
class Percent:
    value: Any


@dataclass(frozen=True)
class Ratio:
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Congruence:
    name: str
    residues: frozenset[int]
    modulus: int


@dataclass(frozen=True)
class InBase:
    digits: str
    base: int


_EMPTY_SET = re.compile(r"\\\{\s*\\\}|[∅∞]")
_NUMBER = r"[-+]?\s*\d+(?:\.\d+)?"
_SCIENTIFIC = _NUMBER + r"(?:\s*\\(?:times|cdot)\s*10\s*\^\s*\{?\s*-?\d+\s*\}?)?"
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_MODULUS = re.compile(r"\s*(?:\\pmod|\(?\s*(?:\\bmod|\\mod|\\text\s*\{\s*mod\s*\}|mod))\s*\{?\s*(\d+)\s*\}?\s*\)?")
_BASE_NAMES = {
    name: base
    for base, name in enumerate("two three four five six seven eight nine ten eleven twelve".split(), start=2)
} | {"sixteen": 16}
_BASE_NAME = "|".join((r"\d+", *_BASE_NAMES))
_BASE = re.compile(
    r"\(?\s*(?P<sign>-?)(?:\\text\s*\{)?(?P<digits>[0-9A-Za-z]+)\}?\s*\)?\s*_\s*"
    rf"(?:\{{\s*(?:\\text\s*\{{)?\s*(?P<braced>{_BASE_NAME})\s*\}}?\s*\}}|(?P<base>\d))"
)
_IN_BASE = re.compile(
    r"(?P<sign>-?)(?P<digits>[0-9A-Fa-f]+)\s*,?\s*\(?(?:\\text\s*\{)?\s*(?:in )?base\s*\}?\s*"
    rf"(?P<base>{_BASE_NAME})\s*\)?\}}?"
)
# A letter in brackets with or without text after it, a capital letter after the word "option", or one alone.
_CHOICE = re.compile(
    r"\s*(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+)?(?:\(\s*(?P<bracketed>[A-Ja-j])\s*\)(?P<after>(?:[\s.:].*)?)|"
    r"(?P<bare>[A-J])\s*(?:[.):]?\s*|[.)]\s+(?P<text>\S.*)))",
    re.DOTALL,
)
_NOT_A_CHOICE = re.compile(r"\s*(?:[-+*/^_=<>,]|(?:and|or)\b|\\(?:cdot|times|cup|cap|leq|geq|in\b))")
_QUANTITY = re.compile(
    r"(?P<number>.*?(?:[\d})]|\\pi))(?P<space>\s*)(?P<unit>(?:\\text\s*\{[^{}]*\}|[A-Za-z€£¢][A-Za-z.]*)"
    r"(?:[\s/^{}*.\d-]|\\cdot|\\text\s*\{[^{}]*\}|[A-Za-z])*|\\\$|\$|€)"
)
# After a number: a count or a calculation in words, or a second number, such as 3 dozen, 10 minus 3, 5 feet 10 inches.
_COUNT_WORDS = (
    r"(?<![A-Za-z])(?:to|by|times|plus|minus|and|or|over|mod|base|choose|sqrt|factorial|squared|cubed|out|r|remainder"
    r"|half|halves|thirds|dozen|hundred|thousand|million|billion|trillion)(?![A-Za-z])"
)
_NO_UNIT = re.compile(rf"{_COUNT_WORDS}|(?<![A-Za-z\d^])\d", re.IGNORECASE)
# "34 (since 17 * 2)" and "18 (eighteen)", not "3 (million)".
_EXPLANATION = re.compile(
    rf"(?<=\S)\s+\((?:(?:since|because)\s[^()]*|(?!(?i:[^()]*{_COUNT_WORDS}))[a-z]{{4,}}(?:[ -][a-z]+)*)\)$"
)
_MONEY = re.compile(
    rf"(?P<sign>-?)\s*(?P<currency>\\?\$|€|£|¥)\s*(?P<number>{_NUMBER}(?:/\d+)?|\\frac.*)\s*(?P<rest>.*)"
)
_DELIMITED = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_BETWEEN_ANSWERS = re.compile(r"\s*(?:,?\s*(?:and|or)|,)\s*")
_JOINT = re.compile(r"(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z}])")
_QUALIFIED = re.compile(r"\b(?:not|least|most|less|than|between|except|isn't|aren't)\b", re.IGNORECASE)
_TRIGONOMETRIC = "sin|cos|tan|cot|sec|csc"
_OF_DEGREES = re.compile(
    rf"(\\(?:{_TRIGONOMETRIC})\s*(?:\^\s*\{{?\d\}}?)?)\s*[{{(]?\s*(\d+(?:\.\d+)?)\s*\^\\circ\s*[)}}]?"
)
_MATRIX = re.compile(
    r"\\begin\s*\{(?P<kind>[pbB]?matrix|smallmatrix|array)\}(?:\{[clr|]*\})?(?P<cells>.*)\\end\s*\{(?P=kind)\}",
    re.DOTALL,
)
_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}|(?<![A-Za-z\\])([A-Za-z]{2,})(?![A-Za-z])")
_COMMANDS = frozenset(
    "frac sqrt times cdot div pi infty pm mp circ binom log ln lg exp sin cos tan cot sec csc arcsin arccos "
    "arctan sinh cosh tanh leq geq neq alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi omega "
    "zeta eta kappa xi chi psi Gamma Delta Theta Lambda Sigma Phi Psi Omega lfloor rfloor lceil rceil emptyset "
    "mathbb setminus cup cap sum prod int lim to infty gcd lcm max min approx in overline bar vec hat ".split()
)
_SUBSCRIPT = re.compile(r"(?:[A-Za-z}]|\\[A-Za-z]+)\s*_")
_NUMBER_WITH_SUBSCRIPT = re.compile(r"(?:(?<![A-Za-z])\d|\))\s*_")
_SUBSCRIPT_OF_COMMAND = re.compile(r"\\(?:log|sum|prod|int|lim|max|min)\s*_")
# Letters that products of variables are made of; a run of letters with any other one is a word.
_VARIABLES = frozenset("abcdhkmnpqrstxyz")


def read(text: str) -> Any:
    """Return the value of an answer's text; a `Text` if it is not mathematical as a whole."""
    if len(text) > _MAX_LENGTH:
        return Text(text)
    return _read(_EXPLANATION.sub("", _without_thousands(normal_form(text))))


def gold_fault(text: str) -> str | None:
    """Return why a gold answer cannot be compared with; None if it can. Only texts of many words are parsed."""
    if text.count("{") - text.count(r"\{") != text.count("}") - text.count(r"\}"):
        return "its braces do not match"
    if text.count(r"\left") > text.count(r"\right"):
        return "it is cut off"
    if not any(sign.isalnum() for sign in text) and not _EMPTY_SET.search(text):
        return "it has neither a letter nor a digit"
    if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text))) > _MAX_WORDS and _has_text(read(text)):
        return "it is prose"
    return None


def _has_text(value: Any) -> bool:
    return isinstance(value, Text) or (isinstance(value, Items) and any(map(_has_text, value.items)))


# ---- reading


def _read(text: str) -> Any:
    text = text.strip()
    for reader in _READERS:
        value = reader(text)
        if value is not None:
            return value
    return Text(_plain_words(text))


def _without_thousands(text: str) -> str:
    """Remove the commas of numbers such as 70,000; in brackets a comma separates items."""

    def joined(match: re.Match[str]) -> str:
        opened, closed = (
            sum(text.count(bracket, 0, match.start()) for bracket in brackets)
            for brackets in (("(", "[", r"\{"), (")", "]", r"\}"))
        )
        return match[0] if opened > closed else match[0].replace(",", "")

    return _THOUSANDS.sub(joined, text)


def _read_number(text: str) -> Any:
    return sympy.Integer(int(text)) if re.fullmatch(r"[-+]?\d+", text) and len(text) < 4000 else None


def _read_in_base(text: str) -> Any:
    match = _BASE.fullmatch(text) or _IN_BASE.fullmatch(text)
    if match is None:
        return None
    groups = match.groupdict()
    name = groups.get("braced") or groups.get("base") or ""
    base, digits = _BASE_NAMES.get(name) or int(name), groups["digits"].upper()
    if not 2 <= base <= 36 or (base <= 10 and not digits.isdigit()):
        return None
    if any(int(digit, 36) >= base for digit in digits):
        return Text(text)
    if base == 10:
        return sympy.Integer(int(groups["sign"] + digits))
    return InBase(groups["sign"] + (digits.lstrip("0") or "0"), base)


def _read_congruence(text: str) -> Any:
    match = _MODULUS.search(text)
    if match is None:
        return None
    if match.end() < len(text) or not int(match[1]):
        return Text(_plain_words(text))
    name, _, residues = text[: match.start()].rstrip(" ,").rpartition(r"\equiv")
    residues = re.sub(r"\\pm\s*(\d+)", r"\1,-\1", residues)
    values = [part.strip().replace(" ", "") for part in re.split(r",|\bor\b|\band\b", residues) if part.strip()]
    if not values or not all(re.fullmatch(r"-?\d+", value) for value in values):
        return Text(_plain_words(text))
    modulus, name = int(match[1]), name.strip()
    found = frozenset(int(value) % modulus for value in values)
    if re.fullmatch(r"-?\d+", name):  # a calculation, such as 20 = 9 mod 11
        return Congruence("", found, modulus) if found == {int(name) % modulus} else Text(_plain_words(text))
    return Congruence(name, found, modulus)


def _read_plus_minus(text: str) -> Any:
    r"""Read an expression with \pm as the list of its values; with \mp all the upper signs belong together."""
    if r"\mp" in text:
        return Items("", tuple(_read(_signed(text, sign)) for sign in "+-"))
    if r"\pm" not in text or text.startswith(r"\{") or len(_split(text, [",", ";"])) > 1 or _JOINT.search(text):
        return None
    if text.count(r"\pm") > _MAX_DOUBLE_SIGNS:
        return Text(text)
    before, _, after = text.partition(r"\pm")
    return Items("", tuple(_read(_signed(before + rf"\pm{after}", sign, 1)) for sign in "+-"))


def _signed(text: str, sign: str, count: int = 0) -> str:
    """Return the text with one reading of its double signs."""
    opposite = {"+": "-", "-": "+"}[sign]
    text = re.sub(r"\\pm(?![A-Za-z])", sign, text, count=count)
    return re.sub(r"(^|[({=,])\s*\+", r"\1", re.sub(r"\\mp(?![A-Za-z])", opposite, text))


def _read_approximation(text: str) -> Any:
    """Read the exact value before its approximation, or the approximation of a name."""
    exact, *decimals = _split(text, [r"\approx"])
    if not decimals:
        return None
    value = _read(exact) if exact.strip() else Text("")
    is_name = isinstance(value, Text | Letters | sympy.Symbol)
    return _read(f"{exact}={decimals[-1]}" if exact.strip() else decimals[-1]) if is_name else value


def _read_letters(text: str) -> Any:
    """Read letters alone: a word if they have vowels that variables are seldom named by, or are many, else both."""
    if not re.fullmatch("[A-Za-z]{2,}", text):
        return None
    product = None if re.search("[eiou]", text) or len(text) > 4 else _expression(text)
    return Text(_plain_words(text)) if product is None else Letters(text, product)


def _read_matrix(text: str) -> Any:
    match = _MATRIX.fullmatch(text.strip("()[] ") if text.startswith(("(\\begin", "[\\begin")) else text)
    if match is None:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match["cells"].replace(r"\hline", "")) if row.strip()]
    return MatrixOf(tuple(tuple(_read(cell) for cell in row.split("&")) for row in rows))


def _read_union(text: str) -> Any:
    parts = _split(text, [r"\setminus"])
    if len(parts) == 2 and None not in (sets := [_as_set(_read(part)) for part in parts]):
        return sympy.Complement(*sets)
    parts = _split(text, [r"\cup"])
    return Union(tuple(map(_read, parts))) if len(parts) > 1 else None


def _read_membership(text: str) -> Any:
    match = re.fullmatch(r"([A-Za-z]|\\[a-z]+)\s*\\in(?![A-Za-z])\s*(.+)", text, re.DOTALL)
    return _read(match[2]) if match else None


def _read_brackets(text: str) -> Any:
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")") if text.startswith(r"\langle") else text
    match = re.fullmatch(r"(\\\{|\(|\[|\])(.*?)(\\\}|\)|\]|\[)", text, re.DOTALL)
    if match is None or not _is_one_group(text, match[1], match[3]):
        return None
    opening, inside, closing = match.groups()
    items = _split(inside, [",", ";"])
    if opening == r"\{":
        if such_that := re.fullmatch(r"\s*[A-Za-z](?:\s*\\in\s*\\mathbb\s*\{R\})?\s*[|:](.+)", inside):
            value = _read(such_that[1])
            return value if _is_relation(value) else None
        if re.search(r"[|:]", inside):
            return None
        return Items("{", *_items(items))
    if len(items) < 2:
        return None
    # ]1,2[ is the open interval; a point of two numbers is written as an open interval.
    brackets = {"]": "("}.get(opening, opening) + {"[": ")"}.get(closing, closing)
    return Items(brackets, *_items(items))


def _read_list(text: str) -> Any:
    parts = [word for part in _split(text, [",", ";"]) for word in _JOINT.split(part) if word.strip()]
    if len(parts) < 2:
        return None
    items, has_ellipsis = _items(parts)
    joints = set(_JOINT.findall(text))
    if joints and any(_is_relation(item) and not isinstance(item, sympy.Eq) for item in items):
        relations = tuple(_as_equation(item) if isinstance(item, Named) else item for item in items)
        if joints == {"or"}:
            return Union(relations)
        # Of several, such as "a or b and c", the text does not say which belong together.
        return And(*relations) if joints == {"and"} and all(map(_is_relation, relations)) else Text(_plain_words(text))
    return Items("", items, has_ellipsis)


def _items(parts: Sequence[str]) -> tuple[tuple[Any, ...], bool]:
    parts = [part.strip() for part in parts if part.strip()]
    return tuple(_read(part) for part in parts), any(part == r"\ldots" for part in parts)


def _read_ratio(text: str) -> Any:
    parts = [part.replace(r"\text{to}", "").strip() for part in _split(text, [":", r"\colon"])]
    if len(parts) < 2 or not all(parts):
        return None
    if len(parts) == 2 and re.fullmatch(r"\d{1,2}", parts[0]) and re.fullmatch(r"[0-5]\d", parts[1]):
        return Text(":".join((str(int(parts[0])), parts[1])))  # may be a time of day
    values = tuple(_expression(part) for part in parts)
    return Ratio(values) if all(_is_number(value) for value in values) else None


def _read_named(text: str) -> Any:
    """Read an equation with one name on its left, or after \text on its left, such as x = 5."""
    parts = _split(text, ["="])
    if len(parts) < 2:
        return None
    values = [_expression(part) for part in parts]
    if all(map(_is_number, values)):  # a calculation, such as 3 + 2 = 5
        return values[-1] if all(equal(value, values[-1]) for value in values) else Text(_plain_words(text))
    name = re.sub(r"\s+", "", parts[0])
    is_name = re.fullmatch(
        r"\([A-Za-z](?:,[A-Za-z])+\)|(?:[A-Za-z]|\\[a-z]+(?<!sqrt)|\\text\{[^{}]*\})'?(?:_(?:\w|\{[^{}]*\}))?(?:\([\w,{}\\]*\))?",
        name,
    )
    # Of a chain such as S = 2 + 3 = 5 the last value counts.
    value = _read(parts[-1])
    if is_name is None and not (_WORDS.search(parts[0]) and not re.search(r"\d", parts[0])):
        is_value = isinstance(value, Quantity | Percent) or (_is_number(value) and value != 0)
        is_inequality = re.search(r"[<>]|\\(?:[lg]eq|neq)(?![A-Za-z])", text)
        is_value = is_value and not is_inequality and not _is_to_solve(parts[0], values[0])
        return Evaluated(parts[0].strip(), value) if is_value else None
    if len(parts) > 2 and isinstance(value, sympy.Symbol):  # a = b = c
        return Text(_plain_words(text))
    names = name.strip("()").split(",")
    if len(names) > 1 and isinstance(value, Items) and value.brackets == "()" and len(value.items) == len(names):
        return Items("()", tuple(map(Named, names, value.items)))
    return Named(name, value)


def _is_to_solve(text: str, left: Any) -> bool:
    """Return whether the left side is a polynomial in one unknown: 2x + 1 = 5 has another value than 5."""
    symbols = getattr(left, "free_symbols", set())
    is_call = re.search(r"[A-Za-z]\s*(?:\\left\s*)?\(|\\", text)  # f(2), \angle A
    return len(symbols) == 1 and is_call is None and not left.is_Symbol and left.is_polynomial(*symbols)


def _read_choice(text: str) -> Any:
    match = _CHOICE.fullmatch(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text))
    if match is None or _NOT_A_CHOICE.match(match["after"] or ""):
        return None
    after = (match["text"] or match["after"] or "").strip(" .:")
    if re.fullmatch(r"\(?[A-H]\)?", after) or re.search(r"\([A-H]\)", after):  # two options are no answer
        return Text(_plain_words(text))
    return Choice((match["bracketed"] or match["bare"]).upper(), _read(after) if after else None)


def _read_percent(text: str) -> Any:
    if not text.endswith("%"):
        return None
    value = _expression(text[:-1])
    return Percent(value) if _is_number(value) else None


def _read_quantity(text: str) -> Any:
    """Read a number with a unit after it, or a currency before it."""
    degrees = re.fullmatch(r"(.*\S)\s*\^\\circ\s*([CF]?)", text)
    if degrees and not re.search(rf"\\(?:{_TRIGONOMETRIC})", text) and _is_number(value := _expression(degrees[1])):
        return Quantity(value, read_unit("degrees" + degrees[2]))  # type: ignore[arg-type]
    if match := _MONEY.fullmatch(text):
        unit = read_unit(match["rest"]) or read_unit(match["currency"].replace("\\$", "$").replace("$", "dollar"))
        value = _read(match["sign"] + match["number"])
        return Quantity(value, unit) if _is_number(value) and unit else None
    match = _QUANTITY.fullmatch(text)
    if match is None or not _is_unit(match):
        return None
    number = match["number"].strip()
    value = _read_number(number) or _expression(number)
    if not _is_number(value):
        return None
    unit = read_unit(match["unit"].replace("\\$", "$").replace("$", "dollar"))
    return value if unit is None else Quantity(value, unit, _expression(text))


def _is_unit(match: re.Match[str]) -> bool:
    """Return whether the letters after a number are a unit and not variables: 5 m is a length, 5m is five times m."""
    unit = match["unit"].strip()
    if _NO_UNIT.search(re.sub(r"\^\s*\{?\s*-?\s*\d", "^", unit)):
        return False
    if unit.startswith("\\text") or unit in ("\\$", "$", "€"):
        return True
    if match["space"] and re.fullmatch(_SCIENTIFIC, match["number"]) and names_unit(unit):
        return True
    if re.fullmatch(r"[A-Za-z]{2,3}", unit) and set(unit) <= _VARIABLES:
        return unit in ("cm", "mm", "km", "kg", "mg")
    return bool(re.search(r"[A-Za-z]{2}|[€£¢]", unit))


def _read_prose(text: str) -> Any:
    """Read the mathematics of a sentence: delimited parts, or its only number; other prose is no value."""
    parts = ["".join(match.groups(default="")) for match in _DELIMITED.finditer(text)]
    if _QUALIFIED.search(text) or not (parts or _WORDS.search(text)):
        return None
    if parts:
        between = _DELIMITED.sub("\n", text).split("\n")
        if re.search(r"\d", "".join(between)) or not all(map(_BETWEEN_ANSWERS.fullmatch, between[1:-1])):
            return None
        values = tuple(map(_read, parts))
        return values[0] if len(values) == 1 else Items("", values)
    found = list(re.finditer(rf"{_NUMBER}(?:\s*/\s*\d+)?\s*%?", text))
    if len(found) != 1 or re.search(r"\\(?!text)|[_^=<>*+/]", text.replace(found[0][0], "")):
        return None
    value, after = _read(found[0][0].strip()), text[found[0].end() :].strip(" .!")
    if len(_WORDS.findall(text)) < 2 or _NO_UNIT.search(after):
        return None
    unit = read_unit(after) if len(after.split()) <= 2 else None
    return Quantity(value, unit) if unit and not isinstance(value, Percent) else value


_READERS: tuple[Callable[[str], Any], ...] = (
    _read_number, _read_approximation, _read_in_base, _read_congruence, _read_matrix, _read_choice, _read_letters,
    _read_plus_minus, _read_membership, _read_union, _read_brackets, _read_list, _read_named, _read_ratio,
    _read_percent, _read_quantity, lambda text: _expression(text), _read_prose,
)  # fmt: skip


def _expression(text: str) -> Any:
    """Return what latex2sympy parses from the text; None unless it parses the whole of it."""
    text = _OF_DEGREES.sub(r"\1(\\frac{\2\\pi}{180})", text.strip())
    text = re.sub(r"\\log\s*_\s*(\w)", r"\\log_{\1} ", text)
    if not text or _leaves_out(text):
        return None
    parsed_text = re.sub(r"(?<=[\d)}])\s*(?=\\infty)", "", text)
    try:
        if not _parses_whole(parsed_text):
            return None
        value = latex2sympy(
            parsed_text, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
        )
    except Exception:  # the parser raises plain Exceptions for what it cannot read
        return None
    if isinstance(value, sympy.Basic):
        return None if _is_too_large(value) else _items_of(_exact(value))
    return value if isinstance(value, sympy.MatrixBase) else None


def _is_too_large(value: Any) -> bool:
    """Return whether the evaluation would need more digits than there is time for."""
    exponents = [power.exp for power in value.atoms(sympy.Pow)] + [
        part.args[0] for part in value.atoms(sympy.factorial)
    ]
    return any(bool(abs(sympy.N(exponent)) > _LARGEST_EXPONENT) for exponent in exponents if exponent.is_number)


def _leaves_out(text: str) -> bool:
    """Return whether latex2sympy would leave out a part of the text, or read it as something else."""
    if any(command not in _COMMANDS for command in re.findall(r"\\([A-Za-z]+)", text)):
        return True
    subscripts = _SUBSCRIPT_OF_COMMAND.sub("", text)
    if _NUMBER_WITH_SUBSCRIPT.search(subscripts) or len(_SUBSCRIPT.findall(subscripts)) != subscripts.count("_"):
        return True
    if re.search(
        r"\d\s+\d|!\s*!|['\"&#@?%;:]|\^\s*\{?\s*(?:T|c|\\top)\s*\}?(?![A-Za-z])|\\approx|\\to(?![A-Za-z])|,", text
    ):
        return True
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]{2,}(?![A-Za-z])", re.sub(r"\\[A-Za-z]+", " ", text))
    return any(len(word) > 2 and not set(word) <= _VARIABLES for word in words)


def _parses_whole(text: str) -> bool:
    parser = PSParser(CommonTokenStream(_quiet(PSLexer(InputStream(text)))))
    _quiet(parser).math()
    return parser.getNumberOfSyntaxErrors() == 0 and parser.getCurrentToken().type == Token.EOF


def _quiet(recognizer: Any) -> Any:
    recognizer.removeErrorListeners()
    return recognizer


def _exact(value: Any) -> Any:
    """Return the value with its decimals as fractions, marked by `Decimal`, and i as the imaginary unit."""
    floats = {number: _Decimal(sympy.Rational(str(number))) for number in value.atoms(sympy.Float)}
    imaginary = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}
    return value.xreplace({**floats, **imaginary}) if floats or imaginary else value


def _items_of(value: Any) -> Any:
    r"""Return a set of the parser's, such as that of 3 \pm \sqrt{2}, as a list."""
    if isinstance(value, sympy.FiniteSet):
        return Items("", tuple(value.args))
    if isinstance(value, sympy.Tuple):
        return Items("()", tuple(value.args))
    return value


class _Decimal(sympy.Symbol):
    """A number that was written as a decimal; `_number` replaces it by its value."""

    def __new__(cls, value: sympy.Rational) -> "_Decimal":
        symbol = sympy.Symbol.__new__(cls, f"decimal_{value}")
        return symbol

    @property
    def value(self) -> sympy.Rational:
        return sympy.Rational(self.name.removeprefix("decimal_"))


def _split(text: str, separators: Sequence[str]) -> list[str]:
    """Split a text at separators that are in no brackets; a text of unmatched brackets is not split."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        if text.startswith((r"\{", r"\}"), place):
            depth += 1 if text[place + 1] == "{" else -1
            place += 2
            continue
        sign = text[place]
        if sign in "{([":
            depth += 1
        elif sign in "})]":
            depth -= 1
        elif depth == 0:
            found = next((s for s in separators if _separates(text, place, s)), None)
            if found is not None:
                parts.append(text[start:place])
                place += len(found)
                start = place
                continue
        place += 1
    return [*parts, text[start:]]


def _separates(text: str, place: int, separator: str) -> bool:
    if not text.startswith(separator, place):
        return False
    after = text[place + len(separator) : place + len(separator) + 1]
    if separator.startswith("\\"):
        return not after.isalpha()
    return separator != "=" or text[place - 1 : place] not in ("<", ">", "!", ":")


def _is_one_group(text: str, opening: str, closing: str) -> bool:
    """Return whether the first bracket of the text closes at its end. (1,2] is one group."""
    depth, place = 0, 0
    half_open = opening == "]" or closing == "["
    while place < len(text):
        width = 2 if text.startswith((r"\{", r"\}"), place) else 1
        sign = text[place + width - 1]
        at_an_end = place == 0 or place + width == len(text)
        if half_open and at_an_end:
            depth += 1 if place == 0 else -1
        elif sign in "{([":
            depth += 1
        elif sign in "})]":
            depth -= 1
        place += width
        if depth == 0 and place < len(text):
            return False
    return depth == 0


def _plain_words(text: str) -> str:
    """Return words for a comparison: without \text, in lower case, without spaces around signs."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"^\s*(?:the|a|an)\s+", "", " ".join(text.split()), flags=re.IGNORECASE)
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", text)
    return text.strip(" .!\"'").casefold() if re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", text)) else text


# ---- comparing


def equal(gold: Any, answer: Any) -> bool:
    """Return whether two values of `read` are equal."""
    gold, answer = _unnamed(gold, answer)
    if isinstance(gold, Letters) and isinstance(answer, Letters) and max(map(len, (gold.text, answer.text))) > 3:
        return gold.text == answer.text
    has_words = isinstance(gold, Text) or isinstance(answer, Text)
    gold, answer = ((Text(v.text) if has_words else v.product) if isinstance(v, Letters) else v for v in (gold, answer))
    if isinstance(gold, Choice) or isinstance(answer, Choice):
        return _equal_choices(gold, answer)
    if isinstance(gold, Text) or isinstance(answer, Text):
        return _equal_texts(gold, answer)
    for kind, compare in _COMPARISONS:
        if isinstance(gold, kind) or isinstance(answer, kind):
            return compare(gold, answer)
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return _equal_matrices(_matrix(gold), _matrix(answer))
    if _is_relation(gold) or _is_relation(answer):
        return _equal_relations(gold, answer)
    if isinstance(gold, sympy.Set) or isinstance(answer, sympy.Set):
        return _equal_sets(gold, answer)
    return _equal_expressions(gold, answer)


def _unnamed(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Return the values without their names: x = 5 is 5, but not y = 5; the case of a name does not matter."""
    if isinstance(gold, Named) and isinstance(answer, Named):
        if _are_one_name(gold.name, answer.name) or "\\text" in gold.name + answer.name:
            return gold.value, answer.value
        return _as_equation(gold), _as_equation(answer)
    if isinstance(gold, Evaluated) or (isinstance(gold, Named) and _is_relation(answer)):
        return _as_equation(gold), answer
    if isinstance(answer, Named) and _is_relation(gold):
        return gold, _as_equation(answer)
    return (
        gold.value if isinstance(gold, Named) else gold,
        answer.value if isinstance(answer, Named) else answer,
    )


def _are_one_name(a: str, b: str) -> bool:
    """Return whether two names differ at most in their case, or one is the unknown x of the solutions x_1 and x_2."""
    a, b = a.casefold(), b.casefold()
    return a == b or (_unknown(a) == _unknown(b) and _unknown(a) in (a, b))


def _unknown(name: str) -> str:
    """Return x for x_1, a solution; a_1 is the term of a sequence, which has an order."""
    return re.sub(r"^([xyzt])_(?:\d|\{\d\})$", r"\1", name, flags=re.IGNORECASE)


def _as_equation(value: Named) -> Any:
    name, right = _expression(value.name), value.value
    right = right.product if isinstance(right, Letters) else right
    if isinstance(name, sympy.Expr) and isinstance(right, sympy.Expr):
        return sympy.Eq(name, right, evaluate=False)
    return Text(f"{value.name}={value.value}")


def _equal_texts(gold: Any, answer: Any) -> bool:
    """Compare texts without regard to case and to a plural at the end; a variable is the same letter."""
    texts = [value.text if isinstance(value, Text) else str(value) for value in (gold, answer)]
    if not all(isinstance(value, Text | sympy.Symbol) for value in (gold, answer)):
        return False
    gold_words, words = (re.sub(r"(?<=[a-z]{3})s$", "", text.casefold().replace(" ", "")) for text in texts)
    return gold_words == words


def _equal_choices(gold: Any, answer: Any) -> bool:
    """Compare choices by their letters, and by their texts if both have one."""
    letters = [
        value.letter if isinstance(value, Choice) else value.text if isinstance(value, Text)
        else value.name if isinstance(value, sympy.Symbol) else "" for value in (gold, answer)
    ]  # fmt: skip
    if letters[0].casefold() != letters[1].casefold():
        return False
    if isinstance(gold, sympy.Symbol) and letters[0] != letters[1]:  # a variable
        return False
    texts = [value.text if isinstance(value, Choice) else None for value in (gold, answer)]
    return None in texts or equal(*texts)


def _equal_congruences(gold: Any, answer: Any) -> bool:
    if not (isinstance(gold, Congruence) and isinstance(answer, Congruence)):
        congruence, number = (gold, answer) if isinstance(gold, Congruence) else (answer, gold)
        # A remainder; a number is not all the solutions of x = 9 mod 11.
        return not congruence.name and isinstance(number, sympy.Integer) and congruence.residues == {int(number)}
    names = {gold.name, answer.name} - {""}
    return len(names) < 2 and (gold.modulus, gold.residues) == (answer.modulus, answer.residues)


def _equal_ratios(gold: Any, answer: Any) -> bool:
    parts = [
        v.parts if isinstance(v, Ratio) else (v, sympy.Integer(1)) if _is_number(v) else () for v in (gold, answer)
    ]
    if len(parts[0]) != len(parts[1]):
        return False
    pairs = [(_number(a), _number(b)) for a, b in zip(*parts, strict=True)]
    (first, second), *others = pairs
    return all(_equal_numbers(first * b, second * a) for a, b in others) if first and second else False


def _equal_percents(gold: Any, answer: Any) -> bool:
    """Compare percentages: 50% is 1/2, and by custom also the number 50; 1/2 is not 1/2%."""
    values = [v.value if isinstance(v, Percent) else v for v in (gold, answer)]
    if not all(map(_is_number, values)):
        return False
    if isinstance(gold, Percent) and isinstance(answer, Percent):
        return _equal_expressions(*values)
    shares = [v / 100 if isinstance(whole, Percent) else v for v, whole in zip(values, (gold, answer), strict=True)]
    if _equal_expressions(*shares):
        return True
    return bool(abs(sympy.N(_number(values[0]))) >= 1) and _equal_expressions(*values)


def _equal_quantities(gold: Any, answer: Any) -> bool:
    """Compare quantities; a number without a unit has that of the other, and radians are angles, too."""
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        (a_size, a_kind), (b_size, b_kind) = gold.unit, answer.unit
        if a_kind == b_kind:
            return _equal_expressions(gold.value * sympy.Rational(a_size), answer.value * sympy.Rational(b_size))
        if {a_kind, b_kind} == {(("angle", 1),), (("radians", 1),)}:
            return _equal_expressions(_in_radians(gold), _in_radians(answer))
        words = [{power for power in kind if is_word(power[0])} for kind in (a_kind, b_kind)]
        measures = [set(kind) - of for kind, of in zip((a_kind, b_kind), words, strict=True)]
        # "18 eggs" and "18 large eggs"
        shared = bool(words[0] & words[1]) and (words[0] <= words[1] or words[1] <= words[0])
        return (
            shared and measures[0] == measures[1] and a_size == b_size and _equal_expressions(gold.value, answer.value)
        )
    quantity, other = (gold, answer) if isinstance(gold, Quantity) else (answer, gold)
    if not _is_number(other):
        return quantity.expression is not None and _equal_expressions(quantity.expression, other)
    if quantity.unit[1] == (("angle", 1),) and other.has(sympy.pi):
        return _equal_expressions(_in_radians(quantity), other)
    return _equal_expressions(quantity.value, other)


def _in_radians(angle: Quantity) -> Any:
    return angle.value * sympy.pi / 180 if angle.unit[1] == (("angle", 1),) else angle.value


def _equal_unions(gold: Any, answer: Any) -> bool:
    parts = [value.parts if isinstance(value, Union) else None for value in (gold, answer)]
    if parts[0] is not None and parts[1] is not None and _matched(parts[0], parts[1]):
        return True
    return len(_variables(gold) | _variables(answer)) < 2 and _equal_sets(gold, answer)


def _equal_items(gold: Any, answer: Any) -> bool:
    if not (isinstance(gold, Items) and isinstance(answer, Items)):
        items, other = (gold, answer) if isinstance(gold, Items) else (answer, gold)
        if len(items.items) == 1 and items.brackets in ("", "{"):
            return equal(items.items[0], other) if items is gold else equal(other, items.items[0])
        joined = other.parts if isinstance(other, Union) else other._unsorted_args if isinstance(other, And) else ()
        if not items.brackets and all(map(_is_relation, joined)):  # a comma can mean "and" or "or"
            return _matched(items.items, joined)
        return _equal_sets(gold, answer)
    if gold.has_ellipsis or answer.has_ellipsis:
        if gold.brackets != answer.brackets:
            return False
        return _in_order(gold.items, answer.items)
    kinds = {gold.brackets[:1], answer.brackets[:1]}
    names = [[item.name for item in value.items if isinstance(item, Named)] for value in (gold, answer)]
    if all(len(of) == len(value.items) for of, value in zip(names, (gold, answer), strict=True)):
        return _matched(_distinct(gold.items), _distinct(answer.items))
    # x = 1, y = 2 is not 2, 1
    ordered = any(len(set(map(_unknown, of))) > 1 for of in names) and not all(names)
    if kinds <= {"", "{"} and not ordered:
        return _matched(_distinct(gold.items), _distinct(answer.items))
    if "{" in kinds:
        return _equal_sets(gold, answer)
    # A point or vector can be written without its brackets, an interval cannot.
    if gold.brackets != answer.brackets and {gold.brackets, answer.brackets} != {"", "()"}:
        return False
    if any(len(set(of)) < len(of) for of in names):  # x = 1 or x = 2 are no coordinates
        return False
    return _in_order(gold.items, answer.items)


def _in_order(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    return len(gold) == len(answer) and all(map(equal, gold, answer))


def _distinct(items: Sequence[Any]) -> list[Any]:
    """Return the items without those that equal an earlier one; lists of solutions are sets."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, Items) and not item.brackets:  # of 3 ± 1
            found.extend(item.items)
        elif not any(equal(other, item) for other in found):
            found.append(item)
    return found


def _matched(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Return whether the values are equal in pairs, in any order."""
    left = list(answer)
    for value in gold:
        place = next((i for i, other in enumerate(left) if equal(value, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _equal_matrices(gold: Any, answer: Any) -> bool:
    if not (isinstance(gold, MatrixOf) and isinstance(answer, MatrixOf)):
        return False
    return len(gold.rows) == len(answer.rows) and all(map(_in_order, gold.rows, answer.rows))


def _matrix(value: Any) -> Any:
    if isinstance(value, sympy.MatrixBase):
        return MatrixOf(tuple(tuple(row) for row in value.tolist()))
    return value


def _equal_sets(gold: Any, answer: Any) -> bool:
    sets = [_as_set(value) for value in (gold, answer)]
    if None in sets:
        return False
    if sets[0] == sets[1]:
        return True
    return sets[0].symmetric_difference(sets[1]) == sympy.S.EmptySet


def _as_set(value: Any) -> Any:
    """Return a value as a sympy set of real numbers; None if it is none."""
    if isinstance(value, sympy.Set):
        return value
    if isinstance(value, Union):
        parts = [_as_set(part) for part in value.parts]
        return None if None in parts or len(_variables(value)) > 1 else sympy.Union(*parts)
    if _is_relation(value):
        return _solution_set(value)
    if not isinstance(value, Items) or value.has_ellipsis:
        return None
    numbers = [_number(item) if _is_number(item) else None for item in value.items]
    if None in numbers or not all(number.is_extended_real for number in numbers):  # type: ignore[union-attr]
        return None
    if value.brackets[:1] in ("", "{"):
        return sympy.FiniteSet(*numbers)
    if len(numbers) != 2 or not numbers[0] < numbers[1]:  # type: ignore[operator]  # a point
        return None
    return sympy.Interval(*numbers, left_open=value.brackets[0] == "(", right_open=value.brackets[1] == ")")


def _variables(value: Any) -> set[Any]:
    """Return the variables of inequalities."""
    parts = value.parts if isinstance(value, Union) else (value,)
    return {symbol for part in parts if _is_relation(part) for symbol in _with_numbers(part).free_symbols}


def _solution_set(value: Any) -> Any:
    symbols = _variables(value)
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    if isinstance(value, sympy.Eq):  # equations are not solved
        return sympy.FiniteSet(_number(value.rhs)) if value.lhs == symbol and _is_number(value.rhs) else None
    variable = sympy.Symbol("x", real=True)
    parts = value._unsorted_args if isinstance(value, And) else [value]
    return reduce(
        lambda found, part: found.intersect(_with_numbers(part).xreplace({symbol: variable}).as_set()),
        parts,
        sympy.S.Reals,
    )


def _is_relation(value: Any) -> bool:
    return isinstance(value, sympy.core.relational.Relational | And)


def _equal_relations(gold: Any, answer: Any) -> bool:
    """Compare equations and inequalities: equal up to a factor, or with equal sets of solutions."""
    if not (_is_relation(gold) and _is_relation(answer)):
        value = answer if _is_relation(gold) else gold
        if isinstance(value, sympy.Set):
            return _equal_sets(gold, answer)
        return False
    parts = [list(v._unsorted_args) if isinstance(v, And) else [v] for v in (gold, answer)]
    if len(parts[0]) == len(parts[1]) and (
        all(map(_equal_relation, *parts)) or all(map(_equal_relation, parts[0], parts[1][::-1]))
    ):
        return True
    if isinstance(gold, sympy.Eq) or isinstance(answer, sympy.Eq):
        return False
    return _variables(gold) == _variables(answer) and _equal_sets(gold, answer)


def _equal_relation(gold: Any, answer: Any) -> bool:
    (a, a_kind), (b, b_kind) = _one_sided(gold), _one_sided(answer)
    if a_kind != b_kind:
        return False
    if _equal_expressions(a, b):
        return True
    ratio = _constant_ratio(a, b)
    return ratio is not None and (a_kind in ("=", "!=") or ratio > 0)


def _one_sided(relation: Any) -> tuple[Any, str]:
    """Return (e, kind) for a relation "e kind 0" with kind =, !=, > or >=."""
    difference = relation.lhs - relation.rhs
    if isinstance(relation, sympy.Eq):
        return difference, "="
    if isinstance(relation, sympy.Ne):
        return difference, "!="
    less = isinstance(relation, sympy.LessThan | sympy.StrictLessThan)
    strict = isinstance(relation, sympy.StrictLessThan | sympy.StrictGreaterThan)
    return -difference if less else difference, ">" if strict else ">="


def _constant_ratio(a: Any, b: Any) -> Any:
    """Return a / b if it is the same real number, not 0, at all points where the two are evaluated, else None."""
    values = [(x, y) for x, y in _at_points(a, b) if x != 0 or y != 0]
    if len(values) < _FEWEST_POINTS or any(x == 0 or y == 0 for x, y in values):
        return None
    ratio, *others = (x / y for x, y in values)
    return ratio if _is_real(ratio) and all(_close(ratio, other) for other in others) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and not any(
        not isinstance(symbol, _Decimal) for symbol in value.free_symbols
    ) and not value.atoms(sympy.core.function.AppliedUndef)  # fmt: skip


def _with_numbers(value: Any) -> Any:
    return value.xreplace({symbol: symbol.value for symbol in value.free_symbols if isinstance(symbol, _Decimal)})


def _number(value: Any) -> Any:
    """Return a number with its decimals replaced by fractions, evaluated as far as it is exact."""
    return _with_numbers(value).doit()


def _equal_expressions(gold: Any, answer: Any) -> bool:
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return gold == answer
    if _is_number(gold) and _is_number(answer):
        has_decimal = [any(isinstance(s, _Decimal) for s in value.free_symbols) for value in (gold, answer)]
        a, b = _number(gold), _number(answer)
        return _equal_numbers(a, b) or any(
            decimal and _is_rounding(x, y) for decimal, x, y in zip(has_decimal, (a, b), (b, a), strict=True)
        )
    a, b = _with_numbers(gold), _with_numbers(answer)
    if a == b:
        return True
    if a.atoms(sympy.core.function.AppliedUndef) or b.atoms(sympy.core.function.AppliedUndef):
        return sympy.simplify(a - b) == 0
    values = _at_points(a, b)
    if not a.is_zero and not b.is_zero:  # such as binomials that are 0 at most points
        values = [pair for pair in values if any(pair)]
    return len(values) >= _FEWEST_POINTS and all(_close(x, y) for x, y in values)


def _equal_numbers(a: Any, b: Any) -> bool:
    """Compare two exact numbers: fractions exactly, others relative to their size with 50 digits."""
    if a.has(sympy.zoo, sympy.nan) or b.has(sympy.zoo, sympy.nan):
        return False
    if a == b:
        return True
    if (a.is_Rational and b.is_Rational) or a.has(sympy.oo, -sympy.oo) or b.has(sympy.oo, -sympy.oo):
        return False
    return _close(*(sympy.N(value, _DIGITS) for value in (a, b)))


def _close(x: Any, y: Any) -> bool:
    return bool(abs(x - y) <= _EPSILON * max(abs(x), abs(y)))


def _is_rounding(decimal: Any, exact: Any) -> bool:
    """Return whether a decimal of at least six significant digits is the rounding of a number without a finite decimal
    expansion: they differ by at most half a unit of its last place.
    """
    if not decimal.is_Rational or not exact.is_real or _places(exact) is not None:
        return False
    places = _places(decimal)
    if places is None or len(str(abs(decimal * sympy.Integer(10) ** places))) < _ROUNDED_DIGITS:
        return False
    return bool(2 * abs(sympy.N(exact, _DIGITS) - decimal) <= sympy.Integer(10) ** -places)


def _places(value: Any) -> int | None:
    """Return the number of decimal places of a fraction (negative: zeros at its end), None if it has no end."""
    if not value.is_Rational:
        return None
    below, twos, fives = int(value.q), 0, 0
    while below % 2 == 0:
        below, twos = below // 2, twos + 1
    while below % 5 == 0:
        below, fives = below // 5, fives + 1
    if below > 1:
        return None
    if value.q > 1 or value == 0:
        return max(twos, fives)
    digits = str(abs(int(value)))
    return -(len(digits) - len(digits.rstrip("0")))


# Of the values of variables: 0 is for whole numbers. Large values are there for |x - 2024|, whole ones for steps.
_SCALES = (2, 1, 0, 3, 30, 0, 5, 9000, 0, 2, 9000, 0, 30, 9000, 1, 9000)
_LARGEST_IN_EXPONENT = 30
_FEWEST_POINTS = 4


def _at_points(a: Any, b: Any) -> list[tuple[Any, Any]]:
    """Return the values of two expressions at fixed points where both are defined; none if these are too few.

    Two different expressions of the usual functions agree at such points with no practical probability. Points where
    both expressions of real variables leave the real numbers count only if there are few others: ln(a/b) and
    ln(a) - ln(b) are equal where both are real.
    """
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    integers = _integer_symbols(a) | _integer_symbols(b)
    has_powers = any(power.exp.free_symbols for value in (a, b) for power in value.atoms(sympy.Pow, sympy.exp))
    values = []
    for point in _points(symbols, integers, _LARGEST_IN_EXPONENT if has_powers else max(_SCALES)):
        if has_powers:  # sympy would compute a root of a large power of a fraction exactly
            point = {
                symbol: value if value.is_Integer else sympy.Float(value, 2 * _DIGITS)
                for symbol, value in point.items()
            }
        found = tuple(sympy.N(value.subs(point).doit(), _DIGITS) for value in (a, b))
        if all(value.is_number and value.is_finite for value in found):
            values.append(found)
    if not integers and not a.has(sympy.I) and not b.has(sympy.I):
        real = [found for found in values if any(map(_is_real, found))]
        values = real if len(real) >= _FEWEST_POINTS else values
    return values if len(values) >= _FEWEST_POINTS else []


def _points(symbols: Sequence[Any], integers: set[Any], largest: int) -> Iterator[dict[Any, Any]]:
    """Return values of the symbols that no relation with small coefficients connects, in all orders and signs."""
    # With factorials and binomials more points: many of them are 0, or undefined, in most orders of three variables.
    for number, scale in enumerate(_SCALES * 4 if integers else _SCALES):
        drawn = random.Random(number)
        whole = drawn.sample(range(1, 20 + len(symbols)), len(symbols))
        real = [
            sympy.Rational(drawn.choice((-1, 1)) * drawn.randint(3 * 10**9, 10**10) * min(scale, largest), 10**10)
            for _ in symbols
        ]
        yield {
            symbol: sympy.Integer(integer) if scale == 0 or symbol in integers else value
            for symbol, integer, value in zip(symbols, whole, real, strict=True)
        }


def _is_real(value: Any) -> bool:
    return bool(abs(sympy.im(value)) <= _EPSILON * abs(value))


def _integer_symbols(value: Any) -> set[Any]:
    """Return the symbols in limits of sums and products and in factorials, which are whole numbers."""
    inside = value.atoms(sympy.Sum, sympy.Product, sympy.factorial, sympy.binomial)
    return {symbol for part in inside for symbol in part.free_symbols}


_COMPARISONS: tuple[tuple[type, Callable[[Any, Any], bool]], ...] = (
    (Congruence, _equal_congruences),
    (InBase, lambda gold, answer: gold == answer),
    (MatrixOf, lambda gold, answer: _equal_matrices(_matrix(gold), _matrix(answer))),
    (Items, _equal_items),
    (Union, _equal_unions),
    (Ratio, _equal_ratios),
    (Percent, _equal_percents),
    (Quantity, _equal_quantities),
)
