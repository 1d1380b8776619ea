"""Print one table of this project's and its peers' runs: seconds an update, trained tokens a second, and ratios.

    python tools/benchmark/peers/table.py runs/peers

Reads what the scripts of this folder left under RUN_DIR/equal and RUN_DIR/long_tail: metrics.jsonl (ours, verl),
steps.jsonl (TRL), logging.jsonl (ms-swift). The first updates are left out. Trained tokens are those of completions:
the prompts are the same in all. The ratio is seconds over our seconds.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron_grpo.utils.errors import GrpoError

Steps = Iterator[tuple[float, float]]  # (seconds, mean length of the completions) of each update


def rows(path: Path) -> Iterator[dict]:
    """Yield the rows of a file of JSON lines that are finished; none if the run stopped before it wrote one."""
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").split("\n")[:-1])


def of_ours(run: Path) -> Steps:
    """Yield the updates of this project's run."""
    for row in rows(run / "metrics.jsonl"):
        if "loss" in row:
            yield row["time/step"], row["completion/length_mean"]


def of_trl(run: Path) -> Steps:
    """Yield the updates that grpo_trl.py wrote."""
    for row in rows(run / "steps.jsonl"):
        yield row["seconds"], row["length"]


def of_ms_swift(run: Path) -> Steps:
    """Yield the updates of ms-swift, whose ``train_speed`` is the mean over all updates so far."""
    total = 0.0
    for row in rows(run / "logging.jsonl"):
        if "train_speed(s/it)" in row:
            before, total = total, row["train_speed(s/it)"] * int(row["iteration"].split("/")[0])
            yield total - before, row["completions/mean_length"]


def of_verl(run: Path) -> Steps:
    """Yield the updates of verl's file logger."""
    for row in rows(run / "metrics.jsonl"):
        if "perf/time_per_step" in row["data"]:
            yield row["data"]["perf/time_per_step"], row["data"]["response_length/mean"]


READERS = {"ours": of_ours, "trl": of_trl, "ms_swift": of_ms_swift, "verl": of_verl}


def table(run: Path, warm_up: int, batch: int) -> list[str]:
    """Return the lines of the table; raises GrpoError if there are no runs."""
    lines = []
    for lengths in ("equal", "long_tail"):
        reference = None
        for name, read in READERS.items():
            if not (run / lengths / name).is_dir():
                continue
            steps = list(read(run / lengths / name))[warm_up:]
            if not steps:
                lines.append(f"| {lengths} | {name} | none: see {run / lengths / name / 'log.txt'} | | | |")
                continue
            seconds = sum(step[0] for step in steps) / len(steps)
            tokens = batch * sum(step[1] for step in steps) / sum(step[0] for step in steps)
            reference = seconds if name == "ours" else reference
            ratio = f"{seconds / reference:.2f}" if reference else "–"
            lines.append(f"| {lengths} | {name} | {len(steps)} | {seconds:.2f} | {tokens:,.0f} | {ratio} |")
    if not lines:
        raise GrpoError(f"{run} has no runs: bash tools/benchmark/peers/ours.sh equal {run}")
    return [
        "| lengths | trainer | updates | s an update | trained tokens/s | ratio |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the scripts' RUN_DIR")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="updates that are left out [2]")
    parser.add_argument("--batch-size", type=int, default=512, metavar="N", help="completions of an update [512]")
    own = parser.parse_args()
    try:
        print("\n".join(table(own.run, own.warm_up, own.batch_size)))
    except GrpoError as error:
        print(f"table.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
