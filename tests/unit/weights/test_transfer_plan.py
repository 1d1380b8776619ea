"""The plan of a weight sync, carried out in this process for made-up trainer ranks, against the numbered elements."""

import datetime
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from differing_pairs import wrong_answers
from hypothesis import given
from hypothesis import strategies as st
from interpreted import last_line
from made_up_trainers import LAYOUTS, shards_of, world
from slow import slow_except
from toy_checkpoints import make, toy_args

from megatron_grpo.models.config import params_dtype
from megatron_grpo.rollout.weight_sync import planned
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import model_weights, stream, transfer_plan
from megatron_grpo.weights.transfer_plan import Plan

FAMILIES = ["qwen3, tied", "deepseek_v3", "gpt_oss", "qwen3_5_text", "gemma2, tied"]


def numbered(tensors):
    """Tensors whose elements have numbers of their own."""
    ends = np.cumsum([tensor.shape.numel() for tensor in tensors])
    return [torch.arange(end - t.shape.numel(), end).view(t.shape) for end, t in zip(ends, tensors, strict=True)]


def drawn_needs(tensors, generator):
    """A few boxes of each tensor; of some none."""
    found = []
    for tensor in tensors:
        boxes = []
        for _ in range(generator.integers(0, 3)):
            ends = [sorted(generator.integers(0, size + 1, 2)) for size in tensor.shape]
            boxes.append(tuple((int(a), int(max(a + 1, b))) if a < size else (0, size)
                               for (a, b), size in zip(ends, tensor.shape, strict=True)))  # fmt: skip
        found.append(boxes)
    return found


def nbytes_of(tensor, boxes):
    """The bytes of the parts of a tensor in boxes."""
    return sum(math.prod(b - a for a, b in box) for box in boxes) * tensor.dtype.itemsize


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """The arguments of a family's toy in a layout of the trainer."""
    root = tmp_path_factory.mktemp("families")

    def of(name, layout, layers=4):
        family, _, tied = name.partition(", ")
        path = root / f"{family}_{layers}"
        if not path.exists():
            make(path, family, tied=bool(tied), num_hidden_layers=layers)
        return toy_args(path, tensor_model_parallel_size=layout[0])

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", slow_except(["qwen3, tied", "deepseek_v3"], FAMILIES))
def test_every_engine_rank_receives_what_it_needs_and_nothing_else(family, layout, arguments, monkeypatch):
    args = arguments(family, layout)
    if layout[-1] > 1 and family == "gpt_oss":
        pytest.skip("biased experts have no tensor parallelism")
    monkeypatch.setattr(transfer_plan, "PIECE_BYTES", 1000)
    weights = model_weights.table(args)
    holders = [replace(holder, host=rank // 2) for rank, holder in enumerate(world(args, layout, weights))]
    tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
    generator = np.random.default_rng(1)
    ours, others = (drawn_needs(tensors, generator) for _ in range(2))
    needs, homes = [transfer_plan.whole(tensors)], [None]
    needs += [ours, ours, ours, others]  # of three replicas, and of another rank
    homes += [0, len(holders) // 2, None, len(holders) - 1]
    plan = Plan(weights, tensors, holders, needs, limit=20_000, homes=homes)

    assert [number for part in plan.rounds for number in part.weights] == list(range(len(weights)))
    assert [number for part in plan.rounds for number in part.tensors] == list(range(len(tensors)))
    for part in plan.rounds:
        indivisible = len(part.weights) == 1 or len(part.tensors) == 1
        for boxes in needs:
            assert indivisible or sum(nbytes_of(tensors[number], boxes[number]) for number in part.tensors) <= 20_000
        for number in part.weights:
            numbers = [tensors.index(t) for t in tensors if t.name in weights[number].hf]
            assert all(tensor in part.tensors for tensor in numbers)

    whole = numbered(tensors)
    by_name = dict(zip((tensor.name for tensor in tensors), whole, strict=True))
    shards = [shards_of(weights, holder, by_name) for holder in holders]

    def distance(home, rank):  # an engine reads its own device before its host, and this before others
        return 0 if home in (None, rank) else 1 + (holders[home].host != holders[rank].host)

    for engine, boxes in enumerate(needs):
        received = [torch.full_like(tensor, -1) for tensor in whole]
        nbytes = 0
        for sender, piece in plan.pieces(engine):
            shard = shards[sender][weights[piece.weight].name]
            part = (shard.mT if weights[piece.weight].transposed else shard)[piece.spot]
            assert part.shape == piece.shape and part.numel() * tensors[piece.tensor].dtype.itemsize == piece.nbytes
            assert piece.nbytes <= 1000 or piece.shape[0] == 1 or sender == homes[engine]
            received[piece.tensor][piece.place] = part
            nbytes += piece.nbytes
        for tensor, numbers, of_tensor in zip(received, whole, boxes, strict=True):
            needed = torch.zeros_like(tensor, dtype=torch.bool)
            for box in of_tensor:
                needed[tuple(slice(*bounds) for bounds in box)] = True
            assert torch.equal(tensor, numbers.where(needed, -1))
        assert nbytes == sum(map(nbytes_of, tensors, boxes))
        for rank, name in {(sender, weights[piece.weight].name) for sender, piece in plan.pieces(engine)}:
            of_stage = [
                n for n, other in enumerate(holders) if other.stage == holders[rank].stage and name in shards[n]
            ]
            alike = [n for n in of_stage if torch.equal(shards[n][name], shards[rank][name])]
            assert distance(homes[engine], rank) == min(distance(homes[engine], n) for n in alike)
        for rank in range(len(holders)):  # a trainer makes its part alone
            mine = [(sender, piece) for sender, piece in plan.pieces(engine) if sender == rank]
            assert plan.pieces(engine, rank) == mine


@pytest.mark.parametrize("engines", [1, 3, 8])
def test_replicas_share_the_load(engines, arguments, monkeypatch):
    """Up to any weight of a dense model all ranks send the same bytes, but for a piece a group and engine rank."""
    monkeypatch.setattr(transfer_plan, "PIECE_BYTES", 100)
    layout = (2, 1, 8, 1, 1)
    args = arguments("qwen3, tied", layout)
    weights = model_weights.table(args)
    tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
    needs = [transfer_plan.whole(tensors)] * engines
    plan = Plan(weights, tensors, world(args, layout, weights), needs)
    sent = np.zeros(16)
    largest = max(piece.nbytes for _, piece in plan.pieces(0))
    for engine in range(engines):
        for _, pieces in groupby(plan.pieces(engine), key=lambda found: found[1].weight):
            for sender, piece in pieces:
                sent[sender] += piece.nbytes
            assert sent.max() - sent.min() <= 4 * (engine + 1) * largest
    mean = engines * sum(tensor.nbytes for tensor in tensors) / 16
    assert sent.sum() == 16 * mean
    assert sent.max() < 1.2 * mean


def test_a_round_has_experts_of_all_ranks(arguments):
    """Experts in the table's order would be sent by one expert-parallel rank after the other."""
    layout = (1, 1, 2, 2, 1)
    args = replaced(arguments("qwen3_moe", layout), expert_model_parallel_size=2)
    plain, mixed = model_weights.table(args), planned.table(args, "weights")
    assert sorted(weight.name for weight in mixed) == sorted(weight.name for weight in plain)
    (key, *_), size = filter(None, map(stream._expert_group_key, mixed)), args.num_experts // 2
    experts = [weight.expert for weight in mixed if stream._expert_group_key(weight) == key]
    assert experts == [number for pair in zip(range(size), range(size, 2 * size), strict=True) for number in pair]

    def rounds(table):
        tensors = transfer_plan.hf_tensors(table, params_dtype(args))
        needs = [transfer_plan.whole(tensors)] * 8
        return len(Plan(table, tensors, world(args, layout, table), needs, limit=400_000).rounds)

    assert rounds(mixed) < rounds(plain)


def test_a_weight_above_the_limit_is_sent_beside_that_of_another_holder(arguments):
    """With many engines a holder sends more than the limit of one expert; the others would wait for it."""
    layout = (1, 1, 2, 2, 1)
    args = replaced(arguments("qwen3_moe", layout), expert_model_parallel_size=2)
    table = planned.table(args, "weights")
    tensors = transfer_plan.hf_tensors(table, params_dtype(args))
    expert = max(tensor.nbytes for tensor in tensors if ".experts." in tensor.name)
    needs = [transfer_plan.whole(tensors)] * 8  # the holder of gate and up of an expert sends 16
    rounds = Plan(table, tensors, world(args, layout, table), needs, limit=4 * expert).rounds
    experts = [[table[number].expert for number in part.weights if table[number].expert is not None] for part in rounds]
    pairs = [numbers for numbers in experts if len(numbers) == 2]
    assert 2 * len(pairs) > 0.8 * sum(map(len, experts))
    assert all({number * 2 // args.num_experts for number in pair} == {0, 1} for pair in pairs)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_trainer_reads_few_shards_at_a_time_for_an_engine_of_many_ranks(tp, arguments):
    """Shards that are merged with an adapter, or stored in 8 bits, are copies: of a whole round."""
    layout, ranks, limit = (tp, 1, 1, 1, 1), 16, 20_000
    args = arguments("qwen3, tied", layout)
    weights = model_weights.table(args)
    tensors, holders = transfer_plan.hf_tensors(weights, params_dtype(args)), world(args, layout, weights)

    def rows(tensor, rank):
        first, *others = tensor.shape
        return (first * rank // ranks, first * (rank + 1) // ranks), *((0, size) for size in others)

    needs = [[[rows(tensor, rank)] for tensor in tensors] for rank in range(ranks)]
    rounds = Plan(weights, tensors, holders * 8, needs, limit=limit).rounds
    itemsize = params_dtype(args).itemsize
    of_rounds = [[math.prod(weights[n].shard_shape(tp)) * itemsize for n in part.weights] for part in rounds]
    assert all(sum(nbytes) <= transfer_plan.SHARDS * limit or len(nbytes) == 1 for nbytes in of_rounds)
    assert max(map(sum, of_rounds)) > 2 * limit and len(rounds) < sum(map(len, of_rounds)) / 2


@pytest.mark.parametrize(("stages", "chunks", "replicas"), [(2, 1, 2), (3, 1, 3), (3, 1, 7), (3, 1, 2), (2, 2, 4)])
def test_a_stage_sends_one_round_at_a_time(stages, chunks, replicas, arguments):
    """Replicas in the same order would receive from one stage; those in other rounds of a stage wait for its ranks.

    No order has fewer steps: each replica has all rounds, and each stage sends its own to replicas in turn. Three
    stages of four layers are uneven; of two chunks of layers a stage, the second follows those of other stages.
    """
    layout = (1, stages * chunks, 1, 1, 1)
    args = arguments("qwen3, tied", layout)
    weights = model_weights.table(args)
    tensors, parts = transfer_plan.hf_tensors(weights, params_dtype(args)), world(args, layout, weights)
    holders = [
        replace(parts[stage], held=np.any([part.held for part in parts[stage::stages]], 0)) for stage in range(stages)
    ]
    needs = [transfer_plan.whole(tensors)] * (2 * replicas)
    plan = Plan(weights, tensors, holders, needs, limit=20_000, width=2)
    stage_of = [min(stage for stage, holder in enumerate(holders) if holder.held[n]) for n in range(len(weights))]
    of_rounds = [{stage_of[number] for number in part.weights} for part in plan.rounds]
    assert all(len(of_round) <= 1 for of_round in of_rounds)
    steps, turns = range(len(plan.rounds)), min(stages, replicas)
    each = [of_rounds.count({stage}) for stage in range(stages)]
    assert min(each) > 4 and len(steps) == max(sum(each), turns * max(each))
    for engine in range(2 * replicas):
        rounds = [plan.round_of_step(engine, step) for step in steps]
        assert sorted(rounds) == list(steps)
        assert rounds == [plan.round_of_step(engine - engine % 2, step) for step in steps]  # of a replica
    for step in steps:
        now = [plan.round_of_step(2 * replica, step) for replica in range(replicas)]
        assert max(map(now.count, now)) == -(-replicas // turns)
        busy = [stage for number in set(now) for stage in of_rounds[number]]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("sender", [0, 1])
def test_replicas_wait_for_no_stage_that_has_no_weights(sender, arguments):
    """All ranks have an adapter, and stage 0 sends it. A vision tower is on one stage; it can be all that is trained.

    Each replica can have the same round then. In turns they would take three times as many steps.
    """
    args = arguments("qwen3, tied", (1, 1, 1, 1, 1))
    weights = model_weights.table(args)
    tensors, (holder,) = transfer_plan.hf_tensors(weights, params_dtype(args)), world(args, (1, 1, 1, 1, 1), weights)
    holders = [replace(holder, held=holder.held & (stage >= sender), stage=stage) for stage in range(3)]
    needs = [transfer_plan.whole(tensors)] * 3
    plan = Plan(weights, tensors, [part for part in holders for _ in range(4)], needs, limit=20_000)
    assert len(plan.rounds) > 4 and all(part.weights for part in plan.rounds)
    assert all(plan.round_of_step(engine, step) == step for engine in range(3) for step in range(len(plan.rounds)))
    senders = {rank for engine in range(3) for rank, _ in plan.pieces(engine)}
    assert senders == set(range(4 * sender, 4 * sender + 4))


@pytest.mark.parametrize("replicas", [1, 3, 6, 12])
def test_seconds_of_a_sync_are_near_the_floor(replicas, arguments, monkeypatch):
    """A step takes as long as its busiest rank. No plan is faster than an engine rank, or a stage, at its full rate."""
    monkeypatch.setattr(transfer_plan, "PIECE_BYTES", 2000)
    stages, replicated, ranks = 3, 8, 4
    layout = (1, stages, replicated, 4, 1)
    args = replaced(arguments("qwen3_moe", layout, layers=13), expert_model_parallel_size=4)
    weights = planned.table(args, "weights")
    tensors, holders = transfer_plan.hf_tensors(weights, params_dtype(args)), world(args, layout, weights)

    def part_of(tensor, rank):
        if ".experts." in tensor.name:  # as vLLM: consecutive experts
            mine = int(tensor.name.split(".")[5]) * ranks // args.num_experts == rank
            return [tuple((0, size) for size in tensor.shape)] if mine else []
        first, *others = tensor.shape
        return [((first * rank // ranks, first * (rank + 1) // ranks), *((0, size) for size in others))]

    needs = [[part_of(tensor, rank) for tensor in tensors] for rank in range(ranks)]
    plan = Plan(weights, tensors, holders, needs * replicas, limit=20_000, width=ranks)
    sent, received = (np.zeros((len(plan.rounds), count)) for count in (len(holders), ranks * replicas))
    for engine in range(ranks * replicas):
        rounds = [plan.rounds[plan.round_of_step(engine, step)] for step in range(len(plan.rounds))]
        step_of = {number: step for step, part in enumerate(rounds) for number in part.weights}
        for sender, piece in plan.pieces(engine):
            sent[step_of[piece.weight], sender] += piece.nbytes
            received[step_of[piece.weight], engine] += piece.nbytes
    of_stage = np.zeros(stages)
    for weight, held in zip(weights, np.stack([holder.held for holder in holders], 1), strict=True):
        stage = min(holders[rank].stage for rank in np.flatnonzero(held))
        of_stage[stage] += sum(tensor.nbytes for tensor in tensors if tensor.name in weight.hf)
    of_ranks = [sum(map(nbytes_of, tensors, own)) for own in needs]
    floor = max(*of_ranks, of_stage.max() * replicas / replicated)
    assert np.maximum(sent.max(1), received.max(1)).sum() < 1.4 * floor
    assert sent.sum(0).max() < 2 * sent.sum(0).mean()
    # A round that a holder fills with parts of one weight cannot be smaller: an expert has two holders.
    experts = [weight for weight in weights if weight.expert is not None]
    largest = max(sum(math.prod(shape) for shape in weight.hf.values()) for weight in experts)
    share = largest * params_dtype(args).itemsize * math.ceil(replicas / stages) / 2
    assert received.max() <= 20_000 and sent.max() < 1.4 * max(20_000, share)


def test_replicas_send_their_needs_once(arguments, monkeypatch):
    """Those of a thousand engine ranks would be gigabytes on every rank, and making them one by one minutes."""
    args = arguments("qwen3, tied", LAYOUTS[0])
    tensors = transfer_plan.hf_tensors(model_weights.table(args), params_dtype(args))
    kinds = [drawn_needs(tensors, np.random.default_rng(seed)) for seed in range(2)]
    axes = max(len(tensor.shape) for tensor in tensors)
    rows = [transfer_plan.to_rows(kind, axes).nbytes for kind in kinds]
    places = [0, 1, 0, 0, 1]  # kind of each engine rank, whose numbers follow those of three trainers
    sent, concatenated = {}, planned.concatenated

    def counted(arrays, group):
        sent.setdefault(group.rank(), []).append(sum(array.nbytes for array in arrays))
        return concatenated(arrays, group)

    monkeypatch.setattr(planned, "concatenated", counted)
    store = dist.HashStore()

    def of_rank(rank):
        group = dist.ProcessGroupGloo(store, rank, 8, datetime.timedelta(seconds=60))
        needs, ranks = planned._needs_of_all(None if rank < 3 else kinds[places[rank - 3]], tensors, group)
        assert ranks == [3, 4, 5, 6, 7]
        return needs

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(of_rank, range(8)))
    for needs in found:
        assert needs == [kinds[kind] for kind in places] and len(set(map(id, needs))) == 2
    digests = [0 if rank < 3 else 32 for rank in range(8)]
    assert [sent[rank] for rank in range(8)] == [
        [digest, rows[rank - 3] if rank in (3, 4) else 0] for rank, digest in enumerate(digests)
    ]


def test_a_weight_that_no_rank_holds_is_named(arguments):
    args = arguments("qwen3, tied", LAYOUTS[0])
    table = model_weights.table(args)
    (holder,) = world(args, LAYOUTS[0], table)
    holder.held[3] = False
    tensors = transfer_plan.hf_tensors(table, params_dtype(args))
    needs = [transfer_plan.whole(tensors)]
    with pytest.raises(GrpoError, match=f"no parameter {table[3].name}"):
        assert Plan(table, tensors, [holder], needs).rounds


def test_needs_survive_their_message(arguments):
    args = arguments("deepseek_v3", LAYOUTS[0])
    tensors = transfer_plan.hf_tensors(model_weights.table(args), params_dtype(args))
    needs = drawn_needs(tensors, np.random.default_rng(2))
    assert transfer_plan.from_rows(transfer_plan.to_rows(needs, axes=3), tensors) == needs


def test_one_other_bit_is_found():
    assert wrong_answers(planned.differing, "cpu") == []


def test_kernels_of_the_weight_sync_give_the_answers_of_torch():
    assert last_line(Path(__file__).with_name("sync_kernels_worker.py")) == "yes"


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 2**32), st.data())
def test_checksums_are_the_sums_of_the_definition(sizes, seed, data):
    """Sums by Python's integers modulo 2^64; a changed bit changes both sums of its piece alone, signs change one."""
    width = planned.ROW_BYTES // 8
    words = np.random.default_rng(seed).integers(-(2**63), 2**63, (sum(sizes) + 1, width), dtype=np.int64)
    ends = np.cumsum([1, *sizes])  # the first row belongs to no piece
    rows = torch.from_numpy(np.stack([ends[:-1], ends[1:]]))

    def found():
        return planned.checksums(torch.from_numpy(words.view(np.uint8).reshape(-1)), rows)

    def wanted(first, end):
        own = [[word ^ (word >> 33 & 2**31 - 1) for word in row] for row in words[first:end].tolist()]
        sums = [
            sum(word * factor(r, c) for r, row in enumerate(own) for c, word in enumerate(row))
            for factor in (lambda r, c: 2 * r + 1, lambda r, c: 2 * c + 1)
        ]
        return [(one + 2**63) % 2**64 - 2**63 for one in sums]

    before = found()
    assert before.tolist() == [wanted(*pair) for pair in pairwise(ends.tolist())]
    piece = data.draw(st.integers(0, len(sizes) - 1))
    row, column = data.draw(st.integers(ends[piece], ends[piece + 1] - 1)), data.draw(st.integers(0, width - 1))
    words[row, column] ^= np.int64(1) << data.draw(st.integers(0, 62))
    changed = found() != before
    assert changed[piece].all() and changed.sum() == 2
    # The signs of one or two numbers of 32 bits, of four of 16 bits, and of every second one: in two words.
    for bits in (63,), (63, 31), (63, 47, 31, 15), (47, 15):
        before = found()
        for place in {column, (column + 1) % width}:
            words[row, place] ^= np.array(sum(1 << bit for bit in bits), np.uint64).view(np.int64)
        assert (found() != before).any(1).tolist() == [number == piece for number in range(len(sizes))]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=12))
def test_pieces_that_are_one_copy_fill_the_same_bytes(given):
    """Rows of two shards; those that follow each other in the shard and in the buffer are copied together."""
    shards = [torch.arange(number, number + 8 * 512.0).view(8, 512) for number in (0, 5000)]
    pieces, places, begin = [], [], 0
    for tensor, (weight, first, rows) in enumerate(given):
        spot, shape = (slice(first, first + rows), slice(0, 512)), (rows, 512)
        pieces.append(transfer_plan.Piece(weight, tensor, spot, spot, shape, rows * 2048))
        places.append((torch.float32, shape, (512, 1), begin))
        begin += rows * 512
    layout = planned._Layout(pieces, places, torch.empty(2, 0), [], {0: begin * 4}, [], passing=True)
    buffers = []
    for of in (layout, planned._joined(layout)):
        packed = planned._Space("cpu").packed(of)
        for piece, part in zip(packed.pieces, packed.parts, strict=True):
            part.copy_(shards[piece.weight][piece.spot])
        buffers.append(packed.whole)
    assert torch.equal(*buffers)
    follow = [a[0] == b[0] and a[1] + a[2] == b[1] for a, b in pairwise(given)]
    assert len(packed.pieces) == len(given) - sum(follow)
