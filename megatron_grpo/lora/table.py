"""The matrices of an adapter as weights of the parameter mapping.

Every Hugging Face linear layer has a pair of its own, A ``[rank, in]`` and B ``[out, rank]``, as in PEFT, although one
Megatron layer may contain several (q_proj, k_proj and v_proj in linear_qkv).
"""

import functools
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from megatron_grpo.lora.targets import saved_weights, targets
from megatron_grpo.utils.arguments import kept_for_newest
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Layout, Slice, Weight, same

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"  # PEFT's names


class Pair(NamedTuple):
    """The adapter of one Hugging Face linear layer.

    ``base``: the Megatron weight that contains the layer; ``source``: the layer's number in ``base.hf``; ``part``: last
    word of the layer's name, such as q_proj. ``m``: the norms of DoRA, one for each row of B.
    """

    base: Weight
    source: int
    part: str
    a: Weight
    b: Weight
    m: Weight | None


def pairs(args: Namespace) -> list[Pair]:
    """Return the adapter of each target, in the order of the model's table."""
    chosen = set(targets(args))
    return [
        _pair(weight, source, name.removesuffix(".weight"), args.lora_rank, args.lora_use_dora)
        for weight in model_weights.table(args)
        for source, name in enumerate(weight.hf)
        if name.removesuffix(".weight") in chosen
    ]


@kept_for_newest  # every weight sync needs it, and making it takes longer than the rest
def adapter_table(args: Namespace) -> list[Weight]:
    """Return the weights of the whole adapter; the same matrix of all experts of a layer follow each other."""
    out: list[Weight] = []
    for _, run in groupby(pairs(args), key=lambda pair: pair.base.name.replace(f".{pair.base.expert}.linear", "")):
        parts: dict[str, list[Pair]] = {}
        for pair in run:
            parts.setdefault(pair.part, []).append(pair)
        for alike in parts.values():
            for column in zip(*((pair.a, pair.b, pair.m) for pair in alike), strict=True):
                out += filter(None, column)
    return out


def check(args: Namespace) -> None:
    """Raise GrpoError for a target that matches nothing, a rank larger than a layer, and tied weights to be saved."""
    if not args.untie_embeddings_and_output_weights and any("embedding" in w.name for w in saved_weights(args)):
        raise GrpoError(
            "--lora-modules-to-save: embed_tokens is also the output layer of this model, which PEFT stores as two "
            "modules: leave it out"
        )
    for pair in pairs(args):
        (outputs, _), (_, inputs) = next(iter(pair.b.hf.values())), next(iter(pair.a.hf.values()))
        if args.lora_rank > min(outputs, inputs):
            layer = next(iter(pair.a.hf)).removesuffix(f".{A}")
            raise GrpoError(
                f"--lora-rank {args.lora_rank} is larger than the layer {layer}, which has {inputs} inputs and "
                f"{outputs} outputs: give a smaller rank, or leave the layer out of --lora-target-modules"
            )


def _pair(base: Weight, source: int, layer: str, rank: int, dora: bool) -> Pair:
    outputs, inputs = list(base.hf.values())[source]
    part, name = layer.rsplit(".", 1)[-1], base.name.removesuffix(".weight")
    lines = tuple(shape[0] for shape in base.hf.values())
    one = replace(base, dtype=None)
    a = replace(
        one,
        name=f"{name}.{part}.{A}",
        hf={f"{layer}.{A}": (rank, inputs)},
        layout=same,
        axis=1 if base.axis == 1 else None,
    )
    b = replace(
        one,
        name=f"{name}.{part}.{B}",
        hf={f"{layer}.{B}": (outputs, rank)},
        layout=_part(base.layout, lines, source) if base.axis == 0 else same,
        axis=0 if base.axis == 0 else None,
    )
    m = replace(b, name=f"{name}.{part}.{MAGNITUDE}", hf={f"{layer}.{MAGNITUDE}": (outputs,)})
    return Pair(base, source, part, a, b, m if dora else None)


@functools.lru_cache
def _part(layout: Layout, lines: tuple[int, ...], source: int) -> Layout:
    """Return the layout of one Hugging Face tensor of several: its lines in the order of ``layout``."""

    def of_part(_: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
        return [span._replace(source=0) for span in layout(lines, tp_size, dims) if span.source == source]

    return of_part


def rows(pair: Pair, tp_rank: int, tp_size: int) -> Iterator[range]:
    """Yield the runs of output rows of the Megatron layer's shard that B's rows are added to, in B's order."""
    if pair.base.axis != 0:
        yield range(next(iter(pair.b.hf.values()))[0])
        return
    start = 0
    for span in pair.base.slices(tp_rank, tp_size):
        if span.source == pair.source:
            yield range(start, start + span.lines)
        start += span.lines
