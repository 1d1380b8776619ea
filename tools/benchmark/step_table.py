"""Print a table of seconds by phase from the metrics.jsonl of runs: means over all updates but the first ones.

    python tools/benchmark/step_table.py RUN_DIR [RUN_DIR ...]

The table is Markdown, with one line for each run.
"""

import argparse
import json
from pathlib import Path

PHASES = ("rollout", "scoring", "logprobs", "update", "sync", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="a run's --save directory")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="updates that are left out [2]")
    own = parser.parse_args()
    runs = own.runs
    print("| run | " + " | ".join(f"{phase} s" for phase in PHASES) + " | mean length | trained tokens/s |")
    print("|---" * (len(PHASES) + 3) + "|")
    for run in runs:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["iteration"] > own.warm_up and "loss" in row]
        if not rows:
            parser.error(
                f"{run / 'metrics.jsonl'} has no update after the first {own.warm_up}: give a smaller --warm-up"
            )
        mean = {phase: sum(row.get(f"time/{phase}", 0.0) for row in rows) / len(rows) for phase in PHASES}
        tokens = sum(row["tokens/update"] for row in rows) / sum(row["time/step"] for row in rows)
        length = sum(row["completion/length_mean"] for row in rows) / len(rows)
        seconds = " | ".join(f"{mean[phase]:.2f}" for phase in PHASES)
        print(f"| {run.name} | {seconds} | {length:,.1f} | {tokens:,.0f} |")


if __name__ == "__main__":
    main()
