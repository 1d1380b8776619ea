"""Two different expressions are not equal at the points where math_equal.py compares them."""

import itertools
import random

import pytest
import sympy

from megatron_grpo.rewards.builtin import math_equal, math_reading

LETTERS = sympy.symbols("a b c d x y z")
REAL = list(math_equal._points(LETTERS, set(), 9000))
WHOLE = list(math_equal._points(LETTERS, set(LETTERS), 9000))


@pytest.mark.parametrize("points", [REAL, WHOLE], ids=["real", "whole"])
def test_no_linear_relation_holds_at_the_points(points):
    drawn = random.Random(0)
    for _ in range(500):
        coefficients = [drawn.randint(-4, 4) * drawn.choice((0, 1)) for _ in LETTERS]
        if not any(coefficients):
            continue
        values = [sum(c * point[s] for c, s in zip(coefficients, LETTERS, strict=True)) for point in points]
        assert len(set(values)) > math_equal._FEWEST_POINTS


def test_orders_signs_sizes_and_remainders_of_the_points():
    for a, b in itertools.permutations(LETTERS, 2):
        assert sum(bool(point[a] > point[b]) for point in WHOLE) >= math_equal._FEWEST_POINTS
        assert {(bool(point[a] > 0), bool(point[b] > 0)) for point in REAL} == set(
            itertools.product((True, False), repeat=2)
        )
        assert any(point[a] > point[b] for point in REAL)
    for a in LETTERS:
        assert any(point[a] > 2500 for point in REAL)
        assert any(point[a] < -2500 for point in REAL)
        assert {point[a] % 3 for point in WHOLE} == {0, 1, 2}
        assert any(point[a].is_Integer for point in REAL)


def an_expression(drawn, depth=2):
    r"""Return a random expression and its text in LaTeX."""
    if depth == 0 or drawn.random() < 0.2:
        symbol = drawn.choice(LETTERS[-4:])
        return drawn.choice([(symbol, str(symbol)), (sympy.Integer(2), "2"), (sympy.Integer(3), "3")])
    (a, a_text), (b, b_text) = an_expression(drawn, depth - 1), an_expression(drawn, depth - 1)
    return drawn.choice(
        [
            (a + b, f"({a_text}+{b_text})"),
            (a - b, f"({a_text}-{b_text})"),
            (a * b, rf"{{{a_text}}} \cdot {{{b_text}}}"),
            (sympy.sqrt(a**2), rf"\sqrt{{({a_text})^{{2}}}}"),
            (sympy.sqrt(1 + a**2), rf"\sqrt{{1+({a_text})^{{2}}}}"),
            (sympy.floor(a), rf"\lfloor {{{a_text}}} \rfloor"),
        ]
    )


@pytest.mark.slow
def test_random_expressions_are_equal_only_where_their_values_are():
    """The values at 40 other points, in double precision, decide; pairs that differ at no point are left out."""
    drawn = random.Random(1)
    found = 0
    while found < 25:
        (a, a_text), (b, b_text) = an_expression(drawn), an_expression(drawn)
        if a == 0:
            continue
        function = sympy.lambdify(LETTERS, a - b, "math")
        if all(abs(function(*(drawn.uniform(-4, 4) for _ in LETTERS))) < 1e-9 for _ in range(40)):
            continue
        found += 1
        gold, answer = math_reading.read(a_text), math_reading.read(b_text)
        assert not math_equal.equal(gold, answer), (a_text, b_text)
        assert isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)
        assert math_equal.equal(gold, math_reading.read(f"{a_text}+z-z")), a_text


# Gold answer, another expression: equal at many points that are easy to choose.
NEARLY_EQUAL = r"""
x-2y+z-1=0 ; x-2y+z+1=0
\frac{a+c}{2} ; b
a+b+c ; 3b
a+d ; b+c
b^2-ac ; (b-a)^2
\binom{n}{k} ; n
\binom{n-1}{k-1} ; k
k!(n-k)! ; k!
\binom{k}{n+k} ; \binom{n}{k+n}
\binom{m+n}{n} ; \binom{2n-1}{n}
m!n! ; (m!)^2 n
(-1)^n n! ; n!
x+y>2z ; z-y<0
|x-2024| ; 2024-x
|x-10| ; 10-x
|xy| ; xy
\lceil x \rceil ; \lfloor x \rfloor + 1
\lceil \frac{n}{2} \rceil ; \lfloor \frac{n}{2} \rfloor + 1
\sin(2\pi x) ; 0
i^n ; (-i)^n
\frac{1}{x-x} ; \frac{2}{x-x}
x^{y} ; y^{x}
n!! ; (n!)!
"""


@pytest.mark.parametrize("pair", NEARLY_EQUAL.strip().splitlines())
def test_nearly_equal(pair):
    gold, answer = map(math_reading.read, pair.split(" ; "))
    assert not math_equal.equal(gold, answer)
    assert not math_equal.equal(answer, gold)


# Equal where both are real, at whole numbers, or up to a factor.
EQUAL = r"""
\ln a-\ln b ; \ln\frac{a}{b}
\binom{n}{k} ; \frac{n!}{k!(n-k)!}
\binom{n}{k}\binom{k}{m} ; \binom{n}{m}\binom{n-m}{k-m}
\sum_{k=0}^{n} x^k ; \frac{x^{n+1}-1}{x-1}
x+y=5 ; 2x+2y=10
x+y>5 ; -2x-2y<-10
"""


@pytest.mark.parametrize("pair", EQUAL.strip().splitlines())
def test_equal(pair):
    gold, answer = map(math_reading.read, pair.split(" ; "))
    assert math_equal.equal(gold, answer)
