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

With shared prompts a pack has one copy of the tokens that several of its sequences begin with: see `SharedPrompts`. One
position can then predict a token of several completions. Each of them has a label of its own, and the head computes the
position once, for the first of them (`Pack.first_labels`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_grpo.data.batch import FIELDS, Array, Int32, Int64, RolloutBatch, UInt8, offsets
from megatron_grpo.data.prefix_tree import (
    PrefixTree,
    as_bytes,
    common_prefixes,
    prefix_tree,
    shareable_tokens,
    token_rows,
)
from megatron_grpo.parallel.zigzag import padded_lengths, sequence_multiple, zigzag
from megatron_grpo.vision.pack_images import PackImages

Bool = npt.NDArray[np.bool_]

IGNORED_LABEL = -100  # torch's ignore_index: the position predicts no token in the loss


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """The keys that the sequences of a pack attend to, where several of them begin with the same tokens.

    Such tokens, a prompt for example, are a sequence of the pack, without the last one in common. The sequences that go
    on from it begin with that token, which predicts their next one. They can be such prefixes again: the sequences of
    the pack are the nodes of a `PrefixTree`, and a sequence of the model is a path from a root to a leaf.
    """

    keys: Int64  # [k], positions in the pack: for each sequence in turn, its ancestors' tokens, root first, and its own
    cu_keys: Int32  # [s + 1], where the keys of each sequence begin
    position_ids: Int64  # [tokens of all context ranks], those of a sequence go on where its parent's end
    parent: Int64  # [s], -1: none. All descendants of a sequence follow it, before any other sequence.
    path_lengths: Int64  # [s], real tokens of a sequence of the model that goes through it; 0 for padding

    @property
    def leaves(self) -> Int64:
        """[n], those in which a sequence of the model ends, and padding."""
        return np.setdiff1d(np.arange(len(self.parent)), self.parent)

    def paths(self) -> tuple[Int64, Int64]:
        """Return pairs (number among `leaves`, a sequence of the pack on the path to this leaf)."""
        at = self.leaves
        numbers, found = np.arange(len(at)), [np.zeros((2, 0), np.int64)]
        while len(at):
            found.append(np.stack([numbers, at]))
            above = self.parent[at]
            numbers, at = numbers[above >= 0], above[above >= 0]
        of_leaves, nodes = np.concatenate(found, axis=1)
        return of_leaves, nodes


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
    own_labels: Int64  # [l], which of the L labels this rank's head computes
    label_positions: Int64  # [l], where in this rank's tokens it does
    token_index: Int64  # [L], where each label token lies in the flat arrays of the batch
    completion: Int64  # [L], number in the pack of the completion of each label
    of_labels: dict[str, Array]  # [L] each: the fields that `RolloutBatch` declares with packed="label"
    of_own_labels: dict[str, Array]  # [l, ...] each: those with packed="own_label"
    of_tokens: dict[str, Array]  # [T, ...] each: those with packed="token", of the tokens themselves
    # Of a vision-language model: M-RoPE's positions [3, tokens of all context ranks], and the images.
    rope_positions: Int64 | None = None
    images: PackImages | None = None
    shared_prompts: SharedPrompts | None = None  # None: each sequence attends to its own tokens
    # [L], for each label the first one that the same position predicts, from the same `kept_token_ids` and with the
    # same teacher; None: itself.
    first_labels: Int64 | None = None
    # [2, c]: further tokens of completions that this rank computes once: where in its tokens, and in the flat arrays.
    copies: Int64 | None = None
    # For each of n multi-token-prediction layers the token so many places after each token, [n, T], 0 behind its
    # sequence; the token so many places after each label, [n, l], IGNORED_LABEL if it is not in the loss; and whether
    # that of each label is, [n, L].
    further_tokens: Int64 | None = None
    further_labels: Int64 | None = None
    further_in_loss: Bool | None = None
    demonstrations: bool = False  # completions beside the rollout, with a loss of their own (--sft-loss-type)

    @property
    def num_labels(self) -> int:
        """L, the number of tokens in the loss, over all context ranks."""
        return len(self.token_index)

    @property
    def sequence_lengths(self) -> Int64:
        """[n], without padding, of the sequences of the model, over all context ranks; 0 for a sequence of padding."""
        shared = self.shared_prompts
        return self.real_lengths if shared is None else shared.path_lengths[shared.leaves]

    def computed(self) -> tuple[Int64, Int64]:
        """Return the places in this rank's tokens, and in the flat arrays, of the tokens of all completions."""
        own = np.flatnonzero(self.source >= 0)
        rows, flat = (np.zeros((2, 0), np.int64)) if self.copies is None else self.copies
        return np.concatenate([own, rows]), np.concatenate([self.source[own], flat])

    def device_arrays(self) -> dict[str, Array]:
        """Return the arrays that model and loss read, by name."""
        names = ["tokens", "position_ids", "labels", "label_positions", "padding", "own_labels", "completion"]
        optional = "rope_positions", "first_labels", "further_tokens", "further_labels", "further_in_loss"
        names += [name for name in optional if getattr(self, name) is not None]
        arrays = {name: getattr(self, name) for name in names} | self.of_labels | self.of_tokens
        # The losses have a slot for each label: numbers of the completions that have one, 0 to at most L - 1.
        return arrays | {"completion": np.unique(self.completion, return_inverse=True)[1]}


class Layout(NamedTuple):
    """Which tokens the sequences of a micro-batch have."""

    flat: Int64  # [N], where the tokens of all its completions lie in the flat arrays
    sequences: Int64  # [n], lengths of the sequences of the model
    owner: Int64  # [n], number in the pack of the completion of each of them
    real: Int64  # [s], lengths of the sequences of the pack
    own: Int64  # which of the N tokens they have
    tree: PrefixTree | None  # None: nothing is shared

    def padded(self, cp_size: int) -> int:
        """Return the tokens of the sequences with their padding."""
        return int(padded_lengths(self.real, cp_size).sum())


def lay_out(
    batch: RolloutBatch, indices: npt.ArrayLike, cp_size: int = 1, share_prompts: bool = False, mtp_layers: int = 0
) -> Layout:
    """Return the tokens of a pack before padding; the arguments are those of `pack_completions`."""
    chosen = np.asarray(indices, dtype=np.int64)
    if not batch.held[chosen].all():
        raise ValueError(f"this rank does not hold the tokens of completions {chosen[~batch.held[chosen]].tolist()}")
    flat = batch.token_positions(chosen)
    sequences, owner = batch.sequences(chosen)
    if share_prompts:
        prefixes = common_prefixes(_inputs(batch, chosen, flat, sequences), offsets(sequences))
        shared = shareable_tokens(prefixes.common - mtp_layers, cp_size)
        if shared.any():
            tree = prefix_tree(sequences, prefixes.order, shared)
            begins = offsets(sequences)[tree.source] + tree.depth - offsets(tree.lengths)[:-1]
            own = np.arange(tree.lengths.sum()) + np.repeat(begins, tree.lengths)
            return Layout(flat, sequences, owner, tree.lengths, own, tree)
    return Layout(flat, sequences, owner, sequences, np.arange(len(flat)), None)


def pack_completions(
    batch: RolloutBatch,
    indices: npt.ArrayLike,
    pad_multiple: int = 1,
    total_length: int | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    share_prompts: bool = False,
    mtp_layers: int = 0,
    layout: Layout | None = None,
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
        share_prompts: whether sequences have one copy of the tokens with which they begin alike.
        mtp_layers: number of multi-token-prediction layers that are trained. They read and predict the tokens after a
            token: so many fewer tokens at the end of a common beginning have one copy.
        layout: what `lay_out` returns for the same arguments, if it is known.

    Raises:
        ValueError: `total_length` is too small or no such multiple, or this rank does not hold the tokens.
    """
    chosen = np.asarray(indices, dtype=np.int64)
    flat, sequences, owner, real, own, tree = layout or lay_out(batch, chosen, cp_size, share_prompts, mtp_layers)
    lengths = padded_lengths(real, cp_size)
    starts = offsets(lengths)[:-1]
    at = np.arange(len(own)) + np.repeat(starts - offsets(real)[:-1], real)  # where the real tokens go

    used = int(lengths.sum())
    multiple = pad_multiple * sequence_multiple(cp_size)
    total = used + -used % multiple if total_length is None else total_length
    if total < used or total % multiple:
        raise ValueError(f"a pack of {used} tokens cannot be padded to {total}, in multiples of {multiple}")
    if total > used:
        lengths, real = np.append(lengths, total - used), np.append(real, 0)
    cu_seqlens = offsets(lengths)

    index, source = np.full((2, total), -1)  # which of the tokens at ``flat`` each token is, and its place; -1: none
    index[at], source[at] = own, flat[own]
    position_ids = np.arange(total) - np.repeat(cu_seqlens[:-1], lengths)
    rope_positions = None
    if batch.rope_positions is not None:
        rope_positions = np.repeat(position_ids[None], 3, axis=0)
        rope_positions[:, at] = batch.rope_positions[flat[own]].T
    shared_prompts, places = None, at  # where the tokens of all completions are
    if tree is not None:
        position_ids += np.repeat(np.append(tree.depth, np.zeros(len(lengths) - len(tree.depth), np.int64)), lengths)
        keys, cu_keys = _keys_of_nodes(cu_seqlens, tree)
        of_padding = len(lengths) - len(tree.parent)
        shared_prompts = SharedPrompts(
            keys,
            cu_keys.astype(np.int32),
            position_ids,
            parent=np.append(tree.parent, np.full(of_padding, -1)),
            path_lengths=np.append(sequences[tree.source], np.zeros(of_padding, np.int64)),
        )
        begins = cu_keys[tree.leaf] - offsets(sequences)[:-1]
        places = keys[np.arange(len(flat)) + np.repeat(begins, sequences)]

    in_loss = np.flatnonzero(batch.response_mask[flat] == 1)  # never a sequence's first token: prompts are not empty
    token_index, number = flat[in_loss], np.repeat(owner, sequences)[in_loss]
    predicted_at = places[in_loss - 1]
    completion = chosen[number]
    first_labels, computed = None, np.arange(len(in_loss))  # the labels that the head computes
    if tree is not None:
        first_labels = _first_labels(predicted_at, token_index, completion, batch)
        computed = np.flatnonzero(first_labels == computed)
    held = zigzag(cu_seqlens, cp_size, cp_rank)
    place_in_held = np.full(total, -1)
    place_in_held[held] = np.arange(len(held))
    label_positions = place_in_held[predicted_at[computed]]
    order = np.argsort(label_positions, kind="stable")[np.count_nonzero(label_positions < 0) :]
    own_labels, label_positions = computed[order], label_positions[order]
    copies = None
    if tree is not None:
        further = np.flatnonzero((place_in_held[places] >= 0) & (index[places] != np.arange(len(flat))))
        copies = np.stack([place_in_held[places[further]], flat[further]])
    source = source[held]
    padding = source < 0
    tokens = np.zeros(len(source), np.int64)
    tokens[~padding] = batch.tokens[source[~padding]]
    labels = np.full(len(source), IGNORED_LABEL, np.int64)
    labels[label_positions] = batch.tokens[token_index[own_labels]]
    of_labels = _label_values(batch, "label", token_index, completion)
    if batch.advantages is not None:
        of_labels["advantages"] = batch.advantages_of(token_index, completion)
    return Pack(
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
        label_positions=label_positions,
        token_index=token_index,
        completion=number,
        of_labels=of_labels,
        of_own_labels=_label_values(batch, "own_label", token_index[own_labels], completion[own_labels]),
        of_tokens=_token_values(batch, source),
        rope_positions=rope_positions,
        images=_images(batch, chosen, source),
        shared_prompts=shared_prompts,
        first_labels=first_labels,
        copies=copies,
        demonstrations=False,
        **_further_tokens(batch, flat, sequences, index[held], in_loss, own_labels, first_labels, mtp_layers),
    )


def _first_labels(predicted_at: Int64, token_index: Int64, completion: Int64, batch: RolloutBatch) -> Int64:
    """Return `Pack.first_labels` of labels that are predicted at these positions of the pack, [L].

    ``token_index`` [L] and ``completion`` [L] are their tokens and completions in the batch.
    """
    numbers = np.arange(len(predicted_at))
    first = np.empty(predicted_at.max(initial=-1) + 1, np.int64)
    first[predicted_at[::-1]] = numbers[::-1]  # of equal positions numpy keeps the last value
    found = first[predicted_at]
    if batch.kept_token_ids is not None or batch.teacher_numbers is not None:
        several = np.flatnonzero(np.bincount(predicted_at)[predicted_at] > 1)
        columns: list[Array] = [predicted_at[several, None]]
        if batch.kept_token_ids is not None:
            columns.append(batch.kept_token_ids[token_index[several]])
        if batch.teacher_numbers is not None:
            columns.append(batch.teacher_numbers[completion[several], None])
        different = np.concatenate(columns, axis=1)
        _, own, prediction = np.unique(different, axis=0, return_index=True, return_inverse=True)
        found[several] = several[own][prediction.reshape(-1)]
    return found


def _further_tokens(
    batch: RolloutBatch,
    flat: Int64,
    sequences: Int64,
    index: Int64,
    in_loss: Int64,
    own_labels: Int64,
    first_labels: Int64 | None,
    mtp_layers: int,
) -> dict[str, Array]:
    """Return ``further_tokens``, ``further_labels`` and ``further_in_loss`` of `Pack`; {} without layers.

    ``flat`` [N] are places of the tokens of sequences of lengths ``sequences``; ``index`` [T] and ``in_loss`` [L] say
    which of the N a token of the pack is (-1 is none), and a label.
    """
    if not mtp_layers:
        return {}
    ends = np.append(np.repeat(offsets(sequences)[1:], sequences), 0)  # of padding 0
    tokens, mask = (np.append(array[flat], 0) for array in (batch.tokens, batch.response_mask))
    places = np.arange(1, mtp_layers + 1)[:, None] + index
    of_labels = np.arange(1, mtp_layers + 1)[:, None] + in_loss
    known, of_labels_known = places < ends[index], of_labels < ends[in_loss]
    further_in_loss = of_labels_known & (mask[np.where(of_labels_known, of_labels, -1)] == 1)
    further_labels = np.where(further_in_loss, tokens[np.where(of_labels_known, of_labels, -1)], IGNORED_LABEL)
    if first_labels is not None:  # a token after the label can be in the loss of another completion than the first
        own = np.full_like(further_labels, IGNORED_LABEL)
        for of_layer, labels in zip(own, further_labels, strict=True):
            np.maximum.at(of_layer, first_labels, labels)
        further_labels = own
    return {
        "further_tokens": tokens[np.where(known, places, -1)].astype(np.int64),
        "further_labels": further_labels[:, own_labels].astype(np.int64),
        "further_in_loss": further_in_loss,
    }


def _inputs(batch: RolloutBatch, chosen: Int64, flat: Int64, sequences: Int64) -> UInt8:
    """Return what the model reads of the tokens at ``flat`` of the completions ``chosen``, as bytes [N, ...].

    ``sequences`` are the lengths of their sequences. Images are equal if their `RolloutBatch.image_keys` are: an
    environment's reset and an agent show images of their own in a prompt, which can have the tokens of other images.
    """
    columns: list[Array] = [token_rows(batch, flat, offsets(sequences)[:-1])]
    if batch.rope_positions is not None:
        columns.append(batch.rope_positions[flat])
    if batch.visual_index is not None:
        keys = np.repeat(batch.image_keys[chosen], batch.held_lengths[chosen])
        index = batch.visual_index[flat]
        columns += [index, np.where(index < 0, 0, keys)]
    return np.concatenate([as_bytes(column) for column in columns], axis=1)


def _keys_of_nodes(cu_seqlens: Int64, tree: PrefixTree) -> tuple[Int64, Int64]:
    """Return `SharedPrompts.keys` and ``cu_keys`` of sequences at ``cu_seqlens``: the nodes and perhaps padding."""
    lengths = np.diff(cu_seqlens).tolist()
    paths: list[list[int]] = []  # ancestors of each sequence, and itself
    for parent, number in zip([*tree.parent.tolist(), -1], range(len(lengths)), strict=False):
        paths.append([*(paths[parent] if parent >= 0 else ()), number])
    nodes = np.concatenate([np.zeros(0, np.int64), *(np.array(path) for path in paths)])
    counts = np.array(lengths)[nodes]
    keys = np.arange(counts.sum()) + np.repeat(cu_seqlens[nodes] - offsets(counts)[:-1], counts)
    return keys, offsets(counts)[offsets(np.array([len(path) for path in paths]))]


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


def _label_values(batch: RolloutBatch, packed: str, token_index: Int64, completion: Int64) -> dict[str, Array]:
    """Return the values of label tokens in the fields that are ``packed`` so (`ArrayField`), [L, ...] each.

    ``completion`` [L] is the completion in the batch.
    """
    values = {}
    for name, spec in FIELDS.items():
        array = getattr(batch, name)
        if spec.packed == packed and array is not None:
            values[name] = array[token_index if spec.axis == "token" else completion]
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
