"""A run without a model, for test_ledger_kills.py: rollouts with a made-up engine, a ledger, and checkpoints.

Every process draws other tokens, so that a group that was generated again can be told from a recorded one.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from functools import partial as partial_of
from pathlib import Path

import numpy as np
import torch.distributed as dist
from selection_engine import GENERATIONS, InterruptibleEngine, Letters, TableScorer, prompts

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel import initialize
from megatron_grpo.rollout.collect import collect_rollout, everything
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.ledger import content
from megatron_grpo.rollout.ledger.ledger import Ledger, delete_before
from megatron_grpo.rollout.ledger.recording import Recording
from megatron_grpo.rollout.ledger.replay import Replay
from megatron_grpo.rollout.partial import collect_partial_rollout
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.unfinished import PartialRollouts

GROUPS, BATCHES, SAVE_EVERY, STALENESS = 3, 6, 2, 2


def length(number: int) -> int:
    """Return the tokens of a completion: most few, and some of several rollouts."""
    return 12 if number % 7 == 3 else 1 + number * 5 % 4


class Engine(InterruptibleEngine):
    """An engine whose tokens and log-probabilities are never the same."""

    def __init__(self):
        super().__init__(length)
        self.rng = np.random.default_rng()

    def completion(self, request, versions, reason):
        steps = len(versions)
        ids, log_probs = self.rng.integers(1, 2**30, steps).tolist(), (-self.rng.random(steps)).tolist()
        return Completion(request.id, ids, log_probs, reason, list(versions)).after(request.begun)

    def poll(self):
        assert self.running
        return super().poll()


class Scorer(TableScorer):
    """A scorer whose rewards are late by one call."""

    def __init__(self):
        super().__init__(lambda number, place: number + place / 8)
        self.late = set()

    def submit(self, key, sample, member=None):
        super().submit(key, sample, member)
        self.late.add(key)

    def give(self, key, sample, rewards):
        (self.values[key],) = rewards

    def scored(self, keys):
        late, self.late = self.late, set()
        return late.isdisjoint(keys)

    def poll(self):
        pass


class Dataset:
    """The prompts by number."""

    def __getitem__(self, number):
        return prompts(1, first=number)[0]


def prompt_of(row: int, ids: list[int]) -> Prompt:
    """Return the prompt of a row."""
    return prompts(1, first=row)[0]


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints of a run, the oldest first."""
    return sorted(root.glob("checkpoint-*[0-9]"))


def run(root: Path, partial: bool, batches: int = BATCHES, keep: int | None = None) -> None:
    """Run from the checkpoint and the ledger in ``root`` to the end; append each trained batch to trained.jsonl.

    ``keep``: number of checkpoints to keep. Files of the ledger are deleted with the older ones.
    """
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    initialize._host_group = dist.group.WORLD
    engine, number, drawn, groups = Engine(), 0, 0, None
    if partial:
        groups = PartialRollouts(engine, GROUPS, GENERATIONS, STALENESS)
    if saved := checkpoints(root):
        position = json.loads((saved[-1] / "position.json").read_text())
        number, drawn = position["number"], position["drawn"]
        if groups is not None:
            groups.load(saved[-1], position["partial"], Dataset())
    found = content.read(root / "ledger")
    following = found.next_missing(number)
    ledger = Ledger(root / "ledger", found, following, {"seed": 1}, 0, True, True)
    ledger.begin()
    replay = Replay(ledger.content)
    while number < batches:
        record = replay.get(number)
        if record is not None:
            batch, drawn = replay.collect(record, everything), record.sampler["drawn"]
            if groups is not None:
                groups.take_over(record.started, partial_of(replay.unfinished, number, prompt_of=prompt_of))
        else:
            new = prompts(groups.prompts_to_draw() if groups is not None else GROUPS, first=100 + drawn)
            drawn += len(new)
            recording = Recording(ledger, number)
            plan = RolloutPlan(new, GENERATIONS, Sampling(50), number, partial=groups, recording=recording)
            collect = collect_rollout if groups is None else collect_partial_rollout
            batch, _ = collect(engine, plan, Scorer(), Letters, Timers())
            recording.close({"drawn": drawn}, {}, 0, 0, groups)
        with open(root / "trained.jsonl", "a") as file:
            file.write(
                json.dumps({"number": number, "rows": batch.row_ids.tolist(), "ids": batch.tokens.tolist()}) + "\n"
            )
        number += 1
        if number % SAVE_EVERY == 0:
            save(root, number, drawn, groups)
            ledger.roll()
            if keep is not None:
                for old in checkpoints(root)[:-keep]:
                    shutil.rmtree(old)
                oldest = int(checkpoints(root)[0].name.partition("-")[2])
                delete_before(root / "ledger", oldest, STALENESS if partial else 0)
    ledger.close()
    dist.destroy_process_group()


def save(root: Path, number: int, drawn: int, groups: PartialRollouts | None) -> None:
    """Write a checkpoint; it has its name when it is complete."""
    directory = root / f"checkpoint-{number:02d}"
    shutil.rmtree(directory.with_suffix(".tmp"), ignore_errors=True)
    temporary = directory.with_suffix(".tmp")
    temporary.mkdir()
    position = {"number": number, "drawn": drawn}
    if groups is not None:
        position["partial"] = groups.position(groups.state)
        groups.save(temporary, groups.state)
    (temporary / "position.json").write_text(json.dumps(position))
    os.rename(temporary, directory)


def serve():
    """Run for each line of stdin, [root, partial, kill, more of `run`], in a forked process; print its exit status."""
    for line in sys.stdin:
        root, partial, kill, words = json.loads(line)
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        os.dup2(2, 1)
        try:
            if kill is not None:
                fatal(*kill)
            run(Path(root), partial, *words)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def fatal(name, at, after):
    """Let the ``at``-th call of a function of os or of the engine end the process, before or after it does its work."""
    owner = os if name == "fsync" else Engine
    function, calls = getattr(owner, name), iter(range(1, 10**6))

    def killing(*words):
        now = next(calls) == at
        if now and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*words)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, killing)
