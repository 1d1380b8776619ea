"""Weights by the plan, from trainer ranks of any layout to vLLM's models of any tensor-parallel size, bit for bit.

Ranks are threads that exchange bytes with gloo. vLLM's loaders are traced, and then load what was received into a model
of zeros, which must equal one that has loaded the whole tensors. Elements that were not received are NaN.
"""

import datetime
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from made_up_trainers import LAYOUTS, shards_of, world
from slow import slow_except
from test_stream import SIZES
from toy_checkpoints import HYBRID, make, tensors_of, toy_args

from megatron_grpo.models.config import params_dtype
from megatron_grpo.rollout.stream.weights import Transfer
from megatron_grpo.rollout.vllm.loader_trace import trace
from megatron_grpo.weights import model_weights, transfer_plan
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


@pytest.mark.parametrize(("family", "size", "options", "layout"), slow_except(FEW, CASES))
def test_an_engine_filled_by_the_plan_is_one_that_has_loaded_whole_tensors(
    family, size, options, layout, directory, unfilled_is_nan
):
    if family == "gpt_oss" and layout[4] > 1:
        pytest.skip("biased experts have no tensor parallelism of their own")
    args = toy_args(directory(family), tensor_model_parallel_size=layout[0])
    weights, whole = model_weights.table(args), tensors_of(directory(family))
    tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
    assert {tensor.name for tensor in tensors} == set(whole)
    needs = []
    for rank in range(size):
        with model_of_rank(directory(family), rank, size, **options) as model:
            needs.append(trace(model, tensors))

    received, sent = run(args, world(args, layout, weights), weights, whole, needs)
    assert all(sent)  # each holds a part that only its replicas have, and these share the load
    for rank in range(size):
        with model_of_rank(directory(family), rank, size, **options) as model:
            expected = loaded(model, whole.items())
        with model_of_rank(directory(family), rank, size, **options) as model:
            found = loaded(model, received[rank].items())
        assert not any(tensor.isnan().any() for tensor in expected.values())
        assert {name for name in expected if not same(expected[name], found[name])} == set()
        if size > 1:  # norms, routers and latent projections are on every rank
            elements = sum(int((~tensor.isnan()).sum()) for tensor in received[rank].values())
            assert elements < (0.4 if size == 4 else 0.6) * sum(tensor.numel() for tensor in whole.values())


def run(args, holders, weights, whole, needs):
    """What each engine rank receives, {name: tensor} each, and whether each trainer rank has sent anything."""
    store, size = dist.HashStore(), len(holders) + len(needs)
    found, sent = [None] * len(needs), [False] * len(holders)
    errors = []

    def rank_runs(rank):
        try:
            timeout = datetime.timedelta(seconds=60)
            groups = [dist.ProcessGroupGloo(dist.PrefixStore(n, store), rank, size, timeout) for n in ("one", "two")]
            joint = SimpleNamespace(rank=rank, trainers=len(holders), group=groups[0], weights=groups[1])
            engine = rank - len(holders)
            transfer = Transfer(args, joint, weights, holders[rank] if engine < 0 else needs[engine])
            for _ in range(2):  # the plan is used again
                if engine < 0:
                    sent[rank] = any(traffic.pieces for traffic in transfer._traffic)
                    transfer.send(shards_of(weights, holders[rank], whole))
                else:
                    found[engine] = {name: tensor.clone() for name, tensor in transfer.receive()}
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return found, sent


def loaded(model, weights):
    """The parameters and buffers of a model of zeros that has loaded these weights."""
    state = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    fixed = {name for name, tensor in state.items() if "rotary" in name}
    for name, tensor in state.items():
        if name not in fixed:
            tensor.zero_()
    model.load_weights(iter(list(weights)))
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
