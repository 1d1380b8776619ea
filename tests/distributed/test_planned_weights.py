"""Weights by the plan, from trainer ranks of any layout to vLLM's models of any tensor-parallel size, bit for bit.

Ranks are threads that exchange bytes with gloo. vLLM's loaders are traced, and then load what was received into a model
of zeros, which must equal one that has loaded the whole tensors. Elements that were not received are NaN.
"""

import contextlib
import datetime
import functools
import threading

import pytest
import torch
import torch.distributed as dist
from made_up_trainers import LAYOUTS, shards_of, world
from slow import slow_except
from test_stream import SIZES
from toy_checkpoints import HYBRID, make, tensors_of, toy_args

from megatron_grpo.models.config import params_dtype
from megatron_grpo.rollout.vllm import loading_shapes
from megatron_grpo.rollout.vllm.loader_trace import trace
from megatron_grpo.rollout.weight_sync import planned
from megatron_grpo.rollout.weight_sync.planned import Links, Transfer
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import model_weights, transfer_plan
from megatron_grpo.weights.transfer_plan import Plan, Reads
from tools.made_up_engine import model_of_rank

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]
EXPERT_PARALLEL = {"enable_expert_parallel": True}
# (family, tensor-parallel size of the engine, options of vLLM)
ENGINES = [
    *(
        (family, size, {})
        for family in ("qwen3, tied", "qwen3", "gemma2, tied", "phi3", "nemotron_h")
        for size in (1, 2)
    ),
    *((family, size, {}) for family in ("qwen3_moe", "deepseek_v3", "glm4_moe", "gemma4_moe") for size in (1, 2)),
    *((family, 2, {}) for family in ("glm4_moe_lite", "minimax_m2", "gemma4_text")),
    *((family, size, {"dtype": "bfloat16"}) for family in HYBRID for size in (1, 2)),
    ("gpt_oss", 1, {}),
    ("qwen3_moe", 2, EXPERT_PARALLEL),
    ("qwen3_moe", 4, EXPERT_PARALLEL),
]
CASES = [(*engine, layout) for engine in ENGINES for layout in LAYOUTS]
FEW = [
    ("qwen3, tied", 2, {}, LAYOUTS[1]),
    ("deepseek_v3", 2, {}, LAYOUTS[4]),
    ("qwen3_moe", 2, EXPERT_PARALLEL, LAYOUTS[2]),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The directory of a family's toy with the sizes that vLLM has on a CPU."""
    root = tmp_path_factory.mktemp("toys")

    def of(name):
        family, _, tied = name.partition(", ")
        if not (root / name).exists():
            sizes = {"num_hidden_layers": 4, **SIZES.get(family, {"head_dim": 32})}
            make(root / name, family, tied=bool(tied), **sizes)
        return root / name

    return of


@pytest.fixture
def unfilled_is_nan():
    """Give new tensors NaN in place of whatever the memory has."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def engines(directory):
    """What the ranks of an engine read, and its parameters after a load of the whole tensors."""

    @functools.cache
    def of(family, size, options):
        options = dict(options)
        args = toy_args(directory(family), tensor_model_parallel_size=1)
        tensors = transfer_plan.hf_tensors(model_weights.table(args), params_dtype(args))
        needs, expected = [], []
        for rank in range(size):
            with model_of_rank(directory(family), rank, size, **options) as model:
                needs.append(trace(model, tensors).needs)
                expected.append(loaded(model, tensors_of(directory(family)).items()))
        return needs, expected

    return lambda family, size, options: of(family, size, tuple(options.items()))


@pytest.mark.parametrize(("family", "size", "options", "layout"), slow_except(FEW, CASES))
def test_an_engine_filled_by_the_plan_is_one_that_has_loaded_whole_tensors(
    family, size, options, layout, directory, engines, unfilled_is_nan
):
    if family == "gpt_oss" and layout[4] > 1:
        pytest.skip("biased experts have no tensor parallelism of their own")
    args = toy_args(directory(family), tensor_model_parallel_size=layout[0])
    weights, whole = model_weights.table(args), tensors_of(directory(family))
    tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
    assert {tensor.name for tensor in tensors} == set(whole)
    needs, expected = engines(family, size, options)
    reads = [Reads.of_loaders(of_rank) for of_rank in needs]

    received, sent, differences = run(args, world(args, layout, weights), weights, whole, reads, width=size)
    assert not differences
    assert all(sent)  # each holds a part that only its replicas have, and these share the load
    for rank in range(size):
        with model_of_rank(directory(family), rank, size, **options) as model:
            found = loaded(model, received[rank].items())
        assert not any(tensor.isnan().any() for tensor in expected[rank].values())
        assert differing(expected[rank], found) == set()
        if size > 1:  # norms, routers and latent projections are on every rank
            elements = sum(int((~tensor.isnan()).sum()) for tensor in received[rank].values())
            assert elements < (0.4 if size == 4 else 0.6) * sum(tensor.numel() for tensor in whole.values())


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
@pytest.mark.parametrize(("family", "size", "options", "layout"), slow_except(FEW, CASES))
def test_parts_go_straight_into_the_parameters(
    family, size, options, layout, colocated, directory, engines, unfilled_is_nan, monkeypatch
):
    """Colocated: of each trainer rank an engine rank, in replicas. What the loaders compute, they are given."""
    if family == "gpt_oss" and layout[4] > 1:
        pytest.skip("biased experts have no tensor parallelism of their own")
    args = toy_args(directory(family), tensor_model_parallel_size=layout[0])
    weights, whole = model_weights.table(args), tensors_of(directory(family))
    tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
    monkeypatch.setattr(
        loading_shapes, "_unpacked_experts", lambda layer, parameter, like: parameter
    )  # it is not packed
    monkeypatch.setattr(planned, "Plan", functools.partial(Plan, limit=100_000))  # replicas are in different rounds
    options = {**options, "dtype": "float32"}  # the trainer's
    holders, expected = world(args, layout, weights), engines(family, size, options)[1]
    if colocated and len(holders) % size:
        pytest.skip("the replicas of an engine have all ranks")
    count = len(holders) if colocated else size
    with contextlib.ExitStack() as stack:
        models, reads = [], []
        for rank in range(count):
            models.append(stack.enter_context(model_of_rank(directory(family), rank % size, size, **options)))
            zero(models[-1])
            reads.append(trace(models[-1], tensors, in_place=True))
        received, _, differences = run(args, holders, weights, whole, reads, colocated, size)
        assert not differences
        for rank in range(count):
            assert received[rank].keys() == {t.name for t, to in zip(tensors, reads[rank].targets) if to is None}
            computed = ("A_log", "conv1d", "experts") if family in ("gpt_oss", *HYBRID) else ("A_log", "conv1d")
            assert all(any(part in name for part in computed) for name in received[rank]), received[rank].keys()
            if received[rank]:
                with model_of_rank(directory(family), rank % size, size, **options):  # the loaders' rank
                    models[rank].load_weights(iter(received[rank].items()))
            assert differing(expected[rank % size], state_of(models[rank])) == set()


def test_replicas_wait_where_another_one_receives_from_the_stage(directory, monkeypatch):
    """Three stages of four layers are uneven: a replica has steps without a round."""
    layout, replicas, limit = (1, 3, 2, 1, 1), 4, 50_000
    args = toy_args(directory("qwen3"), tensor_model_parallel_size=1)
    weights, whole = model_weights.table(args), tensors_of(directory("qwen3"))
    tensors, holders = transfer_plan.hf_tensors(weights, params_dtype(args)), world(args, layout, weights)
    needs = [transfer_plan.whole(tensors)] * replicas
    rounds = Plan(weights, tensors, holders, needs, limit=limit).rounds
    assert any(part.weights for part in rounds) and not all(part.weights for part in rounds)
    monkeypatch.setattr(planned, "Plan", functools.partial(Plan, limit=limit))
    received, sent, differences = run(args, holders, weights, whole, list(map(Reads.of_loaders, needs)))
    assert all(sent) and not differences
    for found in received:
        assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def flip(target):
    """A bit, as on the way or in the memory."""
    target[0, 0].neg_()


def swap(target):
    """Two rows: all bytes are there."""
    assert not torch.equal(target[1], target[3])
    target[[1, 3]] = target[[3, 1]]


@pytest.mark.parametrize("fault", [flip, swap])
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1]])
@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
def test_a_fault_of_the_transfer_names_its_tensor(fault, layout, colocated, directory, monkeypatch):
    args = toy_args(directory("qwen3"), tensor_model_parallel_size=layout[0])
    weights, whole = model_weights.table(args), tensors_of(directory("qwen3"))
    tensors, spoilt = transfer_plan.hf_tensors(weights, params_dtype(args)), []
    check, compare = Transfer._check, Transfer._compare

    def spoil_one(transfer, pieces):
        for piece in pieces:
            (target,) = transfer._targets[id(piece)]
            if not spoilt and target.ndim == 2 and len(target) > 3:
                spoilt.append(tensors[piece.tensor].name)
                fault(target)

    def check_with_fault(transfer, packed, expected):
        spoil_one(transfer, packed.pieces)
        check(transfer, packed, expected)

    def compare_with_fault(transfer, pieces, *both):
        spoil_one(transfer, pieces)
        compare(transfer, pieces, *both)

    monkeypatch.setattr(Transfer, "_check", check_with_fault)
    monkeypatch.setattr(Transfer, "_compare", compare_with_fault)
    holders = world(args, layout, weights)
    with contextlib.ExitStack() as stack:
        reads = []
        for _ in holders if colocated else range(1):
            model = stack.enter_context(model_of_rank(directory("qwen3"), 0, 1, dtype="float32"))
            reads.append(trace(model, tensors, in_place=True))
        assert run(args, holders, weights, whole, reads, colocated)[2] == set(spoilt) != set()


PLACES = {"for the loaders": (0, None), "straight": (1, 0), "first of two": (2, 0), "second of two": (2, 1)}


@pytest.mark.parametrize(("copies", "place"), PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
def test_one_wrong_element_is_found_in_every_place(copies, place, colocated, directory, monkeypatch):
    """The last element of a piece that does not fill its row, in a parameter, in one of two, or before the loaders."""
    args = toy_args(directory("qwen3"), tensor_model_parallel_size=LAYOUTS[1][0])
    weights, whole = model_weights.table(args), tensors_of(directory("qwen3"))
    tensors, spoilt = transfer_plan.hf_tensors(weights, params_dtype(args)), []
    check, compare = Transfer._check, Transfer._compare

    def compare_with_fault(transfer, pieces, targets, parts):
        if not spoilt:
            spoilt.append(tensors[pieces[place].tensor].name)  # the first piece has the first places
            targets[place][(-1,) * targets[place].ndim] += 1
        compare(transfer, pieces, targets, parts)

    def check_with_fault(transfer, packed, expected):
        for piece, part in zip(packed.pieces, packed.parts, strict=True):
            if not spoilt and piece.nbytes % planned.ROW_BYTES:
                spoilt.append(tensors[piece.tensor].name)
                given = part if place is None else transfer._targets[id(piece)][place]
                given[(-1,) * given.ndim] += 1
        check(transfer, packed, expected)

    monkeypatch.setattr(Transfer, "_check", check_with_fault)
    monkeypatch.setattr(Transfer, "_compare", compare_with_fault)
    needs = transfer_plan.whole(tensors)
    holders, reads = world(args, LAYOUTS[1], weights), []
    for _ in holders if colocated else range(1):
        targets = [{box: [torch.zeros(t.shape) for _ in range(copies)]} for t, (box,) in zip(tensors, needs)]
        reads.append(Reads(needs, targets if copies else [None] * len(tensors)))
    assert run(args, holders, weights, whole, reads, colocated)[2] == set(spoilt) != set()


class Losing(dist.ProcessGroupGloo):
    """A group whose exchange number ``lost`` leaves what it receives where it is."""

    lost = 0

    def alltoall_base(self, received, *others):
        self.exchanges = getattr(self, "exchanges", 0) + 1
        self.elsewhere = torch.empty_like(received) if self.exchanges == self.lost else received
        return super().alltoall_base(self.elsewhere, *others)


@pytest.mark.parametrize("straight", [False, True], ids=["for the loaders", "straight"])
def test_a_round_that_does_not_arrive_is_found(straight, directory, monkeypatch):
    """The buffer then has zeros, or a round before with its checksums: the layers' rounds are alike."""
    args = toy_args(directory("qwen3"), tensor_model_parallel_size=1)
    weights, whole = model_weights.table(args), tensors_of(directory("qwen3"))
    tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
    of_layer = sum(tensor.nbytes for tensor in tensors if ".layers.1." in tensor.name)
    monkeypatch.setattr(planned, "Plan", functools.partial(Plan, limit=of_layer))
    monkeypatch.setattr(dist, "ProcessGroupGloo", Losing)
    holders, needs = world(args, LAYOUTS[0], weights), transfer_plan.whole(tensors)
    rounds = planned.Plan(weights, tensors, holders, [needs]).rounds
    assert len({len(part.tensors) for part in rounds}) < len(rounds) > 4
    for number, part in enumerate(rounds, start=1):
        monkeypatch.setattr(Losing, "lost", number)
        targets = [{box: [torch.zeros(t.shape)]} for t, (box,) in zip(tensors, needs, strict=True)]
        reads = Reads(needs, targets if straight else [None] * len(tensors))
        lost = {tensors[place].name for place in part.tensors}
        assert run(args, holders, weights, whole, [reads])[2] == lost


def run(args, holders, weights, whole, reads, colocated=False, width=1):
    """What the loaders of each engine rank receive, {name: tensor} each, whether each trainer has sent anything, and
    the names of tensors with other bytes.
    """
    store, trainers = dist.HashStore(), len(holders)
    size = max(trainers, len(reads)) if colocated else trainers + len(reads)
    found, sent = [None] * len(reads), [False] * len(holders)
    errors, differences = [], set()

    def rank_runs(rank):
        try:
            timeout = datetime.timedelta(seconds=60)
            groups = [dist.ProcessGroupGloo(dist.PrefixStore(n, store), rank, size, timeout) for n in ("one", "two")]
            engine = rank if colocated else rank - trainers
            holder = holders[rank] if rank < trainers else None
            read = (lambda tensors: reads[engine]) if engine >= 0 else None
            transfer = Transfer(
                replaced(args, vllm_tensor_parallel_size=width), Links(*groups, "cpu"), weights, holder, read
            )
            for _ in range(2):  # the plan is used again
                local = shards_of(weights, holder, whole) if holder is not None else None
                given = dict(transfer.run(local))  # as vLLM keeps a layer's tensors until all are there
                differences.update(transfer.differences)
                if rank < trainers:
                    sent[rank] = any(traffic.sent for traffic in transfer._traffic)
                if engine >= 0:
                    found[engine] = given
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return found, sent, differences


def state_of(model):
    """The parameters and buffers of a model."""
    return dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if b.is_floating_point()}


def zero(model):
    """Make a model one of zeros."""
    for name, tensor in state_of(model).items():
        if "rotary" not in name:
            tensor.zero_()


def differing(expected, found):
    return {name for name in expected if not same(expected[name], found[name])}


def loaded(model, weights):
    """The parameters and buffers of a model of zeros that has loaded these weights."""
    zero(model)
    model.load_weights(iter(list(weights)))
    return {name: tensor.clone() for name, tensor in state_of(model).items()}


def same(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
