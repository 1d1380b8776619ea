"""Sync of a LoRA adapter to the engine, and the proof that it has arrived.

*At every sync*, A and B are read back from the engine and compared with what was sent, bit by bit.

*Once, before the first rollout*, a random adapter on all layers of one kind must change the engine's log-probabilities,
for each kind in turn. An adapter could otherwise lie in memory that no kernel reads.
"""

from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import nn

from megatron_grpo.lora.layers import scaling
from megatron_grpo.lora.stream import stream_adapter
from megatron_grpo.models.config import params_dtype
from megatron_grpo.rollout.engine import AdapterEngine
from megatron_grpo.rollout.weight_sync.weight_check import refuse
from megatron_grpo.utils.device import device_time
from megatron_grpo.weights.stream import stream_hf


def sync_adapter(args: Namespace, engine: AdapterEngine, model: Sequence[nn.Module], version: int) -> dict[str, float]:
    """Send the model's adapter to the engine and compare it with the engine's; return metrics. Collective.

    An engine without weights, as after --sleep-level 2, first receives the base. GrpoError on every rank if a tensor
    of the adapter differs.
    """
    times = [device_time()]
    if not engine.has_base:
        engine.update_weights(stream_hf(model, args), version)
    times.append(device_time())
    adapter = sent_adapter(args, model)
    engine.update_adapter(adapter, version)
    times.append(device_time())
    metrics: dict[str, float] = {
        "lora/sync_bytes": sum(tensor.nbytes for tensor in adapter.values()),
        "lora/base_seconds": times[1] - times[0],
        "lora/adapter_seconds": times[2] - times[1],
    }
    if not args.no_check_lora_sync:
        differences = engine.compare_adapter(adapter)
        refuse(differences, f"the engine does not hold the adapter of update {version}")
        metrics["lora/check_seconds"] = device_time() - times[2]
    return metrics


def probe_adapter(engine: AdapterEngine) -> None:
    """Raise GrpoError on every rank if the engine does not use its adapter in one kind of layers. Collective."""
    kinds = engine.probe_adapter()
    refuse(
        [f"a random adapter of all layers {kind} changes no log-probability" for kind in kinds],
        "the engine does not use the adapter that it holds: give --lora-weight-sync merged",
    )


def sent_adapter(args: Namespace, model: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the model's adapter in full, in the dtype of the engine, with the scale in B. Collective.

    Tensors may be views of the model's parameters.
    """
    adapter = dict(stream_adapter(model, args))
    dtype = getattr(torch, args.vllm_dtype) if args.vllm_dtype else params_dtype(args)
    # Together, because the launch of a kernel for each of the small matrices takes longer than the work.
    for kind, factor in ((".lora_A.", 1.0), (".lora_B.", scaling(args))):
        names = [name for name in adapter if kind in name]
        tensors = [adapter[name] for name in names]
        if factor != 1 or tensors[0].dtype != dtype:
            flat = (torch.cat([tensor.reshape(-1) for tensor in tensors]).float() * factor).to(dtype)
            parts = flat.split([tensor.numel() for tensor in tensors])
            adapter.update((name, part.view(t.shape)) for name, part, t in zip(names, parts, tensors, strict=True))
    return adapter
