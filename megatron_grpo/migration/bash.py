"""Reader of bash scripts: the words of each command, with simple variables, arrays and arithmetic expanded.

The script is read and never run. The reader knows quotes, comments, line continuations, here-documents, assignments
(``A=1``, ``A=( ... )``, ``A+=( ... )``), ``${A}``, ``${A:-default}``, ``${A[@]}``, ``$((1024 * 2))`` and ``source
FILE``. It does not evaluate conditions: a variable that branches of an ``if`` or ``case`` leave with several values has
all of them (``Script.text``). The value before the condition is the first of them, else that of ``*)``, else that of
the first branch. What only a run of the script can tell, such as a variable of the environment or ``$(command)``, stays
as it is written.
"""

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_grpo.utils.errors import GrpoError

ENDS = ";&|\n"
KEYWORDS = {
    "if",
    "then",
    "else",
    "elif",
    "fi",
    "for",
    "while",
    "until",
    "do",
    "done",
    "case",
    "esac",
    "in",
    "{",
    "}",
    "!",
}
DEEPER, LESS_DEEP = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
PREFIXES = {"export", "declare", "local", "readonly", "typeset"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TESTS = {"[", "[[", "test"}
CHOICE = re.compile(r"\x01(\d+)\x02")  # stands for a value that depends on a condition: Script.choices
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass
class Script:
    """The commands of a script, each with its words, its variables before the words, and what could not be read."""

    commands: list[tuple[dict[str, str], list[str]]] = field(default_factory=list)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    choices: list[list[str]] = field(default_factory=list)

    def text(self, word: str, branch: int = 0) -> str:
        """Return a word with this branch's value of what depends on conditions, the first one where there are fewer."""
        while found := CHOICE.search(word):
            values = self.choices[int(found[1])]
            word = word[: found.start()] + values[branch if branch < len(values) else 0] + word[found.end() :]
        return word

    def branches(self, words: list[str]) -> int:
        """Return the largest number of values that a part of these words has."""
        numbers = [int(number) for word in words for number in CHOICE.findall(word)]
        return max((max(len(self.choices[n]), self.branches(self.choices[n])) for n in numbers), default=1)

    def choice(self, values: list[str]) -> str:
        """Return a text that stands for one of several values."""
        self.choices.append(values)
        return f"\x01{len(self.choices) - 1}\x02"

    def either(self, states: list[str | list[str] | None], before: str | list[str] | None) -> str | list[str] | None:
        """Return the value of a variable that has one of these after a condition."""
        if before in states:
            states = [before, *states]
        if all(state == states[0] for state in states):
            return states[0]
        if any(isinstance(state, list) for state in states):
            arrays = [state if isinstance(state, list) else [state] for state in states if state is not None]
            return self._either_array(arrays + [[]] * (None in states))
        values: dict[str, None] = {}
        for state in states:
            whole = CHOICE.fullmatch(str(state or ""))
            values.update(dict.fromkeys(self.choices[int(whole[1])] if whole else [str(state or "")]))
        given = [value for value in values if value]
        return self.choice(given if len(given) > 1 else [*given, ""]) if given else ""

    def _either_array(self, arrays: list[list[str]]) -> list[str]:
        """Return the first array, with the items of others as words that are empty in it."""
        others = dict.fromkeys(item for array in arrays[1:] for item in array if item not in arrays[0])
        first = [item if all(item in array for array in arrays) else self.choice([item, ""]) for item in arrays[0]]
        return first + [self.choice(["", item]) for item in others]


@dataclass
class _Condition:
    """A condition or loop around the position: the variables before it, and those after each of its branches."""

    word: str
    before: dict[str, str | list[str]]
    after: list[dict[str, str | list[str]]] = field(default_factory=list)
    complete: bool = False  # one branch is always taken
    left: bool = False  # the branch at the position ends the script
    at_pattern: bool = False  # of a case
    at_default: bool = False  # its branch *)


def read_bash(path: Path) -> Script:
    """Return the commands of a bash script; GrpoError for a file that cannot be read as one."""
    script = Script()
    _Reader(_text(path), path, script).read()
    return script


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GrpoError(f"{path} cannot be read as text: {error}") from error


class _Reader:
    """One pass over the text of a script; ``conditions`` are the conditions and loops around the position."""

    def __init__(self, text: str, path: Path, script: Script) -> None:
        self.text, self.path, self.script = text.replace("\r\n", "\n") + "\n", path, script
        self.position = 0
        self.conditions: list[_Condition] = []
        self.end = self.guard = ""  # what ended the command; the test that decides whether the next one runs
        self.heredocs: list[str] = []

    def read(self) -> None:
        """Read all commands of the text into the script."""
        while self.position < len(self.text):
            words, scalars = self._command()
            if words or scalars:
                self._run(words, scalars)
            self.guard = words[0] if self.end in ("&&", "||") and words and words[0] in TESTS else ""
            if self.end == ";;" and self._in_case():
                self._end_branch()
                self.conditions[-1].at_pattern = True

    def _error(self, what: str) -> GrpoError:
        line = self.text.count("\n", 0, self.position) + 1
        return GrpoError(f"{self.path}:{line}: {what}: this reader needs a script that bash can read")

    def _command(self) -> tuple[list[str], dict[str, str | list[str]]]:
        """Return the words of the next command, and the assignments in front of them."""
        words: list[str] = []
        assigned: dict[str, str | list[str]] = {}
        while self.position < len(self.text):
            char = self.text[self.position]
            if char in " \t":
                self.position += 1
            elif self.text.startswith("\\\n", self.position):
                self.position += 2
            elif char == "#":
                self._skip_line()
            elif self._in_case() and self.conditions[-1].at_pattern and char in "()|":
                self.position += 1
                if char == ")":
                    self.conditions[-1].at_default = "*" in words
                    self.conditions[-1].complete |= "*" in words
                    self.conditions[-1].at_pattern = False
                    words = []
            elif char in ENDS:
                double = self.text[self.position : self.position + 2]
                self.end = double if double in ("&&", "||", ";;") else char
                self.position += len(self.end)
                if char == "\n":
                    self._skip_heredocs()
                break
            elif char in "<>" or re.match(r"\d+[<>]|&>", self.text[self.position : self.position + 3]):
                self._redirection()
            elif char in "()":
                self.position += 1
            elif (not words or words[0] in PREFIXES) and (found := ASSIGNMENT.match(self.text, self.position)):
                name, plus = found.groups()
                self.position = found.end()
                value: str | list[str] = self._array() if self.text[self.position] == "(" else self._joined()
                assigned[name] = self._appended(name, value) if plus else value
            else:
                words.extend(self._word())
                if words[-1:] and words[-1] in KEYWORDS and len(words) == 1:
                    self._keyword(words.pop())
        return words, assigned

    def _keyword(self, word: str) -> None:
        if word in DEEPER:
            self.conditions.append(_Condition(word, dict(self.script.variables), at_pattern=word == "case"))
        elif word in LESS_DEEP and self.conditions:
            self._end_condition()
        elif word in ("elif", "else") and self.conditions:
            self._end_branch()
            self.conditions[-1].complete |= word == "else"
        if word in DEEPER and word != "for":
            note = f"{self.path.name} has conditions, which are not evaluated: check the values that they set"
            if note not in self.script.notes:
                self.script.notes.append(note)

    def _in_case(self) -> bool:
        return bool(self.conditions) and self.conditions[-1].word == "case"

    def _end_branch(self) -> None:
        """Keep the variables of a branch, and go back to those before the condition."""
        condition = self.conditions[-1]
        if not condition.left:
            condition.after.insert(0 if condition.at_default else len(condition.after), self.script.variables)
        condition.left = condition.at_default = False
        self.script.variables = dict(condition.before)

    def _end_condition(self) -> None:
        """Give each variable its values of all branches."""
        if not self.conditions[-1].at_pattern:
            self._end_branch()
        condition = self.conditions.pop()
        states = condition.after if condition.complete and condition.after else [condition.before, *condition.after]
        for name in dict.fromkeys(name for state in states for name in state):
            value = self.script.either([state.get(name) for state in states], condition.before.get(name))
            if value is not None:
                self.script.variables[name] = value

    def _run(self, words: list[str], assigned: dict[str, str | list[str]]) -> None:
        """Apply assignments, follow ``source``, and record any other command."""
        if not words or words[0] in PREFIXES:
            for name, value in assigned.items():
                before = self.script.variables.get(name)
                either = self.script.either([before, value], before) if self.guard else value
                self.script.variables[name] = value if either is None else either
        elif words[0] in ("source", ".") and len(words) > 1:
            self._source(self.script.text(words[1]))
        elif words[0] == "exit" and self.conditions:
            self.conditions[-1].left = True
        else:
            self.script.commands.append(({name: str(value) for name, value in assigned.items()}, words))

    def _source(self, name: str) -> None:
        file = Path(name)
        found = next((f for f in (file, self.path.parent / file) if f.is_file()), None)
        if found is None:
            self.script.notes.append(f"source {name}: there is no such file, so its variables are missing")
            return
        _Reader(_text(found), found, self.script).read()

    def _appended(self, name: str, value: str | list[str]) -> str | list[str]:
        before = self.script.variables.get(name, [] if isinstance(value, list) else "")
        if isinstance(value, list):
            return [*before, *value] if isinstance(before, list) else [before, *value]
        return f"{before}{value}"

    def _array(self) -> list[str]:
        self.position += 1
        items: list[str] = []
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == ")":
                self.position += 1
                return items
            if char in " \t\n":
                self.position += 1
            elif self.text.startswith("\\\n", self.position):
                self.position += 2
            elif char == "#":
                self._skip_line()
            else:
                items.extend(self._word())
        raise self._error("an array without its end, ')'")

    def _joined(self) -> str:
        """Return the word after an assignment's equals sign, which may be empty."""
        if self.text[self.position] in " \t" + ENDS:
            return ""
        return " ".join(self._word())

    def _word(self) -> list[str]:
        """Return the word at the position, expanded: several words for an array or an unquoted list of flags."""
        parts: list[str] = [""]
        quoted = False
        while self.position < len(self.text):
            char = self.text[self.position]
            if char in " \t()<>" + ENDS:
                break
            if char == "\\":
                if self.text[self.position + 1] != "\n":
                    parts[-1] += self.text[self.position + 1]
                self.position += 2
            elif char == "'":
                end = self.text.find("'", self.position + 1)
                if end < 0:
                    raise self._error("a quote without its end")
                parts[-1] += self.text[self.position + 1 : end]
                self.position, quoted = end + 1, True
            elif char == '"':
                quoted = self._double_quoted(parts) or quoted
            elif char in "$`":
                value = self._expansion()
                texts = value if isinstance(value, list) else [value]
                items = [item for text in texts for item in self._split(text)]
                if items:
                    parts[-1] += items[0]
                    parts.extend(items[1:])
            else:
                parts[-1] += char
                self.position += 1
        return parts if quoted or parts != [""] else []

    def _split(self, text: str) -> list[str]:
        """Return the words of an unquoted value."""
        plain = self.script.text(text)
        if "$(" in plain or "`" in plain:
            return [text]
        if plain == text or len(plain.split()) <= 1:
            return text.split()
        return [self.script.choice([item, ""]) for item in plain.split()]

    def _double_quoted(self, parts: list[str]) -> bool:
        """Add the text in double quotes to the word; return whether it makes one: an empty array does not."""
        self.position += 1
        is_word = True
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == '"':
                self.position += 1
                return is_word
            if char == "\\" and self.text[self.position + 1] in '"\\$`\n':
                if self.text[self.position + 1] != "\n":
                    parts[-1] += self.text[self.position + 1]
                self.position += 2
            elif char in "$`":
                value = self._expansion()
                if isinstance(value, list):  # "${A[@]}": each item is a word
                    is_word = bool(value)
                    parts[-1] += value[0] if value else ""
                    parts.extend(value[1:])
                else:
                    parts[-1] += value
            else:
                parts[-1] += char
                self.position += 1
        raise self._error("a quote without its end")

    def _expansion(self) -> str | list[str]:
        """Return the value of the ``$`` or backquote at the position, or its text where only a run can tell it."""
        start = self.position
        if self.text.startswith("$((", start):
            end = self._closing("$((", "))")
            return self._arithmetic(self.text[start + 3 : end - 2]) or self.text[start:end]
        if self.text.startswith("$(", start):
            end = self._closing("$(", ")")
            inside = self.text[start:end]
            directory = "dirname" in inside and ("BASH_SOURCE" in inside or "$0" in inside)
            return str(self.path.parent) if directory else inside
        if self.text[start] == "`":
            self.position = self.text.find("`", start + 1) + 1
            if not self.position:
                raise self._error("a backquote without its end")
            return self.text[start : self.position]
        if self.text.startswith("${", start):
            end = self._closing("${", "}")
            return self._parameter(self.text[start + 2 : end - 1])
        if found := NAME.match(self.text, start + 1):
            self.position = found.end()
            value = self._value(found[0])
            return f"${{{found[0]}}}" if value is None else value
        self.position += 2 if self.text[start + 1] in "@*#?!$0123456789" else 1
        return [] if self.text[start + 1] in "@*" else self.text[start : self.position]

    def _closing(self, opening: str, closing: str) -> int:
        """Move behind the end of a construct and return that position."""
        depth, place = 0, self.position
        left, right = opening[-1], closing[-1]
        while place < len(self.text):
            depth += (self.text[place] == left) - (self.text[place] == right)
            place += 1
            if depth == 0 and self.text[place - 1] == right:
                self.position = place
                return place
        raise self._error(f"{opening} without its end")

    def _value(self, name: str) -> str | list[str] | None:
        value = self.script.variables.get(name)
        return value[0] if isinstance(value, list) and value else value if isinstance(value, str) else None

    def _parameter(self, inside: str) -> str | list[str]:
        """Return ``${inside}``: a variable, an array, or a variable with a default."""
        found = re.fullmatch(r"(\w+)(\[[@*]\])?(?:(:?[-=?+])(.*))?", inside, re.DOTALL)
        if not found:
            return f"${{{inside}}}"
        name, array, mark, default = found.groups()
        value = self.script.variables.get(name)
        if array and not mark:
            return value if isinstance(value, list) else [] if value is None else [value]
        if mark in (":+", "+"):
            return [] if not value else self._expanded(default)
        if value or (value == "" and mark in ("-", "=")):
            return value if array else self._value(name) or ""
        if mark in (":-", "-", ":=", "="):
            return self._expanded(default)
        return "" if value == "" else f"${{{name}}}"

    def _expanded(self, text: str) -> str:
        inner = _Reader(text, self.path, self.script)
        inner.text = text + " "
        words = []
        while inner.position < len(text):
            if inner.text[inner.position] in " \t\n":
                inner.position += 1
            else:
                words.extend(inner._word() or [inner.text[inner.position]])
        return " ".join(words)

    def _arithmetic(self, text: str) -> str | None:
        """Return the value of an integer expression, or None where a variable is missing."""
        names = {name: self._value(name) for name in NAME.findall(text)}
        branches = self.script.branches([value for value in names.values() if isinstance(value, str)])
        if branches > 1:
            results = [
                self._computed(text, {n: v and self.script.text(str(v), k) for n, v in names.items()})
                for k in range(branches)
            ]
            return self.script.choice([*dict.fromkeys(filter(None, results))]) if all(results) else None
        return self._computed(text, names)

    def _computed(self, text: str, names: Mapping[str, str | list[str] | None]) -> str | None:
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: f"({names[m[1]] or m[1]})", text)

        def value(node: ast.AST) -> int:
            match node:
                case ast.Constant(value=int() as constant):
                    return constant
                case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                    return OPERATORS[type(op)](value(left), value(right))
                case ast.UnaryOp(op=ast.USub(), operand=operand):
                    return -value(operand)
            raise ValueError

        try:
            return str(value(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def _redirection(self) -> None:
        """Skip a redirection; remember the end word of a here-document."""
        found = re.compile(r"\d*(&>>?|<<<|<<-?|[<>]&?>?)[ \t]*").match(self.text, self.position)
        if found is None:
            self.position += 1
            return
        self.position = found.end()
        word = "".join(self._word())
        if found[1] in ("<<", "<<-"):
            self.heredocs.append(word)

    def _skip_heredocs(self) -> None:
        for end in self.heredocs:
            while self.position < len(self.text):
                stop = self.text.find("\n", self.position)
                line = self.text[self.position : stop]
                self.position = stop + 1
                if line.strip() == end:
                    break
        self.heredocs = []

    def _skip_line(self) -> None:
        self.position = self.text.find("\n", self.position)
