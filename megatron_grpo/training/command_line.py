"""The command line: a parser with one-line errors, and a check of the flags before anything large is imported.

``flags.json`` holds the parser of ``arguments.build_parser`` as data, which ``tools/generate_arguments_doc.py`` writes.
A wrong flag thus ends a run in a second, and not after the imports of torch, megatron-core and transformers.
"""

import argparse
import difflib
import importlib.metadata
import itertools
import json
import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_grpo.migration.table import answer
from megatron_grpo.patches import megatron_core
from megatron_grpo.patches.replacement import check_all
from megatron_grpo.rewards.registry import check_file
from megatron_grpo.training.early_checks import check_early
from megatron_grpo.utils.arguments import Arguments, hyphens
from megatron_grpo.utils.batch_sizes import trainer_ranks
from megatron_grpo.utils.core_names import ACCEPTED, EXCLUDED, RENAMED, SWITCHED_OFF_BY
from megatron_grpo.utils.errors import GrpoError, of_file, prints_for_host, record_for_torchrun
from megatron_grpo.utils.flag_values import integer_or_auto, integer_or_pattern, integers, json_object
from megatron_grpo.utils.flags import PATH, TEXT, Number
from megatron_grpo.utils.launch import rank
from megatron_grpo.utils.rules import check_value, flag

TABLE = Path(__file__).with_name("flags.json")
_READERS = (int, float, str, json_object, integers, integer_or_pattern, integer_or_auto)
_TYPES: dict[str, Callable[[str], Any]] = {reader.__name__: reader for reader in _READERS}

NOT_GIVEN = object()


# The flags of --help: those that most runs set.
COMMON = frozenset(
    """
    --load-hf --load --save --save-interval --bf16 --train-data-path --valid-data-path --system-prompt
    --max-prompt-length --max-completion-length --num-generations --global-batch-size --micro-batch-size
    --max-tokens-per-microbatch --steps-per-generation --train-iters --num-epochs --seed --tensor-model-parallel-size
    --pipeline-model-parallel-size --context-parallel-size --expert-model-parallel-size --sequence-parallel
    --use-distributed-optimizer --recompute-granularity --offload-optimizer --rollout-engine --vllm-tensor-parallel-size
    --vllm-gpu-memory-utilization --temperature --reward-funcs --reward-weights --external-plugins --loss-type
    --advantage-estimator --beta --lr --eval-interval --tensorboard-dir --dry-run
    """.split()
)


class Help(argparse.Action):
    """Action of --help [GROUP] and --help-all: print flags on rank 0, and exit."""

    def __call__(self, parser, namespace, values, option_string=None) -> NoReturn:
        """Print the common flags, all flags, or those whose group or name contains the text ``values``."""
        text = parser.format_help()
        if option_string != "--help-all":
            text = parser.format_common_help() if values is None else parser.format_group_help(values)
        if rank() == 0:
            print(text, end="", flush=True)
        sys.exit(0)


class Parser(argparse.ArgumentParser):
    """ArgumentParser with one-line errors, printed by the first process of each host, and help on groups of flags."""

    def __init__(self, add_help: bool = True, **settings: Any):
        def formatter(prog: str) -> argparse.HelpFormatter:
            return argparse.HelpFormatter(prog, max_help_position=36)

        super().__init__(formatter_class=formatter, allow_abbrev=False, add_help=False, **settings)
        if add_help:
            hidden: dict[str, Any] = {"action": Help, "dest": "help", "default": argparse.SUPPRESS}
            text = "show the most common flags, or those of which the group or the name contains GROUP"
            self.add_argument("-h", "--help", nargs="?", metavar="GROUP", help=text, **hidden)
            self.add_argument("--help-all", nargs=0, help="show all flags", **hidden)

    def format_common_help(self) -> str:
        """Return the help on ``COMMON``, with the titles of all groups."""
        titles = dict.fromkeys(group.title for group, _ in self._grouped())
        lines = textwrap.wrap("; ".join(filter(None, titles)), 76, break_on_hyphens=False)
        return (
            f"{self._help_on(lambda title, name: name in COMMON)}\n"
            "--help GROUP shows a group of flags, or flags by a part of their name;\n"
            "--help-all shows all flags; tools/shell_completion.py completes them. Groups:\n"
            + textwrap.indent("\n".join(lines), "  ")
            + "\n"
        )

    def format_group_help(self, wanted: str) -> str:
        """Return the help on a group: the one of this title, or flags with this text in their group's title or name."""
        words = wanted.lower().lstrip("-").replace("_", "-").replace(" ", "-")
        titles = [(group.title or "").lower().replace(" ", "-") for group in self._action_groups]

        def shown(title: str, name: str) -> bool:
            title = title.lower().replace(" ", "-")
            return title == words if words in titles else words in title or words in name

        if not any(shown(group.title or "", action.option_strings[0]) for group, action in self._grouped()):
            self.error(f"--help {wanted}: no group and no flag has this text; --help shows the groups")
        return self._help_on(shown)

    def _grouped(self) -> Iterator[tuple[argparse._ArgumentGroup, argparse.Action]]:
        """Yield (group, action) of every flag."""
        for group in self._action_groups:
            for action in group._group_actions:
                if not isinstance(action, Help):
                    yield group, action

    def _help_on(self, shown: Callable[[str, str], bool]) -> str:
        """Return the help on the flags for which ``shown(title of the group, name)`` is true."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group, grouped in itertools.groupby(self._grouped(), lambda pair: pair[0]):
            title = group.title or ""
            formatter.start_section(title)
            formatter.add_arguments([action for _, action in grouped if shown(title, action.option_strings[0])])
            formatter.end_section()
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        self.end(message, code=2)

    def end(self, message: str, code: int) -> NoReturn:
        """Print the error and exit with this code."""
        if prints_for_host():
            print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
            record_for_torchrun(message)
        sys.exit(code)


class Accept(argparse.Action):
    """Action that records a flag of ``ACCEPTED``."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Append the flag's name to ``args.accepted``."""
        given = namespace.accepted if isinstance(namespace.accepted, list) else []
        namespace.accepted = [*given, option_string]


def parse_words(parser: Parser, words: Sequence[str]) -> Arguments:
    """Parse flags; ``explicit`` has the attributes that they set, ``repeated`` the flags that replace earlier ones."""
    defaults = vars(parser.parse_args([]))
    found, unknown = parser.parse_known_args(words, Namespace(**dict.fromkeys(defaults, NOT_GIVEN)))
    if unknown:
        parser.error(_explain_unknown(unknown, parser, words))
    given = {dest: value for dest, value in vars(found).items() if value is not NOT_GIVEN}
    return Arguments(**defaults | given, explicit=frozenset(given), repeated=tuple(sorted(_repeated(words, parser))))


def check_flags(argv: Sequence[str]) -> None:
    """Exit with one line if a flag is unknown, its value is wrong, or flags contradict each other; answer --help.

    Else print what is next. The rules that need torch follow in ``resolve.MODEL``.

    Leaves the check to ``arguments.parse_args`` with --external-plugins, whose losses may add flags, and with another
    megatron-core than the one of ``flags.json``.
    """
    _check(argv)
    if rank() == 0:
        print("importing torch and megatron-core", flush=True)


def _check(argv: Sequence[str]) -> None:
    """Do `check_flags` without its line; as a program, before torchrun (examples/grpo/launch.sh)."""
    words = [hyphens(word) for word in argv]
    table = json.loads(TABLE.read_text())
    parser = parser_from_table(table)
    try:
        version = _core_version()
        check_all(megatron_core.ENTRIES)
        if plugin_files(words) or version != table["megatron-core"]:
            return
        args = parse_words(parser, words)
        for row in table["flags"]:
            value = getattr(args, row["dest"])
            if row["dest"] in args.explicit and value != row.get("default"):
                check_value(row["options"][0], _kind_from_json(row.get("kind")), value)
        check_early(args, trainer_ranks(args, int(os.environ.get("WORLD_SIZE", "1"))))
    except PermissionError as error:  # of a folder
        parser.end(of_file(error), code=1)
    except GrpoError as error:
        parser.end(str(error), code=1)


def _core_version() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise GrpoError(
            f"megatron-core is not installed for {sys.executable}: activate the environment that has it "
            "(tools/make_venv.sh makes .venv: source .venv/bin/activate), or install requirements.txt"
        ) from error


def plugin_files(words: Sequence[str]) -> list[str]:
    """Return the files of --external-plugins; GrpoError if one does not exist or cannot be compiled."""
    parser = Parser(prog="pretrain_grpo.py", add_help=False)
    parser.add_argument("--external-plugins", nargs="+", default=[], metavar="S")
    files = parser.parse_known_args(words)[0].external_plugins
    check_value("--external-plugins", [PATH], files)
    for file in files:
        check_file(Path(file), "--external-plugins")
    return files


def table_of(parser: Parser, kinds: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return ``flags.json``: the flags of a parser in their groups, with the kinds of their values.

    ``version``: of megatron-core, whose flags they include.
    """
    rows = []
    for group, action in parser._grouped():
        row: dict[str, Any] = {"group": group.title, "options": list(action.option_strings), "dest": action.dest}
        row |= {name: getattr(action, name) for name in ("nargs", "const", "default", "metavar", "help")}
        row["action"] = "accept" if isinstance(action, Accept) else "store_const" if action.nargs == 0 else "store"
        row["choices"] = action.choices and list(action.choices)
        row["type"] = getattr(action.type, "__name__", None)
        row["kind"] = _kind_to_json(kinds.get(action.option_strings[0]))
        rows.append({name: value for name, value in row.items() if value is not None})
    about = {name: getattr(parser, name) for name in ("prog", "usage", "description")}
    return {"megatron-core": version, "parser": about, "flags": rows}


def parser_from_table(table: Mapping[str, Any]) -> Parser:
    """Return the parser of which ``table_of`` made the table."""
    parser = Parser(**table["parser"])
    groups = {}
    for row in table["flags"]:
        if row["group"] not in groups:
            groups[row["group"]] = parser.add_argument_group(row["group"])
        names = ["dest", "default", "metavar", "help"]
        names += {"store": ["nargs", "choices"], "store_const": ["const"], "accept": ["nargs"]}[row["action"]]
        settings = {name: row[name] for name in names if name in row}
        if settings.get("help") == argparse.SUPPRESS:
            settings["help"] = argparse.SUPPRESS  # argparse compares by identity
        if "type" in row:
            settings["type"] = _TYPES[row["type"]]
        action = Accept if row["action"] == "accept" else row["action"]
        groups[row["group"]].add_argument(*row["options"], action=action, **settings)
    return parser


def _kind_to_json(kind: Any) -> Any:
    """Return a kind for ``check_value`` as JSON; None for a kind without a range."""
    if isinstance(kind, list):
        return [_kind_to_json(kind[0])]
    if isinstance(kind, Number):
        return {"type": kind.type.__name__, "low": kind.low, "high": kind.high, "above": kind.above}
    return kind if kind in (PATH, TEXT) else None


def _kind_from_json(stored: Any) -> Any:
    """Return the kind of which ``_kind_to_json`` made ``stored``."""
    if isinstance(stored, list):
        return [_kind_from_json(stored[0])]
    return Number(**stored | {"type": _TYPES[stored["type"]]}) if isinstance(stored, dict) else stored


def _repeated(words: Sequence[str], parser: Parser) -> set[str]:
    """Return the flags that set an attribute which an earlier flag has set; argparse keeps the last value."""
    dests: set[str] = set()
    found = set()
    for word in words:
        action = parser._option_string_actions.get(word.partition("=")[0])
        if action is not None and not isinstance(action, Accept):
            if action.dest in dests:
                found.add(flag(action.dest))
            dests.add(action.dest)
    return found


def _explain_unknown(unknown: Sequence[str], parser: Parser, words: Sequence[str]) -> str:
    """Return one line about an unknown argument: what takes its place, why it does not exist, or a similar one.

    ``words``: the command line with it.
    """
    flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), None)
    if flag is None:
        setting = unknown[0].partition("=")[0].lstrip("+")
        if "=" in unknown[0] and (there := answer(setting)):
            return there
        before = words[max(0, words.index(unknown[0]) - 1)] if unknown[0] in words else ""
        action = parser._option_string_actions.get(before)
        if action is not None and action.nargs == 0:
            both = unknown[0].lower() in ("false", "no", "off", "0")
            cure = f"leave both out, {before} is off then" if both else "leave it out"
            if both and action.const == action.default:  # it is on then
                cure = f"give {_opposite(parser, action)} in place of both"
            return f"unexpected argument {unknown[0]!r}: {before} is a switch and takes no value; {cure}"
        return f"unexpected argument {unknown[0]!r}: a value without its flag, or one value too many"
    field = flag[2:].replace("-", "_")
    reason = EXCLUDED.get(field) or EXCLUDED.get(field.removeprefix("no_"))
    if reason:
        return f"{flag} is not a flag of this program: {reason}"
    switch = "--no-" + flag[2:]
    if switch in parser._option_string_actions and switch not in ACCEPTED:
        return f"unknown flag {flag}: it is the default, leave it out; {switch} switches it off"
    taken_back = parser._option_string_actions.get("--" + flag[5:]) if flag.startswith("--no-") else None
    if taken_back is not None and taken_back.nargs == 0 and (other := _opposite(parser, taken_back)):
        return f"unknown flag {flag}: {other} takes --{flag[5:]} back"
    if field in RENAMED:
        return f"megatron-core's {field} is {RENAMED[field]} here"
    if field.removeprefix("no_") in SWITCHED_OFF_BY:  # of a field that is renamed, too
        return f"{flag} is {SWITCHED_OFF_BY[field.removeprefix('no_')][0]} here"
    there = answer(flag)
    if there:
        return there
    close = similar_flag(flag, parser._option_string_actions)
    return f"unknown flag {flag}; " + (f"did you mean {close}?" if close else "--help-all lists all flags")


def _opposite(parser: Parser, switch: argparse.Action) -> str | None:
    """Return the switch that takes another one back; None for one without effect."""
    others = (one for one in parser._actions if one.dest == switch.dest and one.nargs == 0)
    return next((one.option_strings[0] for one in others if one.const != switch.const), None)


def similar_flag(flag: str, flags: Iterable[str]) -> str | None:
    """Return the flag of which ``flag`` is a misspelling, or None.

    A misspelling has the same number of words, each similar to its counterpart, and the same digits; or the same
    letters with other hyphens. The opposite of a flag, --no-x for --x, is none.
    """

    def alike(word: str, other: str) -> bool:
        digits = [[c for c in text if c.isdigit()] for text in (word, other)]
        close = difflib.SequenceMatcher(None, word, other).ratio() >= 0.7 or (len(word) > 2 and other.startswith(word))
        return digits[0] == digits[1] and close

    words = flag[2:].split("-")
    found = [
        name
        for name in flags
        if name.startswith("--no-") == flag.startswith("--no-")
        and (
            (len(other := name[2:].split("-")) == len(words) and all(map(alike, words, other)))
            or "".join(words) == "".join(other)
        )
    ]
    return max(found, key=lambda name: difflib.SequenceMatcher(None, flag, name).ratio(), default=None)


if __name__ == "__main__":
    _check(sys.argv[1:])
