"""Count the operations of an update and the host's seconds by phase, on a machine without a GPU.

    torchrun --nproc-per-node N tools/benchmark/operations.py --completions 64 --tokens 17 MODEL_AND_LAYOUT_FLAGS

Flags are those of pretrain_grpo.py; the weights are random. With a model as deep as the real one and tiny in every
other dimension, arithmetic is negligible: what is left is what the host does for each launch.

Operations are those below autograd that compute: not views and not allocations. What a GPU runs as one kernel or one
compiled region is one operation (a norm, flash attention, queries, keys and values, the elementwise work of the head),
and so is a function over a list of tensors, which launches a few kernels. Counts come from one update; the seconds from
the quickest of three others, which this machine computes without such regions: compare them between versions of the
code only. The phase "backward" includes the loss. Prints a Markdown table of rank 0.
"""

import argparse
import contextlib
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first: it prepares for machines without a GPU

# isort: split
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import pretrain_grpo
from megatron_grpo.models import attention, forward, head, norm, self_attention
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.fused_adam import FusedAdam
from megatron_grpo.training.multi_tensor import DistributedOptimizer
from megatron_grpo.utils import progress
from megatron_grpo.utils.log import print_rank_0

# Parts of the optimizer's step: (class, method, phase).
PARTS = [
    (DistributedDataParallel, "zero_grad_buffer", "zeros"),
    (MegatronOptimizer, "get_grad_norm", "gradient norm"),
    (FusedAdam, "step", "Adam"),
    *(
        (kind, method, phase)
        for kind in (Float16OptimizerWithFloat16Params, DistributedOptimizer)
        for method, phase in (
            ("_copy_model_grads_to_main_grads", "gradients to main gradients"),
            ("_copy_main_params_to_model_params", "main parameters to the model"),
        )
    ),
]


class Phases:
    """Operations and seconds of each phase, in the order of their first occurrence."""

    def __init__(self):
        self.operations: dict[str, Counter] = defaultdict(Counter)
        self.seconds: dict[str, float] = defaultdict(float)
        self.name, self.since = "packs", time.perf_counter()
        self.inside = 0  # depth of regions: their operations do not count

    def begin(self, name: str) -> str:
        """Begin a phase; return the name of the one that ends."""
        now, before = time.perf_counter(), self.name
        self.seconds[before] += now - self.since
        self.name, self.since = name, now
        return before

    def count(self, name: str) -> None:
        if not self.inside:
            self.operations[self.name][name] += 1

    @contextlib.contextmanager
    def region(self, name: str):
        self.count(name)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1


phases = Phases()


class Operations(TorchDispatchMode):
    """Counts operations that launch a kernel on a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        view = any(out.alias_info and not out.alias_info.is_write for out in function._schema.returns)
        if name.startswith("index") and any(getattr(x, "dtype", None) == torch.bool for x in tree_flatten(args)[0][1:]):
            name += " of a mask"  # calls nonzero, which waits for the device
        if not view and not name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "profiler")):
            phases.count(name)
        return function(*args, **(kwargs or {}))


class Region(torch.autograd.Function):
    """A function whose forward pass counts as one operation. Its backward pass counts as one more."""

    @staticmethod
    def forward(ctx, name, function, spec, *inputs):
        with phases.region(name), torch.enable_grad():
            floats = [torch.is_tensor(value) and value.is_floating_point() for value in inputs]
            ctx.inputs = [
                value.detach().requires_grad_(value.requires_grad) if float_ else value
                for value, float_ in zip(inputs, floats, strict=True)
            ]
            arguments, options = tree_unflatten(ctx.inputs, spec)
            output = function(*arguments, **options)
        ctx.name, ctx.outputs = name, output if isinstance(output, tuple) else (output,)
        return tuple(part.detach() for part in output) if isinstance(output, tuple) else output.detach()

    @staticmethod
    def backward(ctx, *gradients):
        with phases.region(f"{ctx.name} backward"):
            trained = [torch.is_tensor(value) and value.requires_grad for value in ctx.inputs]
            of = [value for value, own in zip(ctx.inputs, trained, strict=True) if own]
            outputs = [output for output in ctx.outputs if output.requires_grad]
            given = [g for output, g in zip(ctx.outputs, gradients, strict=True) if output.requires_grad]
            results = iter(torch.autograd.grad(outputs, of, given, allow_unused=True))
        return None, None, None, *[next(results) if own else None for own in trained]


def as_region(name: str, function):
    def call(*arguments, **options):
        inputs, spec = tree_flatten((arguments, options))
        return Region.apply(name, function, spec, *inputs)

    return call


def without_gradient(name: str, function):
    def call(*arguments):
        with phases.region(name):
            return function(*arguments)

    return call


def regions() -> contextlib.ExitStack:
    """Return the context in which the regions of a GPU are one operation each."""
    functions = [(self_attention, "queries_keys_values"), (attention, "attend"), (norm.F, "rms_norm")]
    functions.append((fused_bias_dropout, "bias_dropout_add_fused_train"))
    replaced = [(module, name, as_region(name, getattr(module, name))) for module, name in functions]
    elementwise = [(head, name) for name in ("_peak", "_sums", "_gradient")]
    elementwise += [(fused_bias_swiglu, name) for name in ("swiglu", "swiglu_back")]
    replaced += [(module, name, without_gradient(name, getattr(module, name))) for module, name in elementwise]
    stack = contextlib.ExitStack()
    for module, name, function in replaced:
        stack.enter_context(patch.object(module, name, function))
    return stack


def in_phase(name: str, function):
    def call(*arguments, **options):
        before = phases.begin(name)
        try:
            return function(*arguments, **options)
        finally:
            phases.begin(before)

    return call


def mark_phases() -> None:
    """Begin a phase at each step of the update (`progress`) and for `PARTS`."""
    note = progress.step

    def step(name: str) -> None:
        phases.begin(name)
        note(name)

    progress.step = step
    for kind, method, phase in PARTS:
        setattr(kind, method, in_phase(phase, getattr(kind, method)))


def main() -> None:
    """Parse the command line, run the updates, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--completions", type=int, default=64, metavar="N", help="completions of an update [64]")
    parser.add_argument(
        "--tokens", type=int, default=17, metavar="N", help="tokens of a completion and its prompt [17]"
    )
    parser.add_argument("--top", type=int, default=0, metavar="N", help="operations to list for each phase [0]")
    options, flags = parser.parse_known_args()
    size = made_up.size_flags(options.completions, options.tokens)
    args = made_up.parse([*size, *flags], int(os.environ.get("WORLD_SIZE", "1")))
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    batch, chosen = made_up.one_update(args, options.tokens)
    mark_phases()

    def update() -> dict[str, float]:
        phases.begin("packs")
        phases.seconds.clear()
        pretrain_grpo.update(args, trainer, batch, chosen)
        phases.begin("")
        return dict(phases.seconds)

    update()  # the first one makes the optimizer's state
    seconds = min((update() for _ in range(3)), key=lambda measured: sum(measured.values()))
    with regions(), Operations():
        update()
    packs = len(forward.micro_batches(args, batch, chosen))
    print_rank_0(f"| phase | operations of an update | of one of {packs} micro-batches | host ms of an update |")
    print_rank_0("|---|--:|--:|--:|")
    for phase, operations in phases.operations.items():
        number = operations.total()
        each = f"{number / packs:,.0f}" if phase in ("forward", "backward") else ""
        print_rank_0(f"| {phase} | {number:,} | {each} | {1e3 * seconds.get(phase, 0):.1f} |")
        for name, calls in operations.most_common(options.top):
            print_rank_0(f"| – `{name}` | {calls:,} | | |")
    total = sum(operations.total() for operations in phases.operations.values())
    print_rank_0(f"| all | {total:,} | | {1e3 * sum(seconds.values()):.1f} |")
    dist.barrier()


if __name__ == "__main__":
    run(main)
