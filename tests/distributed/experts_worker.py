"""GroupedExperts beside megatron-core's SequentialMLP: what test_experts.py uses, and test_experts_layouts.py runs.

torchrun --nproc-per-node 2 tests/distributed/experts_worker.py DIRECTORY [--every-pair]
python tests/distributed/experts_worker.py --cuda        # milliseconds on a GPU, in bfloat16
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default

from megatron_grpo.checkpointing import checkpoint, checkpoint_directory
from megatron_grpo.models.experts import ExpertRowParallelLinear, GroupedExperts
from megatron_grpo.models.norm import RMSNorm
from megatron_grpo.parallel import initialize
from megatron_grpo.parallel.initialize import destroy_rank_groups, set_random_seed
from megatron_grpo.training import fused_adam

EXPERTS, HIDDEN, FFN = 4, 16, 32
KINDS = (SequentialMLP, GroupedExperts)


# gpt-oss's experts, with a limit that many of the numbers here exceed
GPT_OSS = {
    "add_bias_linear": True,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 1.0,
    "glu_linear_offset": 1.0,
}


def make_config(dtype=torch.float32, experts=EXPERTS, hidden=HIDDEN, ffn=FFN, **options) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=2,
        ffn_hidden_size=3 * ffn,  # the dense layers', which experts must not use
        moe_ffn_hidden_size=ffn,
        num_moe_experts=experts,
        gated_linear_unit=True,
        params_dtype=dtype,
        cuda_graph_modules=[],
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        **{"activation_func": F.silu, "add_bias_linear": False, **options},
    )


def build(kind: type, config: TransformerConfig, seed: int = 1):
    """This rank's experts, initialised from the seed; biases, which would be zero, are random."""
    set_random_seed(seed)
    local = config.num_moe_experts // config.expert_model_parallel_size
    fc2 = ExpertRowParallelLinear if config.add_bias_linear else RowParallelLinear
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=fc2)
    experts = kind(local, config, linears, ProcessGroupCollection.use_mpu_process_groups())
    for biases in by_expert(experts)[2:]:
        for bias in biases:
            bias.normal_()
    return experts


def by_expert(experts, name: str = "data") -> list[list[torch.Tensor]]:
    """Of fc1 and of fc2, the weight of each expert (or its ``grad`` or ``main_grad``), of either kind, and the same of
    their biases, where there are any.
    """
    wanted = [("linear_fc1", "weight"), ("linear_fc2", "weight")]
    if experts.config.add_bias_linear:
        wanted += [("linear_fc1", "bias"), ("linear_fc2", "bias")]
    if isinstance(experts, GroupedExperts):
        return [list(getattr(getattr(getattr(experts, linear), part), name)) for linear, part in wanted]
    return [
        [getattr(getattr(getattr(expert, linear), part), name) for expert in experts.local_experts]
        for linear, part in wanted
    ]


def stacked(experts, name: str = "data") -> list[torch.Tensor]:
    """``[E, 2 * f, h]``, ``[E, h, f]``, and of biases ``[E, 2 * f]`` and ``[E, h]``."""
    return [torch.stack(tensors) for tensors in by_expert(experts, name)]


def step(experts, hidden, counts, probs, upstream) -> list[torch.Tensor]:
    """Forward and backward: output, and gradients of input and probabilities."""
    leaves = [x.clone().requires_grad_() for x in (hidden, probs)]
    experts.zero_grad()
    output, bias = experts(leaves[0], counts, leaves[1])
    assert bias is None
    output.backward(upstream)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def run(experts, *inputs) -> dict[str, torch.Tensor]:
    """What ``step`` gives, and the gradients of the weights and biases."""
    results = [*step(experts, *inputs), *stacked(experts, "grad")]
    names = ("output", "d input", "d probs", "d weight1", "d weight2", "d bias1", "d bias2")
    return dict(zip(names, results, strict=False))


def problem(counts: list[int], dtype=torch.float32, hidden=HIDDEN, device="cpu"):
    """Tokens, their number by expert, float32 probabilities and an upstream gradient, as ``step`` wants them."""
    generator = torch.Generator(device).manual_seed(3)
    tokens, upstream = torch.randn(2, sum(counts), hidden, generator=generator, device=device).to(dtype)
    probs = torch.rand(sum(counts), generator=generator, device=device)
    return tokens, torch.tensor(counts), probs, upstream


# ---- on two ranks

LAYOUTS = {"one expert group": (1, 1), "EP2": (1, 2), "ETP2": (2, 1)}  # (TP = ETP, EP)


def enter(layout: str) -> tuple[int, int]:
    tp, ep = LAYOUTS[layout]
    destroy_rank_groups()
    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp)
    return tp, ep


def whole(seed: int) -> list[torch.Tensor]:
    """Weights of all experts, bfloat16: gates [E, F, H], ups [E, F, H], downs [E, H, F]; biases [E, 2 F], [E, H]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(EXPERTS, FFN, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, FFN), (EXPERTS, 2 * FFN), (EXPERTS, HIDDEN)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def part(seed: int) -> list[torch.Tensor]:
    """What this rank holds of the whole: its experts, and of each its rows of gates and ups and columns of downs, and
    the biases as without expert tensor parallelism.
    """
    group = parallel_state.get_expert_model_parallel_group()
    gates, ups, downs, *biases = (tensor.chunk(group.size())[group.rank()] for tensor in whole(seed))
    group = parallel_state.get_expert_tensor_parallel_group()
    gates, ups = (tensor.chunk(group.size(), 1)[group.rank()] for tensor in (gates, ups))
    return [torch.cat([gates, ups], 1), downs.chunk(group.size(), 2)[group.rank()], *biases]


class Layer(MegatronModule):
    """Experts in a model of one layer, which has an axis for layers in its checkpoints or not."""

    share_embeddings_and_output_weights = False

    def __init__(self, kind: type, axis_for_layers: bool, seed: int, **options):
        super().__init__(make_config(torch.bfloat16, bf16=True, **options))
        self.experts = build(kind, self.config)
        self.norm = RMSNorm(self.config, HIDDEN)  # so that the optimizer has something outside the experts too
        self.offsets = ((0, 0, 1),) if axis_for_layers else ()
        self.fill(seed)

    def fill(self, seed: int, name: str = "data") -> None:
        """Set the weights, or their ``main_grad``, to this rank's part of the whole."""
        for targets, values in zip(by_expert(self.experts, name), part(seed), strict=False):  # without biases fewer
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        tp = parallel_state.get_tensor_model_parallel_group()
        norm = sharded_state_dict_default(self.norm, f"{prefix}norm.", self.offsets, metadata, tp_group=tp)
        return norm | self.experts.sharded_state_dict(f"{prefix}experts.", self.offsets, metadata)


def same_shards(layer: Layer, other: Layer) -> None:
    """Keys, global shapes and, where both cut a tensor alike, the places of its shards."""

    def described(layer):
        state = layer.sharded_state_dict()
        apply_factories(state)
        shards = [x for value in state.values() for x in (value if isinstance(value, list) else [value])]
        objects = {
            (x.key, x.global_shape, x.global_offset, x.replica_id) for x in shards if isinstance(x, ShardedObject)
        }
        tensors = [x for x in shards if not isinstance(x, ShardedObject)]
        shapes = {(x.key, x.global_shape, x.dtype, x.replica_id) for x in tensors}
        places = {(x.key, x.global_offset) for x in tensors if "fc1" in x.key}
        return objects, shapes, places

    assert described(layer) == described(other)


def options(path: Path) -> SimpleNamespace:
    path = str(path)
    return SimpleNamespace(
        save=path,
        load=path,
        max_checkpoints_to_keep=None,
        no_load_optim=False,
        no_load_rng=True,
        seed=1,
        async_save=False,
    )


def weights_move(root: Path, every_pair: bool) -> None:
    """Weights saved by either kind in any layout are, bit for bit, those that the other loads in another layout.

    ``every_pair`` loads each checkpoint in all layouts, otherwise in the next one only.
    """
    with_biases = [layout for layout in LAYOUTS if layout != "ETP2"]
    variants = [(False, list(LAYOUTS), {}), (True, list(LAYOUTS), {}), (True, with_biases, GPT_OSS)]
    loads: dict[str, list] = {layout: [] for layout in LAYOUTS}
    for place, source in enumerate(LAYOUTS):
        enter(source)
        for axis_for_layers, layouts, more in variants:
            if source not in layouts:
                continue
            targets = layouts if every_pair else [layouts[(place + 1) % len(layouts)]]
            for kind, other in (KINDS, KINDS[::-1]):
                directory = root / f"{kind.__name__} {source} {axis_for_layers} {bool(more)}"
                saved = Layer(kind, axis_for_layers, seed=7, **more)
                same_shards(saved, Layer(other, axis_for_layers, seed=7, **more))
                checkpoint.save_checkpoint(options(directory), 0, [saved], None, None, {})
                for target in targets:
                    loads[target].append((directory, other, axis_for_layers, more))
    for target in LAYOUTS:
        enter(target)
        for directory, kind, axis_for_layers, more in loads[target]:
            loaded = Layer(kind, axis_for_layers, seed=8, **more)
            checkpoint.load_weights(directory, [loaded])
            for got, want in zip(stacked(loaded.experts), part(7), strict=False):
                assert torch.equal(got, want), (directory, target)
    print(f"weights moved {sum(map(len, loads.values()))} times", flush=True)


def trainable(kind: type, seed: int, **more):
    layer = Layer(kind, True, seed, **more)
    ddp = DistributedDataParallel(layer.config, DistributedDataParallelConfig(use_distributed_optimizer=True), layer)
    config = OptimizerConfig(
        lr=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1e9,  # the norm is computed, and nothing is scaled by it: it differs in its last bits
    )
    return layer, ddp, get_megatron_optimizer(config, [ddp])


def optimizer_moves(root: Path, every_pair: bool) -> None:
    """Two equal updates of either kind, saved, loaded into the other, and saved again: all tensors are equal.

    Without ``every_pair`` each layout has one kind that loads.
    """

    def tensors(directory):
        stored = dist_checkpointing.load_plain_tensors(str(checkpoint_directory.find(directory)[1]))
        return {key: value for key, value in stored.items() if torch.is_tensor(value)}

    for layout, more, tensors_there, loads in (
        ("EP2", GPT_OSS, 5, KINDS if every_pair else KINDS[1:]),
        ("ETP2", {}, 3, KINDS if every_pair else KINDS[:1]),
    ):
        enter(layout)
        norms, states = [], []
        for kind, other in (KINDS, KINDS[::-1]):
            layer, ddp, optimizer = trainable(kind, seed=7, **more)
            for step in range(2):
                layer.fill(20 + step, "main_grad")
                norms.append(optimizer.step()[1])
            directories = [root / f"{kind.__name__} {layout} {i}" for i in range(2)]
            checkpoint.save_checkpoint(options(directories[0]), 0, [ddp], optimizer, None, {})
            states.append(tensors(directories[0]))
            if other in loads:
                _, ddp, optimizer = trainable(other, seed=8, **more)
                checkpoint.load_checkpoint(options(directories[0]), [ddp], optimizer, None)
                checkpoint.save_checkpoint(options(directories[1]), 0, [ddp], optimizer, None, {})
                states.append(tensors(directories[1]))
        # Every gradient is somewhere once, or once on each of the data-parallel ranks.
        updates = [whole(20 + step)[:tensors_there] for step in range(2)]
        exact = [sum((x.double() ** 2).sum() for x in tensors).sqrt().item() for tensors in updates]
        for norm, want in zip(norms, exact * 2, strict=True):
            assert abs(norm / want - 1) < 1e-5, (layout, norms, exact)
        assert any("exp_avg_sq" in key for key in states[0])
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            different = [key for key in state if not torch.equal(state[key], states[0][key])]
            assert not different, (layout, different)
    print("optimizer moved", flush=True)


def parts_agree() -> None:
    """On each rank of a layout: results without communication, and the marks of the parameters."""
    for layout in LAYOUTS:
        tp, ep = enter(layout)
        more = GPT_OSS if tp == 1 else {}
        layers = [Layer(kind, False, seed=7, **more).experts.float() for kind in KINDS]
        inputs = problem([3, 0, 5, 2][: EXPERTS // ep])
        want, got = (run(experts, *inputs) for experts in layers)
        for name in want:
            assert (got[name] - want[name]).norm() <= 1e-6 * want[name].norm(), (layout, name)
        sequential, grouped = layers
        for linear in ("linear_fc1", "linear_fc2"):
            weight = getattr(grouped, linear).weight
            other = getattr(sequential.local_experts[0], linear).weight
            for mark in ("allreduce", "tensor_model_parallel", "partition_stride"):
                assert getattr(weight, mark) == getattr(other, mark), (layout, mark)
            assert weight.partition_dim == other.partition_dim + 1
            assert not hasattr(weight, "sequence_parallel") and not hasattr(other, "sequence_parallel")
    print("parts agree", flush=True)


# ---- on a GPU


def time_on_gpu() -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    experts, hidden, tokens, chosen = 32, 2048, 8192, 8
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    routed = scores.topk(chosen).indices.flatten().bincount(minlength=experts).tolist()
    for fused in (False, True):
        config = make_config(
            torch.bfloat16, experts=experts, hidden=hidden, ffn=768, bf16=True, bias_activation_fusion=fused
        )
        sequential, grouped = (build(kind, config) for kind in KINDS)
        inputs = problem(routed, torch.bfloat16, hidden, "cuda")
        for kind in (sequential, grouped):
            print(f"fused={fused} {type(kind).__name__}: {milliseconds(step, kind, *inputs):.2f} ms")
    dist.destroy_process_group()


def milliseconds(function, *arguments, times: int = 20) -> float:
    """Mean time of a call, after three that are not counted."""
    for _ in range(3):
        function(*arguments)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        function(*arguments)
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / times


if __name__ == "__main__":
    if sys.argv[1] == "--cuda":
        time_on_gpu()
    else:
        dist.init_process_group("gloo")
        initialize._host_group = dist.group.WORLD  # for the checkpoints
        fused_adam.install()
        parts_agree()
        every_pair = "--every-pair" in sys.argv
        weights_move(Path(sys.argv[1]) / "weights", every_pair)
        optimizer_moves(Path(sys.argv[1]) / "optimizer", every_pair)
        dist.destroy_process_group()
