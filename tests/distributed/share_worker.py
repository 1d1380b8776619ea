"""What test_share.py runs on 1 to 4 ranks: a rollout made by some of them, and exchanged.

    torchrun --nproc-per-node N tests/distributed/share_worker.py OUT_DIR

Rank r writes what it holds after each step as OUT_DIR/STEP.N.r.npz, and arrays of completions beside it.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_grpo.data import share
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prefix_tree import with_prefixes
from megatron_grpo.parallel import exchange, initialize

NUMBER = 23


def whole_rollout() -> RolloutBatch:
    """Completions of 0 to 8 tokens, with every kind of array that an engine makes."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 99, rng.integers(1, 6)).tolist() for _ in range(NUMBER)]
    completions = [rng.integers(1, 99, rng.integers(0, 9)).tolist() for _ in range(NUMBER)]
    batch = RolloutBatch.from_completions(
        prompts,
        completions,
        [(-rng.random(len(c))).tolist() for c in completions],
        [[7] * len(c) for c in completions],
        np.arange(NUMBER) // 4,
        100 + np.arange(NUMBER) // 4,
        np.arange(NUMBER),
        [FinishReason.STOP if len(c) < 8 else FinishReason.LENGTH for c in completions],
        routed_experts=[rng.integers(0, 8, (len(p) + len(c), 3, 2)) for p, c in zip(prompts, completions, strict=True)],
        kept_token_ids=[np.stack([c, np.full(len(c), -1)], 1).astype(np.int32) for c in completions],
    )
    batch.rewards = rng.random((NUMBER, 2)).astype(np.float32)
    turns = np.stack([rng.random(NUMBER), *[np.full(NUMBER, np.nan)] * 2], 1).astype(np.float32)
    return replace(batch, turn_rewards=turns, turn_states=np.array([[n + 1, 0, 0] for n in range(NUMBER)]))


def made_by(number: int, world: int) -> int:
    """The rank that made a completion: of three or more ranks the last has none."""
    return number * 7 % max(world - 1, 1)


def wanted(rank: int, world: int) -> np.ndarray:
    """The completions that a rank needs: some are needed by several ranks, and with four ranks one needs none."""
    chosen = np.random.default_rng(rank).random(NUMBER) < 0.4
    return chosen if rank != 2 else np.zeros(NUMBER, bool)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    initialize._host_group = dist.group.WORLD
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange.ROUND = 500  # bytes: several rounds, and completions that are larger

    def save(step: str, batch: RolloutBatch, **arrays: np.ndarray) -> None:
        batch.validate()
        batch.save(out / f"{step}.{world}.{rank}.npz")
        np.savez(out / f"{step}.{world}.{rank}.of_completions.npz", **arrays)

    whole = whole_rollout()
    makers = np.array([made_by(number, world) for number in range(NUMBER)])
    own = whole.select(np.flatnonzero(makers == rank)[::-1])  # in any order
    if not own.num_completions:  # as of a rank that does not lead: without optional arrays and columns
        own = replace(own, routed_experts=None, kept_token_ids=None, rewards=np.zeros((0, 0), np.float32))
        own = replace(own, turn_rewards=None, turn_states=None)
    elif rank:  # as of a replica whose episodes all began after a resume with a smaller --max-turns
        own = replace(own, turn_rewards=own.turn_rewards[:, :1], turn_states=own.turn_states[:, :1])
    numbers = share.of_all_ranks(with_prefixes(own) if own.num_completions else own)
    save("made", numbers)
    save("everything", share.with_tokens_of(numbers, np.ones(NUMBER, bool)))
    mine = share.with_tokens_of(numbers, wanted(rank, world))
    first = share.first_holders(mine) == rank
    sums = np.bincount(mine.completion_of_tokens, mine.tokens, NUMBER)
    (spread,) = share.spread(mine, [np.where(first[mine.completion_of_tokens], 2.0 * mine.tokens, -1.0)], first)
    mean = np.array(share.mean_in_loss(mine, np.sqrt(mine.tokens)))
    save("mine", mine, spread=spread, sums=share.of_completions(mine, sums), mean=mean)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
