"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors."""

import itertools
import json
import os
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from megatron_grpo.lora.attach import local_adapter
from megatron_grpo.lora.stream import stream_adapter, stream_saved
from megatron_grpo.lora.table import adapter_table
from megatron_grpo.lora.targets import linear_layers, module_name, saved_weights, targets
from megatron_grpo.models.config import params_dtype
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_json_object
from megatron_grpo.utils.rules import flag
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.safetensors_files import Safetensors, save_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings of PEFT that change what an adapter computes, and the values that this project's adapters have.
_PLAIN: dict[str, tuple] = {
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "exclude_modules": (None, []),
    "layers_to_transform": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
}
# Initialisations of PEFT that leave the base as it is. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change it, and
# PEFT's files do not hold the changed base.
_BASE_KEPT = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Settings that every adapter has, and the words for their types.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "r": ((int,), "a number"),
    "lora_alpha": ((int, float), "a number"),
    "target_modules": ((list, str), "a list of names or a regular expression"),
    "modules_to_save": ((list, type(None)), "a list of names"),
}


class _AdapterFiles(Safetensors):
    index, single = f"{WEIGHTS}.index.json", WEIGHTS

    def header(self) -> dict[str, str]:
        """Return the metadata of the file."""
        return self._open(self.dir / self.single).metadata() or {}


def config_of(args: Namespace) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    ``target_modules`` are the last words of the layers' names if these select the same layers, else whole names. Layers
    of a vision tower have the same last words: a regular expression leaves them out.
    """
    chosen = targets(args)
    short = sorted({name.rsplit(".", 1)[-1] for name in chosen})
    same = [name for name in linear_layers(args) if name.rsplit(".", 1)[-1] in short] == chosen
    entries: list[str] | str = short if same else [module_name(args, name) for name in chosen]
    if same and args.vision_config:
        entries = rf"(?!.*vis(ual|ion)).*\.({'|'.join(short)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": args.load_hf or args.pretrained_checkpoint,
        "r": args.lora_rank,
        "lora_alpha": args.lora_alpha,
        "use_rslora": args.lora_use_rslora,
        "use_dora": args.lora_use_dora,
        "lora_dropout": args.lora_dropout,
        "target_modules": entries,
        "modules_to_save": sorted(
            {re.sub(r"\.(weight|bias)$", "", module_name(args, n)) for w in saved_weights(args) for n in w.hf}
        )
        or None,
        "bias": "none",
        "init_lora_weights": True if args.lora_init == "default" else args.lora_init,
        "inference_mode": True,
    }


def base_of(args: Namespace) -> dict[str, str]:
    """Return the dtypes of the base that an adapter was trained on, for the header of adapter_model.safetensors.

    PEFT's configuration has no field for them, and PEFT and vLLM do not read the header.
    """
    dtype = str(params_dtype(args)).removeprefix("torch.")
    return {"lora_base_dtype": args.lora_base_dtype, "params_dtype": dtype}


def read_base(directory: str | Path) -> dict[str, str]:
    """Return `base_of` the run that wrote an adapter; the defaults for the files of another program."""
    header = _AdapterFiles(directory).header() if (Path(directory) / WEIGHTS).exists() else {}
    return {"lora_base_dtype": "model", "params_dtype": "float32"} | header


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the content of an adapter's adapter_config.json; GrpoError for an adapter of another kind."""
    config = read_json_object(Path(directory) / CONFIG, f"{directory} is not the directory of a PEFT adapter")
    if config.get("peft_type") != "LORA":
        raise GrpoError(f"{directory}: {CONFIG} has peft_type {config.get('peft_type')}: only LORA is supported")
    for key, values in _PLAIN.items():
        if config.get(key) not in values:
            raise GrpoError(f"{directory}: {CONFIG} has {key} {config[key]}, which is not supported")
    if (start := config.get("init_lora_weights")) not in _BASE_KEPT:
        raise GrpoError(
            f"{directory}: {CONFIG} has init_lora_weights {json.dumps(start)}: the adapter belongs to other base "
            "weights than the model's. Save it with path_initial_model_for_weight_conversion of PEFT's "
            "save_pretrained, or give the model with the adapter merged as --load-hf"
        )
    for key, (types, words) in _TYPES.items():
        if not isinstance(config.get(key), types):
            raise GrpoError(
                f"{directory}: {CONFIG} has {key} {json.dumps(config.get(key))}, not {words}: give an adapter that "
                "PEFT or this project has written"
            )
    return config


def resolve_adapter(args: Namespace, directory: str | Path) -> dict[str, Any]:
    """Return rank, alpha, rsLoRA, target modules and the base's storage from an adapter's files.

    Raises GrpoError, which names the flag and both values, when a flag that was given differs.
    """
    config = read_config(directory)
    entries = config["target_modules"]
    settings = {
        "lora_rank": config["r"],
        "lora_alpha": float(config["lora_alpha"]),
        "lora_use_rslora": bool(config.get("use_rslora")),
        "lora_use_dora": bool(config.get("use_dora")),
        "lora_target_modules": [entries] if isinstance(entries, str) else sorted(entries),
        "lora_modules_to_save": sorted(config.get("modules_to_save") or []),
    }
    for dest, value in settings.items():
        given = getattr(args, dest)
        if dest in args.explicit and given != value and "modules" not in dest:
            raise GrpoError(f"{flag(dest)} is {given}, the adapter in {directory} has {value}: leave the flag out")
    if "lora_base_dtype" not in args.explicit:  # another one may be given
        settings["lora_base_dtype"] = read_base(directory)["lora_base_dtype"]
    return {dest: value for dest, value in settings.items() if dest not in args.explicit}


def check_same_shape(args: Namespace, directory: str | Path) -> None:
    """Raise GrpoError unless an adapter's configuration has the run's rank, scale and kind."""
    config = read_config(directory)
    found = {
        "lora_rank": config["r"],
        "lora_alpha": float(config["lora_alpha"]),
        "lora_use_rslora": bool(config.get("use_rslora")),
        "lora_use_dora": bool(config.get("use_dora")),
    }
    for dest, value in found.items():
        if getattr(args, dest) != value:
            raise GrpoError(
                f"--reference-adapter {directory} has {flag(dest)} {value}, the policy's adapter "
                f"{getattr(args, dest)}: give an adapter of the same shape"
            )


def open_adapter(args: Namespace, directory: str | Path) -> Callable[..., Tensor]:
    """Return the reader, (name without PEFT's prefix, index) -> tensor, of an adapter's files.

    Raises GrpoError when a tensor of the run's adapter is missing or has another shape, or the files hold others.
    """
    source = _AdapterFiles(directory)
    weights = [*adapter_table(args), *saved_weights(args)]
    expected = {name: shape for weight in weights for name, shape in weight.hf.items()}
    found = {module_name(args, name.removeprefix(PREFIX)): name for name in source.names()}
    expected = {module_name(args, name): shape for name, shape in expected.items()}
    for name, shape in expected.items():
        if name not in found:
            raise GrpoError(
                f"{directory} has no tensor {PREFIX}{name}: it is the adapter of another model, or of other "
                "--lora-target-modules"
            )
        if source.shape(found[name]) != shape:
            raise GrpoError(
                f"{directory}: tensor {found[name]} has shape {source.shape(found[name])}, this run's is {shape}: "
                f"give the adapter's base, and the {CONFIG} that was written with it"
            )
    if unknown := sorted(found.keys() - expected.keys()):
        raise GrpoError(
            f"{directory} has the tensor {found[unknown[0]]}, whose layer has no adapter in this run: add it to "
            "--lora-target-modules"
        )
    return lambda name, index=(slice(None),): source.read(found[module_name(args, name)], index)


def load_adapter(args: Namespace, model: Sequence[nn.Module], directory: str | Path) -> None:
    """Fill the model's adapters from PEFT's files; every rank reads its own slices.

    Raises GrpoError before anything is changed when the files do not fit (`open_adapter`).
    """
    read, saved = open_adapter(args, directory), saved_weights(args)
    names = {weight.name for weight in saved}
    whole = [row for row in model_weights.local_weights(model, model_weights.table(args)) if row[0].name in names]
    for weight, tensor in [*local_adapter(model), *whole]:
        weight.fill(tensor, *model_weights.tensor_parallel(weight), read)


def save_adapter(args: Namespace, model: Sequence[nn.Module], directory: str | Path) -> None:
    """Write the adapter as PEFT's files; each is replaced atomically. Collective.

    Raises GrpoError on every rank when rank 0 cannot write.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in itertools.chain(stream_adapter(model, args), stream_saved(model, args)):
        if dist.get_rank() == 0:
            tensors[PREFIX + module_name(args, name)] = tensor.to("cpu", copy=True).contiguous()
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            write_files(directory, tensors, config_of(args), base_of(args))
        except (OSError, SafetensorError) as error:
            failure = [f"{directory}: the adapter cannot be written: {error}"]
    dist.broadcast_object_list(failure, src=0, group=host_group())
    if failure[0] is not None:
        raise GrpoError(failure[0])


def write_files(
    directory: str | Path, tensors: dict[str, Tensor], config: dict[str, Any], base: dict[str, str]
) -> None:
    """Write both files of an adapter. ``base``: `base_of`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    partials = {name: directory / f".{name}.partial" for name in (WEIGHTS, CONFIG)}
    try:
        save_tensors(tensors, partials[WEIGHTS], {"format": "pt"} | base)
        partials[CONFIG].write_text(json.dumps(config, indent=2) + "\n")
        for name, partial in partials.items():
            os.replace(partial, directory / name)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
