"""Sync of a LoRA adapter to the engine, and the proof that it has arrived.

*At every sync*, A and B are read back from the engine and compared with what was sent, bit by bit.

*Once, before the first rollout*, a random adapter on all layers of one kind must change the engine's log-probabilities,
for each kind in turn. An adapter could otherwise lie in memory that no kernel reads.
"""

import time
from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_grpo.lora.layers import scaling
from megatron_grpo.lora.stream import stream_adapter
from megatron_grpo.models.config import params_dtype
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.rollout.engine import Engine
from megatron_grpo.rollout.weight_sync.weight_check import ENDING
from megatron_grpo.utils.errors import GrpoError


def sync_adapter(args: Namespace, engine: Engine, model: Sequence[nn.Module], version: int) -> dict[str, float]:
    """Send the model's adapter to the engine and compare it with the engine's; return metrics. Collective.

    GrpoError on every rank if a tensor differs.
    """
    adapter = sent_adapter(args, model)
    engine.update_adapter(adapter, version)
    metrics: dict[str, float] = {"lora/sync_bytes": sum(tensor.nbytes for tensor in adapter.values())}
    if not args.no_check_lora_sync:
        start = _now()
        differences = engine.compare_adapter(adapter)
        _refuse(differences, f"the engine does not hold the adapter of update {version}")
        metrics["lora/check_seconds"] = _now() - start
    return metrics


def probe_adapter(engine: Engine) -> None:
    """Raise GrpoError on every rank if the engine does not use its adapter in one kind of layers. Collective."""
    kinds = engine.probe_adapter()
    _refuse(
        [f"a random adapter of all layers {kind} changes no log-probability" for kind in kinds],
        "the engine does not use the adapter that it holds: give --lora-weight-sync merged",
    )


def sent_adapter(args: Namespace, model: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the model's adapter in full, in the dtype of the engine, with the scale in B. Collective.

    Tensors may be views of the model's parameters.
    """
    adapter = dict(stream_adapter(model, args))
    dtype = getattr(torch, args.vllm_dtype) if args.vllm_dtype else params_dtype(args)
    ups = [name for name in adapter if ".lora_B." in name]
    scaled = torch._foreach_mul([adapter[name].float() for name in ups], scaling(args))
    adapter.update(zip(ups, scaled, strict=True))
    return {name: tensor.to(dtype) for name, tensor in adapter.items()}


def _refuse(lines: list[str], what: str) -> None:
    """Raise GrpoError on every rank if one has lines."""
    count = torch.tensor(len(lines))
    dist.all_reduce(count, group=host_group())
    if not count:
        return
    everywhere: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, lines, group=host_group())
    rank, first = next((rank, found) for rank, found in enumerate(everywhere) if found)
    more = f" and {len(first) - 3} more" if len(first) > 3 else ""
    raise GrpoError(f"{what}: on rank {rank} {'; '.join(first[:3])}{more}. {ENDING}")


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
