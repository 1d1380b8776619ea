"""Files of a checkpoint, with Megatron-LM's names; a save is atomic, so a killed run leaves a complete checkpoint.

    {root}/latest_checkpointed_iteration.txt     iteration of the newest complete checkpoint
    {root}/iter_0000020/                         common.pt, metadata.json, .metadata, *.distcp (megatron-core's)
                        args.json                arguments of the run that wrote the checkpoint
                        files.json               every file with its size, to detect a damaged checkpoint

A checkpoint is written to ``iter_0000020.tmp``, flushed to the disk (fsync), renamed, and then named in
latest_checkpointed_iteration.txt. ``iter_0000020.old`` is an earlier checkpoint of the same iteration while it is being
replaced.

These functions run on one process and access only files. They raise GrpoError for a missing or damaged checkpoint.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_json_object

LATEST = "latest_checkpointed_iteration.txt"
ARGS = "args.json"
MANIFEST = "files.json"
# megatron-core's files beside the data: small, and two of them are unpickled, so verify() checks their content.
CORE_FILES = (".metadata", "common.pt", "metadata.json")


def latest_iteration(root: str | Path) -> int | None:
    """Return the iteration of the newest checkpoint under ``root`` (a --save directory), or None without one."""
    file = Path(root, LATEST)
    if not file.exists():
        return None
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":  # written by Megatron-LM's converters
        return 0
    if not re.fullmatch(r"[0-9]+", text):
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


def find(root: str | Path) -> tuple[int, Path]:
    """Return iteration and directory of the newest checkpoint under ``root``."""
    root = Path(root)
    iteration = latest_iteration(root)
    if iteration is None:
        hint = (
            f"; this directory is a single checkpoint: give {root.parent}" if (root / "metadata.json").exists() else ""
        )
        raise GrpoError(f"no checkpoint in {root}: there is no {LATEST}{hint}")
    directory = iteration_directory(root, iteration)
    candidates = [directory, directory.with_suffix(".old")] + ([root / "release"] if iteration == 0 else [])
    for candidate in candidates:
        if candidate.is_dir():
            return iteration, candidate
    raise GrpoError(
        f"{root / LATEST} names iteration {iteration}, but {directory} does not exist; "
        f"to use another checkpoint, write its number to that file: {_list_others(root)}"
    )


def verify(directory: Path) -> None:
    """Raise GrpoError unless every file exists with its original size, and small files with their original content."""
    if not (directory / MANIFEST).exists():  # written by Megatron-LM
        # Megatron-LM with megatron-core 0.19 writes no common.pt.
        missing = [name for name in CORE_FILES if name != "common.pt" and not (directory / name).exists()]
        if missing and any(directory.glob("*.distcp")):
            raise GrpoError(
                f"checkpoint {directory} is incomplete: {missing[0]} is missing; to use another checkpoint, write its "
                f"number into {directory.parent / LATEST}: {_list_others(directory.parent, besides=directory)}"
            )
        if missing:
            raise GrpoError(
                f"{directory} is not a checkpoint of megatron.core.dist_checkpointing: {missing[0]} is missing "
                "(convert Megatron-LM's older formats to torch_dist with Megatron-LM)"
            )
        return
    for name, (size, digest) in read_json_object(directory / MANIFEST).items():
        file = directory / name
        if not file.exists():
            problem = f"{name} is missing"
        elif file.stat().st_size != size:
            problem = f"{name} has {file.stat().st_size} bytes instead of {size}"
        elif digest and _digest(file) != digest:
            problem = f"the content of {name} has changed since it was written"
        else:
            continue
        raise GrpoError(
            f"checkpoint {directory} is damaged: {problem}; to use another checkpoint, write its number into "
            f"{directory.parent / LATEST}: {_list_others(directory.parent, besides=directory)}"
        )


def read_checkpoint_args(root: str | Path) -> dict:
    """Return the arguments stored with the newest checkpoint under ``root``; {} for one written by Megatron-LM."""
    _, directory = find(root)
    return read_json_object(directory / ARGS) if (directory / ARGS).exists() else {}


def start(root: str | Path, iteration: int) -> Path:
    """Delete the leftovers of a killed run; create and return the empty directory for a new checkpoint."""
    clean_up(root)
    temporary = iteration_directory(root, iteration).with_suffix(".tmp")
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, args: dict, keep: int | None = None) -> None:
    """Make the written directory the newest checkpoint; delete the oldest beyond ``keep`` (None: keep all)."""
    _write(temporary / ARGS, json.dumps(args, indent=1, sort_keys=True))
    manifest = {}
    for file in sorted(path for path in temporary.rglob("*") if path.is_file()):
        name = str(file.relative_to(temporary))
        manifest[name] = [file.stat().st_size, _digest(file) if file.name in CORE_FILES else None]
        _sync(file)
    _write(temporary / MANIFEST, json.dumps(manifest, indent=1))
    _sync(temporary)

    final, root = temporary.with_suffix(""), temporary.parent
    old = final.with_suffix(".old")
    if final.exists():
        os.replace(final, old)  # os.replace needs an empty target directory; find() accepts this name, too
    os.replace(temporary, final)
    _sync(root)
    _write(root / (LATEST + ".tmp"), str(int(final.name.removeprefix("iter_"))))
    os.replace(root / (LATEST + ".tmp"), root / LATEST)
    _sync(root)
    _remove(old)
    if keep is not None:
        others = [directory for directory in _iterations(root) if directory != final]
        for directory in others[: max(0, len(others) + 1 - keep)]:
            _remove(directory)


def clean_up(root: str | Path) -> None:
    """Delete partly written and partly deleted checkpoints of a killed run."""
    for directory in Path(root).glob("iter_*.tmp"):
        _remove(directory)
    for old in Path(root).glob("iter_*.old"):
        final = old.with_suffix("")
        if final.exists():
            _remove(old)
        else:  # killed between the two renames
            os.replace(old, final)


def iteration_directory(root: str | Path, iteration: int) -> Path:
    """Return ``{root}/iter_0000020`` for iteration 20."""
    return Path(root, f"iter_{iteration:07d}")


def _iterations(root: str | Path) -> list[Path]:
    """Return the checkpoints under ``root``, oldest iteration first."""
    found = [path for path in Path(root).glob("iter_*") if re.fullmatch(r"iter_[0-9]+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _list_others(root: str | Path, besides: Path | None = None) -> str:
    return ", ".join(path.name for path in _iterations(root) if path != besides) or "there is no other checkpoint"


def _write(file: Path, text: str) -> None:
    file.write_text(text + "\n", encoding="utf-8")
    _sync(file)


def _sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    """Delete a directory; rename it first, so that a partly deleted one is never taken for a checkpoint."""
    if directory.exists():
        doomed = directory.with_suffix(".tmp")
        os.replace(directory, doomed)
        shutil.rmtree(doomed)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
