"""Groups that have started and are not trained on yet (``--partial-rollouts``), and their files in a checkpoint.

A checkpoint has one file for each engine replica: ``unfinished/00000.npz``, flat arrays without pickles. A resumed run
continues every completion after its recorded tokens.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_grpo.data.batch import FinishReason, of_one_width, offsets
from megatron_grpo.data.prompts import Prompt, PromptDataset
from megatron_grpo.rollout.engine import Completion, Engine, InterruptibleEngine
from megatron_grpo.rollout.staleness import groups_to_start, groups_to_take
from megatron_grpo.utils.durable import flush_to_disk
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.encoded import divided, joined

DIRECTORY = "unfinished"  # subfolder of a checkpoint
PromptOf = Callable[[int, list[int]], Prompt]  # of a row and the token ids that a file has


@dataclass(frozen=True)
class Group:
    """The completions of one draw of a prompt, finished or not."""

    prompt: Prompt
    birth: int  # version at the start: batches that the trainer had taken
    completions: tuple[Completion | None, ...]  # by place in the group; None: without a token
    rewards: npt.NDArray[np.float32] | None = None  # [completions, functions] of a complete group, on the lead rank

    @property
    def complete(self) -> bool:
        """Whether every completion is finished."""
        return all(completion is not None and completion.finish_reason != "abort" for completion in self.completions)


@dataclass(frozen=True)
class Unfinished:
    """All groups of a replica between two rollouts, by number; a new object replaces it after each rollout."""

    groups: Mapping[int, Group]
    started: int = 0  # groups of all replicas since the first rollout
    version: int = 0  # batches that the trainer has taken


class PartialRollouts:
    """The groups of a run with --partial-rollouts, on one rank; all ranks of a replica have the same groups.

    Groups are numbered in the order of their prompts. Of every ``num_groups`` groups, the batch of the trainer, replica
    r of n has the places r, r + n, ...; it takes as many for each batch. ``keeps``: --weight-update keep.
    """

    def __init__(self, engine: Engine, num_groups: int, num_generations: int, max_staleness: int, keeps: bool = False):
        assert engine.replica is not None  # engines over servers are refused
        self.num_groups, self.num_generations, self.max_staleness = num_groups, num_generations, max_staleness
        self.replica, self.num_replicas = engine.replica, engine.num_replicas
        self.quota = len(range(num_groups)[self.replica :: self.num_replicas])
        self.state = Unfinished({})
        self.keeps = keeps
        self.running: frozenset[int] = frozenset()  # ids of the requests that the engine goes on with

    def prompts_to_draw(self) -> int:
        """Return how many groups all replicas start in the next rollout."""
        return groups_to_start(self.state.started, self.state.version, self.num_groups, self.max_staleness)

    def with_new(self, prompts: Sequence[Prompt]) -> dict[int, Group]:
        """Return this replica's groups with the new ones of ``prompts``, which are those of all replicas."""
        groups = dict(self.state.groups)
        for number, prompt in enumerate(prompts, start=self.state.started):
            if self._is_own(number):
                groups[number] = Group(prompt, self.state.version, (None,) * self.num_generations)
        return groups

    def _is_own(self, place: int) -> bool:
        return place % self.num_groups % self.num_replicas == self.replica

    def to_take(self, groups: Mapping[int, Group]) -> list[int] | None:
        """Return the groups of the next batch, or None while the engine has to generate further."""
        births = {number: group.birth for number, group in groups.items()}
        complete = {number for number, group in groups.items() if group.complete}
        return groups_to_take(births, complete, self.state.version, self.quota, self.max_staleness)

    def take(self, groups: Mapping[int, Group], taken: Sequence[int], num_started: int) -> None:
        """Remove the groups of a batch; ``num_started`` groups of all replicas were new."""
        left = {number: group for number, group in groups.items() if number not in taken}
        self.state = Unfinished(left, self.state.started + num_started, self.state.version + 1)

    # ---- requests

    def stop(self, engine: InterruptibleEngine, groups: Mapping[int, Group]) -> dict[int, Group]:
        """End the requests of a rollout, or leave them running; return those of ``groups`` that have new tokens."""
        under_way = engine.unfinished() if self.keeps else engine.interrupt()
        self.running = frozenset(completion.id for completion in under_way) if self.keeps else frozenset()
        return self.with_completions(groups, under_way)

    def pause(self, engine: InterruptibleEngine) -> None:
        """End the requests that were left running: the engine has other work. The next rollout continues them.

        Those that ended with the newest sync of weights come with a step.
        """
        if not self.keeps:
            return
        with engine.rollout(seed=0):
            ended = engine.poll() if self.running else []
            newer = self.with_completions(self.state.groups, [*ended, *engine.interrupt()])
        self.state, self.running = replace(self.state, groups={**self.state.groups, **newer}), frozenset()

    def with_completions(self, groups: Mapping[int, Group], completions: Sequence[Completion]) -> dict[int, Group]:
        """Return those of ``groups`` that have newer states of ``completions``, in the order of the last of each."""
        newer: dict[int, Group] = {}
        for completion in completions:
            number, place = divmod(completion.id, self.num_generations)
            group = newer.pop(number) if number in newer else groups[number]
            newer[number] = with_completion(group, place, completion)
        return newer

    # ---- checkpoints

    def position(self, state: Unfinished) -> dict[str, int]:
        """Return what all replicas' files have in common."""
        ours = {"num_groups": self.num_groups, "num_generations": self.num_generations}
        ours |= {"max_staleness": self.max_staleness, "num_replicas": self.num_replicas}
        return ours | {"started": state.started, "version": state.version}

    def save(self, directory: Path, state: Unfinished) -> None:
        """Write the file of this replica into a checkpoint, on its lead rank."""
        write_groups(directory, self.replica, state.groups)

    def load(self, directory: Path, position: Mapping[str, int], dataset: PromptDataset) -> None:
        """Continue with the groups of a checkpoint; GrpoError if they are another run's or the data has changed."""
        names = ("num_groups", "num_generations", "max_staleness")
        check_same_run(position, {name: getattr(self, name) for name in names})
        self.take_over(position, lambda replica: read_groups(directory, replica, prompts_of(dataset)))

    def take_over(self, position: Mapping[str, int], groups_of: Callable[[int], dict[int, Group]]) -> None:
        """Continue at ``position`` with the groups that ``groups_of`` returns of each replica of then.

        Another number of replicas shares the groups, in order, as it shares new ones. The groups that are due k batches
        later are as many as k + 1 batches have, and the oldest: each replica then has its quota of them.
        """
        if position["num_replicas"] == self.num_replicas:
            groups = groups_of(self.replica)
        else:
            found = [item for replica in range(position["num_replicas"]) for item in groups_of(replica).items()]
            found.sort(key=lambda item: item[0])
            groups = dict(item for place, item in enumerate(found) if self._is_own(place))
        self.state = Unfinished(groups, position["started"], position["version"])


def check_same_run(was: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Raise GrpoError if a checkpoint with unfinished groups has other numbers than this run."""
    flags = {
        "num_groups": "the prompts of a rollout (--generation-batch-size / --num-generations)",
        "num_generations": "--num-generations",
        "max_staleness": "--max-staleness",
    }
    for name, number in now.items():
        if was[name] != number:
            raise GrpoError(
                f"the checkpoint holds unfinished completions, and {flags[name]} was {was[name]} and is now {number}: "
                "restore it, or load only the weights with --finetune"
            )


def write_groups(directory: Path, replica: int, groups: Mapping[int, Group]) -> None:
    """Write the groups of a replica into a checkpoint, and flush them to the disk; raises OSError."""
    directory.mkdir(exist_ok=True)
    file = directory / f"{replica:05d}.npz"
    arrays: dict[str, Any] = to_arrays(groups)
    np.savez(file, **arrays)
    flush_to_disk(file)


def read_groups(directory: Path, replica: int, prompt_of: PromptOf) -> dict[int, Group]:
    """Return the groups of a replica in a checkpoint; GrpoError if the file cannot be read."""
    file = directory / f"{replica:05d}.npz"
    try:
        with np.load(file, allow_pickle=False) as content:
            return from_arrays({name: content[name] for name in content.files}, prompt_of)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise GrpoError(f"cannot read the unfinished completions {file}: {error}") from error


def to_arrays(groups: Mapping[int, Group]) -> dict[str, npt.NDArray[Any]]:
    """Return groups as flat arrays: [groups], [completions of all groups], or one entry a token.

    An unknown log-probability is NaN; a token that was sampled from the whole vocabulary has a row of -1.
    """
    completions = [completion for group in groups.values() for completion in group.completions]
    known = [completion for completion in completions if completion is not None]
    rewards = [group.rewards for group in groups.values() if group.rewards is not None]
    kept = next((completion.kept_token_ids for completion in known if completion.kept_token_ids is not None), None)
    experts = [completion.routed_experts for completion in known if completion.routed_experts is not None]
    reasons = [FinishReason[c.finish_reason.upper()] if c is not None else FinishReason.ABORT for c in completions]
    log_probs = [c.log_probs if c.log_probs is not None else [math.nan] * len(c.token_ids) for c in known]
    arrays: dict[str, npt.NDArray[Any]] = {
        "numbers": np.array(list(groups), np.int64),
        "births": np.array([group.birth for group in groups.values()], np.int64),
        "rows": np.array([group.prompt.id for group in groups.values()], np.int64),
        "prompt_lengths": np.array([len(group.prompt.ids) for group in groups.values()], np.int64),
        "prompt_ids": np.array([i for group in groups.values() for i in group.prompt.ids], np.int32),
        "scored": np.array([group.rewards is not None for group in groups.values()], bool),
        "lengths": np.array([len(c.token_ids) if c is not None else 0 for c in completions], np.int64),
        "finish_reasons": np.array(reasons, np.uint8),
        "token_ids": np.array([i for completion in known for i in completion.token_ids], np.int32),
        "log_probs": np.array([x for values in log_probs for x in values], np.float32),
        "weight_versions": np.array([v for completion in known for v in completion.weight_versions], np.int32),
    }
    if rewards:
        arrays["rewards"] = np.stack(rewards)
    if kept is not None:
        none = [np.full((len(c.token_ids), kept.shape[1]), -1, np.int32) for c in known]
        rows = [c.kept_token_ids if c.kept_token_ids is not None else n for c, n in zip(known, none, strict=True)]
        arrays["kept_token_ids"] = np.concatenate(rows)
    if any(completion.turns > 1 or completion.messages is not None for completion in known) or any(
        completion.response_mask is not None or completion.prompt_ids is not None for completion in known
    ):
        arrays |= _of_episodes(completions)
    if experts:
        lengths = [len(c.routed_experts) if c is not None and c.routed_experts is not None else 0 for c in completions]
        arrays["expert_lengths"] = np.array(lengths, np.int64)
        arrays["routed_experts"] = np.concatenate(experts)
    return arrays


def _of_episodes(completions: Sequence[Completion | None]) -> dict[str, npt.NDArray[Any]]:
    """Return what episodes (rollout/episodes.py) have besides tokens; see `_with_episode`."""
    found = [completion or Completion(0, [], None, "abort", []) for completion in completions]
    texts = {
        "message": [json.dumps(completion.messages).encode() for completion in found],
        "episode_state": [json.dumps(completion.episode_state).encode() for completion in found],
    }
    prompts, starts = [c.prompt_ids for c in found], [c.sample_starts for c in found]
    rewards = [math.nan if c.environment_reward is None else c.environment_reward for c in found]
    arrays: dict[str, npt.NDArray[Any]] = {
        "response_mask": np.array([m for completion in found for m in completion.mask], np.uint8),
        "turns": np.array([completion.turns for completion in found], np.int32),
        "malformed_calls": np.array([completion.malformed_calls for completion in found], np.int32),
        "environment_rewards": np.array(rewards, np.float64),
        # -1: None
        "own_prompt_lengths": np.array([-1 if prompt is None else len(prompt) for prompt in prompts], np.int64),
        "own_prompt_ids": np.array([i for prompt in prompts for i in prompt or ()], np.int32),
        "num_sample_starts": np.array([-1 if own is None else len(own) for own in starts], np.int64),
        "sample_starts": np.array([i for own in starts for i in own or ()], np.int64),
    }
    for name, of_all in texts.items():
        arrays[f"{name}_lengths"] = np.array([len(text) for text in of_all], np.int64)
        arrays[f"{name}s"] = np.frombuffer(b"".join(of_all), np.uint8)
    if any(c.shown_images is not None for c in found):
        shown = [joined(c.shown_images or ()) for c in found]
        arrays["shown_sizes"] = np.array([len(data) for data in shown], np.int64)
        arrays["shown_images"] = np.concatenate(shown)
    of_turns = [(c.turn_rewards, c.turn_states) for c in found]
    if any(own is not None for own, _ in of_turns):  # unfinished episodes have none
        turn_rewards = [np.zeros(0, np.float32) if own is None else own for own, _ in of_turns]
        turn_states = [np.zeros(0, np.int64) if own is None else own for _, own in of_turns]
        arrays["turn_rewards"] = np.stack(of_one_width("turn_rewards", turn_rewards))
        arrays["turn_states"] = np.stack(of_one_width("turn_states", turn_states))
    return arrays


def _with_episode(completion: Completion, i: int, arrays: Mapping[str, npt.NDArray[Any]], tokens: slice) -> Completion:
    """Return completion number ``i``, which has ``tokens``, with what `_of_episodes` has of it."""

    def part(lengths: str, values: str) -> npt.NDArray[Any] | None:
        sizes = arrays[lengths]
        begin = int(np.maximum(sizes[:i], 0).sum())
        return None if sizes[i] < 0 else arrays[values][begin : begin + sizes[i]]

    shown = part("shown_sizes", "shown_images") if "shown_sizes" in arrays else None

    def from_json(name: str) -> Any:
        text = part(f"{name}_lengths", f"{name}s") if f"{name}s" in arrays else None
        return None if text is None else json.loads(text.tobytes())

    prompt = part("own_prompt_lengths", "own_prompt_ids")
    starts, mask = part("num_sample_starts", "sample_starts"), arrays["response_mask"][tokens]
    reward = float(arrays["environment_rewards"][i])
    has_turns = "turn_rewards" in arrays
    return replace(
        completion,
        response_mask=None if mask.all() else mask.tolist(),
        turns=int(arrays["turns"][i]),
        # None in checkpoints and ledgers of earlier versions.
        malformed_calls=int(arrays["malformed_calls"][i]) if "malformed_calls" in arrays else 0,
        environment_reward=None if math.isnan(reward) else reward,
        turn_rewards=arrays["turn_rewards"][i] if has_turns else None,
        turn_states=arrays["turn_states"][i] if has_turns else None,
        shown_images=None if shown is None else divided(shown),
        messages=from_json("message"),
        episode_state=from_json("episode_state"),  # none in checkpoints of earlier versions
        prompt_ids=None if prompt is None else prompt.tolist(),
        sample_starts=None if starts is None else starts.tolist(),
    )


def prompts_of(dataset: PromptDataset) -> PromptOf:
    """Return the function that reads prompts from the data again; GrpoError if the prompt of a row has changed."""

    def prompt_of(row: int, ids: list[int]) -> Prompt:
        prompt = dataset[row]
        if prompt is None or prompt.ids != ids:
            raise GrpoError(
                f"the checkpoint holds unfinished completions of row {row} of --train-data-path, whose prompt has "
                "changed since: restore the data, or load only the weights with --finetune"
            )
        return prompt

    return prompt_of


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]], prompt_of: PromptOf) -> dict[int, Group]:
    """Undo `to_arrays`; the id of a request is the completion's number: that of its group x group size + place."""
    num_groups = len(arrays["numbers"])
    per_group = len(arrays["lengths"]) // max(num_groups, 1)
    starts, prompt_starts = offsets(arrays["lengths"]), offsets(arrays["prompt_lengths"])
    scored, expert_starts = offsets(arrays["scored"]), offsets(arrays.get("expert_lengths", arrays["lengths"] * 0))
    groups = {}
    for g in range(num_groups):
        ids = arrays["prompt_ids"][prompt_starts[g] : prompt_starts[g + 1]].tolist()
        prompt, number = prompt_of(int(arrays["rows"][g]), ids), int(arrays["numbers"][g])
        completions = []
        for place in range(per_group):
            i = g * per_group + place
            tokens, experts = slice(starts[i], starts[i + 1]), slice(expert_starts[i], expert_starts[i + 1])
            log_probs = arrays["log_probs"][tokens]
            completion = Completion(
                number * per_group + place,
                arrays["token_ids"][tokens].tolist(),
                None if np.isnan(log_probs).all() else log_probs.tolist(),
                FinishReason(arrays["finish_reasons"][i]).name.lower(),
                arrays["weight_versions"][tokens].tolist(),
                routed_experts=arrays["routed_experts"][experts] if experts.start < experts.stop else None,
                kept_token_ids=arrays["kept_token_ids"][tokens] if "kept_token_ids" in arrays else None,
            )
            if "turns" in arrays:
                completion = _with_episode(completion, i, arrays, tokens)
            begun = completion.token_ids or completion.finish_reason != "abort"
            completions.append(completion if begun else None)
        rewards = arrays["rewards"][scored[g]] if arrays["scored"][g] else None
        groups[number] = Group(prompt, int(arrays["births"][g]), tuple(completions), rewards)
    return groups


def with_completion(group: Group, place: int, completion: Completion) -> Group:
    """Return the group with a newer state of one of its completions."""
    newer = completion if completion.token_ids or completion.finish_reason != "abort" else None
    return replace(group, completions=(*group.completions[:place], newer, *group.completions[place + 1 :]))
