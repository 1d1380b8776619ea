"""Files of held-out prompts and their names in metrics (--valid-data-path). This module imports nothing large."""

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from megatron_grpo.utils.errors import GrpoError

_NAMED = re.compile(r"([^/=:]+)=(.+)")  # NAME=PATH
_ROW_FILES = (".jsonl", ".parquet", ".arrow")


def valid_files(words: Sequence[str] | None) -> dict[str, str]:
    """Return {name: path} of the words of --valid-data-path, each ``PATH`` or ``NAME=PATH``; {} for None.

    Without NAME the name is that of the file, without its suffix; where that is the name of several, the names of the
    parent folder and the file: ``gsm8k_test``. Raises GrpoError for a path or a name that is given twice.
    """
    named = [_NAMED.fullmatch(word) for word in words or ()]
    paths = [found[2] if found else word for found, word in zip(named, words or (), strict=True)]
    if twice := _repeated(paths):
        raise GrpoError(f"--valid-data-path has {twice[0]} twice: give each file once")
    names = [found[1] if found else _name_of(path) for found, path in zip(named, paths, strict=True)]
    several = _repeated(names)
    names = [
        _with_parent(name, path) if name in several and not found else name
        for found, name, path in zip(named, names, paths, strict=True)
    ]
    if several := _repeated(names):
        same = [path for name, path in zip(names, paths, strict=True) if name == several[0]]
        raise GrpoError(
            f'--valid-data-path has {len(same)} files with the name "{several[0]}" in metrics: give names, such as '
            f"{_proposal(several[0], same, names)}"
        )
    return dict(zip(names, paths, strict=True))


def valid_paths(words: Sequence[str] | None) -> list[str]:
    """Return the paths of `valid_files`, in their order."""
    return list(valid_files(words).values())


def _repeated(words: Sequence[str]) -> list[str]:
    return [word for word, count in Counter(words).items() if count > 1]


def _name_of(path: str) -> str:
    name = PurePath(path).name or path
    return next((name.removesuffix(suffix) for suffix in _ROW_FILES if name.endswith(suffix)), name)


def _with_parent(name: str, path: str) -> str:
    parent = PurePath(path).parent.name.removeprefix("hf:")
    return f"{parent}_{name}" if parent else name


def _proposal(name: str, paths: Sequence[str], taken: Sequence[str]) -> str:
    """Return words ``NAME_1=PATH NAME_2=PATH ...`` that give files of one name different names, none in ``taken``."""
    start = re.sub(r"[/=:]", "_", name)
    free = (found for number in itertools.count(1) if (found := f"{start}_{number}") not in taken)
    return " ".join(shlex.quote(f"{new}={path}") for new, path in zip(free, paths, strict=False))
