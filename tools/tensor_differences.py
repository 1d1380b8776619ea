"""The tensors of one sequence in a colocated vLLM and in the trainer, and the first one whose bits differ.

Hooks record what the modules of both models return, for dense families with vLLM's usual names. vLLM runs a prompt
without a CUDA graph if --vllm-enforce-eager is given; hooks see nothing of a graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.utils import unwrap_model

import pretrain_grpo
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.models import forward
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.vllm.scheduler import scheduler_of
from megatron_grpo.utils.errors import GrpoError

OUTPUT = -1


class Place(NamedTuple):
    """A module, and which of its arguments, or ``OUTPUT``."""

    module: str
    which: int = OUTPUT


def places(layers: int) -> Iterator[tuple[str, Place, Place]]:
    """Yield (name, place in vLLM's model, place in the trainer's) in the order of the forward pass."""
    yield "embedding", Place("model.embed_tokens"), Place("embedding")
    for i in range(layers):
        theirs, ours = f"model.layers.{i}", f"decoder.layers.{i}"
        for name, of_engine, of_trainer in (
            ("input norm", Place("input_layernorm"), Place("input_layernorm")),
            ("query, key, value", Place("self_attn.qkv_proj"), Place("self_attention.linear_qkv")),
            ("rotated queries", Place("self_attn.attn", 0), Place("self_attention.core_attention", 0)),
            ("rotated keys", Place("self_attn.attn", 1), Place("self_attention.core_attention", 1)),
            ("attention", Place("self_attn.attn"), Place("self_attention.core_attention")),
            ("attention's projection", Place("self_attn.o_proj"), Place("self_attention.linear_proj")),
            ("norm before the MLP", Place("post_attention_layernorm"), Place("pre_mlp_layernorm")),
            ("gate and up", Place("mlp.gate_up_proj"), Place("mlp.linear_fc1")),
            ("activation", Place("mlp.act_fn"), Place("mlp.linear_fc2", 0)),
            ("down", Place("mlp.down_proj"), Place("mlp.linear_fc2")),
        ):
            engine, trainer = (Place(f"{a}.{b.module}", b.which) for a, b in ((theirs, of_engine), (ours, of_trainer)))
            yield f"layer {i}: {name}", engine, trainer
    yield "final norm", Place("model.norm"), Place("decoder.final_layernorm")


@contextmanager
def recorded(model: Any, wanted: dict[str, Place]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Context in which calls of a model's modules add rows ``[tokens, channels]`` to the dictionary that it gives."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in wanted}
    handles = []

    def keep(name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        rows = value.detach().clone()
        found[name].append(rows.flatten(1) if rows.dim() == 2 or rows.shape[1] > 1 else rows.flatten(0, 1).flatten(1))

    for name, place in wanted.items():
        try:
            module = model.get_submodule(place.module)
        except AttributeError as error:
            raise GrpoError(
                f"--layers follows dense families, and {type(model).__name__} has no {place.module}: leave --layers out"
            ) from error
        if place.which == OUTPUT:
            hook = module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
        else:
            hook = module.register_forward_pre_hook(lambda _, given, name=name, at=place.which: keep(name, given[at]))
        handles.append(hook)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def model_of(engine: Any) -> Any:
    """Return the model of a colocated vLLM."""
    return engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def of_engine(engine: Any, sequences: list[list[int]], wanted: dict[str, Place], cached: bool = False) -> dict:
    """Return the rows of ``sequences``, one tensor for each place; the prompts are computed in common steps.

    ``cached``: leave the prefix cache of earlier prompts.
    """
    requests = [Request(i, ids, Sampling(1, 1.0)) for i, ids in enumerate(sequences)]
    if not cached:
        engine._drop_prefix_cache()
    with recorded(model_of(engine), wanted) as found:
        list(generate(engine, requests))
        torch.cuda.synchronize() if torch.cuda.is_available() else None
    if not all(found.values()):
        raise GrpoError(
            "--layers: vLLM ran the prompt in a CUDA graph, of which nothing is seen: add --vllm-enforce-eager"
        )
    return {name: torch.cat(rows) for name, rows in found.items()}


@contextmanager
def steps_of(engine: Any, tokens: int) -> Iterator[None]:
    """Context in which vLLM computes at most this many tokens in a step."""
    scheduler = scheduler_of(engine._engine)
    before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


def of_trainer(args, model: Any, batch: RolloutBatch, wanted: dict[str, Place]) -> dict[str, torch.Tensor]:
    """Return the rows of the sequence of ``batch``, one tensor for each place."""
    with recorded(unwrap_model(model[0]), wanted) as found:
        forward.log_probs(args, model, pretrain_grpo.forward_step, batch)
    return {name: torch.cat(rows) for name, rows in found.items()}


def in_engines_order(args, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of megatron-core's projection (queries, key and value of each group) as vLLM orders them."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    heads = rows.view(len(rows), groups // args.tensor_model_parallel_size, -1, args.kv_channels)
    return torch.cat([heads[:, :, :-2].flatten(1), heads[:, :, -2].flatten(1), heads[:, :, -1].flatten(1)], 1)


def differences(args, engine: Any, model: Any, batch: RolloutBatch) -> Iterator[tuple[str, int, int, float]]:
    """Yield (name, differing rows, first of them, largest difference) of each tensor of the sequence of ``batch``.

    The last token is not computed, because nothing follows it.
    """
    if args.sequence_parallel or args.tensor_model_parallel_size != args.vllm_tensor_parallel_size:
        raise GrpoError(
            "--layers compares all tokens of equal shards: leave --sequence-parallel out, and give "
            f"--tensor-model-parallel-size ({args.tensor_model_parallel_size}) and --vllm-tensor-parallel-size "
            f"({args.vllm_tensor_parallel_size}) the same value"
        )
    ids = batch.tokens.tolist()[:-1]
    theirs = of_engine(engine, [ids], {name: place for name, place, _ in places(args.num_layers)})
    yield from against(args, theirs, model, batch)


def against(
    args, theirs: dict[str, torch.Tensor], model: Any, batch: RolloutBatch
) -> Iterator[tuple[str, int, int, float]]:
    """Yield what `differences` yields, given the rows of the engine."""
    named, count = list(places(args.num_layers)), len(batch.tokens) - 1
    ours = of_trainer(args, model, batch, {name: place for name, _, place in named})
    for name, _, place in named:
        one, other = theirs[name][:count], ours[name][:count]
        if place.module.endswith("linear_qkv"):
            other = in_engines_order(args, other)
        yield name, *gap(one, other)


def gap(one: torch.Tensor, other: torch.Tensor) -> tuple[int, int, float]:
    """Return (differing rows, the first of them or -1, largest difference) of tensors ``[rows, channels]``."""
    if one.shape != other.shape:
        raise ValueError(f"rows of {tuple(one.shape)} and {tuple(other.shape)} are not comparable")
    rows = (one != other).any(1).nonzero()[:, 0].tolist()
    largest = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
    return len(rows), rows[0] if rows else -1, largest


def line(name: str, count: int, first: int, largest: float) -> str:
    """Return the line of a tensor."""
    if not count:
        return f"{name}: equal, bit for bit"
    return f"{name}: {count} rows differ, the first at position {first}, by up to {largest:.2g}"
