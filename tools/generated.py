"""Command line of the tools that write documents: write the files, or with --check report a stale one."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def write_or_check(tool: str, description: str, make: Callable[[], Mapping[Path, str]]) -> None:
    """Write the files that ``make`` returns; with --check exit with 1 if one has another text."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    check = parser.parse_args().check
    for path, text in make().items():
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.relative_to(REPO)} is stale: run python {Path(tool).resolve().relative_to(REPO)}")
