"""Commands on the pages work: each names a file that exists, and the argument parser of that file takes its flags."""

import argparse
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron_grpo.training.arguments import build_parser

REPO = Path(__file__).resolve().parents[3]
PAGES = ["README.md", *(str(path.relative_to(REPO)) for path in sorted((REPO / "docs").rglob("*.md")))]
PROGRAM = re.compile(r"pretrain_grpo\.py|(?:tools|examples|tests)/[\w/.]+\.(?:py|sh)")
# A script that hands its words to the trainer, a tool that reads the trainer's flags.
TRAINS = re.compile(  # directly, or by examples/grpo/launch.sh
    r'(?:pretrain_grpo\.py\b|^launch )(?:.*\\\n)*.*"\$@"|^import pretrain_grpo|training\.arguments import', re.M
)
ENDS = {"&&", "||", "|", ";", "&", ">", ">>", "<", ")", "("}
OMITTED = re.compile(r"\.\.\.|[A-Z_]*FLAGS")  # stands for flags that the page does not repeat
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")  # stands for any value


class Parsed(Exception):
    """Raised in place of the work of a tool; its argument is the tool's parser and whether unknown flags go on."""


def blocks(text: str) -> Iterator[str]:
    """The code blocks of a page, fenced (without a language, or bash) or indented, and its code in running text."""
    fences = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.S | re.M)
    yield from (block for _, language, block in fences.findall(text) if language in ("", "bash", "sh"))
    prose = fences.sub("\n", text)
    yield from (match[0] for match in re.finditer(r"(?:^ {4,}\S.*\n?)+", prose, re.M))
    yield from re.findall(r"(?<!`)`([^`\n]+)`", prose)


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(program, the words after it) of each command of a page that starts a program of this repository."""
    for block in blocks(text):
        for line in re.sub(r"\\\n *|\b2>&1", "", block).splitlines():
            try:
                lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
                lexer.whitespace_split = True
                words = list(lexer)
            except ValueError:  # a sentence with an apostrophe
                continue
            while words:
                end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
                command, words = words[:end], words[end + 1 :]
                while command and re.match(r"[A-Z_]+=", command[0]):
                    del command[0]
                if command and Path(command[0]).name in ("bash", "python", "python3", "torchrun"):
                    place = next((i for i, word in enumerate(command) if PROGRAM.fullmatch(word)), None)
                    if place is not None:
                        yield command[place], command[place + 1 :]


def tool_parser(path: Path) -> tuple[argparse.ArgumentParser, bool]:
    """The parser that a tool makes in its ``main``, and whether it leaves unknown flags to the trainer's parser."""
    spec = importlib.util.spec_from_file_location(f"command_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)

    def stop(known: bool):
        def parse(parser, *_, **__):
            raise Parsed(parser, known)

        return parse

    changes = {"parse_args": stop(False), "parse_known_args": stop(True)}
    path_of_a_script = mock.patch.object(sys, "path", [str(path.parent), *sys.path])
    with mock.patch.dict(os.environ), mock.patch.object(sys, "argv", [str(path)]), path_of_a_script:
        spec.loader.exec_module(module)
        with mock.patch.multiple(argparse.ArgumentParser, **changes), pytest.raises(Parsed) as caught:
            module.main()
    return caught.value.args


def fault(program: str, words: list[str]) -> str | None:
    """What is wrong with a command, or None."""
    path = REPO / program
    if not path.exists():
        return f"{program} does not exist"
    text, given = path.read_text(), len(words)
    words = [word.strip("[]") for word in words if not OMITTED.fullmatch(word)]
    flags = words[next((i for i, word in enumerate(words) if word.startswith("-")), len(words)) :]
    if re.search(r"ArgumentParser|convert_(files|problems)|write_or_check", text):
        parser, leave = tool_parser(path)
        said, rest = parse(parser, words, incomplete=not words or len(words) < given, leave=leave)
        return said or parse(build_parser(), rest, incomplete=True)[0]
    if program == "pretrain_grpo.py" or TRAINS.search(text):  # what a run needs is validation's, not the parser's
        return parse(build_parser(), flags, incomplete=True)[0]
    unknown = [word for word in flags if word.startswith("-") and word not in text]
    return f"{program} does not know {unknown}" if unknown and "pytest" not in text else None


def parse(
    parser: argparse.ArgumentParser, words: list[str], *, incomplete: bool, leave: bool = False
) -> tuple[str | None, list[str]]:
    """(fault, words left to another parser) of a command's words. ``incomplete``: required flags may be absent."""
    for action in parser._actions:
        action.required &= not incomplete
    for group in parser._mutually_exclusive_groups:
        group.required &= not incomplete
    for i, word in enumerate(words[:-1]):
        action = parser._option_string_actions.get(word)
        if action and PLACEHOLDER.fullmatch(words[i + 1]):
            action.type = action.choices = None
    said: list[str] = []

    def error(message: str) -> None:
        said.append(message)
        raise Parsed

    parser.error = error
    try:
        rest = parser.parse_known_args(words)[1]
    except Parsed:
        return said[0], []
    if leave:
        return None, rest
    rest = [word for word in rest if not PLACEHOLDER.fullmatch(word)]
    return (f"unknown: {' '.join(rest)}" if rest else None), []


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page):
    wrong = []
    for program, words in commands((REPO / page).read_text()):
        said = fault(program, words)
        if said:
            wrong.append(f"{program} {' '.join(words)}: {said}")
    assert not wrong


def test_the_commands_are_found():
    """The search sees fenced and indented blocks, code in sentences, environments, launchers and continued lines."""
    page = """
Run `DRY_RUN=1 bash examples/grpo/a.sh --lr 1`, not `tools/b.py`.

    torchrun --nproc-per-node 2 pretrain_grpo.py --lr 1 \\
        --bf16 2>&1 | tee log        # comment

```bash
.venv/bin/python tools/c.py "x y" && bash tools/d.sh
```
```python
python tools/e.py
```
"""
    assert list(commands(page)) == [
        ("tools/c.py", ["x y"]),
        ("tools/d.sh", []),
        ("pretrain_grpo.py", ["--lr", "1", "--bf16"]),
        ("examples/grpo/a.sh", ["--lr", "1"]),
    ]
    found = [command for page in PAGES for command in commands((REPO / page).read_text())]
    assert len(found) > 40 and len({program for program, _ in found}) > 15


def test_flags_of_vllms_servers_exist():
    """vLLM's sources have each as a field or as an option: importing its parser takes ten seconds."""
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    files = [root / "engine/arg_utils.py", *(root / "config").rglob("*.py"), *(root / "entrypoints").rglob("*.py")]
    source = "\n".join(path.read_text() for path in files)
    server = re.compile(r"(?:vllm serve|-m vllm\.entrypoints\.openai\.api_server)((?: [^\n&|#]*)?)")
    flags = set()
    for page in PAGES:
        for block in blocks((REPO / page).read_text()):
            for line in server.findall(re.sub(r"\\\n *", "", block)):
                flags |= set(re.findall(r"(?<= --)(?:no-)?([a-z-]+)", line))
    assert len(flags) >= 9
    assert not [flag for flag in flags if not re.search(rf'^ +{flag.replace("-", "_")} *:|"--{flag}"', source, re.M)]


@pytest.mark.parametrize(
    "command, message",
    [
        ("python tools/no_such_tool.py", "does not exist"),
        ("bash examples/grpo/qwen3_8b.sh --no-such-flag", "no-such-flag"),
        ("bash examples/grpo/quickstart.sh --no-such-flag", "no-such-flag"),
        ("torchrun pretrain_grpo.py ... --lr fast", "--lr"),
        ("torchrun pretrain_grpo.py ... --loss-type none", "invalid choice"),
        ("python tools/report.py RUN -o x.html --no-such-flag x", "no-such-flag"),
        ("python tools/checkpoint/convert.py --load DIR --save DIR", "required"),
        ("python tools/data/gsm8k.py --input a.jsonl --outputs b.jsonl", "--output"),
        ("python tools/check_engine.py --load-hf DIR --no-such-flag", "no-such-flag"),
        ("python tools/benchmark/step_table.py RUN --no-such-flag", "unknown: --no-such-flag"),
        ("bash tools/make_venv.sh --no-such-flag", "does not know"),
    ],
)
def test_a_wrong_command_is_a_fault(command, message):
    ((program, words),) = commands(f"    {command}\n")
    assert message in fault(program, words)


@pytest.mark.parametrize(
    "command",
    [
        "bash examples/grpo/recipe.sh METHOD FLAGS",
        "python tools/check_parallel.py MODEL_FLAGS --layouts TP1 'TP2 SP'",
        "torchrun ... pretrain_grpo.py ... --lr LR --loss-type NAME",
    ],
)
def test_placeholders_stand_for_anything(command):
    ((program, words),) = commands(f"    {command}\n")
    assert fault(program, words) is None
