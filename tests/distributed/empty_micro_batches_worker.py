"""What test_empty_micro_batches.py runs: two updates of three completions that share no micro-batch, in any layout.

    torchrun --nproc-per-node N tests/distributed/empty_micro_batches_worker.py OUT_DIR FLAGS LAYOUT...

Rank 0 writes a line for each layout to OUT_DIR/results.jsonl, as tools/check_parallel.py.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import check_parallel, made_up

BUDGET = 32
LENGTHS = [BUDGET, 20, 27]  # any two have more tokens than a micro-batch


def main() -> None:
    out, flags, *layouts = sys.argv[1:]
    made_up.rollout = partial(made_up.rollout, length=LENGTHS, prompt=4)
    more = f"--global-batch-size {len(LENGTHS)} --num-generations {len(LENGTHS)}"
    check_parallel.worker(layouts, [*flags.split(), *more.split()], Path(out))


if __name__ == "__main__":
    main()
