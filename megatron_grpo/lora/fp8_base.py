"""Storage of the frozen base in 8 bits (--lora-base-dtype fp8): linear layers of the decoder, except routers.

Embeddings, the output layer, norms, biases, routers, multi-token prediction, modules that are trained whole, and
experts whose files hold them in one tensor keep the model's dtype.
"""

from argparse import Namespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_grpo.lora.targets import is_router, linear_layers, saved_weights
from megatron_grpo.models.fp8_weight import BLOCK, block_maxima, quantized
from megatron_grpo.utils.device import device
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight


def fp8_weights(args: Namespace) -> dict[str, Weight]:
    """Return the weights that are stored in 8 bits, by name; none without --lora-base-dtype fp8."""
    if not args.lora_rank or args.lora_base_dtype != "fp8":
        return {}
    trained = {weight.name for weight in saved_weights(args)}
    layers = linear_layers(args).values()
    return {weight.name: weight for weight in layers if not is_router(weight) and weight.name not in trained}


@torch.no_grad()
def quantize(args: Namespace, chunk: nn.Module) -> None:
    """Replace the chunk's frozen linear weights by 8-bit ones, one after the other. Collective over tensor parallelism.

    A block's largest magnitude is that of all tensor-parallel ranks, so every parallel configuration has the same
    values.
    """
    chosen = fp8_weights(args)
    for name, parameter in list(chunk.named_parameters()):
        names = [canonical for canonical, _ in model_weights.canonical(chunk, name, parameter)]
        if not names or names[0] not in chosen:
            continue
        weight = chosen[names[0]]
        rows, columns, grid = blocks(weight, *model_weights.tensor_parallel(weight))
        maxima = block_maxima(parameter, rows, columns, grid)
        if weight.axis is not None:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=_group(weight))
        stored = nn.Parameter(quantized(parameter, maxima, rows, columns), requires_grad=False)
        stored.__dict__.update(parameter.__dict__)  # megatron-core's attributes
        layer, _, attribute = name.rpartition(".")
        setattr(chunk.get_submodule(layer), attribute, stored)


def blocks(weight: Weight, rank: int, size: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return the block row int32 ``[rows]`` and block column ``[columns]`` of a shard's elements, and the grid's shape.

    The blocks are those of the Hugging Face matrices; the grids of several (q_proj, k_proj and v_proj) lie below each
    other, or beside each other if tensor parallelism shards the columns.
    """
    axis = weight.lines_axis
    counts = [-(-shape[axis] // BLOCK) for shape in weight.part_shapes]
    lines = torch.cat(
        [
            torch.arange(span.start, span.stop, span.step) // BLOCK + sum(counts[: span.source])
            for span in weight.slices(rank, size)
        ]
    )
    across = weight.part_shapes[0][1 - axis]
    others = torch.arange(across) // BLOCK
    pair = (lines, others) if axis == 0 else (others, lines)
    grid = (sum(counts), -(-across // BLOCK))
    rows, columns = (index.to(device(), torch.int32) for index in pair)
    return rows, columns, grid if axis == 0 else grid[::-1]


def _group(weight: Weight) -> dist.ProcessGroup:
    if weight.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()
