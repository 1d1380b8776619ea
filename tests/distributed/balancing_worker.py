"""What test_balancing.py runs: rollouts of two replicas, of two ranks each, with an engine that only counts.

    torchrun --nproc-per-node 4 tests/distributed/balancing_worker.py OUT_DIR

Every rank writes OUT_DIR/facts.RANK.json, and OUT_DIR/BALANCING.RANK.npz of each rollout.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import torch.distributed as dist

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel import initialize
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.plan import RolloutPlan

GENERATIONS, SLOTS = 2, 4
# Polls that each completion of a prompt takes. By turns one replica gets the long ones, the other the short ones.
POLLS = [40, 2] * 12 + [7, 3]
STEP = 0.05  # seconds: much longer than a rank may have to wait for its turn on a busy machine


class CountingEngine:
    """Requests take a number of polls each, at most SLOTS at a time; the rest wait in order."""

    def __init__(self, replica: int, num_replicas: int, is_lead: bool):
        self.replica, self.num_replicas, self.is_lead = replica, num_replicas, is_lead
        self.waiting, self.running, self.polls, self.largest = [], [], 0, 0

    def submit(self, requests):
        self.waiting += [[request, POLLS[request.id // GENERATIONS]] for request in requests]

    def poll(self):
        time.sleep(STEP)
        self.polls += 1
        while self.waiting and len(self.running) < SLOTS:
            self.running.append(self.waiting.pop(0))
        self.largest = max(self.largest, len(self.running) + len(self.waiting))
        for entry in self.running:
            entry[1] -= 1
        done = [request for request, left in self.running if left == 0]
        self.running = [entry for entry in self.running if entry[1]]
        ids = {r.id: [r.id, *r.prompt_ids] for r in done}
        return [Completion(i, tokens, None, "stop", [1000 + i] * len(tokens)) for i, tokens in ids.items()]

    def rollout(self, seed):
        return contextlib.nullcontext()


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    initialize._host_group = dist.group.WORLD
    rank = dist.get_rank()
    prompts = [Prompt(id=50 + p, ids=[p], row={}, source="made up") for p in range(len(POLLS))]
    facts = {}
    for balancing, capacity in (("static", None), ("dynamic", SLOTS), ("dynamic again", SLOTS), ("enough room", 26)):
        engine = CountingEngine(rank // 2, 2, rank % 2 == 0)
        plan = RolloutPlan(prompts, GENERATIONS, Sampling(9), seed=0)
        batch, _ = collect_rollout(engine, plan, None, None, Timers(), capacity)
        batch.save(out / f"{balancing}.{rank}.npz")
        facts[balancing] = {"polls": engine.polls, "largest": engine.largest}
    (out / f"facts.{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
