"""Trainer ranks of a model in any layout, without processes: what each holds, and its shards."""

import itertools

import numpy as np
import torch

from megatron_grpo.weights.transfer_plan import Holder

# (tensor, pipeline, data, expert, expert tensor parallel size)
LAYOUTS = [(1, 1, 1, 1, 1), (2, 2, 2, 1, 1), (2, 1, 2, 2, 2), (4, 1, 1, 2, 1), (1, 2, 4, 4, 1)]


def world(args, layout, weights):
    """The holders of all trainer ranks: tensor-parallel ranks are the innermost, pipeline stages the outermost.

    Both stages at the ends have the embedding.
    """
    tp, pp, dp, ep, etp = layout
    names = [weight.name for weight in weights]
    layers = [int(name.split(".")[2]) if name.startswith("decoder.layers") else None for name in names]
    found = []
    for stage, place, rank in itertools.product(range(pp), range(dp), range(tp)):
        inner = place * tp + rank  # experts have the ranks of a stage, too: their tensor parallelism is innermost
        held = []
        for weight, layer in zip(weights, layers, strict=True):
            if layer is None:
                first = weight.name.startswith(("embedding", "vision"))
                here = stage == (0 if first else pp - 1) or (weight.name.startswith("embedding") and stage == pp - 1)
            else:
                here = layer * pp // args.num_layers == stage
            if weight.expert is not None:
                here &= weight.expert * ep // args.num_experts == inner // etp % ep
            held.append(here)
        found.append(Holder(np.array(held), stage, (rank, tp), (inner % etp, etp)))
    return found


def shards_of(weights, holder, whole):
    """The shards of a trainer rank, by the weights' names, as loading fills them from ``whole`` {name: tensor}."""
    found = {}
    for weight, held in zip(weights, holder.held, strict=True):
        if held:
            place, size = holder.tp if weight.expert is None else holder.expert_tp
            shard = torch.full(weight.shard_shape(size), -1, dtype=whole[next(iter(weight.hf))].dtype)
            weight.fill(shard, place, size, lambda name, index: whole[name][index])
            found[weight.name] = shard
    return found
