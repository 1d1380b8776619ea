"""Packs: completions of a rollout laid end to end as one micro-batch, with labels where the model predicts them.

**The convention for labels.** In a `RolloutBatch` all values of token k, such as its log-probability, lie at k. The
model predicts token k at position k - 1. Only `pack_completions` makes this shift: in a `Pack` the label of token k
stands at position k - 1. The model's head computes log-probabilities at label positions only, so that everything after
it (losses, advantages, weights) has length L, the number of labels in the pack; `Pack.token_index` maps labels back to
the flat arrays.

Under context parallelism each of the `Pack.cp_size` ranks that share a pack holds a part of every sequence (`zigzag`),
in a `Pack` of its own: its tokens and their labels, in its order. Each label belongs to one rank (`Pack.own_labels`).
Values of labels are on every rank, for all labels in the order of the whole pack, because losses read whole
completions.

With shared prompts the completions of a group (`RolloutBatch.group_ids`) in a pack have one copy of their prompt: see
`SharedPrompts`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_grpo.data.batch import FIELDS, Array, Int32, Int64, RolloutBatch, offsets
from megatron_grpo.parallel.zigzag import padded_lengths, sequence_multiple, zigzag
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.pack_images import PackImages

Bool = npt.NDArray[np.bool_]

IGNORED_LABEL = -100  # torch's ignore_index: the position predicts no token in the loss


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """The keys that the sequences of a pack attend to, where several of them go on from one prompt.

    Such a prompt is a sequence of the pack, without its last token. The sequence of each completion begins with that
    token, which predicts the completion's first.
    """

    keys: Int64  # [k], positions in the pack: for each sequence in turn, its prompt's tokens and its own
    cu_keys: Int32  # [s + 1], where the keys of each sequence begin
    position_ids: Int64  # [tokens of all context ranks], those of a completion go on where its prompt's end


@dataclass(frozen=True, eq=False)
class Pack:
    """One micro-batch: m completions with L labels, of which this rank holds T tokens with l labels (see the module).

    T, L and l can be 0. Without context parallelism l is L.
    """

    indices: Int64  # [m], which completions of the batch
    cp_size: int  # ranks that hold the pack
    cp_rank: int  # this rank's number among them
    tokens: Int64  # [T], padding is 0
    position_ids: Int64  # [T], from 0 in each sequence
    labels: Int64  # [T], the next token of the same sequence where it is in the loss, else IGNORED_LABEL
    padding: Bool  # [T], behind a sequence's end or in the padding sequence
    source: Int64  # [T], where each token lies in the flat arrays of the batch, -1 for padding
    # [s + 1] for s sequences (`RolloutBatch.sequences`; the last may be padding): whole ones, over all context ranks
    cu_seqlens: Int32
    real_lengths: Int64  # [s], without padding; 0 for a sequence of padding
    max_seqlen: int  # of cu_seqlens
    own_labels: Int64  # [l], which of the L labels are this rank's
    token_index: Int64  # [L], where each label token lies in the flat arrays of the batch
    completion: Int64  # [L], number in the pack of the completion of each label
    of_labels: dict[str, Array]  # [L] each: the fields that `RolloutBatch` declares with packed="label"
    of_tokens: dict[str, Array]  # [T, ...] each: those with packed="token", of the tokens themselves
    # Of a vision-language model: M-RoPE's positions [3, tokens of all context ranks], and the images.
    rope_positions: Int64 | None = None
    images: PackImages | None = None
    shared_prompts: SharedPrompts | None = None  # None: each sequence attends to its own tokens

    @property
    def num_labels(self) -> int:
        """L, the number of tokens in the loss, over all context ranks."""
        return len(self.token_index)

    @property
    def label_positions(self) -> Int64:
        """The positions of this rank's labels, [l]."""
        return np.flatnonzero(self.labels != IGNORED_LABEL)

    def device_arrays(self) -> dict[str, Array]:
        """Return the arrays that model and loss read, by name."""
        names = ["tokens", "position_ids", "labels", "label_positions", "padding", "own_labels", "completion"]
        names += ["rope_positions"] * (self.rope_positions is not None)
        return {name: getattr(self, name) for name in names} | self.of_labels | self.of_tokens


def pack_completions(
    batch: RolloutBatch,
    indices: npt.ArrayLike,
    pad_multiple: int = 1,
    total_length: int | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    share_prompts: bool = False,
) -> Pack:
    """Lay completions end to end as one micro-batch, with the labels shifted to where they are predicted.

    Each sequence is padded at its end to `padded_lengths`: attention is causal, so no token sees it. The pack is
    padded by one more sequence, of zeros. Padding has no label.

    Args:
        batch: where they lie.
        indices: [m], positions in the batch.
        pad_multiple: each context rank's T is rounded up to a multiple of it.
        total_length: T of all context ranks together instead, a multiple of what `pad_multiple` asks for.
        cp_size, cp_rank: number of context-parallel ranks that hold the pack, and which rank's part to return.
        share_prompts: whether the completions of a group have one copy of their prompt; needs completions of one
            sequence each.

    Raises:
        ValueError: `total_length` is too small or no such multiple, or this rank does not hold the tokens.
        GrpoError: log-probabilities under the old policy or the reference are NaN for a token in the loss: the
            pass that should have computed them did not reach it, or gave NaN. Or prompts to share differ.
    """
    chosen = np.asarray(indices, dtype=np.int64)
    if not batch.held[chosen].all():
        raise ValueError(f"this rank does not hold the tokens of completions {chosen[~batch.held[chosen]].tolist()}")
    prompt = None
    if share_prompts:
        chosen = chosen[_group_by_group(batch.group_ids[chosen])]
        flat, real, owner, prompt = _with_shared_prompts(batch, chosen, cp_size)
    else:
        flat = batch.token_positions(chosen)
        real, owner = batch.sequences(chosen)
    lengths = padded_lengths(real, cp_size)
    starts = offsets(lengths)[:-1]
    at = np.arange(len(flat)) + np.repeat(starts - offsets(real)[:-1], real)  # where the real tokens go

    used = int(lengths.sum())
    multiple = pad_multiple * sequence_multiple(cp_size)
    total = used + -used % multiple if total_length is None else total_length
    if total < used or total % multiple:
        raise ValueError(f"a pack of {used} tokens cannot be padded to {total}, in multiples of {multiple}")
    if total > used:
        lengths, real = np.append(lengths, total - used), np.append(real, 0)
    cu_seqlens = offsets(lengths)

    source = np.full(total, -1)  # where in the flat arrays each token lies, and each label; -1 is none
    source[at] = flat
    label_source = np.full(total, -1)
    in_loss = batch.response_mask[flat] == 1  # never a sequence's first token: prompts are not empty
    label_source[at[in_loss] - 1] = flat[in_loss]
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position_ids = np.arange(total) - np.repeat(cu_seqlens[:-1], lengths)
    shared_prompts = None
    if prompt is not None and (prompt >= 0).any():
        prompt = np.append(prompt, np.full(len(lengths) - len(prompt), -1))  # the padding has none
        before = np.where(prompt >= 0, real[prompt], 0)  # tokens of the prompt, of each sequence
        position_ids += before[sequence]
        shared_prompts = SharedPrompts(*_keys_of_sequences(cu_seqlens, prompt, before), position_ids)

    labelled = label_source >= 0
    token_index, number = label_source[labelled], owner[sequence[labelled]]
    completion = chosen[number]
    held = zigzag(cu_seqlens, cp_size, cp_rank)
    rope_positions = None
    if batch.rope_positions is not None:
        rope_positions = np.repeat(position_ids[None], 3, axis=0)
        rope_positions[:, at] = batch.rope_positions[flat].T
    own_labels = (np.cumsum(labelled) - 1)[held][labelled[held]]
    source = source[held]
    padding = source < 0
    tokens = np.zeros(len(source), np.int64)
    tokens[~padding] = batch.tokens[source[~padding]]
    labels = np.full(len(source), IGNORED_LABEL, np.int64)
    labels[labelled[held]] = batch.tokens[token_index[own_labels]]
    pack = Pack(
        indices=chosen,
        cp_size=cp_size,
        cp_rank=cp_rank,
        tokens=tokens,
        position_ids=position_ids[held],
        labels=labels,
        padding=padding,
        source=source,
        cu_seqlens=cu_seqlens.astype(np.int32),
        real_lengths=real,
        max_seqlen=int(lengths.max(initial=0)),
        own_labels=own_labels,
        token_index=token_index,
        completion=number,
        of_labels=_label_values(batch, token_index, completion),
        of_tokens=_token_values(batch, source),
        rope_positions=rope_positions,
        images=_images(batch, chosen, source),
        shared_prompts=shared_prompts,
    )
    for name, values in pack.of_labels.items():
        if FIELDS[name].complete and np.isnan(values).any():
            samples = batch.sample_ids[chosen].tolist()
            raise GrpoError(
                f"{name} is NaN for {np.isnan(values).sum()} of {pack.num_labels} tokens in the loss of samples "
                f"{samples}: the pass that computes it missed them or the model gives NaN; check the weights loaded"
            )
    return pack


def shareable_tokens(prompt_lengths: npt.NDArray[np.integer], cp_size: int = 1) -> Int64:
    """Return the tokens of each prompt that a pack spares every completion but one of the group, [n].

    A shared prompt is a sequence of its own, without its last token. With ``cp_size`` above 1 it is padded, and so are
    the completions: the result is so small that the padded pack has no more tokens than the sum of the completions'
    padded lengths without them.
    """
    multiple = sequence_multiple(cp_size)
    whole = (prompt_lengths.astype(np.int64) - 1) // multiple * multiple
    return whole if cp_size == 1 else np.maximum(whole - multiple, 0)


def shared_tokens(prompt_lengths: npt.NDArray[np.integer], group_ids: Int64, cp_size: int = 1) -> Int64:
    """Return the `shareable_tokens` of all completions but the first of their group, [n - groups]."""
    return np.delete(shareable_tokens(prompt_lengths, cp_size), np.unique(group_ids, return_index=True)[1])


def _group_by_group(group_ids: Int64) -> Int64:
    """Return the order that brings the members of each group together, groups and members as they come."""
    _, first, group = np.unique(group_ids, return_index=True, return_inverse=True)
    return np.argsort(first[group], kind="stable")


def _with_shared_prompts(batch: RolloutBatch, chosen: Int64, cp_size: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Return the sequences of a pack with shared prompts, each prompt before its completions.

    (positions of their tokens in the flat arrays, lengths [s], positions in ``chosen`` of their completions [s],
    numbers of the sequences of their prompts [s]; -1: none). ``chosen``: the members of a group are neighbours.
    """
    new = np.diff(batch.group_ids[chosen], prepend=batch.group_ids[chosen[:1]] - 1) != 0
    first, group = np.flatnonzero(new), np.cumsum(new) - 1
    shared = (batch.prompt_lengths[chosen[first]] - 1) * (np.diff(np.append(first, len(chosen))) > 1)  # [groups]
    shared *= shared >= sequence_multiple(cp_size)  # the padding of a shorter one could be more than it spares
    begins, left_out = batch.cu_seqlens[chosen], shared[group]
    for i in range(len(chosen)):
        own, common = (batch.tokens[at : at + left_out[i] + 1] for at in (begins[i], begins[first[group[i]]]))
        if left_out[i] and not np.array_equal(own, common):
            raise GrpoError(
                f"--share-prompts: samples {batch.sample_ids[chosen[first[group[i]]]]} and "
                f"{batch.sample_ids[chosen[i]]} are of one group and begin with different prompts: leave the flag out"
            )
    at = first[shared > 0]  # a prompt comes before these
    number = np.full(len(first), -1)
    number[shared > 0] = at + np.arange(len(at))
    starts = np.insert(begins + left_out, at, begins[at])
    lengths = np.insert(batch.held_lengths[chosen] - left_out, at, shared[shared > 0])
    flat = np.arange(lengths.sum()) + np.repeat(starts - offsets(lengths)[:-1], lengths)
    return flat, lengths, np.insert(np.arange(len(chosen)), at, at), np.insert(number[group], at, -1)


def _keys_of_sequences(cu_seqlens: Int64, prompt: Int64, before: Int64) -> tuple[Int64, Int32]:
    """Return `SharedPrompts.keys` and ``cu_keys`` of the sequences at ``cu_seqlens``.

    Their prompts are the first ``before`` tokens of the sequences with the numbers ``prompt``.
    """
    starts = cu_seqlens[:-1]
    begins = np.stack([starts[prompt], starts], 1).ravel()  # each sequence's prompt, then itself
    counts = np.stack([before, np.diff(cu_seqlens)], 1).ravel()
    keys = np.arange(counts.sum()) + np.repeat(begins - offsets(counts)[:-1], counts)
    return keys, offsets(counts)[::2].astype(np.int32)


def _images(batch: RolloutBatch, chosen: Int64, source: Int64) -> PackImages | None:
    """Return the images of the completions ``chosen`` and where their tokens are among those at ``source``."""
    if batch.visual_index is None:
        return None
    index = np.full(len(source), -1)
    index[source >= 0] = batch.visual_index[source[source >= 0]]
    places = np.flatnonzero(index >= 0)
    completion = np.searchsorted(batch.cu_seqlens, source[places], "right") - 1
    keys, key = np.unique(batch.image_keys[completion], return_inverse=True)
    tokens = np.zeros(len(keys), np.int64)  # of all images with a key, which each completion with the key has
    for number in chosen[np.isin(batch.image_keys[chosen], keys)]:
        own = batch.visual_index[batch.cu_seqlens[number] : batch.cu_seqlens[number + 1]]
        tokens[np.searchsorted(keys, batch.image_keys[number])] = own.max() + 1
    return PackImages(keys.tolist(), places, offsets(tokens)[:-1][key] + index[places])


def _label_values(batch: RolloutBatch, token_index: Int64, completion: Int64) -> dict[str, Array]:
    """Return the values of the label tokens, [L] each; ``completion`` [L] is the completion in the batch."""
    values = {}
    for name, spec in FIELDS.items():
        array = getattr(batch, name)
        if spec.packed == "label" and array is not None:
            values[name] = array[token_index if spec.axis == "token" else completion]
    if batch.advantages is not None:
        values["advantages"] = batch.advantages_of(token_index, completion)
    return values


def _token_values(batch: RolloutBatch, source: Int64) -> dict[str, Array]:
    """Return the values of the tokens at ``source`` in the flat arrays, [T, ...] each."""
    values = {}
    for name, spec in FIELDS.items():
        array = getattr(batch, name)
        if spec.packed == "token" and array is not None:
            values[name] = np.full((len(source), *array.shape[1:]), spec.padding, spec.dtype)
            values[name][source >= 0] = array[source[source >= 0]]
    return values
