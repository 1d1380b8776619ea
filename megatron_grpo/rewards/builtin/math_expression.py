r"""Kinds of values that an answer can have, and math-verify's parser (latex2sympy), which reads one expression.

A text that the parser reads in part only is no value: it equals the same text alone.
"""

import re
from dataclasses import dataclass
from typing import Any

import sympy
from antlr4 import CommonTokenStream, InputStream, Token
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.antlr_parser import PSLexer, PSParser
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And

from megatron_grpo.rewards.builtin.units import Unit

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


TRIGONOMETRIC = "sin|cos|tan|cot|sec|csc"
_OF_DEGREES = re.compile(
    rf"(\\(?:{TRIGONOMETRIC})\s*(?:\^\s*\{{?\d\}}?)?)\s*[{{(]?\s*(\d+(?:\.\d+)?)\s*\^\\circ\s*[)}}]?"
)
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
VARIABLES = frozenset("abcdhkmnpqrstxyz")


def parse(text: str) -> Any:
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
    return any(len(word) > 2 and not set(word) <= VARIABLES for word in words)


def _parses_whole(text: str) -> bool:
    parser = PSParser(CommonTokenStream(_quiet(PSLexer(InputStream(text)))))
    _quiet(parser).math()
    return parser.getNumberOfSyntaxErrors() == 0 and parser.getCurrentToken().type == Token.EOF


def _quiet(recognizer: Any) -> Any:
    recognizer.removeErrorListeners()
    return recognizer


def _exact(value: Any) -> Any:
    """Return the value with its decimals as fractions, marked by `Decimal`, and i as the imaginary unit."""
    floats = {number: Decimal(sympy.Rational(str(number))) for number in value.atoms(sympy.Float)}
    imaginary = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}
    return value.xreplace({**floats, **imaginary}) if floats or imaginary else value


def _items_of(value: Any) -> Any:
    r"""Return a set of the parser's, such as that of 3 \pm \sqrt{2}, as a list."""
    if isinstance(value, sympy.FiniteSet):
        return Items("", tuple(value.args))
    if isinstance(value, sympy.Tuple):
        return Items("()", tuple(value.args))
    return value


class Decimal(sympy.Symbol):
    """A number that was written as a decimal; `exact_number` replaces it by its value."""

    def __new__(cls, value: sympy.Rational) -> "Decimal":
        symbol = sympy.Symbol.__new__(cls, f"decimal_{value}")
        return symbol

    @property
    def value(self) -> sympy.Rational:
        return sympy.Rational(self.name.removeprefix("decimal_"))


def is_relation(value: Any) -> bool:
    return isinstance(value, sympy.core.relational.Relational | And)


def is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and not any(
        not isinstance(symbol, Decimal) for symbol in value.free_symbols
    ) and not value.atoms(sympy.core.function.AppliedUndef)  # fmt: skip


def with_numbers(value: Any) -> Any:
    return value.xreplace({symbol: symbol.value for symbol in value.free_symbols if isinstance(symbol, Decimal)})


def exact_number(value: Any) -> Any:
    """Return a number with its decimals replaced by fractions, evaluated as far as it is exact."""
    return with_numbers(value).doit()
