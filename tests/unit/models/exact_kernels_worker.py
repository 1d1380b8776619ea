"""What test_exact_log_probs.py asks the kernels in Triton's interpreter; prints the answers."""

import json
import math
import os
import sys
from itertools import pairwise
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import numpy as np
import torch

from megatron_grpo.data.pack import SharedPrompts
from megatron_grpo.models.exact import kernels
from megatron_grpo.models.exact.layers import key_rows

HEADS, GROUPS, SIZE, BLOCK = 6, 2, 64, 16
LENGTHS = [70, 5, 130, 1]
found: dict[str, float | bool] = {}


def heads(tokens: int, count: int) -> torch.Tensor:
    return torch.randn(tokens, count, SIZE)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last tokens of one sequence in float64, and the logarithms of its sums."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // GROUPS, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * SIZE**-0.5
    before = k.shape[1] - q.shape[1]
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(before + 1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference; infinite if there is NaN, which `max` may pass over."""
    largest = float((one.double() - other.double()).abs().max())
    return math.inf if math.isnan(largest) else largest


def paged(k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of blocks in some order, NaN where no token lies, and the blocks of each sequence."""
    counts = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 3).tolist()
    cache = torch.full((len(order), GROUPS, BLOCK, 2 * SIZE), float("nan"))
    table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
    for s, count in enumerate(counts):
        for b in range(count):
            table[s, b] = number = order.pop()
            tokens = slice(int(starts[s]) + b * BLOCK, min(int(starts[s]) + (b + 1) * BLOCK, int(starts[s + 1])))
            length = tokens.stop - tokens.start
            cache[number, :, :length] = torch.cat([k[tokens], v[tokens]], -1).transpose(0, 1)
    return cache, table


def attention() -> None:
    """A prompt against float64; decode steps, and the end of a prompt, over a cache of blocks against the prompt.

    The interpreter's products depend on the place of a row in a program: the rows that are compared have the same.
    """
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    q, k, v = heads(sum(LENGTHS), HEADS), heads(sum(LENGTHS), GROUPS), heads(sum(LENGTHS), GROUPS)
    packed = kernels.Pages(*key_rows(tuple(starts.tolist()), torch.device("cpu"), None), 1)
    out, log_sum = kernels.attention(q, k[:, None], v[:, None], packed, SIZE**-0.5)
    parts = [slice(*pair) for pair in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    wanted = [dense(q[part], k[part], v[part]) for part in parts]
    found["attention"] = gap(out, torch.cat([one for one, _ in wanted]))
    found["log_sum"] = gap(log_sum, torch.cat([one for _, one in wanted], 1))
    cache, table = paged(k, v, starts)
    keys, values = cache.transpose(1, 2).split(SIZE, -1)
    queries = kernels.ROWS // 4  # of a program: three heads of a group fill four rows
    places = [(s, p) for s, length in enumerate(LENGTHS) for p in range(0, length, queries)]
    at = torch.tensor([int(starts[s]) + p for s, p in places])
    lengths = torch.tensor([p + 1 for _, p in places], dtype=torch.int32)
    each = kernels.Pages(torch.arange(len(at) + 1).int(), lengths, table[[s for s, _ in places]], BLOCK)
    steps, sums = kernels.attention(q[at], keys, values, each, SIZE**-0.5)
    found["decode steps"] = torch.equal(steps, out[at]) and torch.equal(sums, log_sum[:, at])
    few = 5  # of them; the rest of a CUDA graph's sequences are empty
    padded = each._replace(starts=each.starts.clamp(max=few))
    shorter, sums = kernels.attention(q[at[:few]], keys, values, padded, SIZE**-0.5, longest=1)
    found["sequences of one query"] = torch.equal(shorter, steps[:few]) and torch.equal(sums, log_sum[:, at[:few]])
    with mock.patch.object(kernels, "steps_agree", lambda *_: True):
        steps, sums = kernels.attention(q[at], keys, values, each, SIZE**-0.5, longest=1)
    found["programs of few rows"] = max(gap(steps, out[at]), gap(sums, log_sum[:, at]))
    found["32 heads of a key"] = not kernels.steps_agree(32, 1, SIZE, torch.device("cuda"))  # an engine's question
    ends = [length // queries * queries // 2 // queries * queries for length in LENGTHS]
    rest = torch.cat([torch.arange(part.start + end, part.stop) for part, end in zip(parts, ends, strict=True)])
    counts = torch.tensor([0, *(length - end for length, end in zip(LENGTHS, ends, strict=True))]).cumsum(0).int()
    chunked = kernels.Pages(counts, torch.tensor(LENGTHS, dtype=torch.int32), table, BLOCK)
    found["part of a prompt"] = torch.equal(kernels.attention(q[rest], keys, values, chunked, SIZE**-0.5)[0], out[rest])


def parts_of_prompts() -> None:
    """Ends of sequences, of none, of few and of many queries, with one to 40 heads of a key, against float64."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    k, v = heads(sum(LENGTHS), GROUPS), heads(sum(LENGTHS), GROUPS)
    cache, table = paged(k, v, starts)
    keys, values = cache.transpose(1, 2).split(SIZE, -1)
    gaps = []
    for each in (1, 5, 16, 40):
        for counts in ([1, 0, 1, 1], [3, 2, 0, 1], [2, 5, 70, 0]):
            q = heads(sum(counts), each * GROUPS)
            firsts = torch.tensor([0, *counts]).cumsum(0)
            pages = kernels.Pages(firsts.int(), torch.tensor(LENGTHS, dtype=torch.int32), table, BLOCK)
            with mock.patch.object(kernels, "steps_agree", lambda *_: True):
                out, log_sum = kernels.attention(q, keys, values, pages, SIZE**-0.5, longest=max(counts))
            parts = zip(pairwise(firsts.tolist()), pairwise(starts.tolist()), strict=True)
            wanted = [dense(q[a:b], k[first:last], v[first:last]) for (a, b), (first, last) in parts]
            gaps += [gap(out, torch.cat([one for one, _ in wanted]))]
            gaps += [gap(log_sum, torch.cat([one for _, one in wanted], 1))]
    found["parts of prompts"] = max(gaps)


def long_packs() -> None:
    """CUDA has at most 65,535 programs along the second and the third axis."""

    class Launches:
        def __getitem__(self, programs):
            few = all(number < 2**16 for number in programs[1:])
            found["programs of a long pack"] = few and math.prod(programs) == 2**17 + 1
            return lambda *_, **__: None

    empty = torch.empty(2**17, 1, 32, SIZE, device="meta")
    pages = kernels.Pages(torch.tensor([0, 2**17]), torch.tensor([2**17]), torch.empty(1, 2**17, device="meta"), 1)
    with mock.patch.object(kernels, "_attention", Launches()):
        kernels.attention(empty[:, 0], empty[:, :, :1], empty[:, :, :1], pages, 1.0)  # 32 heads of one key head


def shared_prompts() -> None:
    """Completions of a prompt that is in the pack once, against whole sequences in float64."""
    prompt, completions = 20, [7, 30]
    starts = np.cumsum([0, prompt, *completions])
    keys = [np.arange(prompt)] + [np.append(np.arange(prompt), np.arange(a, b)) for a, b in pairwise(starts[1:])]
    cu_keys = np.cumsum([0, *map(len, keys)]).astype(np.int32)
    shared = SharedPrompts.__new__(SharedPrompts)
    vars(shared).update(cu_keys=cu_keys, keys=np.concatenate(keys))
    pages = kernels.Pages(*key_rows(tuple(starts.tolist()), torch.device("cpu"), shared), 1)
    total = int(starts[-1])
    q, k, v = heads(total, HEADS), heads(total, GROUPS), heads(total, GROUPS)
    out, _ = kernels.attention(q, k[:, None], v[:, None], pages, SIZE**-0.5)
    wanted = [
        dense(q[a:b], k[own], v[own])[0] for a, b, own in zip(starts[:-1], starts[1:], keys, strict=True)
    ]  # fmt: skip
    found["shared prompts"] = gap(out, torch.cat(wanted))


def products() -> None:
    """Sizes that no tile divides, with and without a bias, in both tiles and in several numbers of rows."""
    x, weight, bias = torch.randn(150, 200), torch.randn(300, 200), torch.randn(300)
    wanted = x.double() @ weight.double().T
    for name, tile in (("narrow", kernels.NARROW), ("wide", kernels.WIDE)):
        found[f"{name} tiles"] = gap(kernels.linear(x, weight, tile=tile), wanted)
        found[f"{name} tiles, bias"] = gap(kernels.linear(x, weight, bias, tile=tile), wanted + bias)
    logits = kernels.linear(x, weight, multiple=64)
    found["rows with an end"] = gap(logits, wanted)
    found["rows begin at multiples"] = logits.stride() == (320, 1)
    kernels._KNOWN[300, 200, True, torch.float32, x.device] = frozenset({8, 128})  # of torch: 128 rows, and 128 for 22
    larger = torch.full((300, 200), float("nan"))
    larger[:150] = x
    for name, rows in (("copied", x), ("of a storage", larger[:150])):
        found[f"more rows, {name}"] = gap(kernels.linear(rows, weight, bias), wanted + bias)
    for name, result in (
        ("norm", kernels.rms_norm(x, torch.ones(200), 1e-6)[0]),
        ("sum", kernels.add_and_norm(x, x, torch.ones(200), 1e-6)[0]),
        ("activation", kernels.silu_and_mul(torch.cat([x, x], 1))),
    ):
        found[f"rows after those of the {name}"] = kernels._more_rows(result, 277).data_ptr() == result.data_ptr()


def trials() -> None:
    """A product that adds its parts in the opposite order has our bits in most rows, and is not taken for any."""

    def product(x, weight, order: slice) -> torch.Tensor:
        total = torch.zeros(len(x), len(weight))
        for left, right in list(zip(x.double().split(16, 1), weight.double().split(16, 1), strict=True))[order]:
            total += (left @ right.T).float()
        return total

    forwards, backwards = slice(None), slice(None, None, -1)

    def accepted(order: slice) -> frozenset[int]:
        kernels._torch_linear = lambda x, weight, bias, out: out.copy_(product(x, weight, order))
        return kernels.rows_of_torch(256, 512, False, torch.bfloat16, torch.device("cpu"))

    places = set()

    def seconds(product, x, weight, bias, out) -> float:
        places.add(out.untyped_storage().data_ptr())
        return 3.0 if product is kernels._torch_linear and len(x) == 64 else 1.0

    kept = kernels._own_linear, kernels._torch_linear, kernels.MOST_ROWS, kernels._seconds
    kernels._own_linear = lambda x, weight, bias, out: out.copy_(product(x, weight, forwards))
    kernels.MOST_ROWS = 512
    found["numbers of rows with our order"] = {1, 16, 512} < accepted(forwards)
    found["no number with another order"] = not accepted(backwards)
    on_gpu, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    found["no clock of a GPU for the interpreter"] = {1, 16, 512} < accepted(forwards)
    torch.cuda.is_available = on_gpu
    every, kernels._seconds = accepted(forwards), seconds
    found["a number with which torch is slow"] = every - accepted(forwards) == {64}
    found["one memory for all products that are timed"] = len(places) == 1
    kernels._own_linear, kernels._torch_linear, kernels.MOST_ROWS, kernels._seconds = kept


def elementwise() -> None:
    x, weight = torch.randn(9, 3, 96), torch.randn(96)
    found["norm"] = gap(kernels.rms_norm(x, weight, 1e-6)[0], torch.nn.functional.rms_norm(x, (96,), weight, 1e-6))
    branch, residual = torch.randn(9, 3, 96), x.clone()
    residual[0, 0, :2] = branch[0, 0, :2] = torch.tensor([-0.0, 0.0])
    normed, total, scale = kernels.add_and_norm(branch, residual, weight, 1e-6)
    of_sum = kernels.rms_norm(branch + residual, weight, 1e-6)
    results = (total, branch + residual), (normed, of_sum[0]), (scale, of_sum[1])
    found["norm of a sum"] = all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in results)
    gate_and_up = torch.randn(7, 2 * 1500)
    gate, up = gate_and_up.double().chunk(2, -1)
    found["activation"] = gap(kernels.silu_and_mul(gate_and_up), torch.nn.functional.silu(gate) * up)
    parts, positions = torch.randn(5, 2, 4, SIZE), torch.tensor([3, 0, 90, 17, 4])
    of_head = torch.randn(SIZE)
    normed = kernels.head_norm(parts[:, :, 1:], of_head, 1e-6)
    found["norm of heads"] = gap(normed, torch.nn.functional.rms_norm(parts[:, :, 1:], (SIZE,), of_head, 1e-6))
    inv_freq = 10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    table = kernels.rotation_table(inv_freq, 100, 1.0, torch.device("cpu"))
    heads = parts[:, :, :3], parts[:, :, 3:]  # slices: heads of one kind lie between others
    for name, part, turned in zip(("queries", "keys"), heads, kernels.rotate(*heads, positions, table), strict=True):
        pairs = torch.complex(*part.double().chunk(2, -1))
        pairs = pairs * torch.exp(1j * positions[:, None] * inv_freq.double())[:, None, None]
        found[f"rotated {name}"] = gap(turned, torch.cat([pairs.real, pairs.imag], -1).flatten(1, 2))


def log_probs() -> None:
    """Vocabularies of one and of several programs; tokens that may not be sampled have logits of -inf."""
    for columns in (300, 20000):
        logits = 5 * torch.randn(5, columns)
        # Likely tokens where programs begin and end: a sum without one of them, or with one twice, differs.
        edges = torch.tensor(sorted({0, columns - 1, *(n for n in (8191, 8192, 16383, 16384) if n < columns)}))
        logits[:, edges] = 20 + torch.rand(5, len(edges))
        logits[3] += 200  # the largest of another row
        logits[1, : columns // 2] = float("-inf")  # all of a program's
        ids = torch.cat([edges.expand(5, -1), torch.randint(0, columns, (5, 40))], 1)
        ids[1] = columns - 1
        whole = kernels.token_log_probs(logits, ids)
        found[f"log-probabilities of {columns}"] = gap(whole, logits.double().log_softmax(-1).gather(1, ids))
        width = -(-columns // 64) * 64 + 64
        buffer = torch.full((5 * width + 64,), float("nan"))
        first = -buffer.data_ptr() % kernels.ADDRESS // 4
        padded = buffer[first : first + 5 * width].view(5, width)[:, :columns].copy_(logits)
        found[f"rows of {columns} are read where they are"] = kernels._has_whole_rows(padded)
        some = slice(2, 3), slice(1, 5)
        equal = [torch.equal(kernels.token_log_probs(padded[rows], ids[rows, :1]), whole[rows, :1]) for rows in some]
        found[f"log-probabilities of {columns} in other rows"] = all(equal)
        one = padded[:1].expand(5, -1)
        found[f"{columns} columns of one row"] = gap(
            kernels.token_log_probs(one, ids), one.double().log_softmax(-1).gather(1, ids)
        )
        with mock.patch.object(kernels, "ADDRESS", 64):  # torch allocates at multiples of it on a CPU
            found[f"rows of {columns} that are copied"] = all(
                not kernels._has_whole_rows(rows) and torch.equal(kernels.token_log_probs(rows, ids), whole)
                for rows in (rows.copy_(logits) for rows in elsewhere(columns, width))
            )
    found["a token that may not be sampled"] = bool(kernels.token_log_probs(logits, 0 * ids)[1, 0] == float("-inf"))


def elsewhere(columns: int, width: int) -> list[torch.Tensor]:
    """Return rows ``[5, columns]`` that the kernel cannot read where they are.

    In this order they have another width, another address, gaps, and twice an end after the storage's last unit.
    """
    return [
        torch.full((numbers,), float("nan")).as_strided((5, columns), strides, offset)
        for numbers, strides, offset in (
            (5 * columns, (columns, 1), 0),
            (6 * width, (width, 1), 1),
            (10 * width, (2 * width, 2), 0),
            (4 * width + columns, (width, 1), 0),
            (5 * width, (width, 1), 64),
        )
    ]


torch.manual_seed(0)
for question in (attention, parts_of_prompts, long_packs, shared_prompts, products, trials, elementwise, log_probs):
    question()
json.dump(found, sys.stdout)
