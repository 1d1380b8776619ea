r"""Normal form of an answer's text, for math_reading.py: LaTeX without Markdown, layout commands and Unicode signs."""

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙₖ", "0123456789+-nk", strict=True))
_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "∞": r"\infty ",
    "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "≡": r"\equiv ", "±": r"\pm ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "…": r"\ldots ", "∖": r"\setminus ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "′": "'", "，": ",", "；": ";",
}  # fmt: skip
_FUNCTIONS = r"sin|cos|tan|cot|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|gcd|lcm|det"
_FUNCTIONS_OR_UNITS = "max|min|sec"  # units after a number
_BRACED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_NESTED = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"

# (pattern, replacement), in this order. Layout has no meaning and is removed; names of one thing become one name.
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|m?left|mright|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it)(?![A-Za-z])", ""),
        (r"(?<=\d)\s*(?:\{,\}|,?\\!,?|\\,)\s*(?=\d{3}(?!\d))", ""),  # thousands: 70{,}000, 70,\!000, 1\,234
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"\{:\}", ":"),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"\\text\s*\{\s*([-+])\s*\}", r"\1"),
        (r"(?i)(?<![A-Za-z])([ap])\.\s?m(?:\.|(?![A-Za-z]))", r"\1m"),
        (r"(?i)^\s*(?:\\text\s*\{\s*)?(?:all|any)\s+real(?:s|\s+numbers?)\s*\}?\s*$", r"\\mathbb{R}"),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\hspace\{[^{}]*\}|\\phantom\{[^{}]*\}", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\dbinom|\\tbinom", r"\\binom"),
        (r"\\(?:mathrm|text|textrm|textit|mathit|operatorname|mathop)\s*\{\s*([eidx])\s*\}", r" \1 "),
        (rf"\\(?:mathrm|text|textrm|operatorname\*?)\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
        (r"(?<!\d)(?<!\d\s)(?<!\d\s\s)\\(?:mathrm|text|textrm|operatorname\*?)\s*"
         rf"\{{\s*({_FUNCTIONS_OR_UNITS})\s*\}}", r"\\\1 "),
        # Bold mathematics, such as \boldsymbol{3\sqrt{2}}; bold letters are words.
        (rf"\\(?:mathbf|boldsymbol|bm|bold)\s*(?=\{{\s*(?:[-+\d(\[]|\\[A-Za-z{{])){_NESTED}", r"\1"),
        (r"\\(?:textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm"
         r"|operatorname\*?|mbox|emph|bold)(?=\s*\{)", r"\\text"),
        # A number in \text: "18 eggs" is 18 and a unit. Not the digits of \text{12}_5.
        (r"(?<!\w)\\text\s*\{\s*((?:\\?\$)?[-+]?\d[\d,./:]*(?:\\?%)?)(?:\s*|\s+([^{}]+))\}(?!\s*_)",
         r"\1\\text{ \2}"),
        (r"\\text\s*\{\s*(?:\\?%|percent)\s*\}|\s+percent(?![A-Za-z])|\\%", "%"),
        (r"\\text\s*\{\s*(?:,?\s*(and|or)\s*,?|,)\s*\}", r" , \1 "),
        (r"\\text\s*\{\s*\}", " "),
        (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
        (r"\\(?:land|wedge)(?![A-Za-z])", " and "),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
        (r"\\(?:leqslant|leqq|le)(?![A-Za-z])|<=|≦", r"\\leq "),
        (r"\\(?:geqslant|geqq|ge)(?![A-Za-z])|>=|≧", r"\\geq "),
        (r"\\(?:ne|not\s*=)(?![A-Za-z])|!=", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\backslash(?![A-Za-z])", r"\\setminus "),
        (r",?\s*(?:\\(?:cdots|dots|ldots|dotsc|dotsb)(?![A-Za-z])|\.\.\.+)", r" , \\ldots "),
        (r"\^\s*\{?\s*(?:\\circ|\\degree)\s*\}?|\\degree(?![A-Za-z])", r" ^\\circ "),
        (r"\\imath(?![A-Za-z])", "i"),
        (r"\\(?:var)(epsilon|phi|theta)", r"\\\1"),
        (r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\\])(sqrt|pi|sin|cos|tan|log|ln)(?=\s*[({])", r"\\\1"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\\(frac|binom)\s*(\d|[A-Za-z])\s*(\d|[A-Za-z])", r"\\\1{\2}{\3}"),
        (r"\\(frac|binom)\s*(\d|[A-Za-z])\s*\{", r"\\\1{\2}{"),
        (rf"\\(frac|binom)\s*{_BRACED}\s*(\d|[A-Za-z])", r"\\\1{\2}{\3}"),
        (r"(?<=[\w)])\s*\*\*\s*(?=[\w(])", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"(?:\{|^)\s*([^{}]+?)\s*\\choose(?![A-Za-z])\s*([^{}]+?)\s*(?:\}|$)", r"\\binom{\1}{\2}"),
        (r"\^\s*-\s*(\d+)", r"^{-\1}"),
        (r"\\sqrt\s*\[(\d*[13579])\]\s*\{\s*-\s*(\d+)\s*\}", r"(-\\sqrt[\1]{\2})"),  # the real root
        # 1e6, 1e-05, 4.5e-3; 2e-5 can also be 2e - 5
        (r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE](\+?\d+|-0\d+)(?![\w.])|"
         r"(?<![\w.\\])(1|\d+\.\d+)[eE](-\d+)(?![\w.])", r"\1\3\\times 10^{\2\4}"),
        (r"^(?:\\text\s*\{\s*)?(\d+)\s*(?:\^\s*)?\{?\s*(?:\\text\s*\{)?\s*(?:st|nd|rd|th)[\s}]*$", r"\1"),
        (r"\\text\s*\{\s*([A-J](?:\s*,\s*[A-J])+)\s*\}", r"\1"),
    )
]  # fmt: skip
_WRAPPERS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$(?P<inside>[^$]*)\$\$",
        r"\$(?P<inside>[^$]+)(?<!\\)\$",
        r"\\\((?P<inside>(?:(?!\\[()]).)*)\\\)",
        r"\\\[(?P<inside>(?:(?!\\[\[\]]).)*)\\\]",
        rf"\\f?boxed\s*(?:{_BRACED.replace('((', '(?P<inside>(', 1)})",
        r"\*\*(?P<inside>[^*]+)\*\*",
        r"__(?P<inside>[^_]+)__",
        r"\*(?P<inside>[^*\s][^*]*)\*",
        r"```(?:[a-z]+\n)?(?P<inside>[^`]+)```",
        r"`(?P<inside>[^`]+)`",
        r"\{(?P<inside>[^{}]*)\}",
        r"\"(?P<inside>[^\"]*)\"",
        r"“(?P<inside>[^”]*)”",
    )
]
_BOLD = re.compile(r"(?<![\w)*])\*\*(?![\s*])([^*]+?)(?<!\s)\*\*(?![\w(*])|(?<!\\)`([^`]+)`")
_HEADING = re.compile(r"^\s*(?:#{1,6}|>)\s+")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))(?![\d.])")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d.]*\d)")


def normal_form(text: str) -> str:
    """Return the answer's text with one name for each thing, without Markdown, delimiters and layout commands."""
    text = _unicode_signs(text)
    text = _HEADING.sub("", " ".join(text.split()))
    text = _BOLD.sub(lambda match: match[1] or match[2], text)
    text = _without_wrappers(text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_repeating_decimal, text)
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    return _without_wrappers(" ".join(text.split()))


def _without_wrappers(text: str) -> str:
    """Remove delimiters, boxes, emphasis and a final full stop that are around the whole text, in any order."""
    before = None
    while before != text:
        before, text = text, text.strip()
        text = re.sub(r"(?<=[^.\s])\s*(?:[.。;]|,)$", "", text)
        for wrapper in _WRAPPERS:
            if match := wrapper.fullmatch(text):
                text = match["inside"]
    return text


def _unicode_signs(text: str) -> str:
    for table, mark in ((_SUPERSCRIPTS, "^"), (_SUBSCRIPTS, "_")):
        runs = re.split(f"([{re.escape(''.join(table))}]+)", text)  # every second one is of signs
        runs[1::2] = [mark + "{" + "".join(table[sign] for sign in run) + "}" for run in runs[1::2]]
        text = "".join(runs)
    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))", lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    fraction = r"\frac{{{}}}{{{}}}"
    text = "".join(
        fraction.format(*unicodedata.normalize("NFKC", sign).split("⁄"))
        if unicodedata.category(sign) == "No" and "⁄" in unicodedata.normalize("NFKC", sign)
        else sign
        for sign in text
    )
    return unicodedata.normalize("NFKC", text)


def _repeating_decimal(match: re.Match[str]) -> str:
    r"""Return the fraction of a repeating decimal, such as \frac{1}{3} for 0.\overline{3}."""
    whole, fixed, period = match[1] or "0", match[2], match[3] or match[4]
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    above = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{above}}}{{{below}}}"
