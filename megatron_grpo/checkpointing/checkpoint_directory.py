"""Files of a checkpoint, with Megatron-LM's names; a save is atomic, so a killed run leaves a complete checkpoint.

    {root}/latest_checkpointed_iteration.txt     iteration of the newest complete checkpoint
    {root}/iter_0000020/                         metadata.json, .metadata, *.distcp (megatron-core's)
                        args.json                arguments of the run that wrote the checkpoint
                        checksums.json           checksums of the items of *.distcp, which are checked while loading
                        files.json               iteration; size of every other file, and checksum of those but *.distcp
    {root}/best.json                             with --keep-best: iteration, metric and value of the best checkpoint

A checkpoint is written to ``iter_0000020.tmp``, flushed to the disk (fsync), renamed, and then named in
latest_checkpointed_iteration.txt. ``iter_0000020.old`` is an earlier checkpoint of the same iteration while it is being
replaced.

These functions run on one process and access only files. They raise GrpoError for a missing or damaged checkpoint.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.checkpointing import checksums
from megatron_grpo.checkpointing.checksums import CHECKSUMS, Checksum
from megatron_grpo.utils import progress
from megatron_grpo.utils.durable import flush_to_disk
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_json_object

LATEST = "latest_checkpointed_iteration.txt"
ARGS = "args.json"
MANIFEST = "files.json"
BEST = "best.json"
CORE_FILES = (".metadata", "metadata.json")  # megatron-core's files beside the data


def latest_iteration(root: str | Path) -> int | None:
    """Return the iteration of the newest checkpoint under ``root`` (a --save directory), or None without one.

    ``root`` can be a single checkpoint, too. Without latest_checkpointed_iteration.txt it is the newest checkpoint that
    is whole. Raises GrpoError if there are checkpoints and none is whole, and for a latest_checkpointed_iteration.txt
    without a number.
    """
    if is_single(root):
        return _number(Path(root))
    file = Path(root, LATEST)
    if not file.exists():
        there = [path for path in Path(root).glob("iter_*") if re.fullmatch(r"iter_[0-9]+(\.old)?", path.name)]
        whole = [path for path in there if (path / MANIFEST).exists() and not any(damage(path))]
        if there and not whole:
            raise GrpoError(
                f"{root} holds checkpoints ({_list_others(root)}) but no {LATEST}, and none of them is known to be "
                "whole: write the number of one to that file, or choose another directory"
            )
        return max((number for path in whole if (number := _number(path)) is not None), default=None)
    try:
        text = file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise GrpoError(f"{file} cannot be read: {error.strerror}") from None
    if text == "release":  # written by Megatron-LM's converters
        return 0
    if not re.fullmatch(r"[0-9]{1,18}", text):  # Python refuses to read numbers of thousands of digits
        raise GrpoError(f"{file} holds {text[:40]!r}, not an iteration; in {root}: {_list_others(root)}")
    return int(text)


def newest_in_words(root: str | Path | None) -> str:
    """Return a sentence on how to resume a run with ``--save ROOT`` that saves nothing more."""
    if root is None:
        return "Nothing is saved: there is no --save"
    try:
        newest = latest_iteration(root)
    except GrpoError as error:
        return str(error)
    if newest is None:
        return "There is no checkpoint: start the run again"
    return f"The newest checkpoint is iteration {newest}: --load {root} resumes from it"


def room_in_words(root: str | Path | None) -> str:
    """Return the cure of a file that cannot be written, and how to resume the run with ``--save ROOT``."""
    return f"Make room, or correct the path. {newest_in_words(root)}"


def find(root: str | Path) -> tuple[int, Path]:
    """Return iteration and directory of the newest checkpoint under ``root``; raise GrpoError if there is none.

    A ``root`` that is a single checkpoint, such as the one of best.json, is that checkpoint.
    """
    root = Path(root)
    iteration = latest_iteration(root)
    if iteration is None and _number(root) is not None and not root.is_dir():
        raise GrpoError(
            f"checkpoint {root} does not exist; if its run has deleted it meanwhile (--max-checkpoints-to-keep), start "
            "again with another one"
        )
    if iteration is None:
        cure = "; it is a Hugging Face directory, for --load-hf" if (root / "config.json").exists() else ""
        raise GrpoError(f"no checkpoint in {root}: there is no {LATEST}{cure}")
    if is_single(root):
        return iteration, root
    directory = iteration_directory(root, iteration)
    candidates = [directory, directory.with_suffix(".old")] + ([root / "release"] if iteration == 0 else [])
    for candidate in candidates:
        if candidate.is_dir():
            return iteration, candidate
    if latest_iteration(root) != iteration:  # its run has saved another one meanwhile, and deleted this one
        return find(root)
    raise GrpoError(
        f"{root / LATEST} names iteration {iteration}, but {directory} does not exist; "
        f"to use another checkpoint, write its number to that file: {_list_others(root)}"
    )


def pinned(root: str | Path) -> str:
    """Return the newest checkpoint under ``root`` as a path: while its run goes on, the newest one changes.

    Without metadata.json, as in "release" of Megatron-LM's converters, it is ``root``. Raises GrpoError as `find`.
    """
    directory = find(root)[1]
    return str(directory if is_single(directory) else root)


def is_single(path: str | Path) -> bool:
    """Return whether a path is the directory of one checkpoint, ``{root}/iter_0000020``."""
    return _number(Path(path)) is not None and Path(path, "metadata.json").exists()


def run_directory(path: str | Path) -> Path:
    """Return the --save directory of a path that is one, or that is a single checkpoint in it."""
    return Path(path).parent if is_single(path) else Path(path)


def note(root: str | Path) -> str:
    """Return a line on how the newest checkpoint was chosen, if latest_checkpointed_iteration.txt is not the reason."""
    newest = None if is_single(root) else latest_iteration(root)
    if newest is None:
        return ""
    if not Path(root, LATEST).exists():
        return f"{root} has no {LATEST}: iteration {newest} is its newest whole checkpoint"
    later = [path.name for path in iterations(root) if (_number(path) or 0) > newest]
    return f"{Path(root, LATEST)} names iteration {newest}: {', '.join(later)} not used" if later else ""


def verify(directory: Path) -> None:
    """Raise GrpoError if a file is missing or has another size, or the content of one except ``*.distcp`` has changed.

    `data_files.Reader` checks the content of ``*.distcp`` when it is read; ``damage(directory, True)`` reads all of it.
    """
    if not (directory / MANIFEST).exists():
        if not directory.is_dir():
            raise GrpoError(damaged(directory, "it is missing"))
        if any((directory / name).exists() for name in (ARGS, CHECKSUMS)):
            raise GrpoError(damaged(directory, f"{MANIFEST} is missing"))
        _check_foreign(directory)
        return
    for problem in damage(directory):
        raise GrpoError(damaged(directory, problem))


def damaged(directory: Path, problem: str) -> str:
    """Return the message about a checkpoint that is damaged, or was deleted while it was read."""
    if not directory.is_dir():
        return f"checkpoint {directory} cannot be read{way_out(directory)}"
    return f"checkpoint {directory} is damaged: {problem}{way_out(directory)}"


def way_out(directory: Path) -> str:
    """Return the end of a message about a damaged checkpoint: how to use another one."""
    if not directory.is_dir():
        return "; it was deleted meanwhile, as its run does with --max-checkpoints-to-keep: start again"
    if _number(directory) is None:
        return ""
    return (
        f"; to use another checkpoint, write its number into {directory.parent / LATEST}: "
        f"{_list_others(directory.parent, besides=directory)}"
    )


def _check_foreign(directory: Path) -> None:
    """Raise GrpoError if a checkpoint that Megatron-LM wrote lacks files."""
    missing = [name for name in CORE_FILES if not (directory / name).exists()]
    if missing and any(directory.glob("*.distcp")):
        raise GrpoError(f"checkpoint {directory} is incomplete: {missing[0]} is missing{way_out(directory)}")
    if missing:
        raise GrpoError(
            f"{directory} is not a checkpoint of megatron.core.dist_checkpointing: {missing[0]} is missing "
            "(convert Megatron-LM's older formats to torch_dist with Megatron-LM)"
        )


def damage(directory: Path, content: bool = False) -> Iterator[str]:
    """Yield every problem of a checkpoint with files.json; with ``content`` also those within data files."""
    try:
        manifest = _read_manifest(directory)
    except GrpoError as error:
        yield str(error)
        return
    iteration = manifest.get("iteration")
    if iteration is not None and _number(directory) not in (iteration, None):
        yield f"{MANIFEST} is that of iteration {iteration}: the directory was renamed, or its files were replaced"
    for name, (size, digest) in manifest["files"].items():
        progress.advance()
        try:
            found = (directory / name).stat().st_size
            if found != size:
                yield f"{name} has {found} bytes instead of {size}"
            elif digest and digest != (checksums.of_file if iteration is not None else _sha256)(directory / name):
                yield f"the content of {name} has changed since it was written"
            elif content and Path(name).name == CHECKSUMS:
                yield from _damaged_items((directory / name).parent)
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"


def _damaged_items(directory: Path) -> Iterator[str]:
    for name, items in (checksums.read_checksums(directory) or {}).items():
        with open(directory / name, "rb") as file:
            for offset, (length, checksum) in items.items():
                if Checksum.of(file, length) != checksum:
                    yield f"{name} has changed since it was written, in bytes {offset} to {offset + length}"


def check_recurrent_layers(directory: str | Path, keys: Iterable[str]) -> None:
    """Raise GrpoError if a checkpoint with these ``keys`` has recurrent layers of megatron-core's own."""
    ends = {".in_proj.weight.query": "gated delta nets", ".mixer.in_proj.weight.z": "Mamba-2"}
    if found := {kind for key in keys for end, kind in ends.items() if key.endswith(end)}:
        raise GrpoError(
            f"checkpoint {directory} holds {found.pop()} of Megatron-LM's own layer, whose projections are divided "
            "and ordered otherwise than here, and is not read: give the model's Hugging Face directory (--load-hf, or "
            "--hf-to-megatron of tools/checkpoint/convert.py)"
        )


def has_checksums(directory: Path) -> bool:
    """Return whether a checkpoint has checksums of its data; earlier versions and Megatron-LM wrote none."""
    return (directory / CHECKSUMS).exists()


def _read_manifest(directory: Path) -> dict[str, Any]:
    """Return files.json: ``iteration`` and ``files``, {name: (size, checksum or None)}.

    The iteration is None in that of an earlier version, whose checksums are SHA-256.
    """
    file = directory / MANIFEST
    manifest = read_json_object(file)
    earlier = "files" not in manifest
    own = manifest.pop("checksum", None)
    try:
        if not earlier and own != _manifest_checksum(manifest):
            raise GrpoError(f"the content of {MANIFEST} has changed since it was written")
        files = {
            name: (int(size), digest) for name, (size, digest) in (manifest if earlier else manifest["files"]).items()
        }
    except (ValueError, TypeError, AttributeError):
        raise GrpoError(f"the content of {MANIFEST} has changed since it was written") from None
    if not files:
        raise GrpoError(f"{MANIFEST} names no files")
    return {"iteration": None if earlier else manifest["iteration"], "files": files}


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    return Checksum(json.dumps(manifest, sort_keys=True).encode()).text()


def read_checkpoint_args(root: str | Path) -> dict:
    """Return the arguments stored with the newest checkpoint under ``root``; {} for one written by Megatron-LM."""
    _, directory = find(root)
    verify(directory)
    return stored_args(directory)


def stored_args(directory: Path) -> dict:
    """Return the arguments stored in a checkpoint; {} for one written by Megatron-LM."""
    return read_json_object(directory / ARGS) if (directory / ARGS).exists() else {}


def refuse_adapter(directory: Path) -> None:
    """Raise GrpoError for a checkpoint of a run with --lora-rank, which lacks the weights of the model."""
    if stored_args(directory).get("lora_rank"):
        raise GrpoError(
            f"checkpoint {directory} holds an adapter only, not the weights below it: resume its run with --load, or "
            f"merge it with tools/checkpoint/convert.py --load BASE --merge-lora {directory.parent}, with --hf-to-hf "
            "if the base is a Hugging Face directory"
        )


def start(root: str | Path, iteration: int) -> Path:
    """Delete the leftovers of a killed run; create and return the empty directory for a new checkpoint."""
    clean_up(root)
    temporary = iteration_directory(root, iteration).with_suffix(".tmp")
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, args: dict, keep: int | None = None, best: dict[str, Any] | None = None) -> None:
    """Make the written directory the newest checkpoint; delete the oldest beyond ``keep`` (None: keep all).

    Checkpoints of later iterations are deleted before: the run has gone back from them to an earlier one.
    ``best``: content of best.json if this checkpoint is the best one. The checkpoint that best.json names stays, and
    does not count.
    """
    _write(temporary / ARGS, json.dumps(args, indent=1, sort_keys=True))
    _write(temporary / MANIFEST, json.dumps(_manifest(temporary), indent=1))
    flush_to_disk(temporary)

    final, root = temporary.with_suffix(""), temporary.parent
    old = final.with_suffix(".old")
    if final.exists():
        os.replace(final, old)  # os.replace needs an empty target directory; find() accepts this name, too
    os.replace(temporary, final)
    flush_to_disk(root)
    _write(root / (LATEST + ".tmp"), str(int(final.name.removeprefix("iter_"))))
    os.replace(root / (LATEST + ".tmp"), root / LATEST)
    if best is not None:
        write_best(root, best)
    flush_to_disk(root)
    _remove(old)
    if keep is not None:
        kept = (read_best(root) or {}).get("iteration")
        others = [path for path in iterations(root) if path != final and _number(path) != kept]
        here = _number(final) or 0
        others.sort(key=lambda path: (_number(path) or 0) < here)  # those that the run has gone back from come first
        for directory in others[: max(0, len(others) + 1 - keep)]:
            _remove(directory)


def read_best(root: str | Path) -> dict[str, Any] | None:
    """Return iteration, metric and value of the best checkpoint under ``root``; None if no checkpoint is the best.

    Raises GrpoError for a damaged best.json.
    """
    file = Path(root, BEST)
    if not file.exists():
        return None
    best = read_json_object(file)
    numbers = [best.get(name) for name in ("iteration", "value")]
    if not all(isinstance(n, int | float) for n in numbers) or not isinstance(best.get("metric"), str):
        raise GrpoError(f"{file} does not have iteration, metric and value: delete it, and no checkpoint is the best")
    return best if iteration_directory(root, int(best["iteration"])).is_dir() else None


def write_best(root: str | Path, best: dict[str, Any] | None) -> None:
    """Write best.json; delete it for None."""
    file = Path(root, BEST)
    if best is None:
        file.unlink(missing_ok=True)
        return
    temporary = file.with_name(BEST + ".tmp")
    _write(temporary, json.dumps(best))
    os.replace(temporary, file)


def _manifest(temporary: Path) -> dict[str, Any]:
    """Flush all files of a new checkpoint to the disk; return the content of its files.json.

    Raises GrpoError for a data file that is not as long as it was written.
    """
    data = {}  # sizes of the files that a checksums.json describes
    for listing in temporary.rglob(CHECKSUMS):
        for name, items in (checksums.read_checksums(listing.parent) or {}).items():
            data[str((listing.parent / name).relative_to(temporary))] = sum(length for length, _ in items.values())
    files: dict[str, tuple[int, str | None]] = {}
    for file in sorted(path for path in temporary.rglob("*") if path.is_file()):
        name, size = str(file.relative_to(temporary)), file.stat().st_size
        if data.get(name, size) != size:
            raise GrpoError(f"checkpoint {temporary} cannot be written: {name} has {size} of {data[name]} bytes")
        files[name] = size, None if name in data else checksums.of_file(file)
        flush_to_disk(file)
    if missing := data.keys() - files.keys():
        raise GrpoError(f"checkpoint {temporary} cannot be written: {min(missing)} is not there")
    manifest = {"iteration": _number(temporary), "files": files}
    return manifest | {"checksum": _manifest_checksum(manifest)}


def clean_up(root: str | Path) -> None:
    """Delete partly written and partly deleted checkpoints of a killed run."""
    Path(root, BEST + ".tmp").unlink(missing_ok=True)
    for directory in Path(root).glob("iter_*.tmp"):
        _remove(directory)
    for old in Path(root).glob("iter_*.old"):
        final = old.with_suffix("")
        if final.exists():
            _remove(old)
        else:  # killed between the two renames
            os.replace(old, final)


def discard(temporary: Path) -> None:
    """Delete a checkpoint that could not be written; rename it first, so that no rank opens further files there."""
    doomed = temporary.with_suffix(".discarded.tmp")
    with contextlib.suppress(OSError):
        os.replace(temporary, doomed)
    for directory in (doomed, temporary):
        shutil.rmtree(directory, ignore_errors=True)


def iteration_directory(root: str | Path, iteration: int) -> Path:
    """Return ``{root}/iter_0000020`` for iteration 20."""
    return Path(root, f"iter_{iteration:07d}")


def iterations(root: str | Path) -> list[Path]:
    """Return the checkpoints under ``root``, oldest iteration first."""
    found = [path for path in Path(root).glob("iter_*") if re.fullmatch(r"iter_[0-9]+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _number(directory: Path) -> int | None:
    """Return the iteration in the name of a checkpoint's directory; None for another name."""
    found = re.fullmatch(r"iter_([0-9]+)(\.old|\.tmp)?", directory.name)
    return int(found[1]) if found else None


def _list_others(root: str | Path, besides: Path | None = None) -> str:
    return ", ".join(path.name for path in iterations(root) if path != besides) or "there is no other checkpoint"


def _write(file: Path, text: str) -> None:
    file.write_text(text + "\n", encoding="utf-8")
    flush_to_disk(file)


def _remove(directory: Path) -> None:
    """Delete a directory; rename it first, so that a partly deleted one is never taken for a checkpoint."""
    if directory.exists():
        doomed = directory.with_suffix(".tmp")
        os.replace(directory, doomed)
        shutil.rmtree(doomed)


def _sha256(file: Path) -> str:  # in files.json of earlier versions
    return hashlib.sha256(file.read_bytes()).hexdigest()
