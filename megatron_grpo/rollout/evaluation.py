"""Evaluation on held-out prompts: the prompts of each file, which completions are correct, and the metrics.

A completion is **correct** if the reward function that judges its prompt returns at least --eval-correct-reward, which
is 1 by default. This function is the first one of --reward-funcs; with --reward-routing it is the first one that scores
the row. So a reward of 0.7 for seven of ten passed tests is not correct, and counts in the mean reward only.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_grpo.algorithm.advantages import combine_rewards
from megatron_grpo.algorithm.pass_at_k import pass_at_k, powers_of_two
from megatron_grpo.data.batch import Bool, FinishReason, RolloutBatch
from megatron_grpo.data.held_out_files import valid_files
from megatron_grpo.data.prompts import Prompt, PromptDataset
from megatron_grpo.data.routing import reward_routes
from megatron_grpo.rollout.rollout_metrics import mean_of_scored
from megatron_grpo.utils.errors import GrpoError


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts: those of the first file, then those of the next one."""

    prompts: Sequence[Prompt] = ()
    files: Mapping[str, range] = field(
        default_factory=dict
    )  # places of each file's prompts in ``prompts``, by the file's name
    rows: Sequence[int] = ()  # [prompts] row of each prompt in its file, from 0
    judges: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # [prompts] column of the reward function that judges

    def file_of(self, place: int) -> str:
        """Return the name of the file of the prompt at ``place``."""
        return next(name for name, places in self.files.items() if place in places)


def held_out_prompts(args: Namespace, data: PromptDataset | None) -> HeldOut:
    """Return the first --eval-max-prompts prompts of each file of ``data``, the data set of --valid-data-path.

    Without a data set there are none. Raises GrpoError for a file that has no prompts left.
    """
    if data is None:
        return HeldOut()
    prompts: list[Prompt] = []
    files = {}
    of_files = data.first_of_files(args.eval_max_prompts)
    for (name, path), found in zip(valid_files(args.valid_data_path).items(), of_files, strict=True):
        if not found:
            raise GrpoError(f"--valid-data-path: no prompts left of {path}: correct its rows, or leave it out")
        files[name] = range(len(prompts), len(prompts) + len(found))
        prompts += found
    routes = reward_routes(args.reward_routing, args.reward_funcs)
    judges = [args.reward_funcs.index(routes[prompt.row["data_source"]][0]) if routes else 0 for prompt in prompts]
    return HeldOut(prompts, files, [data.row_in_file(prompt) for prompt in prompts], np.array(judges))


def correct(batch: RolloutBatch, held_out: HeldOut, least: float) -> np.ndarray:
    """Return [completions] 1 for a correct one, 0 for another one, and NaN where the judge's reward is missing.

    ``least``: --eval-correct-reward. It is compared as float32, in which rewards are stored.
    """
    judged = batch.rewards[np.arange(batch.num_completions), held_out.judges[batch.group_ids]]
    return np.where(np.isnan(judged), np.nan, judged >= np.float32(least))


def evaluation_metrics(args: Namespace, kind: str, batch: RolloutBatch, held_out: HeldOut) -> dict[str, float]:
    """Return the metrics of an evaluation, with the names of METRICS: over all prompts, and for each of several files.

    ``kind``: ``greedy`` or ``sampled``, a key of `evaluation_plans`. Means leave out completions without a reward.
    """
    right = correct(batch, held_out, args.eval_correct_reward)
    rewards = combine_rewards(batch.rewards, args.reward_weights)
    parts = {"": range(len(held_out.prompts))}
    if len(held_out.files) > 1:
        parts |= {f"{name}/": places for name, places in held_out.files.items()}
    metrics: dict[str, float] = {}
    for prefix, places in parts.items():
        of = (batch.group_ids >= places.start) & (batch.group_ids < places.stop)
        name = f"eval/{prefix}{kind}"
        metrics[f"{name}_reward"] = mean_of_scored(rewards[of])
        metrics[f"{name}_accuracy"] = mean_of_scored(right[of])
        metrics[f"{name}_length"] = float(batch.response_lengths[of].mean())
        metrics[f"{name}_truncated"] = float((batch.finish_reasons[of] == FinishReason.LENGTH).mean())
        metrics[f"{name}_unscored"] = float(np.isnan(right[of]).mean())
        if kind == "sampled":
            # Prompts with all completions scored.
            whole = of & ~np.isin(batch.group_ids, batch.group_ids[np.isnan(right)])
            for k in powers_of_two(args.eval_num_generations) if whole.any() else ():
                metrics[f"eval/{prefix}pass_at_{k}"] = pass_at_k(right[whole] == 1.0, batch.group_ids[whole], k)
    return metrics


def logged(batch: RolloutBatch, held_out: HeldOut, count: int) -> Bool:
    """Return [completions] those to log: the first of each of the first ``count`` prompts of every file."""
    first = np.array([place for places in held_out.files.values() for place in places[:count]], np.int64)
    _, first_of_prompt = np.unique(batch.group_ids, return_index=True)
    is_first = np.zeros(batch.num_completions, bool)
    is_first[first_of_prompt] = True
    return is_first & np.isin(batch.group_ids, first)
