"""One rollout over all engine replicas: dispatch prompts, score completions, exchange what the ranks need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_grpo.data.batch import Bool, FinishReason, RolloutBatch, of_one_width
from megatron_grpo.data.prefix_tree import with_prefixes
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.share import of_all_ranks, with_tokens_of
from megatron_grpo.parallel.agreement import gathered
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.rewards.pool import GroupMember, RewardPool
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.rollout.dispatcher import PromptDispatcher
from megatron_grpo.rollout.engine import Completion, GeneratingEngine, Request, generate
from megatron_grpo.rollout.ledger.recording import KnownFirst
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.routed_experts import check_every_layer
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.encoded import divided, joined
from megatron_grpo.vision.images import RowImages


@dataclass(frozen=True)
class Needs:
    """What this rank needs of the completions of all ranks."""

    tokens: Callable[[RolloutBatch], Bool]  # returns [n], the completions whose tokens it needs
    prefixes: bool = False  # hashes of what completions begin with, for `schedule`; equal on all ranks


everything = Needs(lambda batch: np.ones(batch.num_completions, bool))
nothing = Needs(lambda batch: np.zeros(batch.num_completions, bool))


def collect_rollout(
    engine: GeneratingEngine,
    plan: RolloutPlan,
    scorer: RewardPool | None,
    tokenizer,
    timers,
    capacity: int | None = None,
    progress: Callable[[Sequence[Completion], int], None] = lambda completions, under_way: None,
    needs: Needs = everything,
) -> tuple[RolloutBatch, int]:
    """Return ``plan.num_generations`` completions of every prompt with rewards, and the number of missing rewards.

    Every rank gets the arrays [n] of all completions, and the tokens of those that it ``needs`` (`exchange`). The batch
    has the same order on every rank: completion ``p * num_generations + g`` is the g-th of prompt p, and its group is
    p, whichever replica generated it. All completions of a prompt run on one replica, so the prefill runs once and a
    group-wise reward receives all of them. ``plan.selection`` starts some of the prompts and keeps some of their
    groups; p is then the group's place in `Selection.places`. Scoring overlaps generation.

    ``progress`` is called after every engine step with the finished completions of this replica and the number of
    running ones. ``capacity``: see `PromptDispatcher`. ``scorer`` is None except on the lead rank of each replica. The
    number of missing rewards is that of all replicas; ``scorer.failures`` lists the failures of this replica.
    """
    prompts, num_generations, selection = plan.prompts, plan.num_generations, plan.selection
    recording = plan.recording
    known = recording.known_of(prompts, num_generations) if recording is not None else {}
    dispatcher = selection or PromptDispatcher(engine, len(prompts), num_generations, capacity)
    completions: list[Completion] = []
    members: dict[int, GroupMember] = {}  # by the id of the request; the group is the number of the prompt
    texts: dict[int, str] = {}

    def requests(numbers: Sequence[int] | None) -> list[Request] | None:
        if numbers is None:
            return None
        if scorer is not None:
            texts.update((p, tokenizer.decode(prompts[p].ids)) for p in numbers)
        begun = [GroupMember(p, g, num_generations) for p in numbers for g in range(num_generations)]
        ids = [member.group * num_generations + member.place for member in begun]
        members.update(zip(ids, begun, strict=True))
        return [
            Request(number, prompt.ids, prompt.sampling(plan.sampling), row=prompt.row, images=prompt.images)
            for number, prompt in zip(ids, (prompts[member.group] for member in begun), strict=True)
        ]

    def further(under_way: int) -> list[Request] | None:
        progress(completions, under_way)
        if recording is not None:
            recording.append_scored(scorer)
        return requests(dispatcher.further(under_way))

    with timers("rollout"), engine.rollout(plan.seed):
        source = KnownFirst(engine, known.values()) if known else engine
        for completion in generate(source, requests(dispatcher.first) or (), further):
            completions.append(completion)
            member = members[completion.id]
            if scorer is not None:
                sample = sample_to_score(prompts[member.group], texts[member.group], completion, tokenizer)
                rewards = known[member.group].rewards if member.group in known else None
                if rewards is not None:
                    scorer.give(completion.id, sample, rewards[member.place])
                else:
                    scorer.submit(completion.id, sample, member)
            if recording is not None and member.group not in known:
                recording.take(completion, member, prompts[member.group])
            if selection is not None:
                selection.take(completion.id, member.group)
    with timers("scoring"):
        spoken = completions if engine.is_lead else []  # all ranks of a replica hold the same completions
        places = selection.places() if selection is not None else range(len(prompts))
        spoken = [completion for completion in spoken if members[completion.id].group in places]
        spoken.sort(key=lambda completion: (places[members[completion.id].group], members[completion.id].place))
        mine = to_batch(prompts, spoken, members, places, plan.sampling.num_kept)
        if recording is not None:
            recording.append_scored(scorer, wait=True)
            recording.placed({number: places[number] for number in {members[c.id].group for c in spoken}})
        if scorer is not None:
            mine.rewards = scorer.finish([completion.id for completion in spoken])
        batch, failures = exchange(mine, needs), missing_rewards(scorer)
        if selection is None:
            dispatcher.close()
    return batch, failures


def exchange(mine: RolloutBatch, needs: Needs, group: dist.ProcessGroup | None = None) -> RolloutBatch:
    """Return the batch of all ranks of ``group`` [all] from the completions of this one. Collective.

    Every rank gets the arrays [n] of all completions, in their global order, and the tokens that it ``needs``.
    """
    batch = of_all_ranks(with_prefixes(mine) if needs.prefixes else mine, group)
    return with_tokens_of(batch, needs.tokens(batch), group)


def missing_rewards(scorer: RewardPool | None) -> int:
    """Return the number of missing rewards of all ranks. Collective."""
    failures = torch.tensor(len(scorer.failures) if scorer is not None else 0)
    dist.all_reduce(failures, group=host_group())
    return int(failures)


def check_episodes(batch: RolloutBatch, lines: Sequence[str] = ()) -> None:
    """Raise GrpoError if every episode of a rollout failed, as of a reward function that fails on all samples.

    Collective, with the batch of all ranks. ``lines``: the reasons that this rank has printed; the first one of all is
    in the message.
    """
    if (batch.finish_reasons == FinishReason.FAILED).all():
        # Collective: the lines with the reasons come before the error, also those of other ranks.
        first = next(filter(None, gathered("".join(lines[:1])[:1000])), "the reasons are in lines above")
        raise GrpoError(
            f"every episode of the rollout failed ({first.partition('; not scored')[0]}), and nothing can be learned "
            "from it: mend the environment or the agent, and resume with --load"
        )


def sample_to_score(prompt: Prompt, text: str, completion: Completion, tokenizer) -> Sample:
    """Return what the reward functions score; ``text`` is that of the prompt."""
    last = completion.messages[-1].get("content", "") if completion.messages else None
    return Sample(
        prompt=text,
        completion=tokenizer.decode(completion.token_ids) if last is None else last,
        row=prompt.row,
        finish_reason=completion.finish_reason,
        token_ids=completion.token_ids,
        source=prompt.source,
        messages=completion.messages or [],
        environment_reward=completion.environment_reward,
        response_mask=completion.response_mask,
    )


def to_batch(
    prompts: Mapping[int, Prompt] | Sequence[Prompt],
    completions: list[Completion],
    members: Mapping[int, GroupMember],
    places: Mapping[int, int] | Sequence[int],
    num_kept: int,
) -> RolloutBatch:
    """Return a batch of ``completions``, not scored yet.

    ``members`` has the group and the place of each completion by its id, ``prompts`` the prompt of each group, and
    ``places`` the group's place in the batch, which is its id there.
    """

    def kept(completion: Completion) -> npt.NDArray[np.int32]:
        none = np.full((len(completion.token_ids), num_kept), -1, np.int32)  # the row's constraint replaces the sets
        return none if completion.kept_token_ids is None else completion.kept_token_ids

    of = [members[completion.id] for completion in completions]
    experts = [c.routed_experts for c in completions if c.routed_experts is not None]
    check_every_layer(experts)
    groups = [places[member.group] for member in of]
    batch = RolloutBatch.from_completions(
        prompts=[c.prompt_ids or prompts[member.group].ids for c, member in zip(completions, of, strict=True)],
        completions=[completion.token_ids for completion in completions],
        log_probs=[completion.log_probs for completion in completions],
        weight_version=[completion.weight_versions for completion in completions],
        group_ids=groups,
        row_ids=[prompts[member.group].id for member in of],
        sample_ids=[group * member.size + member.place for group, member in zip(groups, of, strict=True)],
        finish_reasons=[FinishReason[completion.finish_reason.upper()] for completion in completions],
        routed_experts=experts,
        kept_token_ids=[kept(completion) for completion in completions] if num_kept else None,
        response_masks=[completion.response_mask for completion in completions],
        turns=[completion.turns for completion in completions],
        malformed_calls=[completion.malformed_calls for completion in completions],
        sample_starts=_sample_starts(completions),
        images=[
            # none: the completion has the images of its row
            joined(c.shown_images if any(c.shown_images) else ())
            for c in completions
            if c.shown_images is not None
        ]
        or None,
    )
    rewards = [c.turn_rewards for c in completions if c.turn_rewards is not None]
    states = [c.turn_states for c in completions if c.turn_states is not None]
    if not rewards:
        return batch
    turn_rewards, turn_states = of_one_width("turn_rewards", rewards), of_one_width("turn_states", states)
    return replace(batch, turn_rewards=np.stack(turn_rewards), turn_states=np.stack(turn_states))


def shown_images(batch: RolloutBatch) -> dict[int, tuple[int, list[list[bytes]]]]:
    """Return {key: (row, encoded images of each sample)} of the held episodes in which images were shown."""
    assert batch.image_bytes is not None
    return {
        int(batch.image_keys[i]): (int(batch.row_ids[i]), divided(batch.image_bytes[batch.image_slice(i)]))
        for i in np.flatnonzero(batch.held_image_sizes)
    }


def with_images(batch: RolloutBatch, images_of: Callable[[int], RowImages], mrope: bool) -> RolloutBatch:
    """Return the batch with the arrays of a vision-language model.

    ``images_of`` returns the images with a key of `RolloutBatch.image_keys`. ``mrope``: the model has M-RoPE.
    """
    positions, index = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int64)]
    for number in np.flatnonzero(batch.held):
        start, end = batch.cu_seqlens[number : number + 2]
        starts = [] if batch.sample_starts is None else np.flatnonzero(batch.sample_starts[start:end]).tolist()
        found, visual = images_of(int(batch.image_keys[number])).layout(batch.tokens[start:end], starts)
        index.append(visual)
        if found is not None:
            positions.append(found)
    return replace(
        batch,
        rope_positions=np.concatenate(positions).astype(np.int32) if mrope else None,
        visual_index=np.concatenate(index).astype(np.int32),
    )


def _sample_starts(completions: list[Completion]) -> list[list[int]] | None:
    starts = [completion.sample_starts for completion in completions if completion.sample_starts is not None]
    return starts or None  # all completions of a run have them, or none
