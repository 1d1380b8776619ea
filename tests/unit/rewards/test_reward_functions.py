"""The rewards that need no more than a completion and its row, each against values worked out by hand."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_verify.errors import TimeoutException
from ranks import REPO
from slow import slow_except

from megatron_grpo.rewards.builtin import math_answer
from megatron_grpo.rewards.builtin.answer_text import final_answer, last_boxed, last_code_block
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


# --- accuracy: what is equal, and what is not

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
\frac{\pi}{3} | 60^\circ            : radians
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
"""


def pairs(table):
    lines = [line.rpartition(" : ")[0].split(" | ") for line in table.strip().splitlines()]
    return [(completion.strip(), gold.strip()) for completion, gold in lines]


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [(*pair, 1.0) for pair in pairs(EQUAL)] + [(*pair, 0.0) for pair in pairs(DIFFERENT)],
)
def test_accuracy(answer, gold, expected, monkeypatch):
    monkeypatch.setattr(math_answer, "_STEP_TIMEOUT", 60)  # a busy machine is not what is tested
    assert reward("accuracy", f"\\boxed{{{answer}}}", answer=gold) == expected
    assert reward("accuracy", f"<think>{gold}</think><answer>{answer}</answer>", answer=gold) == expected


# Form, gold answer, answer, right verdict, ours; the verdicts are by mathematics (see the head of the file).
PAIRS = [
    tuple(part.strip() for part in line.split(" | ")[:5])
    for line in (Path(__file__).parents[2] / "data/answer_pairs.txt").read_text().splitlines()
    if not line.startswith("#")
]
FORMS = (
    "integer fraction interval set tuple unit percent scientific equation modular base radical complex matrix choice "
    "text sequence"
).split()


@pytest.mark.parametrize("form", slow_except(["fraction", "set", "percent", "choice", "text"], FORMS))
def test_pairs_of_answers(form, monkeypatch):
    monkeypatch.setattr(math_answer, "_STEP_TIMEOUT", 60)
    found = {
        (gold, answer): str(int(reward("accuracy", f"<answer>{answer}</answer>", answer=gold)))
        for of, gold, answer, *_ in PAIRS
        if of == form
    }
    assert found == {(gold, answer): ours for of, gold, answer, _, ours in PAIRS if of == form}


def test_the_table_of_pairs_is_what_it_should_be():
    assert len(PAIRS) >= 200 and {form for form, *_ in PAIRS} == set(FORMS)
    assert len({pair[1:3] for pair in PAIRS}) == len(PAIRS)
    for form in FORMS:
        right = [pair[3] for pair in PAIRS if pair[0] == form]
        assert len(right) >= 10 and 0.4 <= right.count("1") / len(right) <= 0.6
    # An equal answer may be refused; a different one is never taken for equal.
    assert all(ours == "0" for *_, right, ours in PAIRS if right == "0")
    assert sum(right != ours for *_, right, ours in PAIRS) <= len(PAIRS) / 20


@pytest.mark.parametrize(
    ("prompt", "completion", "right"),
    [
        ("", "<think>or <answer>6</answer>?</think>It is \\boxed{5}.", 1),
        ("", "<think>\\boxed{5}?</think>It is \\boxed{6}.", 0),
        ("", "<think>\\boxed{5}</think>I do not know.", 0),
        ("Go.<think>\n", "is it \\boxed{6}?</think>\\boxed{5}", 1),
        ("Go.<think>\n", "maybe \\boxed{5}, but let me check", 0),
        ("", "<think>maybe \\boxed{5}, but let me check", 0),
        ("", "\\boxed{5}", 1),
        ("", "<answer>**5**</answer>", 1),
        ("", "<answer>6</answer> or \\boxed{5}", 0),
        ("", "", 0),
    ],
)
def test_the_answer_is_read_after_the_reasoning(prompt, completion, right):
    assert reward("accuracy", completion, prompt=prompt, answer="5") == right
    read = {"unfinished_thinking": "read"}
    begun = "</think>" not in completion and "<think>" in prompt + completion
    assert reward("accuracy", completion, flags=read, prompt=prompt, answer="5") == (1 if begun else right)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("So $\\boxed 5$.", 1),
        ("\\boxed{6}, no: \\boxed 5", 1),
        ("\\boxed 6, no: \\boxed{5}", 1),
        ("\\boxed{5} as \\boxed asks", 1),
        ("\\boxed 56", 0),
    ],
)
def test_a_box_without_braces(completion, right):
    assert reward("accuracy", completion, answer="5") == right


def test_all_rewards_of_answers_leave_out_the_reasoning():
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    cases = (
        ("gsm8k", "5", {"answer": "5"}),
        ("exact_match", "5", {"answer": "5"}),
        ("countdown", "<answer>2+3</answer>", {"nums": [2, 3], "target": 5}),
        ("tool_call", call, {"tool_calls": [{"name": "a", "arguments": {}}]}),
    )
    for name, said, row in cases:
        assert reward(name, said, **row) == 1
        assert reward(name, f"<think>or 7{call}</think>{said}", **row) == 1
        assert reward(name, f"<think>{said}</think>or 7 or not", **row) == 0
        assert reward(name, f"<think>{said}", **row) == 0


def test_cosine_takes_the_flags_of_answers():
    flags = {"answer_extraction": "line", "unfinished_thinking": "read"}
    assert reward("cosine", "<think>Answer: 2", flags=flags, answer="2") == 1.0
    assert reward("cosine", "<think>Answer: 2", answer="2") == -0.5


# The form that the prompts of DAPO's data sets ask for: The last line .. should be of the form Answer: $Answer
LINES = ("Answer: $13$", "So.\nAnswer: 13", "**Answer:** 13", "Answer: 12\nNo.\nAnswer: \\boxed{13}.", "answer: 13.")


@pytest.mark.parametrize("completion", LINES)
def test_a_line_with_the_answer(completion):
    assert reward("accuracy", completion, answer="13") == (1 if "boxed" in completion else 0)
    for way in ("line", "any"):
        assert reward("accuracy", completion, flags={"answer_extraction": way}, answer="13") == 1
        assert reward("accuracy", completion, answer="13", answer_extraction=way) == 1
        assert reward("accuracy", completion, flags={"answer_extraction": way}, answer="12") == 0


def test_where_the_answer_is_by_row():
    flags = {"answer_extraction": "line"}
    assert reward("accuracy", "\\boxed{13}", flags=flags, answer="13") == 0
    assert reward("accuracy", "\\boxed{13}", flags=flags, answer="13", answer_extraction="boxed") == 1
    assert reward("accuracy", "\\boxed{13}\nAnswer: 14", flags={"answer_extraction": "any"}, answer="13") == 1
    with pytest.raises(GrpoError, match=r'"answer_extraction" must be one of boxed, line, any, found \'box\''):
        reward("accuracy", "", answer="1", answer_extraction="box")


@pytest.mark.parametrize(
    ("gold", "fault"),
    [
        ("\\frac{1}{", "its braces do not match"),
        ("We add both numbers and see that the sum is large", "it is prose"),
        ("?!", "it has neither a letter nor a digit"),
        ("\\boxed{", "its braces do not match"),
    ],
)
def test_a_gold_answer_that_nothing_can_equal_is_an_error(gold, fault):
    with pytest.raises(GrpoError, match=f"cannot be compared with, because {fault}"):
        reward("accuracy", "", answer=gold)


# --- numbers and text


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("$70{,}000$", 1),
        ("\\boxed{70,\\!000}", 1),
        ("\\boxed{70\\,000}", 1),
        ("\\$70{,}000.00", 1),
        ("70,000", 1),
        ("$70{,}001$", 0),
        ("7{,}000", 0),
        ("-70{,}000", 0),
        ("70{,}00", 0),
    ],
)
def test_gsm8k_in_latex(completion, expected):
    assert reward("gsm8k", completion, answer="70000") == expected
    assert reward("gsm8k", "so 70000", answer=f"#### {completion}") == expected


@pytest.mark.parametrize(
    ("completion", "number"), [("Total........18", "18"), ("No.5", "5"), ("It is .5", "0.5"), ("-.5", "-0.5")]
)
def test_gsm8k_reads_no_decimal_point_after_a_word_or_dots(completion, number):
    assert reward("gsm8k", completion, answer=number) == 1


def test_a_small_number_of_a_row_is_a_decimal():
    """Python writes 1e-05, which reads as e - 5."""
    assert reward("accuracy", "\\boxed{0.00001}", answer=1e-05) == 1
    assert reward("accuracy", "\\boxed{10^{-5}}", answer=1e-05) == 1
    assert reward("accuracy", "\\boxed{e-5}", answer=1e-05) == 0


@pytest.mark.parametrize("text", ["<think>", "<think>a</think>", "</think>"])
def test_tags_of_reasoning_in_the_arguments_of_a_call_are_text(text):
    call = {"name": "f", "arguments": {"s": text}}
    said = f"<think>x</think><tool_call>{json.dumps(call)}</tool_call>"
    assert reward("tool_call", said, tool_calls=[call]) == 1
    assert reward("tool_call", f"<think>{said}", tool_calls=[]) == 0


@pytest.mark.parametrize(("gold", "text"), [(72.0, "72"), (-3.0, "-3"), (1e15, "1000000000000000"), (0.5, "0.5")])
def test_exact_match_of_a_column_of_floats(gold, text):
    assert reward("exact_match", text, answer=gold) == 1
    assert reward("exact_match", text + "1", answer=gold) == 0


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("你好" * 12, 2 / 22 - 1),  # 22 trigrams, of two kinds
        ("今天天气很好我们去公园玩", 0),
        ("สวัสดี" * 4, 6 / 22 - 1),
        ("こんにちは" * 4, 5 / 18 - 1),
        ("GRPO 很好 GRPO 很好", -1 / 4),  # GRPO很好 很好GRPO 好GRPO很 GRPO很好
        ("!" * 500, 1 / 498 - 1),
        ("안녕 안녕 안녕 안녕", 1 / 2 - 1),
    ],
)
def test_repetition_in_any_script(text, expected):
    assert reward("repetition", text) == pytest.approx(expected)


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


def test_lengths_are_those_of_the_sampled_tokens():
    """22 of 120 tokens are the policy's, of 64 that are allowed; the rest an environment said."""
    mask = [1] * 10 + [0] * 98 + [1] * 12
    flags = FLAGS | {"max_completion_length": 64, "soft_cache_length": 32}
    for name in ("soft_overlong", "cosine"):
        (function,) = get_rewards([name], flags)
        spoken = Sample("", "\\boxed{2}", {"answer": "2"}, token_ids=[1] * 120, response_mask=mask)
        alone = Sample("", "\\boxed{2}", {"answer": "2"}, token_ids=[1] * 22)
        assert function(spoken) == function(alone)
        assert spoken.num_sampled == alone.num_sampled == 22
    (soft_overlong,) = get_rewards(["soft_overlong"], flags)
    assert soft_overlong(spoken) == 0


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
        (r"(75-25) \times 2 \div 4", 1),
        (r"$\left(75-25\right)\cdot\frac{2}{4}$", 1),
        (r"\dfrac{(75-25) \times 2}{4} = 25", 1),
        (r"[75-25] \times \frac{2}{4}", 1),
        (r"(75+25) \times 2 \div 4", 0),
        (r"\frac{75-25}{2} \times 4", 0),
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


@pytest.mark.parametrize(
    "said",
    [
        "Answer: **42**", "**Answer: 42**", "**Answer:** 42", "Answer: *42*", "Answer: __42__", "Answer: **42**.",
        "Answer:\n\\[\n42\n\\]", "Answer:\n$$\n42\n$$\nThis is all.", "Answer: 42 (since 21*2)", "Answer: $42$.",
        "Answer: 42 (forty-two)",
    ],
)  # fmt: skip
def test_an_answer_line_without_its_emphasis(said):
    assert reward("accuracy", said, answer="42", answer_extraction="line") == 1
    assert reward("accuracy", said, answer="43", answer_extraction="line") == 0


WAITING_AND_WORK = """
import itertools, time
from megatron_grpo.rewards.builtin import math_answer
from megatron_grpo.rewards.registry import Sample, get_rewards
(accuracy,) = get_rewards(["accuracy"])
sample = Sample("", "\\\\boxed{5}", {"answer": "5"})
scores = [accuracy(sample)]  # the first call of a process is slower
math_answer._STEP_TIMEOUT = 0.1
math_answer.math_equal.equal = lambda *_: time.sleep(0.3) is None
scores.append(accuracy(sample))
math_answer.math_equal.equal = lambda *_: any(number < 0 for number in itertools.count())
scores.append(accuracy(sample))
print(scores)
"""


def test_the_time_limit_counts_the_work_and_not_the_waiting():
    """A busy machine must not turn a right answer into a wrong one.

    In a process of its own, as a worker of rewards is: gloo's threads of other tests here would work meanwhile.
    """
    run = subprocess.run([sys.executable, "-c", WAITING_AND_WORK], cwd=REPO, capture_output=True, text=True, check=True)
    assert run.stdout == "[1.0, 1.0, 0.0]\n"


def test_a_gold_answer_that_is_not_read_in_time_is_no_error_in_the_data(monkeypatch):
    """On a machine that is busy it would end the run; an answer that takes too long is wrong."""

    def read(text):
        if "8125" in text:
            raise TimeoutException
        return 7

    monkeypatch.setattr(math_answer.math_reading, "read", read)
    (accuracy,) = get_rewards(["accuracy"])
    with pytest.raises(TimeoutError, match=r"'88125' was not parsed within"):
        accuracy(Sample("", "\\boxed{1}", {"answer": "88125"}))
    assert accuracy(Sample("", "\\boxed{88125}", {"answer": "77125"})) == 0
    math_answer.read.cache_clear()


@pytest.mark.parametrize(
    "text",
    ["The answer" + " " * 64000, r"\boxed{" * 9000, "<answer>" * 8000, r"answer:\[" * 7000, "answer: $$" * 6000],
    ids=["spaces", "boxed", "tags", "displayed", "dollars"],
)
def test_an_answer_is_looked_for_in_linear_time(text):
    """With the square of the length these took minutes, outside of the limit of `accuracy`."""
    began = time.process_time()
    final_answer(Sample("", text, {"answer": "5"}), "any")
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"a \boxed{1} b \boxed {x{y}z} \boxed{open", "x{y}z"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"} \boxed{\{1,2\}} }", r"\{1,2\}"),
        (r"\boxed{", None),
    ],
)
def test_the_last_complete_box(text, content):
    assert last_boxed(text) == content
