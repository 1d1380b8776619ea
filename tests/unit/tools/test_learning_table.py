"""tools/benchmark/learning_table.py: which updates a line of the table covers."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[3] / "tools/benchmark/learning_table.py"


def test_a_line_covers_the_updates_since_the_line_before(tmp_path):
    evaluation = {"eval/greedy_accuracy": 0.5, "eval/sampled_accuracy": 0.25}
    rows = [{"iteration": 0, "time/step": 2.0, "eval/greedy_accuracy": 0.4}]  # no sampled answers
    for update in range(1, 6):
        row = {"iteration": update, "time/step": 1.0, "grad_norm": 2.0 * update}
        if update != 3:  # a rollout without log-probabilities
            row |= {"mismatch/mean_abs": 0.01 * update, "mismatch/max_abs": 0.1 * update}
        rows.append(row | (evaluation if update in (2, 4) else {}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, TOOL, tmp_path / "run"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines()[2:]] == [
        ["run", "0", "0.400", "", "", "", "", "2"],
        ["run", "2", "0.500", "0.250", "0.01500", "0.200", "3.00", "4"],
        ["run", "4", "0.500", "0.250", "0.04000", "0.400", "7.00", "6"],
    ]
