"""What test_tensor_differences.py runs: engine and trainer, and changes of one weight of the trainer in turn.

torchrun --nproc-per-node 1 tests/distributed/tensor_differences_worker.py FLAGS
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import check_engine, tensor_differences  # first of ours: it prepares for machines without a GPU

# isort: split
import torch
from megatron.core.utils import unwrap_model

from megatron_grpo.training.entry_point import run

ROUNDING = 1e-4


def main() -> None:
    args, model, engine = check_engine.start(sys.argv[1:])
    one = check_engine.sample(args, engine).select([0])

    def first() -> str | None:
        items = tensor_differences.differences(args, engine, model, one)
        return next((name for name, *_, largest in items if largest > ROUNDING), None)

    found = {"": first()}
    for name, weight in unwrap_model(model[0]).named_parameters():
        before = weight.detach().clone()
        with torch.no_grad():
            weight[0] += 1.0 if weight.dim() == 1 else torch.linspace(0.5, 1.0, weight.shape[1])
        found[name] = first()
        weight.data.copy_(before)
    print(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    run(main)
