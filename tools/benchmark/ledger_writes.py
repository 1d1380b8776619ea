"""Measure what a ledger's flush to the disk (fsync) costs: milliseconds a record with it and without.

    python tools/benchmark/ledger_writes.py DIRECTORY

A record holds a group of 8 completions: id, log-probability and weight version of each token, 12 bytes. Records with
and without fsync are written in turn, to two files in DIRECTORY, which are deleted. Prints a Markdown table of medians
and of the longest write. A thread writes a run's records while the engine generates (docs/ledger.md).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo.rollout.ledger.records import RecordFile, to_bytes

COMPLETIONS = 8
RECORDS = 200


def milliseconds(function: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def measure(directory: Path, tokens: int) -> str:
    """Return the table's row of completions with ``tokens`` tokens each."""
    rng, shape = np.random.default_rng(0), (COMPLETIONS, tokens)
    arrays = {"ids": rng.integers(0, 150_000, shape).astype("<i4"), "log_probs": rng.random(shape, "f4")}
    arrays["versions"] = np.zeros(shape, "<i4")
    flushed, written = [], []
    ledger = RecordFile(directory / f"flushed-{tokens}.bin")
    with open(directory / f"written-{tokens}.bin", "xb", buffering=0) as file:
        for _ in range(RECORDS):
            flushed.append(milliseconds(lambda: ledger.append({}, arrays)))
            written.append(milliseconds(lambda: file.write(to_bytes({}, arrays))))
    ledger.close()
    size = len(to_bytes({}, arrays)) / 1024
    columns = [f"{value:.2f}" for times in (flushed, written) for value in (median(times), max(times))]
    return f"| {tokens:,} | {size:,.1f} | {' | '.join(columns)} |"


def main() -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="folder on the file system to measure")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    print("| tokens a completion | record, KiB | with fsync, ms | longest | without, ms | longest |")
    print("|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for tokens in (16, 256, 2048, 16384):
            print(measure(Path(folder), tokens), flush=True)


if __name__ == "__main__":
    main()
