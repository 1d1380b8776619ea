"""The order of prompts: a function of the seed, equal on every rank, with a position that a checkpoint saves."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_grpo.data.row_files import Blocks, Int64
from megatron_grpo.utils.errors import GrpoError

WINDOW_BYTES = 64 * 2**20  # size of a window of blocks; rows are shuffled within a window


class PromptSampler:
    """An endless sequence of prompt numbers: a new permutation in every epoch, equal on every rank.

    With ``pass_rates`` (``[num_prompts]``) each epoch is sorted from easy to hard; prompts with equal rates keep the
    order of the permutation. With ``blocks``, which hold the prompts in order, the blocks are permuted first, then the
    prompts within each window of blocks, so that consecutive prompts are in few blocks. Blocks of one row group keep
    their order. The order depends only on (seed, epoch). A checkpoint therefore saves only the position, counted in
    prompts, and the returned prompts.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        shuffle: bool = True,
        pass_rates: np.ndarray | None = None,
        blocks: Blocks | None = None,
        flag: str = "--train-data-path",
    ):
        self.flag = flag  # names the data in messages
        self.num_prompts, self.seed, self.shuffle = num_prompts, seed, shuffle
        self.curriculum, self._pass_rates = pass_rates is not None, pass_rates
        self._blocks = blocks
        self.epoch = 0
        self.position = 0  # prompts drawn in this epoch, below num_prompts
        self.returned: list[int] = []  # unused prompts that were given back; drawn before all others
        self.left_out = 0  # numbers drawn for rows that were skipped
        self._load()

    def _load(self) -> None:
        """Compute the window of the epoch's order that contains the position, and the position of its first prompt."""
        if self._blocks is None:
            self._begin, self._order = 0, self._permutation()
            return
        blocks, rng = self._blocks, np.random.default_rng((self.seed, self.epoch))
        order = np.arange(len(blocks.rows))
        if self.shuffle:
            order = rng.permutation(len(order))
            # The blocks of a row group keep their places in the permutation, but come in file order, so that each block
            # is read after the previous one.
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
        """Return the number of prompts that were drawn and used, over all epochs."""
        return self.epoch * self.num_prompts + self.position - len(self.returned) - self.left_out

    def give_back(self, numbers: Sequence[int]) -> None:
        """Return unused prompts to the sampler, which draws them next, in this order."""
        self.returned = [*numbers, *self.returned]

    def next(self, n: int) -> list[int]:
        """Draw the next n prompt numbers, across the end of an epoch if necessary."""
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

    def replace(self, number: int) -> int:
        """Draw a replacement for ``number``, the number of a skipped row."""
        self.left_out += 1
        return self.next(1)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler and the parameters of its order."""
        names = "num_prompts seed shuffle curriculum epoch position returned left_out".split()
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; raise GrpoError if the position belongs to another order."""
        flags = {
            "num_prompts": f"{self.flag} (number of rows)",
            "seed": "--seed",
            "shuffle": "shuffling (--no-shuffle)",
            "curriculum": "--curriculum",
        }
        # Older checkpoints lack these three keys.
        state = dict[str, Any](curriculum=False, returned=[], left_out=0) | state
        for name, flag in flags.items():
            _check_same(state.get(name), getattr(self, name), flag)
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.returned, self.left_out = list(state["returned"]), state["left_out"]
        self._load()


class BlendedSampler:
    """An endless sequence of prompt numbers of several weighted sources; source s begins at number ``begins[s]``.

    After n draws each of k sources has been drawn n times its weight, to within 1 - 1/(2k - 2). Among the sources that
    lag far enough, the source with the earliest deadline is drawn (Tijdeman 1980, The chairman assignment problem).
    Megatron-LM's blended data sets draw the source with the largest lag: for two sources this is the same; for five
    sources its error can exceed 1.
    """

    def __init__(self, samplers: Sequence[PromptSampler], weights: Sequence[float], begins: Sequence[int]):
        self.samplers, self.begins = list(samplers), list(begins)
        total = math.fsum(weights)
        self.weights = [weight / total for weight in weights]
        self.drawn = [0] * len(self.weights)
        self.returned: list[int] = []

    @property
    def consumed(self) -> int:
        """Return the number of prompts that were drawn and used."""
        return sum(sampler.consumed for sampler in self.samplers) - len(self.returned)

    @property
    def left_out(self) -> int:
        """Return the number of draws that were skipped rows."""
        return sum(sampler.left_out for sampler in self.samplers)

    def give_back(self, numbers: Sequence[int]) -> None:
        """Return unused prompts to the sampler, which draws them next, in this order."""
        self.returned = [*numbers, *self.returned]

    def next(self, n: int) -> list[int]:
        """Draw the next n prompt numbers."""
        numbers, self.returned = self.returned[:n], self.returned[n:]
        while len(numbers) < n:
            source = self._next_source()
            self.drawn[source] += 1
            numbers.append(self.begins[source] + self.samplers[source].next(1)[0])
        return numbers

    def _next_source(self) -> int:
        nth, least = sum(self.drawn) + 1, 1 / max(2 * len(self.weights) - 2, 1)
        lags = [weight * nth - drawn for weight, drawn in zip(self.weights, self.drawn, strict=True)]
        late = [s for s, lag in enumerate(lags) if lag >= least - 1e-9] or [lags.index(max(lags))]
        return min(late, key=lambda s: (1 - least - lags[s]) / self.weights[s])

    def replace(self, number: int) -> int:
        """Draw a replacement for ``number``, the number of a skipped row, from the same source."""
        source = int(np.searchsorted(self.begins, number, "right")) - 1
        return self.begins[source] + self.samplers[source].replace(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler and the parameters of its order."""
        sources = [sampler.state_dict() for sampler in self.samplers]
        return {"weights": self.weights, "drawn": self.drawn, "returned": self.returned, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; raise GrpoError if the position belongs to another order."""
        _check_same(state.get("weights"), self.weights, f"{self.samplers[0].flag} (weights)")
        for sampler, source in zip(self.samplers, state["sources"], strict=True):
            sampler.load_state_dict(source)
        self.drawn, self.returned = list(state["drawn"]), list(state["returned"])


def _check_same(was: Any, now: Any, flag: str) -> None:
    if was != now:
        raise GrpoError(
            f"the checkpoint's data position belongs to other data: {flag} was {was} and is now {now}; restore it, or "
            "restart the data with --finetune"
        )
