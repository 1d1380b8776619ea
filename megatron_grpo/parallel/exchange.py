"""Exchange of the arrays of a rollout between ranks: memory and traffic of a rank grow with what it sends and receives.

A rollout has n completions. What a rank knows of all of them is a few numbers each (`concatenated`, `from_holders`).
Per-token arrays go only to the ranks that ask for the completion (`exchange_tokens`). All tensors lie in host memory,
and the groups are gloo's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Array = npt.NDArray
Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

ROUND = 2**24  # bytes that a rank sends or receives in one round of `exchange_tokens`: host memory above its arrays


def concatenated(arrays: Sequence[Array], group: dist.ProcessGroup) -> tuple[list[Array], Int64]:
    """Return the rows of all ranks in the order of ranks, on every rank, and the rank of each row. Collective.

    ``arrays`` are [m, ...], with the same m, and on all ranks the same types and columns; m can differ between ranks.
    """
    rank, world = group.rank(), group.size()
    counts = torch.zeros(world, dtype=torch.int64)
    counts[rank] = own = len(arrays[0])
    dist.all_reduce(counts, group=group)
    ends = np.cumsum(counts.numpy())
    rows = np.zeros((ends[-1], sum(map(_row_bytes, arrays))), np.uint8)
    rows[ends[rank] - own : ends[rank]] = np.concatenate([_as_bytes(array) for array in arrays], axis=1)
    dist.all_reduce(torch.from_numpy(rows), group=group)  # one rank writes each row, and the others add 0
    columns = np.split(rows, np.cumsum([_row_bytes(array) for array in arrays])[:-1], axis=1)
    whole = [
        np.ascontiguousarray(part).view(array.dtype).reshape(len(rows), *array.shape[1:])
        for part, array in zip(columns, arrays, strict=True)
    ]
    return whole, np.repeat(np.arange(world), counts.numpy())


def from_holders(values: Float64, held: Bool, group: dist.ProcessGroup) -> Float64:
    """Return the values [..., n] of all completions, on every rank; a rank has them where ``held`` [n]. Collective.

    The ranks that hold a completion have equal values, bit for bit.
    """
    bits = np.where(held, np.ascontiguousarray(values, np.float64).view(np.int64), np.iinfo(np.int64).min)
    dist.all_reduce(torch.from_numpy(bits), dist.ReduceOp.MAX, group=group)
    return bits.view(np.float64)


def of_every_rank(mask: Bool, group: dist.ProcessGroup) -> Bool:
    """Return the masks [n] of all ranks, [ranks, n]. Collective."""
    packed = torch.from_numpy(np.packbits(mask))
    masks = [torch.empty_like(packed) for _ in range(group.size())]
    dist.all_gather(masks, packed, group=group)
    return np.unpackbits(torch.stack(masks).numpy(), axis=1, count=len(mask)).astype(bool)


@dataclass(frozen=True)
class Hop:
    """One step of an exchange of n completions: rank ``source[i]`` sends completion i to the ranks ``to[:, i]``."""

    source: Int64  # [n]
    to: Bool  # [ranks, n]

    def traffic(self, sizes: Int64) -> tuple[Int64, Int64]:
        """Return the bytes that each rank sends and receives, [ranks] each, for completions of ``sizes`` [n] bytes."""
        sent = np.bincount(self.source, self.to.sum(0) * sizes, len(self.to)).astype(np.int64)
        return sent, np.array([sizes[mask].sum() for mask in self.to], np.int64)

    def rounds(self, sizes: Int64) -> int:
        """Return the number of rounds, equal on all ranks: the fewest in which no rank sends or receives above ROUND.

        In each of T rounds a rank sends the same part of what it has for each other rank: of L tokens at most
        ceil(L / T) < L / T + 1. So a rank that sends S bytes in all sends at most S / T in a round, plus one token for
        each receiver, and T = ceil(max(S) / ROUND) suffices. The same holds for what a rank receives.
        """
        return -(-int(max(map(np.max, self.traffic(sizes)))) // ROUND)


def hops(source: Int64, needed: Bool, sizes: Int64) -> list[Hop]:
    """Return how the completions of rank ``source`` [n] reach all ranks that need them, ``needed`` [ranks, n].

    Each completion leaves its source once: for one of the ranks that need it, which sends it to the others. These
    relays are chosen so that the ranks of a data-parallel replica send about the same number of bytes.
    """
    relays, ranks = _relays(needed, sizes), np.arange(len(needed))[:, None]
    first = needed & ((ranks == relays) | (ranks == source))
    return [Hop(source, first), Hop(relays, needed & ~first)]


def _relays(needed: Bool, sizes: Int64) -> Int64:
    """Return for each completion the rank that has the least to pass on so far, the largest completions first."""
    relays, copies = needed.argmax(0), needed.sum(0)
    load = np.zeros(len(needed), np.int64)
    for i in np.argsort(-sizes, kind="stable"):
        if copies[i] > 1:
            receivers = np.flatnonzero(needed[:, i])
            relays[i] = receivers[load[receivers].argmin()]
            load[relays[i]] += (copies[i] - 1) * sizes[i]
    return relays


def exchange_tokens(
    arrays: Sequence[Array],
    starts: Int64,
    lengths: Int64,
    sends: Bool,
    needs: Bool,
    group: dist.ProcessGroup,
) -> tuple[list[Array], Bool]:
    """Return the per-token arrays of the completions that this rank needs, laid end to end in their order. Collective.

    A completion comes from the first of the ranks that offer it.

    Args:
        arrays: [t, ...], on all ranks of the same types and columns.
        starts: [n], where the tokens of each completion begin in ``arrays``; read where ``sends``.
        lengths: [n], tokens of each completion, equal on all ranks.
        sends: [n], which completions this rank offers.
        needs: [n], which completions this rank receives. One that no rank offers is left out.
        group: of all ranks that offer or need any.

    Returns:
        (arrays, [n] which completions they have)
    """
    rank = group.rank()
    offered, needed = of_every_rank(sends, group), of_every_rank(needs, group)
    needed &= offered.any(0)
    sizes = lengths * sum(map(_row_bytes, arrays))
    begins = _offsets(np.where(needed[rank], lengths, 0))
    received = [np.empty((begins[-1], *array.shape[1:]), array.dtype) for array in arrays]
    there, at = arrays, starts
    for hop in hops(offered.argmax(0), needed, sizes):
        _send(there, at, received, begins, lengths, hop, hop.rounds(sizes), group)
        there, at = received, begins  # a relay sends what it has received
    return received, needed[rank]


def _send(
    arrays: Sequence[Array],
    starts: Int64,
    received: Sequence[Array],
    begins: Int64,
    lengths: Int64,
    hop: Hop,
    rounds: int,
    group: dist.ProcessGroup,
) -> None:
    """Send the tokens of a hop: from ``arrays``, laid out by ``starts``, to ``received``, by ``begins``. Collective."""
    rank, row = group.rank(), sum(map(_row_bytes, arrays))
    outgoing = [np.flatnonzero((hop.source == rank) & to) for to in hop.to]
    incoming = [np.flatnonzero((hop.source == other) & hop.to[rank]) for other in range(len(hop.to))]
    for number in range(rounds):
        sent = [list(_part(own, lengths, number, rounds)) for own in outgoing]
        taken = [list(_part(own, lengths, number, rounds)) for own in incoming]
        data = np.empty(sum(map(_rows, taken)) * row, np.uint8)
        # The method of the group: that of all roles is not registered, as torch's function expects.
        group.alltoall_base(
            torch.from_numpy(data),
            torch.from_numpy(
                _flat_bytes([a[starts[i] + s : starts[i] + e] for own in sent for i, s, e in own for a in arrays])
            ),
            [_rows(own) * row for own in taken],
            [_rows(own) * row for own in sent],
        ).wait()
        at = 0
        for i, start, end in chain.from_iterable(taken):
            for array in received:
                part = array[begins[i] + start : begins[i] + end]
                part[...] = data[at : at + part.nbytes].view(part.dtype).reshape(part.shape)
                at += part.nbytes


def _part(completions: Int64, lengths: Int64, number: int, rounds: int) -> Iterator[tuple[int, int, int]]:
    """Yield (completion, first token, end) of one of ``rounds`` equal parts of the completions, laid end to end."""
    ends = np.cumsum(lengths[completions])
    total = int(ends[-1]) if len(ends) else 0
    first, end = total * number // rounds, total * (number + 1) // rounds
    for place in range(np.searchsorted(ends, first, "right"), np.searchsorted(ends, end) + 1) if first < end else ():
        begin = int(ends[place] - lengths[completions[place]])
        yield int(completions[place]), max(first - begin, 0), int(min(end, ends[place])) - begin


def _rows(parts: Iterable[tuple[int, int, int]]) -> int:
    return sum(end - first for _, first, end in parts)


def _row_bytes(array: Array) -> int:
    return array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))


def _as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """Return the rows of an array as bytes, [m, bytes of a row]."""
    columns = int(np.prod(array.shape[1:], dtype=np.int64))
    return np.ascontiguousarray(array).reshape(len(array), columns).view(np.uint8)


def _flat_bytes(parts: Sequence[Array]) -> npt.NDArray[np.uint8]:
    views = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    return np.concatenate(views) if views else np.empty(0, np.uint8)


def _offsets(lengths: Int64) -> Int64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
