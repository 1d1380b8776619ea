"""Exchange of the arrays of a rollout between ranks: memory and traffic of a rank grow with what it sends and receives.

A rollout has n completions. What a rank knows of all of them is a few numbers each (`concatenated`, `from_holders`).
Per-token arrays go only to the ranks that ask for the completion (`exchange_tokens`). All tensors lie in host memory,
and the groups are gloo's.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Array = npt.NDArray
Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

ROUND = 2**24  # bytes that a rank sends or receives in one round of `exchange_tokens`, above its own arrays


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


def exchange_tokens(
    arrays: Sequence[Array],
    starts: Int64,
    lengths: Int64,
    sends: Bool,
    needs: Bool,
    group: dist.ProcessGroup,
) -> tuple[list[Array], Bool]:
    """Return the per-token arrays of the completions that this rank needs, laid end to end in their order. Collective.

    One rank sends each completion to all ranks that need it: the first of those that offer it.

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
    source = offered.argmax(0)
    sizes = lengths * sum(map(_row_bytes, arrays))
    begins = _offsets(np.where(needed[rank], lengths, 0))
    received = [np.empty((begins[-1], *array.shape[1:]), array.dtype) for array in arrays]
    for block in _rounds(source, needed, sizes):
        mine = block[source[block] == rank]
        outgoing = [
            [array[starts[i] : starts[i] + lengths[i]] for i in mine[to[mine]] for array in arrays] for to in needed
        ]
        incoming = block[needed[rank, block]]
        incoming = incoming[np.argsort(source[incoming], kind="stable")]
        data = np.empty(sizes[incoming].sum(), np.uint8)
        # The method of the group: that of all roles is not registered, as torch's function expects.
        group.alltoall_base(
            torch.from_numpy(data),
            torch.from_numpy(_flat_bytes([part for parts in outgoing for part in parts])),
            np.bincount(source[incoming], sizes[incoming], len(needed)).astype(int).tolist(),
            [int(sizes[mine[to[mine]]].sum()) for to in needed],
        ).wait()
        at = 0
        for i in incoming:
            for array in received:
                part = array[begins[i] : begins[i] + lengths[i]]
                part[...] = data[at : at + part.nbytes].view(part.dtype).reshape(part.shape)
                at += part.nbytes
    return received, needed[rank]


def _rounds(source: Int64, needed: Bool, sizes: Int64) -> Iterator[Int64]:
    """Yield the completions of each round, equal on all ranks: no rank sends or receives more than ROUND in one.

    A completion that is larger by itself has a round of its own.
    """
    sent, received = np.zeros(len(needed), np.int64), np.zeros(len(needed), np.int64)
    block: list[int] = []
    for i in np.flatnonzero(needed.any(0)):
        receivers = needed[:, i]
        copies = int(receivers.sum())
        full = sent[source[i]] + copies * sizes[i] > ROUND or (received[receivers] + sizes[i] > ROUND).any()
        if block and full:
            yield np.array(block)
            block = []
            sent[:], received[:] = 0, 0
        block.append(i)
        sent[source[i]] += copies * sizes[i]
        received[receivers] += sizes[i]
    if block:
        yield np.array(block)


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
