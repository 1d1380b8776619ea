"""Files of held-out prompts and their names in metrics (--valid-data-path). This module imports nothing large."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from megatron_grpo.utils.errors import GrpoError

_NAMED = re.compile(r"([^/=:]+)=(.+)")  # NAME=PATH
_ROW_FILES = (".jsonl", ".parquet", ".arrow")


def valid_files(words: Sequence[str] | None) -> dict[str, str]:
    """Return {name: path} of the words of --valid-data-path, each ``PATH`` or ``NAME=PATH``; {} for None.

    Without NAME the name is that of the file, without its suffix. Raises GrpoError for a path or a name that is given
    twice.
    """
    files: dict[str, str] = {}
    for word in words or ():
        named = _NAMED.fullmatch(word)
        name, path = named.groups() if named else (_name_of(word), word)
        if path in files.values():
            raise GrpoError(f"--valid-data-path has {path} twice: give each file once")
        if name in files:
            raise GrpoError(
                f'--valid-data-path has two files with the name "{name}" in metrics, {files[name]} and {path}: give '
                f"names, such as {_parent(files[name])}={files[name]} {_parent(path)}={path}"
            )
        files[name] = path
    return files


def _name_of(path: str) -> str:
    name = PurePath(path).name or path
    return next((name.removesuffix(suffix) for suffix in _ROW_FILES if name.endswith(suffix)), name)


def _parent(path: str) -> str:
    """Return a name for the file that an example can show."""
    return PurePath(path).parent.name or "NAME"
