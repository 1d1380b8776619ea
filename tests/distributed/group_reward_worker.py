"""What test_group_rewards.py runs: rollouts that a group-wise reward scores, with an engine double.

    torchrun --nproc-per-node N tests/distributed/group_reward_worker.py PLUGIN OUT_DIR

Every rank is a replica. Rank 0 writes OUT_DIR/NAME.N.npz of each rollout on N ranks.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import torch.distributed as dist

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel import initialize
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.dynamic_sampling import Selection
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.plan import RolloutPlan

PROMPTS, GENERATIONS, SLOTS = 8, 4, 8
TOKENIZER = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))


class ShufflingEngine:
    """The token of a completion is a function of its id; completions finish in an order that mixes the groups."""

    def __init__(self, replica: int, num_replicas: int):
        self.replica, self.num_replicas, self.is_lead = replica, num_replicas, True
        self.waiting, self.rng = [], np.random.default_rng(replica)

    def submit(self, requests):
        self.waiting += requests

    def poll(self):
        request = self.waiting.pop(self.rng.integers(len(self.waiting)))
        token = int(np.random.default_rng(request.id).integers(3))
        return [Completion(request.id, [token], None, "stop", [0])]

    def abort(self, ids):
        self.waiting = [request for request in self.waiting if request.id not in ids]

    def rollout(self, seed):
        return contextlib.nullcontext()


def main(plugin: str, out: Path) -> None:
    dist.init_process_group("gloo")
    initialize._host_group = dist.group.WORLD
    rank, world = dist.get_rank(), dist.get_world_size()
    scorer = RewardPool(["length", "diverse"], [plugin, out / "length.py"], workers=2)
    prompts = [Prompt(id=50 + p, ids=[p], row={}, source="made up") for p in range(PROMPTS)]

    def rollout(name, prompts, generations=GENERATIONS, capacity=None, selected=False):
        engine = ShufflingEngine(rank, world)
        selection = Selection(engine, PROMPTS // 2, generations, 2.0, 0, scorer, [1.0, 1.0]) if selected else None
        plan = RolloutPlan(prompts, generations, Sampling(9), 0, selection)
        batch, failures = collect_rollout(engine, plan, scorer, TOKENIZER, Timers(), capacity)
        if selection is not None:
            selection.close()
        assert failures == 0
        if rank == 0:
            batch.save(out / f"{name}.{world}.npz")

    rollout("static", prompts)
    rollout("dynamic", prompts, capacity=SLOTS)
    rollout("over-sampled", prompts, selected=True)  # keeps the first half of the groups; the others are aborted
    rollout("single", prompts, generations=1)
    scorer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
