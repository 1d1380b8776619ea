"""Selection of the layers with adapters by the Hugging Face names of --lora-target-modules."""

import re
from argparse import Namespace
from collections.abc import Sequence

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight

ALL_LINEAR, ALL_ROUTER = "all-linear", "all-router"


def linear_layers(args: Namespace) -> dict[str, Weight]:
    """Return Hugging Face module name -> weight, for every linear layer of the decoder that can have an adapter.

    Embeddings, the output layer, multi-token prediction and tensors of all experts of a layer are not among them.
    """
    return {
        name.removesuffix(".weight"): weight
        for weight in model_weights.table(args)
        if weight.name.startswith("decoder.layers.") and not weight.all_experts
        for name, shape in weight.hf.items()
        if name.endswith(".weight") and len(shape) == 2
    }


def is_router(weight: Weight) -> bool:
    """Return whether a weight is that of a router."""
    return weight.name.endswith(".router.weight")


def targets(args: Namespace) -> list[str]:
    """Return the Hugging Face names of the layers with adapters, in the model's order.

    As in PEFT, a name matches modules that it equals or that end with it after a dot, and a regular expression matches
    whole module names. Raises GrpoError for an entry that matches no layer.
    """
    layers = linear_layers(args)
    chosen: set[str] = set()
    for entry in args.lora_target_modules:
        found = _matches(entry, layers)
        if not found:
            kinds = sorted({re.sub(r"^\d+$", "N", part) for name in layers for part in [name.rsplit(".", 1)[-1]]})
            raise GrpoError(
                f"--lora-target-modules: {entry} matches no linear layer of the model; its layers are "
                f"{', '.join(kinds)} (such as {next(iter(layers))}): give some of these names, all-linear, or a "
                "regular expression that matches a whole name"
            )
        chosen.update(found)
    return [name for name in layers if name in chosen]


def _matches(entry: str, layers: dict[str, Weight]) -> Sequence[str]:
    if entry == ALL_LINEAR:
        return [name for name, weight in layers.items() if not is_router(weight)]
    if entry == ALL_ROUTER:
        return [name for name, weight in layers.items() if is_router(weight)]
    if named := [name for name in layers if name == entry or name.endswith(f".{entry}")]:
        return named
    try:
        pattern = re.compile(entry)
    except re.error as error:
        raise GrpoError(f"--lora-target-modules: {entry} is not a regular expression: {error}") from None
    return [name for name in layers if pattern.fullmatch(name)]
