"""Whether two values of answers (math_expression.py) are equal."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import sympy
from latex2sympy2_extended.logic import And

from megatron_grpo.rewards.builtin.math_expression import (
    Choice,
    Congruence,
    Decimal,
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
    exact_number,
    is_number,
    is_relation,
    parse,
    with_numbers,
)
from megatron_grpo.rewards.builtin.units import is_word

_DIGITS = 50  # of numerical values
_EPSILON = sympy.Rational(1, 10**30)  # relative difference of two values that are equal, computed with 50 digits
_ROUNDED_DIGITS = 6  # a decimal with as many significant digits may be the rounding of an exact value


def equal(gold: Any, answer: Any) -> bool:
    """Return whether two values (`math_reading.read`) are equal."""
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
    if is_relation(gold) or is_relation(answer):
        return _equal_relations(gold, answer)
    if isinstance(gold, sympy.Set) or isinstance(answer, sympy.Set):
        return _equal_sets(gold, answer)
    return _equal_expressions(gold, answer)


def _unnamed(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Return the values without their names: x = 5 is 5, but not y = 5; the case of a name does not matter."""
    if isinstance(gold, Named) and isinstance(answer, Named):
        if _are_one_name(gold.name, answer.name) or "\\text" in gold.name + answer.name:
            return gold.value, answer.value
        return as_equation(gold), as_equation(answer)
    if isinstance(gold, Evaluated) or (isinstance(gold, Named) and is_relation(answer)):
        return as_equation(gold), answer
    if isinstance(answer, Named) and is_relation(gold):
        return gold, as_equation(answer)
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


def as_equation(value: Named) -> Any:
    name, right = parse(value.name), value.value
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
    parts = [v.parts if isinstance(v, Ratio) else (v, sympy.Integer(1)) if is_number(v) else () for v in (gold, answer)]
    if len(parts[0]) != len(parts[1]):
        return False
    pairs = [(exact_number(a), exact_number(b)) for a, b in zip(*parts, strict=True)]
    (first, second), *others = pairs
    return all(_equal_numbers(first * b, second * a) for a, b in others) if first and second else False


def _equal_percents(gold: Any, answer: Any) -> bool:
    """Compare percentages: 50% is 1/2, and by custom also the number 50; 1/2 is not 1/2%."""
    values = [v.value if isinstance(v, Percent) else v for v in (gold, answer)]
    if not all(map(is_number, values)):
        return False
    if isinstance(gold, Percent) and isinstance(answer, Percent):
        return _equal_expressions(*values)
    shares = [v / 100 if isinstance(whole, Percent) else v for v, whole in zip(values, (gold, answer), strict=True)]
    if _equal_expressions(*shares):
        return True
    return bool(abs(sympy.N(exact_number(values[0]))) >= 1) and _equal_expressions(*values)


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
    if not is_number(other):
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
        if not items.brackets and all(map(is_relation, joined)):  # a comma can mean "and" or "or"
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
    sets = [as_set(value) for value in (gold, answer)]
    if None in sets:
        return False
    if sets[0] == sets[1]:
        return True
    return sets[0].symmetric_difference(sets[1]) == sympy.S.EmptySet


def as_set(value: Any) -> Any:
    """Return a value as a sympy set of real numbers; None if it is none."""
    if isinstance(value, sympy.Set):
        return value
    if isinstance(value, Union):
        parts = [as_set(part) for part in value.parts]
        return None if None in parts or len(_variables(value)) > 1 else sympy.Union(*parts)
    if is_relation(value):
        return _solution_set(value)
    if not isinstance(value, Items) or value.has_ellipsis:
        return None
    numbers = [exact_number(item) if is_number(item) else None for item in value.items]
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
    return {symbol for part in parts if is_relation(part) for symbol in with_numbers(part).free_symbols}


def _solution_set(value: Any) -> Any:
    symbols = _variables(value)
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    if isinstance(value, sympy.Eq):  # equations are not solved
        return sympy.FiniteSet(exact_number(value.rhs)) if value.lhs == symbol and is_number(value.rhs) else None
    variable = sympy.Symbol("x", real=True)
    parts = value._unsorted_args if isinstance(value, And) else [value]
    return reduce(
        lambda found, part: found.intersect(with_numbers(part).xreplace({symbol: variable}).as_set()),
        parts,
        sympy.S.Reals,
    )


def _equal_relations(gold: Any, answer: Any) -> bool:
    """Compare equations and inequalities: equal up to a factor, or with equal sets of solutions."""
    if not (is_relation(gold) and is_relation(answer)):
        value = answer if is_relation(gold) else gold
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


def _equal_expressions(gold: Any, answer: Any) -> bool:
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return gold == answer
    if is_number(gold) and is_number(answer):
        has_decimal = [any(isinstance(s, Decimal) for s in value.free_symbols) for value in (gold, answer)]
        a, b = exact_number(gold), exact_number(answer)
        return _equal_numbers(a, b) or any(
            decimal and _is_rounding(x, y) for decimal, x, y in zip(has_decimal, (a, b), (b, a), strict=True)
        )
    a, b = with_numbers(gold), with_numbers(answer)
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
