"""What test_exact.py runs: engine and trainer with --exact-log-probs, and a difference in each kernel of the trainer.

    torchrun --nproc-per-node 1 tests/gpu/planted_worker.py FLAGS

Prints the lines of the engine's steps, the largest difference of log-probabilities, and by kernel the first tensor that
differs.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from planted import FIRST, LOG_PROBS, planted

import pretrain_grpo  # first: it prepares for machines without a GPU
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.models import forward
from megatron_grpo.training.entry_point import run
from tools import check_engine, engine_steps, tensor_differences


def main() -> None:
    args, model, engine = check_engine.start(sys.argv[1:])
    steps = {answer.question: answer.equal for answer in engine_steps.answers(args, engine)}
    batch = check_engine.sample(args, engine)
    longest = batch.select([int(np.argmax(batch.lengths))])

    def mismatch(of: RolloutBatch) -> float:
        ours = forward.log_probs(args, model, pretrain_grpo.forward_step, of)
        return float(check_engine.gaps(ours, of.rollout_log_probs).max())

    ids = longest.tokens.tolist()[:-1]
    named = list(tensor_differences.places(args.num_layers))
    theirs = tensor_differences.of_engine(engine, [ids], {name: place for name, place, _ in named})

    def first() -> str | None:
        """Return the first tensor that differs; the engine computed before the difference was planted."""
        items = tensor_differences.against(args, theirs, model, longest)
        found = next((name for name, count, *_ in items if count), None)
        return found if found is not None or not mismatch(longest) else LOG_PROBS

    found: dict = {"steps": steps, "mismatch": mismatch(batch), "first": {"": first()}}
    for name in FIRST:
        with planted(name):
            found["first"][name] = first()
    print(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    run(main)
