"""A checkpoint as files: Megatron-LM's layout, written so that a kill at any moment leaves a whole checkpoint.

    {root}/latest_checkpointed_iteration.txt     the iteration of the checkpoint that counts
    {root}/iter_0000020/                         common.pt, metadata.json, .metadata, *.distcp (megatron-core's)
                        args.json                the arguments of the run that wrote it
                        files.json               every file with its size, to tell a damaged checkpoint from a whole one

A checkpoint is written as ``iter_0000020.tmp``, brought to the disk, renamed, and only then named in the first file.
``iter_0000020.old`` is, for a moment, an earlier checkpoint of the same iteration that is being replaced.

These functions run on one process and touch only files. They raise GrpoError for what is wrong with a checkpoint.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from megatron_grpo.utils.errors import GrpoError

LATEST = "latest_checkpointed_iteration.txt"
ARGS = "args.json"
MANIFEST = "files.json"
# megatron-core's own files beside the data; small, and the first two are unpickled, so their content is checked too.
CORE_FILES = (".metadata", "common.pt", "metadata.json")


def latest_iteration(root: str | Path) -> int | None:
    """Iteration of the newest checkpoint under ``root`` (a --save directory), or None when there is none."""
    file = Path(root, LATEST)
    if not file.exists():
        return None
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":  # what Megatron-LM's converters write
        return 0
    if not re.fullmatch(r"[0-9]+", text):
        raise GrpoError(f"{file} holds {text[:40]!r}, not an iteration; in {root}: {_present(root)}")
    return int(text)


def find(root: str | Path) -> tuple[int, Path]:
    """The newest checkpoint under ``root``: its iteration and directory."""
    root = Path(root)
    iteration = latest_iteration(root)
    if iteration is None:
        hint = f"; it is a checkpoint itself: give {root.parent}" if (root / "metadata.json").exists() else ""
        raise GrpoError(f"no checkpoint in {root}: there is no {LATEST}{hint}")
    directory = iteration_directory(root, iteration)
    candidates = [directory, directory.with_suffix(".old")] + ([root / "release"] if iteration == 0 else [])
    for candidate in candidates:
        if candidate.is_dir():
            return iteration, candidate
    raise GrpoError(
        f"{root / LATEST} names iteration {iteration}, but {directory} does not exist; "
        f"to go back to another one, write its number there: {_present(root)}"
    )


def verify(directory: Path) -> None:
    """Check that every file is there and has the size, and the small ones the content, that they were written with."""
    if not (directory / MANIFEST).exists():  # written by Megatron-LM
        missing = [name for name in CORE_FILES if not (directory / name).exists()]
        if missing and any(directory.glob("*.distcp")):
            raise GrpoError(
                f"checkpoint {directory} is unfinished: {missing[0]} is missing; to go back to another one, write its "
                f"number into {directory.parent / LATEST}: {_present(directory.parent, besides=directory)}"
            )
        if missing:
            raise GrpoError(
                f"{directory} is no checkpoint of megatron.core.dist_checkpointing: {missing[0]} is missing "
                "(Megatron-LM's older formats have to be converted to torch_dist with Megatron-LM)"
            )
        return
    for name, (size, digest) in read_json(directory / MANIFEST).items():
        file = directory / name
        if not file.exists():
            problem = f"{name} is missing"
        elif file.stat().st_size != size:
            problem = f"{name} has {file.stat().st_size} bytes instead of {size}"
        elif digest and _digest(file) != digest:
            problem = f"the content of {name} is not what was written"
        else:
            continue
        raise GrpoError(
            f"checkpoint {directory} is damaged: {problem}; to go back to another one, write its number into "
            f"{directory.parent / LATEST}: {_present(directory.parent, besides=directory)}"
        )


def read_checkpoint_args(root: str | Path) -> dict:
    """The arguments stored with the newest checkpoint under ``root``; empty for a checkpoint that Megatron-LM wrote."""
    _, directory = find(root)
    return read_json(directory / ARGS) if (directory / ARGS).exists() else {}


def read_json(file: Path) -> dict:
    """A JSON object from a file; GrpoError when it is not one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GrpoError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise GrpoError(f"{file} is not a JSON object")
    return value


def start(root: str | Path, iteration: int) -> Path:
    """Clear away what a killed run left, and make the empty directory that a new checkpoint is written into."""
    clean_up(root)
    temporary = iteration_directory(root, iteration).with_suffix(".tmp")
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, args: dict, keep: int | None = None) -> None:
    """Make the written directory the newest checkpoint, and delete the oldest beyond ``keep`` (None: keep all)."""
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
        os.replace(final, old)  # a directory that is not empty cannot be replaced in one step; find() knows this name
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
    """Delete half-written and half-deleted checkpoints, which a kill leaves behind."""
    for directory in Path(root).glob("iter_*.tmp"):
        _remove(directory)
    for old in Path(root).glob("iter_*.old"):
        final = old.with_suffix("")
        if final.exists():
            _remove(old)
        else:  # killed between the two renames
            os.replace(old, final)


def iteration_directory(root: str | Path, iteration: int) -> Path:
    """``{root}/iter_0000020``."""
    return Path(root, f"iter_{iteration:07d}")


def _iterations(root: str | Path) -> list[Path]:
    """The checkpoints under ``root``, oldest iteration first."""
    found = [path for path in Path(root).glob("iter_*") if re.fullmatch(r"iter_[0-9]+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _present(root: str | Path, besides: Path | None = None) -> str:
    return ", ".join(path.name for path in _iterations(root) if path != besides) or "there is none"


def _write(file: Path, text: str) -> None:
    file.write_text(text + "\n", encoding="utf-8")
    _sync(file)


def _sync(path: Path) -> None:
    """Bring a file's content, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    """Delete a directory; its name goes first, so that half of it is never taken for a checkpoint."""
    if directory.exists():
        doomed = directory.with_suffix(".tmp")
        os.replace(directory, doomed)
        shutil.rmtree(doomed)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
