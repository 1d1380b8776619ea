"""One record for a rollout: everything that passes between the engine, the rewards and the update.

`RolloutBatch` holds n completions, each with its prompt in front, as flat arrays: no padding, no pickles, no order that
carries a meaning (groups have explicit ids). It can be exchanged between ranks, saved, inspected and replayed. Arrays
are [total], one entry per token of all sequences laid end to end, or [n], one entry per completion.

In the flat arrays every per-token value lies at the token that it is about: `rollout_log_probs[k]` is the
log-probability of `tokens[k]` given the tokens before it. What a model is given is laid out by `pack`.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from megatron_grpo.utils.errors import GrpoError

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int16 = npt.NDArray[np.int16]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

# Which arrays a batch has, in the order in which they travel. The optional ones are None until they have been computed.
PER_TOKEN = {"tokens": np.int32, "response_mask": np.uint8, "rollout_log_probs": np.float32, "weight_version": np.int32}
PER_COMPLETION = {
    "prompt_lengths": np.int32,
    "group_ids": np.int64,
    "row_ids": np.int64,
    "sample_ids": np.int64,
    "rewards": np.float32,
    "finish_reasons": np.uint8,
    "turns": np.int32,
}
SCORES = {"old_log_probs": np.float32, "ref_log_probs": np.float32}
FACTORS = {"rollout_importance_weights": np.float32, "policy_mask": np.float32, "kl_cov": np.float32}
CREDIT = {"teacher_log_probs": np.float32, "token_advantages": np.float32}
PER_TOKEN_OPTIONAL = SCORES | FACTORS | CREDIT | {"routed_experts": np.int16}
PER_COMPLETION_OPTIONAL = {"advantages": np.float32, "weights": np.float32}
OPTIONAL = PER_TOKEN_OPTIONAL | PER_COMPLETION_OPTIONAL
OF_TOKENS = PER_TOKEN | PER_TOKEN_OPTIONAL
COLUMNS = {"rewards": 1, "routed_experts": 2}  # axes behind the first
DTYPES = {"cu_seqlens": np.int64} | PER_TOKEN | PER_COMPLETION | OPTIONAL


class FinishReason(IntEnum):
    """Why a completion ended."""

    STOP = 0  # end-of-sequence token or stop word
    LENGTH = 1  # cut at the length limit
    ABORT = 2  # given up by the engine or by us


@dataclass(eq=False)
class RolloutBatch:
    """n completions with their prompts, as flat numpy arrays of fixed types (see the module)."""

    cu_seqlens: Int64  # [n + 1], where each sequence (prompt + completion) begins; the last is the total
    tokens: Int32  # [total]
    response_mask: UInt8  # [total], 1 on the tokens in the loss: those that the policy sampled
    rollout_log_probs: Float32  # [total], as the engine sampled; NaN where unknown or not asked for
    weight_version: Int32  # [total], which weights the engine held when it made the token
    prompt_lengths: Int32  # [n], at least 1
    group_ids: Int64  # [n], equal for the completions of one draw of a prompt
    row_ids: Int64  # [n], row of the data set
    sample_ids: Int64  # [n], index of the completion in the whole rollout, unique: its global order
    rewards: Float32  # [n, f], one column per reward function; NaN = not scored; f = 0 before scoring
    finish_reasons: UInt8  # [n], FinishReason
    turns: Int32  # [n], how many times the policy spoke
    old_log_probs: Float32 | None = None  # [total], under the weights before the first update; NaN elsewhere
    ref_log_probs: Float32 | None = None  # [total], under the reference; NaN elsewhere
    rollout_importance_weights: Float32 | None = (
        None  # [total], factors of the policy term: algorithm/importance_sampling.py
    )
    policy_mask: Float32 | None = None  # [total], 0 where an update leaves the policy term out: algorithm/masks.py
    kl_cov: Float32 | None = None  # [total], factor of |lp - lp_old| in the policy term, of one update
    teacher_log_probs: Float32 | None = None  # [total], under the teacher; NaN elsewhere
    token_advantages: Float32 | None = None  # [total], where tokens of one completion differ; 0 elsewhere
    routed_experts: Int16 | None = None  # [total, moe layers, topk], to be replayed; a token's are -1 where unknown
    advantages: Float32 | None = None  # [n]; with token_advantages their mean over the tokens in the loss
    weights: Float32 | None = None  # [n], w of every token of the completion within its update

    @classmethod
    def from_completions(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float] | None],
        weight_version: int | Sequence[int],
        group_ids: Sequence[int],
        row_ids: Sequence[int],
        sample_ids: Sequence[int],
        finish_reasons: Sequence[FinishReason],
        routed_experts: Sequence[Int16] | None = None,
    ) -> "RolloutBatch":
        """Build a batch, not scored yet, of single-turn completions: all of a completion's tokens are in the loss.

        Every sequence has n entries; `prompts[i]` are the token ids in front of `completions[i]`, and `log_probs[i]`
        the engine's log-probabilities of the latter, or None; `weight_version` is one for all, or one each.
        `routed_experts[i]`, [tokens, moe layers, topk], begin with the prompt and may end early. Raises GrpoError as
        `validate` does.
        """
        prompt_lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        lengths = prompt_lengths + np.array([len(completion) for completion in completions], dtype=np.int32)
        cu_seqlens = offsets(lengths)
        total = int(cu_seqlens[-1])
        batch = cls(
            cu_seqlens=cu_seqlens,
            tokens=np.zeros(total, np.int32),
            response_mask=np.zeros(total, np.uint8),
            rollout_log_probs=np.full(total, np.nan, np.float32),
            weight_version=np.repeat(np.broadcast_to(np.array(weight_version, np.int32), lengths.shape), lengths),
            prompt_lengths=prompt_lengths,
            group_ids=np.array(group_ids, np.int64),
            row_ids=np.array(row_ids, np.int64),
            sample_ids=np.array(sample_ids, np.int64),
            rewards=np.zeros((len(lengths), 0), np.float32),
            finish_reasons=np.array(finish_reasons, np.uint8),
            turns=np.ones(len(lengths), np.int32),
        )
        for i, (prompt, completion, values) in enumerate(zip(prompts, completions, log_probs, strict=True)):
            begin, middle, end = cu_seqlens[i], cu_seqlens[i] + len(prompt), cu_seqlens[i + 1]
            batch.tokens[begin:middle] = prompt
            batch.tokens[middle:end] = completion
            batch.response_mask[middle:end] = 1
            if values is not None:
                batch.rollout_log_probs[middle:end] = values
        if routed_experts:
            batch.routed_experts = np.full((total, *routed_experts[0].shape[1:]), -1, np.int16)
            for begin, experts in zip(cu_seqlens[:-1], routed_experts, strict=True):
                batch.routed_experts[begin : begin + len(experts)] = experts
        batch.validate()
        return batch

    # ---- sizes

    @property
    def num_completions(self) -> int:
        """n."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Int64:
        """[n], tokens of prompt and completion."""
        return np.diff(self.cu_seqlens)

    @property
    def completion_lengths(self) -> Int64:
        """[n], tokens after the prompt, in the loss or not."""
        return self.lengths - self.prompt_lengths

    @property
    def response_lengths(self) -> Int64:
        """[n], tokens in the loss: T_i of the formulas."""
        return np.diff(offsets(self.response_mask)[self.cu_seqlens])

    @property
    def completion_of_tokens(self) -> Int64:
        """[total], whose token each one is, by its number in the batch."""
        return np.repeat(np.arange(self.num_completions), self.lengths)

    def token_positions(self, indices: Int64) -> Int64:
        """Where all tokens of these completions lie in the flat arrays, one completion after the other."""
        lengths = self.lengths[indices]
        starts = offsets(lengths)[:-1]
        return np.arange(lengths.sum()) + np.repeat(self.cu_seqlens[:-1][indices] - starts, lengths)

    def response_positions(self, indices: Int64) -> Int64:
        """Where the tokens in the loss of these completions lie in the flat arrays, one completion after the other."""
        flat = self.token_positions(indices)
        return flat[self.response_mask[flat] == 1]

    def advantages_of(self, tokens: Int64, completion: Int64) -> Float32:
        """Advantage of tokens at these places in the flat arrays, each of which belongs to such a completion."""
        assert self.advantages is not None
        return self.advantages[completion] if self.token_advantages is None else self.token_advantages[tokens]

    # ---- choosing and joining

    def select(self, indices: npt.ArrayLike) -> "RolloutBatch":
        """The completions with these positions in the batch, in this order, as a new batch."""
        chosen = np.asarray(indices, dtype=np.int64)
        flat = self.token_positions(chosen)
        arrays = {name: array[flat if name in OF_TOKENS else chosen] for name, array in self._arrays().items()}
        return RolloutBatch(**arrays | {"cu_seqlens": offsets(self.lengths[chosen])})

    def sorted_by_sample(self) -> "RolloutBatch":
        """The batch in its global order, whatever rank or engine each completion came from."""
        return self.select(np.argsort(self.sample_ids, kind="stable"))

    @staticmethod
    def concatenate(batches: Sequence["RolloutBatch"]) -> "RolloutBatch":
        """Join batches end to end; raises ValueError unless all have the same optional arrays and reward columns."""
        parts = [batch._arrays() for batch in batches]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise ValueError(f"batches with different arrays: {[sorted(part) for part in parts]}")
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return RolloutBatch(**arrays | {"cu_seqlens": offsets(np.concatenate([batch.lengths for batch in batches]))})

    # ---- travelling and storing

    def to_buffers(self) -> list[Array]:
        """The batch as 1-D arrays for exchange by ranks: always as many, in the same order and of the same types.

        The first, int64, says how to read the rest: the number of reward columns, the MoE layers and experts of a
        token, then 0 or 1 for each optional array. An array that is None travels empty.
        """
        arrays = self._arrays()
        per_token = (0, 0) if self.routed_experts is None else self.routed_experts.shape[1:]
        header = np.array([self.rewards.shape[1], *per_token, *(name in arrays for name in OPTIONAL)], np.int64)
        return [header, *(np.ravel(arrays.get(name, np.empty(0, dtype))) for name, dtype in DTYPES.items())]

    @classmethod
    def from_buffers(cls, buffers: Sequence[Array]) -> "RolloutBatch":
        """Undo `to_buffers`; the arrays are taken as they are, without a copy."""
        header, *rest = buffers
        num_rewards, layers, topk, *present = header.tolist()
        arrays = dict(zip(DTYPES, rest, strict=True))
        arrays["rewards"] = arrays["rewards"].reshape(len(arrays["cu_seqlens"]) - 1, num_rewards)
        arrays["routed_experts"] = arrays["routed_experts"].reshape(len(arrays["tokens"]), layers, topk)
        for name, here in zip(OPTIONAL, present, strict=True):
            if not here:
                del arrays[name]
        return cls(**arrays)

    def save(self, path: str | Path) -> None:
        """Write a .npz file, one plain array for each field that is not None."""
        with open(path, "wb") as file:
            np.savez(file, **self._arrays())

    @classmethod
    def load(cls, path: str | Path) -> "RolloutBatch":
        """Read what `save` wrote and validate it; raises GrpoError when it is missing, damaged or something else."""
        try:
            with open(path, "rb") as file:
                content = np.load(file, allow_pickle=False)
                if not isinstance(content, NpzFile):
                    raise GrpoError(f"{path} is not a saved rollout: it holds one array, not a .npz archive")
                arrays = {name: content[name] for name in content.files}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise GrpoError(f"cannot read the rollout {path}: {error}") from error
        wrong = (DTYPES.keys() - OPTIONAL.keys() - arrays.keys()) | (arrays.keys() - DTYPES.keys())
        if wrong:
            raise GrpoError(f"{path} is not a saved rollout: missing or unknown arrays {sorted(wrong)}")
        batch = cls(**arrays)
        batch.validate()
        return batch

    def validate(self) -> None:
        """Check shapes, types and values; raises GrpoError that names the first rule broken, else does nothing."""
        for name, array in self._arrays().items():
            if array.dtype != DTYPES[name]:
                raise GrpoError(f"rollout batch: {name} is {array.dtype}, expected {np.dtype(DTYPES[name])}")
        n, total = self.num_completions, len(self.tokens)
        cu = self.cu_seqlens
        if cu.ndim != 1 or n < 0 or cu[0] != 0 or cu[-1] != total or (np.diff(cu) < 0).any():
            raise GrpoError(f"rollout batch: cu_seqlens must rise from 0 to the {total} tokens that there are")
        for name, array in self._arrays().items():
            columns = (*array.shape[1:], 0, 0)[: COLUMNS.get(name, 0)]
            shape = (n + 1,) if name == "cu_seqlens" else (total if name in OF_TOKENS else n, *columns)
            if array.shape != shape:
                raise GrpoError(f"rollout batch: {name} has shape {array.shape}, expected {shape}")

        in_prompt = np.arange(total) - np.repeat(cu[:-1], self.lengths) < np.repeat(self.prompt_lengths, self.lengths)
        rules = {
            "a prompt has at least one token": self.prompt_lengths >= 1,
            "a prompt is no longer than its sequence": self.completion_lengths >= 0,
            "token ids are not negative": self.tokens >= 0,
            "response_mask is 0 or 1": self.response_mask <= 1,
            "response_mask is 0 on prompts": (self.response_mask == 0) | ~in_prompt,
            "log-probabilities are not above 0": ~(self.rollout_log_probs > 1e-3),  # engines round; NaN passes
            "sample_ids are unique": np.array([len(np.unique(self.sample_ids)) == n]),
            "rewards are not infinite": ~np.isinf(self.rewards),
            "finish_reasons are known": np.isin(self.finish_reasons, list(FinishReason)),
            "turns is at least 1": self.turns >= 1,
            "advantages are finite": np.isfinite(self.advantages if self.advantages is not None else 0),
            "token_advantages are finite": np.isfinite(
                self.token_advantages if self.token_advantages is not None else 0
            ),
            "weights are finite": np.isfinite(self.weights if self.weights is not None else 0),
        }
        for rule, holds in rules.items():
            if not np.all(holds):
                raise GrpoError(f"rollout batch: {rule}, but not at index {np.argmin(holds)} of {holds.size}")

    # ---- helpers

    def _arrays(self) -> dict[str, Any]:
        """Every array that is not None, by name, in the order of DTYPES."""
        return {name: array for name in DTYPES if (array := getattr(self, name)) is not None}


def offsets(lengths: Array) -> Int64:
    """Where sequences of these lengths begin, laid end to end, and where the last ends: [0, l_0, l_0 + l_1, ...]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
