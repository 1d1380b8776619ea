"""The order of prompts: the same on every rank, a function of the seed, and resumed exactly from a saved position."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_grpo.data.row_files import Blocks, Int64
from megatron_grpo.utils.errors import GrpoError

WINDOW_BYTES = 64 * 2**20  # of blocks whose rows are shuffled among each other


class PromptSampler:
    """Numbers of prompts without end: every epoch a fresh permutation, the same on every rank.

    With ``pass_rates`` (``[num_prompts]``) each epoch goes from easy to hard, in its permutation where rates are equal.
    With ``blocks``, which hold the prompts in their order, it is the blocks that are permuted, and then the prompts of
    each window of them: prompts that follow each other lie in few blocks. Blocks of one row group keep their order.
    The order is a function of (seed, epoch) alone, so a checkpoint keeps the position, counted in prompts, and the
    prompts that were given back.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        shuffle: bool = True,
        pass_rates: np.ndarray | None = None,
        blocks: Blocks | None = None,
    ):
        self.num_prompts, self.seed, self.shuffle = num_prompts, seed, shuffle
        self.curriculum, self._pass_rates = pass_rates is not None, pass_rates
        self._blocks = blocks
        self.epoch = 0
        self.position = 0  # prompts of this epoch already handed out, below num_prompts
        self.returned: list[int] = []  # handed out and given back: the next ones
        self.left_out = 0  # handed out, and no prompt
        self._load()

    def _load(self) -> None:
        """Make the part of the epoch's order in which the position lies, and say where that begins."""
        if self._blocks is None:
            self._begin, self._order = 0, self._permutation()
            return
        blocks, rng = self._blocks, np.random.default_rng((self.seed, self.epoch))
        order = np.arange(len(blocks.rows))
        if self.shuffle:
            order = rng.permutation(len(order))
            # Where parts of a row group came, they come from front to back: each is read on from the one before.
            order[np.argsort(blocks.groups[order], kind="stable")] = np.arange(len(order))
        before = np.cumsum(blocks.rows[order]) - blocks.rows[order]
        windows = (np.cumsum(blocks.bytes[order]) - blocks.bytes[order]) // WINDOW_BYTES
        window = windows[np.searchsorted(before, self.position, "right") - 1]
        chosen = order[windows == window]
        firsts = (np.cumsum(blocks.rows) - blocks.rows)[chosen]
        self._begin = int(before[windows == window][0])
        self._order = np.concatenate(
            [first + np.arange(n) for first, n in zip(firsts, blocks.rows[chosen], strict=True)]
        )
        if self.shuffle:
            self._order = np.random.default_rng((self.seed, self.epoch, int(window))).permutation(self._order)

    def _permutation(self) -> Int64:
        order = np.arange(self.num_prompts)
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_prompts)
        return order if self._pass_rates is None else order[np.argsort(-self._pass_rates[order], kind="stable")]

    @property
    def consumed(self) -> int:
        """Prompts handed out and kept, over all epochs."""
        return self.epoch * self.num_prompts + self.position - len(self.returned) - self.left_out

    def give_back(self, numbers: Sequence[int]) -> None:
        """Put prompts that were not used in front of those to come, in this order."""
        self.returned = [*numbers, *self.returned]

    def next(self, n: int) -> list[int]:
        """The next n prompt numbers; runs into the following epochs when this one ends."""
        numbers, self.returned = self.returned[:n], self.returned[n:]
        while len(numbers) < n:
            begin = self.position - self._begin
            part = self._order[begin : begin + n - len(numbers)].tolist()
            numbers += part
            self.position += len(part)
            if self.position == self.num_prompts:
                self.epoch, self.position = self.epoch + 1, 0
                self._load()
            elif self.position == self._begin + len(self._order):
                self._load()
        return numbers

    def instead_of(self, number: int) -> int:
        """The next number, for one that stands for no prompt."""
        self.left_out += 1
        return self.next(1)[0]

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands and what its order depends on."""
        names = "num_prompts seed shuffle curriculum epoch position returned left_out".split()
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position; GrpoError when that belongs to another order."""
        flags = {
            "num_prompts": "--train-data-path (number of prompts)",
            "seed": "--seed",
            "shuffle": "shuffling (--no-shuffle)",
            "curriculum": "--curriculum",
        }
        # These three are younger than the first checkpoints.
        state = dict[str, Any](curriculum=False, returned=[], left_out=0) | state
        for name, flag in flags.items():
            _same(state.get(name), getattr(self, name), flag)
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.returned, self.left_out = list(state["returned"]), state["left_out"]
        self._load()


class BlendedSampler:
    """Numbers of prompts of several sources, weighted; source s begins at number ``begins[s]``.

    After n draws k sources have had n times their weights to within 1 - 1/(2k - 2). Of those that lag far enough behind
    that comes which must come soonest (Tijdeman 1980, The chairman assignment problem); the largest lag first, as in
    Megatron-LM's blended data sets, is the same with two sources, and is more than 1 off at times with five.
    """

    def __init__(self, samplers: Sequence[PromptSampler], weights: Sequence[float], begins: Sequence[int]):
        self.samplers, self.begins = list(samplers), list(begins)
        total = math.fsum(weights)
        self.weights = [weight / total for weight in weights]
        self.drawn = [0] * len(self.weights)
        self.returned: list[int] = []

    @property
    def consumed(self) -> int:
        """Prompts handed out and kept."""
        return sum(sampler.consumed for sampler in self.samplers) - len(self.returned)

    @property
    def left_out(self) -> int:
        """Numbers handed out that were no prompts."""
        return sum(sampler.left_out for sampler in self.samplers)

    def give_back(self, numbers: Sequence[int]) -> None:
        """Put prompts that were not used in front of those to come, in this order."""
        self.returned = [*numbers, *self.returned]

    def next(self, n: int) -> list[int]:
        """The next n prompt numbers."""
        numbers, self.returned = self.returned[:n], self.returned[n:]
        while len(numbers) < n:
            source = self._due()
            self.drawn[source] += 1
            numbers.append(self.begins[source] + self.samplers[source].next(1)[0])
        return numbers

    def _due(self) -> int:
        nth, least = sum(self.drawn) + 1, 1 / max(2 * len(self.weights) - 2, 1)
        lags = [weight * nth - drawn for weight, drawn in zip(self.weights, self.drawn, strict=True)]
        late = [s for s, lag in enumerate(lags) if lag >= least - 1e-9] or [lags.index(max(lags))]
        return min(late, key=lambda s: (1 - least - lags[s]) / self.weights[s])

    def instead_of(self, number: int) -> int:
        """The next number of the same source, for one that stands for no prompt."""
        source = int(np.searchsorted(self.begins, number, "right")) - 1
        return self.begins[source] + self.samplers[source].instead_of(number)

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands and what its order depends on."""
        sources = [sampler.state_dict() for sampler in self.samplers]
        return {"weights": self.weights, "drawn": self.drawn, "returned": self.returned, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position; GrpoError when that belongs to another order."""
        _same(state.get("weights"), self.weights, "--train-data-path (weights)")
        for sampler, source in zip(self.samplers, state["sources"], strict=True):
            sampler.load_state_dict(source)
        self.drawn, self.returned = list(state["drawn"]), list(state["returned"])


def _same(was: Any, now: Any, flag: str) -> None:
    if was != now:
        raise GrpoError(
            f"the checkpoint's data position belongs to other data: {flag} was {was} and is now {now}; restore it, or "
            "start the data anew with --finetune"
        )


def read_blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """The paths of --train-data-path and their weights (None without): all paths have one before them, or none has."""
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return list(words), None
    if len(words) % 2 or None in numbers[::2] or any(number is not None for number in numbers[1::2]):
        raise GrpoError(
            f"--train-data-path {' '.join(words)}: give a weight before each file (0.7 a.parquet 0.3 b.jsonl), or none"
        )
    weights = [number for number in numbers[::2] if number is not None]
    if not all(0 < weight < math.inf for weight in weights):
        raise GrpoError(f"--train-data-path {' '.join(words)}: weights are above 0; leave a file of weight 0 out")
    return list(words[1::2]), weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
