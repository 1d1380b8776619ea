"""The record of a rollout, which passes between engine, rewards and update.

`RolloutBatch` holds n completions, each after its prompt, as flat arrays: no padding, no pickles, no order that carries
a meaning (groups have explicit ids). It can be exchanged between ranks, saved, inspected and replayed. Arrays are
[total], one entry per token of all sequences laid end to end, or [n], one entry per completion.

During training no rank holds the tokens of all completions: the arrays [n] describe the whole rollout on every rank,
and the flat arrays have the tokens of the completions that this rank computes (`RolloutBatch.held`). A completion
keeps its number on every rank; where its tokens are not held, its sequence in the flat arrays is empty (data/share.py).

In the flat arrays every per-token value lies at the token that it is about: `rollout_log_probs[k]` is the
log-probability of `tokens[k]` given the tokens before it. `pack` lays out the input of the model.

**A function never changes a batch that it receives: it returns a new one**, `dataclasses.replace(batch, ...)`.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

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
Bool = npt.NDArray[np.bool_]
# numpy changes what these aliases consist of, so a dtype is looked up and not taken from its alias.
DTYPE_OF = {Int64: np.int64, Int32: np.int32, Int16: np.int16, UInt8: np.uint8, Float32: np.float32}


class FinishReason(IntEnum):
    """Why a completion ended."""

    STOP = 0  # end-of-sequence token or stop word
    LENGTH = 1  # cut at the length limit
    ABORT = 2  # aborted by the engine or the trainer
    FAILED = 3  # an environment failed: not scored, and no token is in the loss


@dataclass(frozen=True)
class ArrayField:
    """How one array of a `RolloutBatch` is stored and checked, and what `pack` copies of it."""

    # The first axis has length n + 1, n, total, or the bytes of the held completions' encoded images.
    axis: Literal["offset", "completion", "token", "byte"]
    columns: int = 0  # number of axes after the first
    # A pack holds one value per label, one per label that the rank's head computes, or one per token.
    packed: Literal["label", "own_label", "token"] | None = None
    padding: int = 0  # value of padding tokens in a pack
    fill: float | None = None  # of further columns: batches of different widths go together
    dtype: Any = None  # of the annotated type
    optional: bool = False  # None until it is computed: the default is None


PER_TOKEN = ArrayField("token")
PER_COMPLETION = ArrayField("completion")
PER_LABEL = ArrayField("token", packed="label")


@dataclass(eq=False)
class RolloutBatch:
    """n completions with their prompts, as flat numpy arrays (see the module).

    A field is declared here and nowhere else.
    """

    # Start of each sequence (prompt + completion) in the flat arrays; the last value is the total.
    cu_seqlens: Annotated[Int64, ArrayField("offset")]
    tokens: Annotated[Int32, PER_TOKEN]
    response_mask: Annotated[UInt8, PER_TOKEN]  # 1 on the tokens in the loss: those that the policy sampled
    rollout_log_probs: Annotated[Float32, PER_LABEL]  # as the engine sampled; NaN where unknown or not requested
    weight_version: Annotated[Int32, PER_TOKEN]  # version of the engine's weights at this token
    prompt_lengths: Annotated[Int32, PER_COMPLETION]  # at least 1
    group_ids: Annotated[Int64, PER_COMPLETION]  # equal for the completions of one draw of a prompt
    row_ids: Annotated[Int64, PER_COMPLETION]  # row of the data set
    # Index of the completion in the whole rollout, unique: its global order.
    sample_ids: Annotated[Int64, PER_COMPLETION]
    # One column per reward function; NaN: not scored. No columns before scoring.
    rewards: Annotated[Float32, ArrayField("completion", columns=1)]
    finish_reasons: Annotated[UInt8, PER_COMPLETION]  # FinishReason
    turns: Annotated[Int32, PER_COMPLETION]  # number of turns of the policy
    malformed_calls: Annotated[Int32 | None, PER_COMPLETION] = None  # of tools, in all turns; None: not counted
    # Sequences of the model: 1 + the number of ``sample_starts``. None: each completion is one.
    samples: Annotated[Int32 | None, PER_COMPLETION] = None
    # Of episodes with an environment, [n, --max-turns or more]: its reward for each turn (NaN: none), and a number for
    # what it said before the turn (equal for equal texts; 0 before the first turn and after the last).
    turn_rewards: Annotated[Float32 | None, ArrayField("completion", columns=1, fill=np.nan)] = None
    turn_states: Annotated[Int64 | None, ArrayField("completion", columns=1, fill=0)] = None
    # Under the weights before the first update; NaN on other tokens, and where the model gives NaN.
    old_log_probs: Annotated[Float32 | None, PER_LABEL] = None
    ref_log_probs: Annotated[Float32 | None, PER_LABEL] = None  # the same under the reference model
    # With --max-staleness: 1 on tokens that the engine sampled with the trainer's weights (`weight_check`).
    newest: Annotated[Float32 | None, PER_LABEL] = None
    # 0 where an update leaves the policy term out: algorithm/masks.py.
    policy_mask: Annotated[Float32 | None, PER_LABEL] = None
    kl_cov: Annotated[Float32 | None, PER_LABEL] = None  # factor of |lp - lp_old| in the policy term of one update
    teacher_log_probs: Annotated[Float32 | None, PER_TOKEN] = None  # under the teacher; NaN on other tokens
    # With --loss-type gkd, of the teacher's distribution at each token in the loss: its hidden state before the output
    # layer, the bits of its numbers as 16-bit integers [total, h] (of float32: [total, 2 h]);
    teacher_hidden: Annotated[Int16 | None, ArrayField("token", columns=1, packed="own_label")] = None
    # (with several teachers as many columns as the widest has);
    # or its k most likely tokens [total, k], and log-probabilities of these and of all others together [total, k + 1].
    teacher_token_ids: Annotated[Int32 | None, ArrayField("token", columns=1, packed="own_label")] = None
    teacher_token_log_probs: Annotated[Float32 | None, ArrayField("token", columns=1, packed="own_label")] = None
    # Which of several teachers the completion has: `reference.teacher.Teachers`.
    teacher_numbers: Annotated[Int32 | None, ArrayField("completion", packed="own_label")] = None
    # 1 on the first token of every further sample of a completion. Samples do not see each other: each is a sequence of
    # the model, with positions from 0. All else (group, reward, advantage, T_i of the weights) is the completion's.
    sample_starts: Annotated[UInt8 | None, PER_TOKEN] = None
    # Where tokens of one completion differ in their advantage; 0 on other tokens. A pack has them as ``advantages``.
    token_advantages: Annotated[Float32 | None, PER_TOKEN] = None
    # [total, k], the tokens that each token was sampled from after top-k, top-p and min-p; -1 pads. A row of -1, as of
    # prompts, is the whole vocabulary.
    kept_token_ids: Annotated[Int32 | None, ArrayField("token", columns=1, packed="label")] = None
    # [total, MoE layers, topk], to be replayed; -1 where unknown.
    routed_experts: Annotated[Int16 | None, ArrayField("token", columns=2, packed="token", padding=-1)] = None
    # Of a vision-language model: [total, 3], M-RoPE's positions.
    rope_positions: Annotated[Int32 | None, ArrayField("token", columns=1)] = None
    # Of a vision-language model: which of its completion's visual tokens a token is, in their order; -1 for text.
    visual_index: Annotated[Int32 | None, PER_TOKEN] = None
    # Of episodes of a vision-language model: bytes of the images that the environment or the agent showed.
    image_sizes: Annotated[Int64 | None, PER_COMPLETION] = None
    # These images, encoded (`vision.encoded.joined`), of the held completions, one after the other.
    image_bytes: Annotated[UInt8 | None, ArrayField("byte")] = None
    # With token_advantages their mean over the tokens in the loss.
    advantages: Annotated[Float32 | None, ArrayField("completion", packed="label")] = None
    # w of every token of the completion in its update: algorithm/weighting.py.
    weights: Annotated[Float32 | None, ArrayField("completion", packed="label")] = None
    # Of the tokens of one update, before it, for losses that read them: algorithm/policy_term.py.
    covariances: Annotated[Float32 | None, PER_LABEL] = None
    entropies: Annotated[Float32 | None, PER_LABEL] = None
    # By these the schedule finds common prefixes (`prefix_tree.with_prefixes`). The first has hashes of a completion's
    # beginnings; the second counts the tokens that its samples have in common.
    prefix_hashes: Annotated[Int64 | None, ArrayField("completion", columns=1)] = None
    repeated_tokens: Annotated[Int64 | None, PER_COMPLETION] = None
    # Of all completions, where some rank does not hold all tokens: `lengths` and `response_lengths`.
    all_lengths: Annotated[Int64 | None, PER_COMPLETION] = None
    all_response_lengths: Annotated[Int64 | None, PER_COMPLETION] = None

    @classmethod
    def from_completions(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float] | None],
        weight_version: int | Sequence[Sequence[int]],
        group_ids: Sequence[int],
        row_ids: Sequence[int],
        sample_ids: Sequence[int],
        finish_reasons: Sequence[FinishReason],
        routed_experts: Sequence[Int16] | None = None,
        kept_token_ids: Sequence[Int32] | None = None,
        response_masks: Sequence[Sequence[int] | None] | None = None,
        turns: Sequence[int] | None = None,
        malformed_calls: Sequence[int] | None = None,
        sample_starts: Sequence[Sequence[int]] | None = None,
        images: Sequence[UInt8] | None = None,
    ) -> "RolloutBatch":
        """Build a batch, not scored yet: all tokens of a completion are in the loss but those with a mask of 0.

        Every sequence has n entries; `prompts[i]` are the token ids before `completions[i]`, and `log_probs[i]`
        the engine's log-probabilities of the latter, or None; `weight_version` is one for all tokens, or
        `weight_version[i]` are those of the tokens of `completions[i]` (a prompt has that of the token after it).
        `routed_experts[i]`, [tokens, moe layers, topk], begin with the prompt and may end early; `kept_token_ids[i]`
        are [tokens of the completion, k]; `response_masks[i]`, [tokens of the completion], None for ones; `turns` [n],
        default 1; `malformed_calls` [n]; `sample_starts[i]` are positions in `completions[i]`; `images[i]` are bytes.
        No token of a completion with the finish reason FAILED is in the loss. Raises GrpoError as `validate` does.
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
            weight_version=np.full(total, weight_version if isinstance(weight_version, int) else 0, np.int32),
            prompt_lengths=prompt_lengths,
            group_ids=np.array(group_ids, np.int64),
            row_ids=np.array(row_ids, np.int64),
            sample_ids=np.array(sample_ids, np.int64),
            rewards=np.zeros((len(lengths), 0), np.float32),
            finish_reasons=np.array(finish_reasons, np.uint8),
            turns=np.ones(len(lengths), np.int32) if turns is None else np.array(turns, np.int32),
            malformed_calls=None if malformed_calls is None else np.array(malformed_calls, np.int32),
        )
        masks = response_masks or [None] * len(completions)
        after_prompt = np.zeros(total, bool)
        for i, (prompt, completion, values) in enumerate(zip(prompts, completions, log_probs, strict=True)):
            begin, middle, end = cu_seqlens[i], cu_seqlens[i] + len(prompt), cu_seqlens[i + 1]
            batch.tokens[begin:middle] = prompt
            batch.tokens[middle:end] = completion
            mask = masks[i]
            batch.response_mask[middle:end] = 1 if mask is None else mask
            if finish_reasons[i] == FinishReason.FAILED:
                batch.response_mask[middle:end] = 0
            after_prompt[middle:end] = True
            if values is not None:
                batch.rollout_log_probs[middle:end] = values
        for i, versions in enumerate(() if isinstance(weight_version, int) else weight_version):
            begin, middle, end = cu_seqlens[i], cu_seqlens[i] + len(prompts[i]), cu_seqlens[i + 1]
            batch.weight_version[begin:middle] = versions[0] if len(versions) else 0
            batch.weight_version[middle:end] = versions
        if sample_starts is not None:
            batch.samples = np.array([1 + len(starts) for starts in sample_starts], np.int32)
            batch.sample_starts = np.zeros(total, np.uint8)
            for begin, prompt, starts in zip(cu_seqlens[:-1], prompts, sample_starts, strict=True):
                batch.sample_starts[begin + len(prompt) + np.array(starts, np.int64)] = 1
        if routed_experts:
            batch.routed_experts = np.full((total, *routed_experts[0].shape[1:]), -1, np.int16)
            for begin, experts in zip(cu_seqlens[:-1], routed_experts, strict=True):
                batch.routed_experts[begin : begin + len(experts)] = experts
        if kept_token_ids:
            batch.kept_token_ids = np.full((total, kept_token_ids[0].shape[1]), -1, np.int32)
            batch.kept_token_ids[after_prompt] = np.concatenate(kept_token_ids)
        if images is not None:
            batch.image_sizes = np.array([len(data) for data in images], np.int64)
            batch.image_bytes = np.concatenate([np.zeros(0, np.uint8), *images])
        batch.validate()
        return batch

    # ---- sizes

    @property
    def num_completions(self) -> int:
        """n."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Int64:
        """[n], tokens of prompt and completion, whether this rank holds them or not."""
        return self.held_lengths if self.all_lengths is None else self.all_lengths

    @property
    def completion_lengths(self) -> Int64:
        """[n], tokens after the prompt, in the loss or not."""
        return self.lengths - self.prompt_lengths

    @property
    def response_lengths(self) -> Int64:
        """[n], tokens in the loss: T_i of the formulas."""
        if self.all_response_lengths is not None:
            return self.all_response_lengths
        sums = np.zeros(self.num_completions, np.int64)
        if len(starts := self.cu_seqlens[:-1][self.held]):
            sums[self.held] = np.add.reduceat(self.response_mask, starts, dtype=np.int64)
        return sums

    @property
    def held_lengths(self) -> Int64:
        """[n], tokens in the flat arrays; 0 where this rank does not hold them."""
        return np.diff(self.cu_seqlens)

    @property
    def held(self) -> Bool:
        """[n], whether this rank holds the completion's tokens."""
        return self.held_lengths > 0  # a prompt has at least one token

    @property
    def holds_all(self) -> bool:
        """Whether every rank holds all tokens; equal on all ranks."""
        return self.all_lengths is None

    @property
    def held_image_sizes(self) -> Int64:
        """[n], bytes of each completion in `image_bytes`; 0 where this rank does not hold the tokens."""
        return np.zeros(len(self.held), np.int64) if self.image_sizes is None else self.image_sizes * self.held

    @property
    def image_keys(self) -> Int64:
        """[n], which images a completion has: those of its row, or (negative) its own, which an environment showed."""
        if self.image_sizes is None:
            return self.row_ids
        return np.where(self.image_sizes > 0, -1 - self.sample_ids, self.row_ids)

    def image_slice(self, number: int) -> slice:
        """Return the part of `image_bytes` that belongs to a completion."""
        sizes = self.held_image_sizes
        return slice(int(sizes[:number].sum()), int(sizes[: number + 1].sum()))

    @property
    def completion_of_tokens(self) -> Int64:
        """[total], the number of the completion of each token."""
        return np.repeat(np.arange(self.num_completions), self.held_lengths)

    def token_positions(self, indices: Int64) -> Int64:
        """Return the positions in the flat arrays of all held tokens of these completions, in their order."""
        lengths = self.held_lengths[indices]
        starts = offsets(lengths)[:-1]
        return np.arange(lengths.sum()) + np.repeat(self.cu_seqlens[:-1][indices] - starts, lengths)

    def sequences(self, indices: Int64) -> tuple[Int64, Int64]:
        """Return (length, position in ``indices``) of every sequence of the model in these completions, in order.

        A completion is one sequence, or one for each of its samples.
        """
        lengths = self.held_lengths[indices]
        if self.sample_starts is None:
            return lengths, np.arange(len(lengths))
        starts = self.sample_starts[self.token_positions(indices)] == 1
        starts[offsets(lengths)[:-1][lengths > 0]] = True
        begins = np.flatnonzero(starts)
        owner = np.repeat(np.arange(len(lengths)), lengths)[begins]
        return np.diff(np.append(begins, lengths.sum())), owner

    def response_positions(self, indices: Int64) -> Int64:
        """Return the positions in the flat arrays of the held tokens in the loss of these completions, in order."""
        flat = self.token_positions(indices)
        return flat[self.response_mask[flat] == 1]

    def advantages_of(self, tokens: Int64, completion: Int64) -> Float32:
        """Return the advantages of ``tokens`` (positions in the flat arrays) of the given completions."""
        assert self.advantages is not None
        return self.advantages[completion] if self.token_advantages is None else self.token_advantages[tokens]

    # ---- selection and concatenation

    def select(self, indices: npt.ArrayLike) -> "RolloutBatch":
        """Return a new batch of the completions at these positions, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        flat = self.token_positions(chosen)

        def part(array: Array, axis: str) -> Array:
            if axis == "byte":
                return np.concatenate([array[:0], *(array[self.image_slice(i)] for i in chosen)])
            return array[flat if axis == "token" else chosen]

        arrays = {name: part(array, FIELDS[name].axis) for name, array in self.arrays().items()}
        return RolloutBatch(**arrays | {"cu_seqlens": offsets(self.held_lengths[chosen])})

    def sorted_by_sample(self) -> "RolloutBatch":
        """Return the batch in its global order, independent of the rank or engine of each completion."""
        return self.select(np.argsort(self.sample_ids, kind="stable"))

    @staticmethod
    def concatenate(batches: Sequence["RolloutBatch"]) -> "RolloutBatch":
        """Join batches end to end; raises ValueError unless all have the same optional arrays and reward columns."""
        parts = [batch.arrays() for batch in batches]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise ValueError(f"batches with different arrays: {[sorted(part) for part in parts]}")
        arrays = {name: np.concatenate(of_one_width(name, [part[name] for part in parts])) for name in parts[0]}
        lengths = np.concatenate([batch.held_lengths for batch in batches])
        return RolloutBatch(**arrays | {"cu_seqlens": offsets(lengths)})

    # ---- storage

    def save(self, path: str | Path) -> None:
        """Write a .npz file, one plain array for each field that is not None."""
        with open(path, "wb") as file:
            np.savez(file, **self.arrays())

    @classmethod
    def load(cls, path: str | Path) -> "RolloutBatch":
        """Read and validate a file of `save`; GrpoError if it is missing, damaged or not a rollout.

        Of a directory, return the completions of all its files in their global order.
        """
        if Path(path).is_dir():
            parts = [cls.load(file) for file in sorted(Path(path).glob("*.npz"))]
            if not parts:
                raise GrpoError(f"{path} holds no saved rollout, a .npz file")
            return cls.concatenate(parts).sorted_by_sample()
        try:
            with open(path, "rb") as file:
                content = np.load(file, allow_pickle=False)
                if not isinstance(content, NpzFile):
                    raise GrpoError(f"{path} is not a saved rollout: it holds one array, not a .npz archive")
                arrays = {name: content[name] for name in content.files}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise GrpoError(f"cannot read the rollout {path}: {error}") from error
        required = {name for name, spec in FIELDS.items() if not spec.optional}
        wrong = (required - arrays.keys()) | (arrays.keys() - FIELDS.keys())
        if wrong:
            raise GrpoError(f"{path} is not a saved rollout: missing or unknown arrays {sorted(wrong)}")
        batch = cls(**arrays)
        batch.validate()
        return batch

    def validate(self) -> None:
        """Check shapes, types and values; raises GrpoError that names the first rule broken, else does nothing."""
        for name, array in self.arrays().items():
            if array.dtype != FIELDS[name].dtype:
                raise GrpoError(f"rollout batch: {name} is {array.dtype}, expected {np.dtype(FIELDS[name].dtype)}")
        n, total = self.num_completions, len(self.tokens)
        cu = self.cu_seqlens
        if cu.ndim != 1 or n < 0 or cu[0] != 0 or cu[-1] != total or (np.diff(cu) < 0).any():
            raise GrpoError(f"rollout batch: cu_seqlens must rise from 0 to the {total} tokens that there are")
        sizes = {"offset": n + 1, "completion": n, "token": total, "byte": int(self.held_image_sizes.sum())}
        for name, array in self.arrays().items():
            shape = (sizes[FIELDS[name].axis], *_columns(array, FIELDS[name]))
            if array.shape != shape:
                raise GrpoError(f"rollout batch: {name} has shape {array.shape}, expected {shape}")

        kept = np.empty((total, 0), np.int32) if self.kept_token_ids is None else self.kept_token_ids
        begins = np.zeros(total, np.uint8) if self.sample_starts is None else self.sample_starts
        held, visual = self.held_lengths, self.visual_index
        in_prompt = np.arange(total) - np.repeat(cu[:-1], held) < np.repeat(self.prompt_lengths, held)
        rules = {
            "a prompt has at least one token": self.prompt_lengths >= 1,
            "a prompt is no longer than its sequence": self.completion_lengths >= 0,
            "a sequence is held whole or not at all": (held == self.lengths) | (held == 0),
            "token ids are not negative": self.tokens >= 0,
            "response_mask is 0 or 1": self.response_mask <= 1,
            "response_mask is 0 where a sample begins": (self.response_mask == 0) | (begins == 0),
            "response_mask is 0 on prompts": (self.response_mask == 0) | ~in_prompt,
            "log-probabilities are not above 0": ~(self.rollout_log_probs > 1e-3),  # engines round; NaN passes
            "sample_ids are unique": np.array([len(np.unique(self.sample_ids)) == n]),
            "rewards are not infinite": ~np.isinf(self.rewards),
            "finish_reasons are known": np.isin(self.finish_reasons, list(FinishReason)),
            "turns is at least 1": self.turns >= 1,
            "visual tokens are not in the loss": (self.response_mask == 0) | ((-1 if visual is None else visual) < 0),
            "image_sizes are not negative": (0 if self.image_sizes is None else self.image_sizes) >= np.zeros(n),
            "a sampled token is among its kept tokens": (kept < 0).all(1) | (kept == self.tokens[:, None]).any(1),
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

    def arrays(self) -> dict[str, Any]:
        """Return every array that is not None, by name, in the order of FIELDS."""
        return {name: array for name in FIELDS if (array := getattr(self, name)) is not None}


def _declared_arrays() -> dict[str, ArrayField]:
    """Return the arrays of `RolloutBatch` by name, each with the dtype of its annotation."""
    declared = {}
    for name, hint in get_type_hints(RolloutBatch, include_extras=True).items():
        array, spec = get_args(hint)
        optional = type(None) in get_args(array)
        array = get_args(array)[0] if optional else array
        declared[name] = replace(spec, dtype=DTYPE_OF[array], optional=optional)
    return declared


FIELDS = _declared_arrays()


def _columns(array: Array | None, spec: ArrayField) -> tuple[int, ...]:
    """Return the sizes of the axes after the first; 0 for each that the array lacks."""
    return (*(() if array is None else array.shape[1:]), *(0,) * spec.columns)[: spec.columns]


def of_one_width(name: str, arrays: Sequence[Array]) -> list[Array]:
    """Return arrays [..., columns] of a field, all as wide as the widest if the field has a `ArrayField.fill`."""
    fill = FIELDS[name].fill
    if fill is None:
        return list(arrays)
    most = max((array.shape[-1] for array in arrays), default=0)
    return [
        np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, most - array.shape[-1])], constant_values=fill)
        for array in arrays
    ]


def offsets(lengths: Array) -> Int64:
    """Return the starts of sequences laid end to end, and the end of the last: [0, l_0, l_0 + l_1, ...]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
