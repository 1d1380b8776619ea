"""Demonstrations in the policy's updates: which ones an update has, and the arguments of their loss.

Those of "sft" and "chord" are drawn from --sft-data-path, --sft-batch-size an update. Those of "luffy" belong to the
rollout: a group has the demonstration of its prompt, if there is one. In an update demonstrations have micro-batches of
their own: no statistic of the rollout reads them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.mixing import mu_of
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.demonstrations import Demonstration, Demonstrations, batch_of, prompt_key, prompts_of
from megatron_grpo.data.pack import Pack
from megatron_grpo.data.prompts import PromptDataset, draw
from megatron_grpo.parallel.agreement import on_rank_0
from megatron_grpo.training.warm_up import SETTINGS
from megatron_grpo.utils.arguments import Arguments, replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0

LOOKED_AT = 256  # training prompts whose demonstrations are counted at the start


def demonstration_args(args: Arguments) -> Arguments:
    """Return the arguments of the micro-batches of demonstrations: their loss alone, at temperature 1."""
    return replaced(args, **SETTINGS | {"loss_type": args.sft_loss_type, "sft_loss_type": args.sft_loss_type})


def mixture_metrics(
    args: Arguments,
    trainer: Any,
    metrics: Mapping[str, float],
    packs: Sequence[Pack],
    demonstrations: RolloutBatch | None,
) -> dict[str, float]:
    """Return the metrics of an update's demonstrations, and the FLOPs with theirs. Collective.

    ``metrics`` are those of the update without them; ``packs`` are the micro-batches of the demonstrations.
    """
    if demonstrations is None:
        return {}
    whole = np.arange(demonstrations.num_completions)
    flops = metrics["flops/update"] + trainer.flops.of_update(packs, demonstrations, whole)["flops/update"]
    if LOSSES.get(args.sft_loss_type).joins_groups:
        assert demonstrations.advantages is not None
        return {"flops/update": flops, "sft/advantage": float(demonstrations.advantages.mean())}
    return {"flops/update": flops, "sft/mu": mu_of(args, trainer.iteration)}


def parts_of_groups(group_ids: np.ndarray, parts: Sequence[np.ndarray], groups: np.ndarray) -> np.ndarray:
    """Return which of the ``parts`` of a rollout has most completions of each of the ``groups`` (the first such), [m].

    ``group_ids`` [n] are those of all completions, of which a part has some.
    """
    return np.stack([(group_ids[part] == groups[:, None]).sum(1) for part in parts]).argmax(0)


class Mixture:
    """Demonstrations of --sft-loss-type and their position.

    ``state``: of a checkpoint, {} at the start. The row ids of the demonstrations begin at ``first_row``.
    """

    def __init__(
        self,
        args: Arguments,
        data: Demonstrations,
        train: PromptDataset,
        state: Mapping[str, Any],
        first_row: int,
    ):
        self.args, self.joins_groups = args, LOSSES.get(args.sft_loss_type).joins_groups
        self._data, self._train, self._sampler, self._first_row = data, train, data.sampler(), first_row
        if state:
            self._sampler.load_state_dict(state["sampler"])
        if self.joins_groups:
            self._numbers = on_rank_0(prompts_of, data)
            self._print_coverage()

    def _print_coverage(self) -> None:
        """Print how many of the first training prompts have a demonstration; GrpoError if none has."""
        first = self._train.first(LOOKED_AT)
        count = sum(prompt_key(prompt.ids) in self._numbers for prompt in first)
        print_rank_0(f"{count} of the first {len(first)} training prompts have a demonstration")
        if not count:
            raise GrpoError(
                f"--sft-loss-type {self.args.sft_loss_type}: none of the first {len(first)} prompts of "
                "--train-data-path has a demonstration in --sft-data-path: give demonstrations of the same prompts, "
                "with the same tools and template variables"
            )

    def of_groups(self, batch: RolloutBatch) -> RolloutBatch | None:
        """Return the demonstrations of a rollout's groups, in the order of the groups; None if none has one."""
        found, groups = [], []
        for first in np.sort(np.unique(batch.group_ids, return_index=True)[1]):
            number = self._numbers.get(prompt_key(self._prompt(batch, int(first))))
            if number is not None:
                found.append(cast(Demonstration, self._data[number]))
                groups.append(int(batch.group_ids[first]))
        return batch_of(found, self._first_row, groups) if found else None

    def _prompt(self, batch: RolloutBatch, i: int) -> Sequence[int]:
        """Return the token ids of the prompt of completion ``i``; GrpoError if its row has another prompt."""
        row = int(batch.row_ids[i])
        prompt = self._train[row] if row < len(self._train) else None
        if prompt is None or not (self.args.vision_config or self._has(batch, i, prompt.ids)):
            raise GrpoError(
                f"--sft-loss-type {self.args.sft_loss_type}: the rollout has completions of row {row} of "
                "--train-data-path, which has another prompt there now: give the files with which it was recorded"
            )
        return prompt.ids

    @staticmethod
    def _has(batch: RolloutBatch, i: int, prompt: Sequence[int]) -> bool:
        """Return whether completion ``i`` has this prompt, as far as this rank holds its tokens."""
        begin, length = int(batch.cu_seqlens[i]), int(batch.prompt_lengths[i])
        return len(prompt) == length and (
            not batch.held[i] or np.array_equal(prompt, batch.tokens[begin : begin + length])
        )

    def next_batch(self, update: int) -> RolloutBatch | None:
        """Return the demonstrations drawn for an update, whose number begins at 0; None if they have no weight in it.

        Every rank has all tokens.
        """
        if mu_of(self.args, update) == 0:
            return None
        found = draw(self._data, self._sampler, self.args.sft_batch_size)
        return batch_of(cast(list[Demonstration], found), self._first_row)

    def state(self) -> dict[str, Any]:
        """Return the position for a checkpoint."""
        return {"sampler": self._sampler.state_dict()}
