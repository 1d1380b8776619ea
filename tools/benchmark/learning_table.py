"""Print a Markdown table of learning from the metrics.jsonl of runs: a line for each evaluation.

    python tools/benchmark/learning_table.py RUN_DIR [RUN_DIR ...]

Accuracies are those on held-out problems after the update. The columns behind them cover the updates since the line
before: the mean and the largest difference of log-probabilities of engine and trainer in nats (mismatch/mean_abs,
mismatch/max_abs), and the mean gradient norm. Seconds are those of all steps so far, evaluations among them.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.observability.run_folder import Run, read_run

HEADINGS = ("run", "update", "greedy", "sampled", "mean difference", "largest", "gradient norm", "seconds")
COLUMNS = (("mismatch/mean_abs", fmean, ".5f"), ("mismatch/max_abs", max, ".3f"), ("grad_norm", fmean, ".2f"))


def lines(run: Run) -> Iterator[str]:
    """Yield the lines of a run in the table."""
    since, seconds = [], 0.0
    for row in run.rows:
        since.append(row)
        seconds += row["time/step"]
        if "eval/greedy_accuracy" not in row:
            continue
        found = [row.get(f"eval/{kind}_accuracy") for kind in ("greedy", "sampled")]
        accuracies = ["" if value is None else f"{value:.3f}" for value in found]
        cells = []
        for name, combined, form in COLUMNS:
            values = [update[name] for update in since if update.get(name) is not None]
            cells.append(format(combined(values), form) if values else "")
        yield f"| {' | '.join([run.label, str(row['iteration']), *accuracies, *cells, f'{seconds:.0f}'])} |"
        since = []


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="a run's --save directory")
    runs = [read_run(directory, directory.name) for directory in parser.parse_args().runs]
    print(f"| {' | '.join(HEADINGS)} |\n|---{'|--:' * (len(HEADINGS) - 1)}|")
    for run in runs:
        print("\n".join(lines(run)))


if __name__ == "__main__":
    main()
