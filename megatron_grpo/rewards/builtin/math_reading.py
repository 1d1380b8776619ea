r"""Values of answers' texts: what expressions stand in (tuples, sets, lists, matrices, units, congruences, bases)."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from latex2sympy2_extended.logic import And

from megatron_grpo.rewards.builtin.math_equal import as_equation, as_set, equal
from megatron_grpo.rewards.builtin.math_expression import (
    TRIGONOMETRIC,
    VARIABLES,
    Choice,
    Congruence,
    Evaluated,
    InBase,
    Items,
    Letters,
    MatrixOf,
    Named,
    Percent,
    Quantity,
    Ratio,
    Text,
    Union,
    is_number,
    is_relation,
    parse,
)
from megatron_grpo.rewards.builtin.math_text import normal_form
from megatron_grpo.rewards.builtin.units import names_unit, read_unit

_MAX_LENGTH = 2000  # characters of an answer; longer ones are not read
_MAX_WORDS = 6  # of a text that can be a gold answer
_MAX_DOUBLE_SIGNS = 4  # in an expression, which has two values for each
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
_MATRIX = re.compile(
    r"\\begin\s*\{(?P<kind>[pbB]?matrix|smallmatrix|array)\}(?:\{[clr|]*\})?(?P<cells>.*)\\end\s*\{(?P=kind)\}",
    re.DOTALL,
)
_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}|(?<![A-Za-z\\])([A-Za-z]{2,})(?![A-Za-z])")


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
    product = None if re.search("[eiou]", text) or len(text) > 4 else parse(text)
    return Text(_plain_words(text)) if product is None else Letters(text, product)


def _read_matrix(text: str) -> Any:
    match = _MATRIX.fullmatch(text.strip("()[] ") if text.startswith(("(\\begin", "[\\begin")) else text)
    if match is None:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match["cells"].replace(r"\hline", "")) if row.strip()]
    return MatrixOf(tuple(tuple(_read(cell) for cell in row.split("&")) for row in rows))


def _read_union(text: str) -> Any:
    parts = _split(text, [r"\setminus"])
    if len(parts) == 2 and None not in (sets := [as_set(_read(part)) for part in parts]):
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
            return value if is_relation(value) else None
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
    if joints and any(is_relation(item) and not isinstance(item, sympy.Eq) for item in items):
        relations = tuple(as_equation(item) if isinstance(item, Named) else item for item in items)
        if joints == {"or"}:
            return Union(relations)
        # Of several, such as "a or b and c", the text does not say which belong together.
        return And(*relations) if joints == {"and"} and all(map(is_relation, relations)) else Text(_plain_words(text))
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
    values = tuple(parse(part) for part in parts)
    return Ratio(values) if all(is_number(value) for value in values) else None


def _read_named(text: str) -> Any:
    """Read an equation with one name on its left, or after \text on its left, such as x = 5."""
    parts = _split(text, ["="])
    if len(parts) < 2:
        return None
    values = [parse(part) for part in parts]
    if all(map(is_number, values)):  # a calculation, such as 3 + 2 = 5
        return values[-1] if all(equal(value, values[-1]) for value in values) else Text(_plain_words(text))
    name = re.sub(r"\s+", "", parts[0])
    is_name = re.fullmatch(
        r"\([A-Za-z](?:,[A-Za-z])+\)|(?:[A-Za-z]|\\[a-z]+(?<!sqrt)|\\text\{[^{}]*\})'?(?:_(?:\w|\{[^{}]*\}))?(?:\([\w,{}\\]*\))?",
        name,
    )
    # Of a chain such as S = 2 + 3 = 5 the last value counts.
    value = _read(parts[-1])
    if is_name is None and not (_WORDS.search(parts[0]) and not re.search(r"\d", parts[0])):
        is_value = isinstance(value, Quantity | Percent) or (is_number(value) and value != 0)
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
    symbols: set[Any] = getattr(left, "free_symbols", set())
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
    value = parse(text[:-1])
    return Percent(value) if is_number(value) else None


def _read_quantity(text: str) -> Any:
    """Read a number with a unit after it, or a currency before it."""
    degrees = re.fullmatch(r"(.*\S)\s*\^\\circ\s*([CF]?)", text)
    if degrees and not re.search(rf"\\(?:{TRIGONOMETRIC})", text) and is_number(value := parse(degrees[1])):
        return Quantity(value, read_unit("degrees" + degrees[2]))  # type: ignore[arg-type]
    if match := _MONEY.fullmatch(text):
        unit = read_unit(match["rest"]) or read_unit(match["currency"].replace("\\$", "$").replace("$", "dollar"))
        value = _read(match["sign"] + match["number"])
        return Quantity(value, unit) if is_number(value) and unit else None
    match = _QUANTITY.fullmatch(text)
    if match is None or not _is_unit(match):
        return None
    number = match["number"].strip()
    value = _read_number(number) or parse(number)
    if not is_number(value):
        return None
    unit = read_unit(match["unit"].replace("\\$", "$").replace("$", "dollar"))
    return value if unit is None else Quantity(value, unit, parse(text))


def _is_unit(match: re.Match[str]) -> bool:
    """Return whether the letters after a number are a unit and not variables: 5 m is a length, 5m is five times m."""
    unit = match["unit"].strip()
    if _NO_UNIT.search(re.sub(r"\^\s*\{?\s*-?\s*\d", "^", unit)):
        return False
    if unit.startswith("\\text") or unit in ("\\$", "$", "€"):
        return True
    if match["space"] and re.fullmatch(_SCIENTIFIC, match["number"]) and names_unit(unit):
        return True
    if re.fullmatch(r"[A-Za-z]{2,3}", unit) and set(unit) <= VARIABLES:
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
    _read_percent, _read_quantity, lambda text: parse(text), _read_prose,
)  # fmt: skip


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
