"""What test_selection_ranks.py runs: the same rollout by one replica of two ranks, and by two replicas.

    torchrun --nproc-per-node 2 tests/distributed/selection_worker.py OUT_DIR

Every rank writes OUT_DIR/LAYOUT.RANK.json: what it began and aborted when, the batch, and what goes back; and
OUT_DIR/partial LAYOUT.RANK.json, the batches of partial rollouts; OUT_DIR/kept ..., synced ... and paused ... those of
an engine that goes on with what it runs, finishes a step at new weights, and has other work between rollouts.
"""

import json
import sys
from pathlib import Path

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import torch.distributed as dist
from selection_engine import GENERATIONS, CountingEngine, InterruptibleEngine, Letters, TableScorer, prompts

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel import initialize
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.dynamic_sampling import Selection, prompts_to_draw
from megatron_grpo.rollout.partial import collect_partial_rollout
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.unfinished import PartialRollouts

GROUPS, RATIO, ROUNDS = 5, 1.4, 2
STALENESS, ROLLOUTS = 2, 8


def rewards(number: int, place: int) -> float:
    return float(place) if number % 3 else 1.0  # every third prompt has no signal


def polls(number: int) -> int:
    """How many steps a completion takes: most few, and some several rollouts."""
    return 40 if number % 11 == 5 else 1 + number * 7 % 5


def partial_rollouts(place, keeps=False, syncs=False, pauses=()) -> list:
    """Batches of partial rollouts: the same on every rank. The engine has other work before the rollouts ``pauses``."""
    engine = InterruptibleEngine(polls, *place)
    groups = PartialRollouts(engine, GROUPS, GENERATIONS, STALENESS, keeps)
    drawn, batches = 0, []
    for rollout in range(ROLLOUTS):
        new = prompts(groups.prompts_to_draw(), first=50 + drawn)
        drawn += len(new)
        scorer = TableScorer(rewards) if engine.is_lead else None
        if syncs and engine.running:
            engine.sync()
        if rollout in pauses:
            groups.pause(engine)
            assert not engine.running
        plan = RolloutPlan(new, GENERATIONS, Sampling(50), rollout, partial=groups)
        batch, _ = collect_partial_rollout(engine, plan, scorer, Letters, Timers())
        facts = {name: getattr(batch, name).tolist() for name in ("row_ids", "group_ids", "sample_ids", "rewards")}
        facts |= {"lengths": batch.completion_lengths.tolist(), "versions": batch.weight_version.tolist()}
        batches.append(facts)
    again = len(engine.submitted) - len(set(engine.submitted))
    assert (again == 0) == (keeps and not pauses), again
    return batches


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    initialize._host_group = dist.group.WORLD
    rank = dist.get_rank()
    for layout, place in (("one", (0, 1, rank == 0)), ("two", (rank, 2, True)), ("server", (0, 1, True))):
        if layout == "server" and rank == 1:
            place = (None, 1, False)  # it only waits
        engine = CountingEngine(lambda number: 3 + number * 7 % 5, *place)
        scorer = TableScorer(rewards) if engine.is_lead else None
        selection = Selection(engine, GROUPS, GENERATIONS, RATIO, ROUNDS, scorer, [1.0])
        drawn = prompts(prompts_to_draw(GROUPS, RATIO, ROUNDS), first=50)
        plan = RolloutPlan(drawn, GENERATIONS, Sampling(9), 0, selection)
        batch, _ = collect_rollout(engine, plan, scorer, Letters, Timers())
        unused, metrics = selection.close()
        facts = {"log": engine.log, "rows": batch.row_ids.tolist(), "groups": batch.group_ids.tolist()}
        facts |= {"samples": batch.sample_ids.tolist(), "rewards": batch.rewards.tolist()}
        (out / f"{layout}.{rank}.json").write_text(json.dumps(facts | {"unused": unused, "metrics": metrics}))
    for layout, place in (("one", (0, 1, rank == 0)), ("two", (rank, 2, True))):
        for name, *how in ("partial",), ("kept", True), ("synced", True, True), ("paused", True, True, range(2, 7)):
            (out / f"{name} {layout}.{rank}.json").write_text(json.dumps(partial_rollouts(place, *how)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
