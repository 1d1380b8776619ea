"""Batches that are read from a ledger in place of a rollout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.rewards.pool import GroupMember
from megatron_grpo.rollout.collect import Needs, exchange, to_batch
from megatron_grpo.rollout.ledger import records
from megatron_grpo.rollout.ledger.content import BatchRecord, Content
from megatron_grpo.rollout.ledger.ledger import load, recorded_prompt
from megatron_grpo.rollout.unfinished import Group, PromptOf, from_arrays
from megatron_grpo.utils.errors import GrpoError


@dataclass(frozen=True)
class Replay:
    """Recorded batches, by number; equal on all ranks."""

    content: Content

    def get(self, number: int) -> BatchRecord | None:
        """Return the record of a batch, or None if it has to be generated."""
        return self.content.batches.get(number)

    def collect(self, record: BatchRecord, needs: Needs) -> RolloutBatch:
        """Return a recorded batch, with the tokens of the completions that this rank ``needs``. Collective.

        Each rank reads a part of the groups.
        """
        places = range(dist.get_rank(), len(record.groups), dist.get_world_size())
        found = load(self.content, [record.groups[place] for place in places], recorded_prompt)
        groups = {place: found[record.groups[place]] for place in places}
        return exchange(batch_of(groups, record.num_kept), needs)

    def unfinished(self, batch: int, replica: int, prompt_of: PromptOf) -> dict[int, Group]:
        """Return the groups that a replica of --partial-rollouts had after a batch was taken, by number."""
        if (batch, replica) not in self.content.unfinished:
            raise GrpoError(f"the ledger has no record of the unfinished groups after batch {batch}: a file is missing")
        place, complete = self.content.unfinished[batch, replica]
        left = from_arrays(records.read_arrays(place.file, place.offset), prompt_of)
        return left | {key.number: group for key, group in load(self.content, complete, prompt_of).items()}


def batch_of(groups: Mapping[int, Group], num_kept: int) -> RolloutBatch:
    """Return the batch of recorded groups, by their places in it."""
    size = max((len(group.completions) for group in groups.values()), default=1)
    members, completions = {}, []
    for place, group in groups.items():
        for g, completion in enumerate(group.completions):
            assert completion is not None
            completions.append(replace(completion, id=place * size + g))
            members[place * size + g] = GroupMember(place, g, size)
    prompts = {place: group.prompt for place, group in groups.items()}
    batch = to_batch(prompts, completions, members, {place: place for place in groups}, num_kept)
    rewards = [group.rewards for group in groups.values() if group.rewards is not None]
    return replace(batch, rewards=np.concatenate(rewards)) if rewards else batch
