"""The rewards that need no more than a completion and its row, each against values worked out by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.rewards.builtin import math_answer
from megatron_grpo.rewards.builtin.answer_text import last_code_block
from megatron_grpo.rewards.registry import Sample, get_rewards
from megatron_grpo.utils.errors import GrpoError

FLAGS = {
    "max_completion_length": 100,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "repetition_n_grams": 3,
    "soft_cache_length": 20,
}


def reward(name, completion, length=0, flags=None, prompt="", **row):
    (function,) = get_rewards([name], FLAGS | (flags or {}))
    return function(Sample(prompt, completion, row, token_ids=[1] * length))


# --- accuracy: what math-verify takes for equal, and what it does not

EQUAL = r"""
\dfrac12 | 1/2                      : \frac without braces
\tfrac{3}{6} | \frac12              : not reduced
-\frac{1}{2} | \frac{-1}{2}         : where the minus stands
1\frac{1}{2} | 1.5                  : a mixed number
\frac{1}{\sqrt2} | \frac{\sqrt2}{2} : a root below
0.333333 | \frac13                  : six decimals
\pi | 3.14159265                    : numbers are compared by value
18\text{ cm} | 18                   : units
18 cm | 18                          : units without \text
5 \text{ km/h} | 5                  : units with a slash
5\mathrm{kg} | 5                    : units in \mathrm
18 dollars | 18                     : money
$18 | 18                            : money
\$18.00 | 18                        : money in LaTeX
90^\circ | 90                       : degrees
1,234,567 | 1234567                 : thousands
1{,}234 | 1234                      : thousands in LaTeX
1\,234 | 1234                       : thousands with a thin space
1 234 567 | 1234567                 : thousands with spaces
10,000.5 | 10000.5                  : thousands and decimals
50\% | 50                           : percent as the number
50\% | 0.5                          : percent as the share
50\% | \frac12                      : percent as a fraction
0.5 | 50\%                          : and the other way round
x=5 | 5                             : an assignment
5 | x=5                             : on the other side
x \in [0,1] | [0,1]                 : membership
x<3 | 3>x                           : an inequality turned round
\{1,2\} | \{2,1\}                   : a set has no order
1,2,3 | 3,2,1                       : nor has a list without brackets
(1,2) | (1,2)                       : a point
2^{10} | 1024                       : a power
3 \times 10^8 | 300000000           : scientific
\log_2 8 | 3                        : a logarithm
5! | 120                            : a factorial
(x+1)^2 | x^2+2x+1                  : an expression
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix} : a vector
\text{(B)} | B                      : a choice
007 | 7                             : zeros in front
"""
DIFFERENT = r"""
0.333 | \frac13                     : too few decimals
\pi | 3.14                          : too few decimals
5\% | 0.5                           : percent of another size
-5 | 5                              : the sign
(1,2) | (2,1)                       : a point has an order
(0,1] | [0,1]                       : an open end
x<3 | x\le3                         : an open end
x^2+2x | x^2+2x+1                   : an expression
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix} : a vector
1, 2 | 2                            : one answer too many
1/0 | 1                             : nonsense
\frac{\pi}{3} | 60^\circ            : radians: math-verify knows no units
"""


def pairs(table):
    lines = [line.rpartition(" : ")[0].split(" | ") for line in table.strip().splitlines()]
    return [(completion.strip(), gold.strip()) for completion, gold in lines]


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [(*pair, 1.0) for pair in pairs(EQUAL)] + [(*pair, 0.0) for pair in pairs(DIFFERENT)],
)
def test_accuracy_by_math_verify(answer, gold, expected, monkeypatch):
    monkeypatch.setattr(math_answer, "_STEP_TIMEOUT", 60)  # a busy machine is not what is tested
    assert reward("accuracy", f"\\boxed{{{answer}}}", answer=gold) == expected
    assert reward("accuracy", f"<think>{gold}</think><answer>{answer}</answer>", answer=gold) == expected


# --- length


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [(0, 1.0, -0.5), (25, 0.75 + math.sqrt(2) / 8, -0.25 - math.sqrt(2) / 8), (50, 0.75, -0.25), (100, 0.5, 0.0)],
)
def test_cosine(length, right, wrong):
    assert reward("cosine", r"\boxed{2}", length, answer="2") == pytest.approx(right)
    assert reward("cosine", r"\boxed{3}", length, answer="2") == pytest.approx(wrong)


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("a b c a b c", 3, -1 / 4),  # abc bca cab abc
        ("A b a B", 2, -1 / 3),  # ab ba ab
        ("so so so so so", 2, -3 / 4),
        ("one two three four", 3, 0),
        ("a a", 3, 0),
        ("", 3, 0),
    ],
)
def test_repetition(text, n, expected):
    assert reward("repetition", text, flags={"repetition_n_grams": n}) == pytest.approx(expected)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 4))
def test_repetition_is_zero_only_without_any(words, n):
    value = reward("repetition", " ".join(words), flags={"repetition_n_grams": n})
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    assert -1 < value <= 0
    assert (value == 0) == all(grams.count(gram) == 1 for gram in grams)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1)])
def test_soft_overlong(length, expected):
    assert reward("soft_overlong", "", length) == pytest.approx(expected)


def test_soft_overlong_of_the_paper():
    flags = {"max_completion_length": 20480, "soft_cache_length": 4096}
    assert [reward("soft_overlong", "", n, flags) for n in (16384, 18432, 20480)] == [0, -0.5, -1]


# --- form


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('<think>a</think>\nAction: search\nAction Input: {"q": "x"}', 1),
        ("<think>a</think> Action: search\n\nAction Input: x\ny", 1),
        ("Action: search\nAction Input: x", 0),
        ("<think>a</think>\nAction: search", 0),
        ("<think>a</think>\nAction:\nAction Input: x", 0),
        ("<think>a</think>\nAction: search\nAction Input: ", 0),
        ("<think>a</think>\nwell\nAction: search\nAction Input: x", 0),
        ("<think>a</think>\nAction: search\nAction Input: x\nAction: search\nAction Input: y", 0),
        ("Action: b\nAction Input: c\n<think>a</think>", 0),
    ],
)
def test_react_format(completion, expected):
    assert reward("react_format", completion) == expected
    if completion.startswith("<think>"):
        assert reward("react_format", completion.removeprefix("<think>"), prompt="<think>\n") == expected


# --- countdown


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("(75 - 25) * 2 / 4", 1),
        ("(75-25)*2/4 = 25", 1),
        ("(75 − 25) × 2 ÷ 4", 1),
        ("75 / (4 - 2) - 25 / 2", 0),  # 25 twice short: 2 twice
        ("75 - 25 * 2", 0),  # 25, but without the 4
        ("25", 0),
        ("(75 - 25) * 2 / 4 + 0", 0),
        ("75 - 25 - 25", 0),
        ("(75 - 25) * 2 / (4 - 4)", 0),
        ("75 // 4", 0),
        ("75 ** 2", 0),
        ("__import__('os')", 0),
        ("(" * 5000, 0),
        ("(75 - 25", 0),
        ("", 0),
    ],
)
def test_countdown(answer, expected):
    completion = f"<think>hm</think><answer>{answer}</answer>"
    assert reward("countdown", completion, nums=[75, 25, 2, 4], target=25) == expected


def test_countdown_is_exact_and_needs_an_answer():
    assert reward("countdown", r"\boxed{8 / (3 - 8 / 3)}", nums=[3, 3, 8, 8], target=24) == 1
    assert reward("countdown", "1 + 2", nums=[1, 2], target=3) == 0
    assert reward("countdown", "<answer>-1 + 2</answer>", nums=[1, 2], target=1) == 1


@pytest.mark.parametrize("row", [{}, {"nums": [1, 2]}, {"nums": [], "target": 1}, {"nums": ["1"], "target": 1}])
def test_countdown_needs_its_row(row):
    with pytest.raises(GrpoError, match=r'"nums" \(a list of integers\) and "target" \(an integer\)'):
        reward("countdown", "<answer>1</answer>", **row)


# --- tool calls

A = {"name": "a", "arguments": {"x": 1, "y": [True, "z"]}}
B = {"name": "b", "arguments": {}}


def calls(*made):
    return "Well.\n" + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made)


@pytest.mark.parametrize(
    ("completion", "expected", "score"),
    [
        (calls(A), [A], 1),
        (calls(B, A), [A, B], 1),
        (calls({"name": "a", "arguments": {"y": [True, "z"], "x": 1.0}}), [A], 1),
        (calls({"name": "a", "arguments": {"x": 2, "y": [True, "z"]}}), [A], 1 / 2),  # the name
        (calls({"name": "c", "arguments": A["arguments"]}), [A], 0),
        (calls(A), [A, B], 1 / 2),  # (1 name + 1 call) / 4
        (calls(A, A), [A], 1 / 2),
        (calls(A, B, "nonsense"), [A, B], 2 / 3),  # (2 + 2) / 6
        ("<tool_call>{</tool_call>", [A], 0),
        (f"<think>{calls(A, B)}</think>{calls(A)}", [A], 1),  # what is in reasoning is no call
        (f"{calls(A, B)}</think>{calls(A)}", [A], 1),  # the prompt ends with <think>
        (f"<think>{calls(A)}</think>12", [], 1),
        (f"<think>{calls(A)}", [A], 0),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", [A], 0),
        (calls(A).replace("</tool_call>", ""), [A], 0),
        ("", [A], 0),
        ("no need", [], 1),
        (calls(A), [], 0),
    ],
)
def test_tool_call(completion, expected, score):
    assert reward("tool_call", completion, tool_calls=expected) == pytest.approx(score)
    assert reward("tool_call", completion, tool_calls=json.dumps(expected)) == pytest.approx(score)


@pytest.mark.parametrize("column", [None, "", "[", {"name": "a"}, [{"name": "a"}], [{"name": 1, "arguments": {}}]])
def test_tool_call_needs_its_row(column):
    with pytest.raises(GrpoError, match='"tool_calls" must be a list of'):
        reward("tool_call", "", tool_calls=column)


# --- blocks of code


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```py\na\n```\nor\n```\nb\n```\n", "b\n"),
        ("```python\na\n```\nrun it:\n```bash\nls\n```", "a\n"),
        ("  ```Python\n  a\n  ```", "  a\n"),
        ("```python\na\n", None),
        ("a = 1", None),
    ],
)
def test_last_code_block(text, expected):
    assert last_code_block(text) == expected


def test_a_gold_answer_that_is_not_read_in_time_is_no_error_in_the_data(monkeypatch):
    """On a machine that is busy it would end the run; an answer that takes too long is wrong."""
    monkeypatch.setattr(math_answer, "_STEP_TIMEOUT", 0)  # whatever it takes
    monkeypatch.setattr(math_answer, "parse", lambda text, **_: [7] if "77125" in text else [])
    (accuracy,) = get_rewards(["accuracy"])
    with pytest.raises(TimeoutError, match=r"did not parse '\$88125\$' within"):
        accuracy(Sample("", "\\boxed{1}", {"answer": "88125"}))
    assert accuracy(Sample("", "\\boxed{88125}", {"answer": "77125"})) == 0
    math_answer.read.cache_clear()
