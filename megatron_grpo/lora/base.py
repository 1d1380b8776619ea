"""The identity of an adapter's base: where its weights came from, and a checksum of all of them."""

import hashlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_grpo.models.config import params_dtype
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import model_weights

SHARED = (
    *("lora_rank", "lora_alpha", "lora_use_rslora", "lora_use_dora", "lora_target_modules"),
    *("lora_modules_to_save", "lora_base_dtype"),
)


def describe(args: Namespace, model: Sequence[nn.Module], path: str | None) -> dict[str, Any]:
    """Return path, dtype and checksum of the model's weights. Collective."""
    return {"path": path, "dtype": str(params_dtype(args)).removeprefix("torch."), "checksum": checksum(args, model)}


@torch.no_grad()
def checksum(args: Namespace, model: Sequence[nn.Module]) -> str:
    """Return a checksum of the weights that does not depend on the parallel configuration. Collective.

    It is the SHA-256 of the names and sums of all weights. A sum adds the bits of every element as an integer, modulo
    2^64, so that the shards' sums add up. It tells bases apart, and protects from mistakes, not from forgery.
    """
    weights = model_weights.table(args)
    places = {weight.name: place for place, weight in enumerate(weights)}
    sums = torch.zeros(len(weights), dtype=torch.int64, device=device())
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    expert_replica = parallel_state.get_expert_data_parallel_rank()
    local = model_weights.local_weights(model, weights)
    stages = model_weights.owning_stages(weights, {weight.name for weight, _ in local})
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for weight, tensor in {weight.name: (weight, tensor) for weight, tensor in local}.values():
        rank, size = model_weights.tensor_parallel(weight)
        copy = (replica if weight.expert is None else expert_replica) or (weight.axis is None and rank)
        if not copy and stages[weight.name] == stage:
            padding = sum(span.lines for span in weight.slices(rank, size) if span.source is None)  # at the end
            sums[places[weight.name]] = _sum_of_bits(tensor[: len(tensor) - padding])
    dist.all_reduce(sums)
    rows = "\n".join(f"{weight.name} {value}" for weight, value in zip(weights, sums.tolist(), strict=True))
    return hashlib.sha256(rows.encode()).hexdigest()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integers).sum(dtype=torch.int64)


def resolve_stored(args: Namespace, stored: dict[str, Any]) -> dict[str, Any]:
    """Return what a resumed run with an adapter leaves out: the adapter's settings, and where its base is."""
    if not stored.get("lora_rank"):
        return {}
    # A checkpoint has no value for a flag that is newer than it.
    found = {dest: stored[dest] for dest in (*SHARED, "lora_dropout") if dest in stored.keys() - args.explicit}
    if not (args.load_hf or args.pretrained_checkpoint):
        found |= {dest: stored[dest] for dest in ("load_hf", "pretrained_checkpoint")}
    return found


def check(args: Namespace, now: dict[str, Any], stored: dict[str, Any]) -> None:
    """Raise GrpoError unless a checkpoint's adapter fits the run: its shape and its base.

    ``now``: the base of the run (`describe`); ``stored``: the arguments of the run that wrote the checkpoint.
    """
    if not stored.get("lora_rank"):
        raise GrpoError(
            f"{args.load} holds all weights, no adapter: to train an adapter of them, start a run with "
            "--pretrained-checkpoint in place of --load"
        )
    for dest in SHARED:
        if stored.get(dest, getattr(args, dest)) != getattr(args, dest):
            name = "--" + dest.replace("_", "-")
            raise GrpoError(
                f"{args.load} holds an adapter with {name} {stored[dest]}, this run has {getattr(args, dest)}: give "
                "the same"
            )
    was = stored["lora_base"]
    if was["checksum"] != now["checksum"]:
        raise GrpoError(
            f"{args.load} holds an adapter of other base weights: those of {was['path']} in {was['dtype']} (checksum "
            f"{was['checksum'][:12]}), this run loaded {now['path']} in {now['dtype']} ({now['checksum'][:12]}): give "
            "the weights that the run started from"
        )
