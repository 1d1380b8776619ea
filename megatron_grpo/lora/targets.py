"""Selection of the layers with adapters by the Hugging Face names of --lora-target-modules."""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megatron_grpo.models.gemma4 import PER_LAYER_INPUTS
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight

_PLACES = ("decoder.layers.", f"{PER_LAYER_INPUTS}.projection.")  # beginnings of Megatron names
ALL_LINEAR, ALL_ROUTER = "all-linear", "all-router"
_VISION = r"(?:visual|vision_tower|multi_modal_projector|image_newline)\b"  # beginnings of names of a vision part


def module_name(args: Namespace, name: str) -> str:
    """Return the name of a parameter, or of a layer, of the files as transformers' modules have it.

    Files of vision-language models name the two parts in several ways, transformers in one; those of Nemotron-H have
    another name of the decoder.
    """
    if not args.vision_config:
        return re.sub(r"^backbone\.", "model.", name)
    name = re.sub(rf"^(language_model\.)?model\.(language_model\.)?(?!{_VISION})", "model.language_model.", name)
    name = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
    return re.sub(rf"^(?={_VISION})", "model.", name)


def linear_layers(args: Namespace) -> dict[str, Weight]:
    """Return Hugging Face module name -> weight, for every linear layer of the decoder that can have an adapter.

    Embeddings, the output layer, multi-token prediction, tensors of all experts of a layer, the gate of a shared
    expert, a parameter without a layer of its own in megatron-core, and Mamba's output projection are not among them.
    """
    return {
        name.removesuffix(".weight"): weight
        for weight in model_weights.table(args)
        if weight.name.startswith(_PLACES) and weight.name.endswith(".weight") and not weight.all_experts
        for name, shape in weight.hf.items()
        if name.endswith(".weight") and len(shape) == 2 and not _refused_by_peft(args, name)
    }


def _refused_by_peft(args: Namespace, name: str) -> bool:
    """Return whether PEFT refuses an adapter of this tensor's layer: Mamba's fused kernels read the weight itself."""
    return bool(args.hybrid_layer_pattern) and name.endswith(".out_proj.weight")


def is_router(weight: Weight) -> bool:
    """Return whether a weight is that of a router."""
    return weight.name.endswith(".router.weight")


def targets(args: Namespace) -> list[str]:
    """Return the Hugging Face names of the layers with adapters, in the model's order.

    As in PEFT, a name matches modules that it equals or that end with it after a dot, and a regular expression matches
    whole module names, those of the files or those of transformers (`module_name`). Raises GrpoError for an entry that
    matches no layer.
    """
    layers = linear_layers(args)
    kinds = {
        ALL_LINEAR: [name for name, weight in layers.items() if not is_router(weight)],
        ALL_ROUTER: [name for name, weight in layers.items() if is_router(weight)],
    }
    names = {name: module_name(args, name) for name in layers}
    return _chosen("--lora-target-modules", args.lora_target_modules, names, kinds, without=_without_adapters(args))


def _without_adapters(args: Namespace) -> dict[str, str]:
    """Return the modules of matrices that no adapter can train, and for each the reason with what to do."""
    found = {}
    for weight in model_weights.table(args):
        for name in weight.hf:
            if weight.all_experts and not name.endswith("bias"):
                found[_module(name)] = "a tensor of all experts of a layer, which has no adapter: leave it out"
            elif _refused_by_peft(args, name):
                found[_module(name)] = "Mamba's output projection, for which PEFT refuses adapters: leave it out"
            elif weight.name.endswith(".shared_experts.gate_weight"):
                found[_module(name)] = (
                    "the gate of a shared expert, which has one row and no adapter: give it in --lora-modules-to-save"
                )
    return found


def saved_weights(args: Namespace) -> list[Weight]:
    """Return the weights that are trained whole (--lora-modules-to-save), in the model's order.

    Raises GrpoError for an entry that matches no module, for a layer that has an adapter, and for a part of a Megatron
    weight (q_proj without k_proj and v_proj).
    """
    table = {weight.name: weight for weight in reversed(model_weights.table(args))}  # without copies in the files
    weights = [weight for weight in reversed(table.values()) if not weight.name.startswith("mtp.")]
    modules = {_module(name): module_name(args, _module(name)) for weight in weights for name in weight.hf}
    # As in PEFT, names match here without a dot before them: norm stands for input_layernorm, too.
    chosen = set(_chosen("--lora-modules-to-save", args.lora_modules_to_save, modules, {}, dot=""))
    if both := chosen.intersection(targets(args) if chosen else ()):
        raise GrpoError(f"{min(both)} is in --lora-modules-to-save and in --lora-target-modules: leave it out of one")
    saved = []
    for weight in weights:
        of_weight = {_module(name) for name in weight.hf}
        if of_weight & chosen and weight.expert is not None:
            way = "leave it out" if weight.all_experts else "name it in --lora-target-modules"
            raise GrpoError(
                f"--lora-modules-to-save: {min(of_weight & chosen)} is an expert's, which is not trained whole: {way}"
            )
        if of_weight <= chosen and not weight.name.endswith(model_weights.BUFFERS):
            saved.append(weight)
        elif part := chosen & of_weight:
            raise GrpoError(
                f"--lora-modules-to-save: {min(part)} is one weight with {', '.join(sorted(of_weight - part))}: give "
                "all of them"
            )
    return saved


def _module(name: str) -> str:
    """Return the module of a parameter; a parameter with a name of its own, such as sinks, is its own module."""
    return re.sub(r"\.(weight|bias)$", "", name)


def _chosen(
    flag: str,
    entries: Sequence[str],
    names: Mapping[str, str],
    kinds: Mapping[str, Sequence[str]],
    dot: str = ".",
    without: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the ``names`` (of the files -> of transformers) that any entry matches, in their order.

    ``dot`` stands before an entry that ends a name. ``without``: other names -> why none of them
    can be chosen.
    """
    chosen: set[str] = set()
    for entry in entries:
        found = kinds[entry] if entry in kinds else _matches(flag, entry, names, dot)
        if not found:
            if others := _matches(flag, entry, {name: name for name in without}, dot):
                raise GrpoError(f"{flag}: {entry} matches only {others[0]}, {without[others[0]]}")
            words = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise GrpoError(
                f"{flag}: {entry} matches nothing in the model, which has {', '.join(words)} (such as "
                f"{next(iter(names))}): give some of these names{''.join(f', {kind}' for kind in kinds)}, or a regular "
                "expression that matches a whole name"
            )
        chosen.update(found)
    return [name for name in names if name in chosen]


def _matches(flag: str, entry: str, names: Mapping[str, str], dot: str) -> Sequence[str]:
    both = [(name, {name, other}) for name, other in names.items()]
    if named := [name for name, two in both if any(one == entry or one.endswith(f"{dot}{entry}") for one in two)]:
        return named
    try:
        pattern = re.compile(entry)
    except re.error as error:
        raise GrpoError(f"{flag}: {entry} is not a regular expression: {error}") from None
    return [name for name, two in both if any(map(pattern.fullmatch, two))]
