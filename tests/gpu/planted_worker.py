"""What test_exact.py runs: engine and trainer with --exact-log-probs, and a difference in each kernel of the trainer.

    torchrun --nproc-per-node 1 tests/gpu/planted_worker.py FLAGS

Prints the lines of the engine's steps, the largest difference of log-probabilities, and by kernel the first tensor that
differs.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

import pretrain_grpo  # first: it prepares for machines without a GPU
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.models import forward
from megatron_grpo.models.exact import head, kernels
from megatron_grpo.training.entry_point import run
from tools import check_engine, engine_steps, tensor_differences

KERNELS = {
    "rms_norm": kernels,
    "linear": kernels,
    "rotate": kernels,
    "attention": kernels,
    "silu_and_mul": kernels,
    "token_log_probs": head,
}
LOG_PROBS = "log-probabilities"


def changed(kernel: Callable) -> Callable:
    """Return the kernel with one bit changed in one number of its result."""

    def planted(*args, **options):
        out = kernel(*args, **options)
        first = (out[0] if isinstance(out, tuple) else out).view(-1)
        number = first[len(first) // 2 : len(first) // 2 + 1]
        bits = number.view(torch.int32 if number.dtype == torch.float32 else torch.int16)
        bits ^= 1
        return out

    return planted


def main() -> None:
    args, model, engine = check_engine.start(sys.argv[1:])
    steps = {answer.question: answer.equal for answer in engine_steps.answers(args, engine)}
    batch = check_engine.sample(args, engine)
    longest = batch.select([int(np.argmax(batch.lengths))])

    def mismatch(of: RolloutBatch) -> float:
        ours = forward.log_probs(args, model, pretrain_grpo.forward_step, of)
        return float(np.nanmax(np.abs(ours - of.rollout_log_probs)))

    ids = longest.tokens.tolist()[:-1]
    named = list(tensor_differences.places(args.num_layers))
    theirs = tensor_differences.of_engine(engine, [ids], {name: place for name, place, _ in named})

    def first() -> str | None:
        """Return the first tensor that differs; the engine computed before the difference was planted."""
        items = tensor_differences.against(args, theirs, model, longest)
        found = next((name for name, count, *_ in items if count), None)
        return found if found is not None or not mismatch(longest) else LOG_PROBS

    found: dict = {"steps": steps, "mismatch": mismatch(batch), "first": {"": first()}}
    for name, module in KERNELS.items():
        kernel = getattr(module, name)
        setattr(module, name, changed(kernel))
        try:
            found["first"][name] = first()
        finally:
            setattr(module, name, kernel)
    print(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    run(main)
