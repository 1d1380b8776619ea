"""What test_mixture_layouts.py runs: updates with demonstrations, in several layouts.

    torchrun --nproc-per-node N tests/distributed/mixture_worker.py OUT.json FLAGS LAYOUT_FLAGS...

For each LAYOUT_FLAGS (one word each) and each loss of demonstrations two updates follow each other, with made-up
weights, completions and demonstrations. Rank 0 writes the metrics of the updates to OUT.json: {LAYOUT_FLAGS: {loss:
[row, row]}}.
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
from megatron_grpo.models import forward, router_replay
from megatron_grpo.parallel.initialize import initialize_distributed

MIX = "--sft-data-path unused --sft-loss-type"
LOSSES = {
    "sft": f"{MIX} sft --sft-batch-size 5 --chord-mu-peak 0.3",
    "chord": f"{MIX} chord --sft-batch-size 5 --chord-mu-peak 0.9 --chord-mu-valley 0.1 --chord-mu-decay-steps 2",
    "luffy": f"{MIX} luffy --luffy-gamma 0.3",
}
COUNT = 5  # demonstrations of an update: not a multiple of the ranks


def two_updates(flags: list[str], world_size: int) -> list[dict[str, float]]:
    args = made_up.parse(flags, world_size)
    initialize_distributed(args)
    trainer, whole = made_up.trainer(args), made_up.rollout(args)
    updates = np.split(np.arange(whole.num_completions), 2)
    demonstrations = whole.select(np.arange(COUNT))
    demonstrations = replace(demonstrations, tokens=(demonstrations.tokens + 7) % (args.vocab_size - 2))
    batch = made_up.share(args, replace(whole, ref_log_probs=whole.rollout_log_probs), updates)
    rows = []
    for trainer.iteration, completions in enumerate(updates):
        given = batch
        if args.router_replay_mode == "R2":  # experts of the present weights: those of an update without replay
            with router_replay.recording(args, trainer.model) as with_experts:
                forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, batch, updates)
            given = with_experts(batch)
        rows.append(pretrain_grpo.update(args, trainer, given, completions, demonstrations))
    made_up.release(trainer)
    return rows


def main() -> None:
    out, flags, *layouts = sys.argv[1:]
    world_size = int(os.environ["WORLD_SIZE"])
    found = {}
    for layout in layouts:
        words = [*flags.split(), *layout.split()]
        found[layout] = {name: two_updates([*words, *more.split()], world_size) for name, more in LOSSES.items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
