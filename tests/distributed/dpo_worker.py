"""What test_dpo_layouts.py runs: two updates with --loss-type dpo, in several layouts.

    torchrun --nproc-per-node N tests/distributed/dpo_worker.py OUT.json FLAGS LAYOUT_FLAGS...

The weights are those of --load-hf, completions and the reference's log-probabilities made up (`rollout`). Rank 0 writes
the metrics of the updates to OUT.json: {LAYOUT_FLAGS: [row, row]}.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import numpy as np
import torch.distributed as dist

import pretrain_grpo
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.parallel.initialize import initialize_distributed

DPO = "--loss-type dpo --beta 0 --dpo-beta 0.05"


def rollout(args) -> RolloutBatch:
    """Return made-up completions: the first group's are equally good, one of the second has no reward."""
    batch = made_up.rollout(args)
    batch.advantages[:4] = 0.0
    batch.rewards[4] = np.nan
    return replace(batch, ref_log_probs=batch.rollout_log_probs)


def two_updates(flags: list[str], world_size: int) -> list[dict[str, float]]:
    """Return the metrics of two updates in sequence."""
    args = made_up.parse(flags, world_size)
    initialize_distributed(args)
    trainer, whole = made_up.trainer(args), rollout(args)
    updates = np.split(np.arange(whole.num_completions), 2)
    batch = made_up.share(args, whole, updates)
    rows = []
    for trainer.iteration, completions in enumerate(updates):
        rows.append(pretrain_grpo.update(args, trainer, batch, completions))
    made_up.release(trainer)
    return rows


def main() -> None:
    out, flags, *layouts = sys.argv[1:]
    world_size = int(os.environ["WORLD_SIZE"])
    found = {layout: two_updates([*flags.split(), *DPO.split(), *layout.split()], world_size) for layout in layouts}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
