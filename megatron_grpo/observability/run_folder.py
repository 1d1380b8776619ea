"""Reader of the files that a run has written to ``--save``. This module does not import torch."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.observability.run_status import read_status
from megatron_grpo.utils.errors import GrpoError

# Columns of a profile's phase beside its name: heading in a report by field of ``profiling.Phase``.
PROFILE_COLUMNS = {
    "calls": "calls",
    "seconds": "seconds",
    "busy": "device busy",
    "communication": "communication",
    "only_communication": "communication alone",
    "waiting": "waiting for launches",
    "idle": "idle otherwise",
}

BLOCK = 4 << 20  # bytes of a log that a search reads at once

# Fields of every row of completions.jsonl and eval_completions.jsonl.
TEXTS: dict[str, type] = {"prompt": str, "completion": str, "finish_reason": str, "length": int, "row": int}


@dataclass(frozen=True)
class Run:
    """Rows of a run's metrics.jsonl, and the run's label in a legend."""

    label: str
    rows: list[dict[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return iterations and values of a metric, for the rows that have a number."""
        pairs = [(row["iteration"], row[name]) for row in self.rows if isinstance(row.get(name), int | float)]
        return [x for x, _ in pairs], [y for _, y in pairs]


def read_record(directory: Path, label: str) -> "Record":
    """Read the files of a run's folder; raise GrpoError, which names the file, if one is missing or damaged."""
    for name in ("metrics.jsonl", "completions.jsonl"):
        if not (directory / name).exists():
            raise GrpoError(f"{directory / name} cannot be read: give the --save directory of a run")
    record = Record(directory, label)
    record.read()
    if record.damaged:
        raise GrpoError(record.damaged[0])
    if not record.rows:
        error = (read_status(directory) or {}).get("error")
        stopped = f"; it has stopped: {error!s:.500}" if error else ""
        raise GrpoError(f"{directory / 'metrics.jsonl'} is empty: the run has not finished its first update{stopped}")
    return record


class GrowingFile:
    """A JSON-lines file that a run appends to.

    ``check`` returns what is wrong with a row, or None. Such rows, and lines that are no rows, are left out;
    ``damaged`` has a sentence for each. Bytes that are not UTF-8 are read as U+FFFD.
    """

    def __init__(self, file: Path, check: Callable[[dict[str, Any]], str | None]):
        self.file, self.check = file, check
        self.restart()

    def restart(self) -> None:
        """Read the file from its beginning again."""
        self.offset = self.lines = 0
        self.inode: int | None = None
        self.damaged: list[str] = []
        self.unreadable = ""  # why the file could not be read the last time

    def replaced(self) -> bool:
        """Return whether the file is another one than before: a resumed run has written it anew."""
        try:
            found = self.file.stat()
        except OSError:
            return self.inode is not None
        return self.inode is not None and (found.st_ino != self.inode or found.st_size < self.offset)

    def new_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each row since the last call, and where its line begins; not a last line that is being written."""
        self.unreadable = ""
        try:
            yield from self._new_rows()
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable = f"{self.file} cannot be read: {error.strerror}"

    def _new_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with open(self.file, "rb") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start, self.offset, self.lines = self.offset, self.offset + len(line), self.lines + 1
                where = f"{self.file}:{self.lines}"
                try:
                    row = parsed(line[:-1].decode("utf-8", "replace"), where, self.file.name)
                except GrpoError as error:
                    self.damaged.append(str(error))
                    continue
                if wrong := self.check(row):
                    self.damaged.append(f"{where}: {wrong}")
                else:
                    yield start, row


class SampleFile(GrowingFile):
    """A file of completions, of which only places are kept: a long run has gigabytes of them."""

    def restart(self) -> None:
        """Read the file from its beginning again."""
        super().restart()
        self.places: list[tuple[int, int, str, int]] = []  # of each sample: start of its line, iteration, file, row

    def read(self) -> None:
        """Take the places of the new rows."""
        for start, row in self.new_rows():
            self.places.append((start, row["iteration"], row.get("file", ""), row["row"]))

    def iterations(self) -> list[int]:
        """Return the iterations of the samples, each once."""
        return list(dict.fromkeys(iteration for _, iteration, _, _ in self.places))

    def samples(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return the rows with these numbers, with ``id``, the number."""
        found = []
        with contextlib.suppress(OSError), open(self.file, "rb") as file:
            for number in numbers:
                file.seek(self.places[number][0])
                found.append(_loaded(file.readline().decode("utf-8", "replace")) | {"id": number})
        return found

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """Return the length of the lines of the samples with these numbers; that of the last line counts as 0."""
        starts = [start for start, *_ in self.places]
        return sum(starts[number + 1] - starts[number] for number in numbers if number + 1 < len(starts))

    def with_text(self, text: str, most: int, begin: int = 0) -> list[dict[str, Any]]:
        """Return the newest rows from number ``begin`` on, at most ``most``, whose prompt or completion has the text.

        Case does not count. The file is read once, from its end; only lines that may have the text are parsed.
        """
        found, text = list[dict[str, Any]](), text.lower()
        places, needles = self.places, _needles(text)  # a file that is replaced meanwhile has other places
        number = len(places)
        with contextlib.suppress(OSError), open(self.file, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            while number > begin and len(found) < most:
                first = number - 1
                while first > begin and end - places[first - 1][0] <= BLOCK:
                    first -= 1
                file.seek(places[first][0])
                block = file.read(end - places[first][0])
                lowered = block.lower()
                if any(needle in lowered for needle in needles):
                    for one in range(number - 1, first - 1, -1):
                        start = places[one][0] - places[first][0]
                        stop = block.find(b"\n", start)
                        if not any(lowered.find(needle, start, stop) >= 0 for needle in needles):
                            continue
                        sample = _loaded(block[start:stop].decode("utf-8", "replace"))
                        if text in sample["prompt"].lower() or text in sample["completion"].lower():
                            found.append(sample | {"id": one})
                number, end = first, places[first][0]
        return found[:most][::-1]


def _needles(text: str) -> set[bytes]:
    """Return what a line, in lower case, has one of if the value of a JSON text in it has ``text`` (lower case, too).

    It is the longest part of the text that JSON writes in one way or, where it escapes all that is not ASCII, in two.
    """
    plain = (c.isprintable() and (c not in '"\\/' if c.isascii() else c.lower() == c.upper()) for c in text)
    parts = "".join(c if one else "\n" for c, one in zip(text, plain, strict=True)).split("\n")
    part = max(parts, key=len)
    return {part.encode(), json.dumps(part)[1:-1].encode().lower()}


class Record:
    """Content of a run's folder. `read` takes what the run has written since the last call.

    ``generation`` grows when the run is another one than before: resumed, or begun anew.
    """

    def __init__(self, directory: Path, label: str):
        self.directory, self.label, self.generation = directory, label, 0
        self.metrics = GrowingFile(directory / "metrics.jsonl", _not_a_number)
        self.completions = SampleFile(directory / "completions.jsonl", _in_words(wrong_field))
        self.held_out = SampleFile(directory / "eval_completions.jsonl", _in_words(wrong_held_out))
        self.rows: list[dict[str, Any]] = []
        self.damaged: list[str] = []
        self.others_damaged: list[str] = []  # of the files that are read whole
        self.args: dict[str, Any] = {}
        self.environment: dict[str, Any] = {"given": []}
        self.profiles: list[dict[str, Any]] = []  # rank{R}.phases.json of each rank with --use-pytorch-profiler

    def read(self) -> bool:
        """Take new rows, and the other files whole; return whether there are new rows. ``damaged``: what was wrong."""
        files = self.metrics, self.completions, self.held_out
        if any(file.replaced() for file in files):
            self.generation += 1
            self.rows = []
            for file in files:
                file.restart()
        before = len(self.rows)
        self.rows += [row for _, row in self.metrics.new_rows()]
        self.completions.read()
        self.held_out.read()
        if not self.args or len(self.rows) != before:
            self._read_others()
        self.damaged = [file.unreadable for file in files if file.unreadable]
        self.damaged += [text for file in files for text in file.damaged] + self.others_damaged
        return len(self.rows) != before

    def _read_others(self) -> None:
        self.others_damaged = []
        try:
            self.args = read_object(self.directory / "args.json")
            file = self.directory / "environment.json"
            environment = read_object(file)
            if not isinstance(environment.get("given"), list):
                raise GrpoError(f"{file} has no list 'given': is it the environment.json of a run?")
            self.environment = environment
            self.profiles = [read_profile(file) for file in sorted(self.directory.glob("profile/rank*.phases.json"))]
        except GrpoError as error:
            self.others_damaged.append(str(error))


def _not_a_number(row: dict[str, Any]) -> str | None:
    return next((f"{name} is {v!r:.80}, which is not a number" for name, v in row.items() if not _numbers([v])), None)


def _in_words(wrong: Callable[[dict[str, Any]], str | None]) -> Callable[[dict[str, Any]], str | None]:
    def check(sample: dict[str, Any]) -> str | None:
        return f"{name!r} is missing or has the wrong type" if (name := wrong(sample)) else None

    return check


def read_profile(file: Path) -> dict[str, Any]:
    """Read the phases of a profile; raise GrpoError, which names the file, if it is damaged."""
    profile = read_object(file)
    try:
        for phase in profile["phases"]:
            if not isinstance(phase["name"], str) or not _numbers(phase[name] for name in PROFILE_COLUMNS):
                raise TypeError(f"phase {phase['name']!r} has a value of the wrong type")
        first, last = profile["updates"]
        if not _numbers([profile["rank"], first, last]):
            raise TypeError(f"rank {profile['rank']!r} or updates {profile['updates']!r} are not numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise GrpoError(f"{file} is not the phases of a profile ({error!r}): copy the file again") from error
    return profile


def wrong_field(sample: dict[str, Any]) -> str | None:
    """Return the first field of a completions.jsonl row that ``completion_log.completion_row`` would not write."""
    if wrong := _wrong_kind(sample, TEXTS | {"picked": str}):
        return wrong
    tokens = sample.get("tokens")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {str}:
        return "tokens"
    for name in ("log_probs", "token_advantages", "rollout_log_probs", "response_mask", "clipped"):
        values = sample.get(name) if name in sample or name == "log_probs" else [0.0] * len(tokens)
        if not isinstance(values, list) or len(values) != len(tokens) or not _numbers(values):
            return name
    if wrong := _wrong_rewards(sample):
        return wrong
    advantage = sample.get("advantage")
    return None if advantage is not None and _numbers([advantage]) else "advantage"


def wrong_held_out(sample: dict[str, Any]) -> str | None:
    """Return the first field of a row of eval_completions.jsonl that the log would not write."""
    return _wrong_kind(sample, TEXTS | {"file": str, "kind": str}) or _wrong_rewards(sample)


def _wrong_kind(sample: dict[str, Any], kinds: dict[str, type]) -> str | None:
    return next((name for name, kind in kinds.items() if not isinstance(sample.get(name), kind)), None)


def _wrong_rewards(sample: dict[str, Any]) -> str | None:
    rewards = sample.get("rewards")
    return None if isinstance(rewards, dict) and _numbers(rewards.values()) else "rewards"


def read_run(path: Path, label: str) -> Run:
    """Read ``metrics.jsonl``, given the file or its folder; raise GrpoError as ``read_lines`` does."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    rows = read_lines(file)
    if not rows:
        raise GrpoError(f"{file} is empty: the run has not finished its first update")
    return Run(label, rows)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's JSON-lines file; raise GrpoError, which names file and line, if one is damaged.

    A last line without a newline is ignored: the run is still writing it.
    """
    lines = _text(file).split("\n")[:-1]
    return [parsed(line, f"{file}:{number}", file.name) for number, line in enumerate(lines, 1)]


def parsed(line: str, where: str, name: str) -> dict[str, Any]:
    """Return the row in a line; raise GrpoError, which begins with ``where``, for what is no row of ``name``."""
    try:
        row = _loaded(line)
    except (ValueError, RecursionError) as error:
        raise GrpoError(f"{where} is not JSON ({error}): is it the {name} of a run?") from error
    if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
        raise GrpoError(f"{where} is not a row of a run (a JSON object with an 'iteration'): {line[:80]}")
    return row


def _loaded(line: str) -> Any:
    """Return the JSON value in a line, with None for NaN and Infinity, which other programs write."""
    return json.loads(line, parse_constant=lambda constant: None)


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise GrpoError, which names the file, if it is missing or not an object."""
    try:
        content = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise GrpoError(f"{file} is not JSON ({error}): copy the file from the run again") from error
    if not isinstance(content, dict):
        raise GrpoError(f"{file} holds no JSON object: is it the {file.name} of a run?")
    return content


def _numbers(values: Iterable[Any]) -> bool:
    """Return whether all values are finite numbers, or None, which replaces numbers that are not finite.

    Without a loop in Python: a log of gigabytes is mostly lists of numbers.
    """
    values = list(values)
    if not set(map(type, values)) <= {int, float, type(None)}:
        return False
    try:
        return sum(map(abs, filter(None, values)), 0.0) < 1e300
    except OverflowError:  # an integer of hundreds of digits
        return False


def labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest final parts of the paths that are different for all runs."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GrpoError(f"{file} cannot be read ({error}): give the --save directory of a run") from error
