"""Load a Hugging Face checkpoint directory into a model, save a model as one, and compare the two."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_grpo.models.config import params_dtype
from megatron_grpo.parallel.agreement import on_all_ranks, on_rank_0
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_config, read_json_object
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights import families, model_weights, quantized
from megatron_grpo.weights.parameter_mapping import Weight
from megatron_grpo.weights.safetensors_files import (
    PlannedFile,
    Safetensors,
    SafetensorsWriter,
    plan_files,
    write_checksums,
    write_index,
)
from megatron_grpo.weights.stream import owned_hf_tensors

# Buffers in older checkpoints; they are computed from the configuration.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
# Files of a model directory, other than the weights, that are copied; all others are not copied.
_ASSETS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",  # of images
    "*.model",
    "*.tiktoken",
    "tekken.json",  # of mistral-common
    "SYSTEM_PROMPT.txt",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "tokenization*.py",  # run with --trust-remote-code only
    "tool_declaration*.py",  # imported by Kimi-K2's tokenizer
)
_TEMPLATES = "additional_chat_templates"  # folder of the templates that have a name, such as tool_use.jinja
# Files with the settings of transformers' image processor. In the second they are a part, in newer directories.
_IMAGE_SETTINGS = ("preprocessor_config.json", "processor_config.json")
# Subfolder of a Megatron checkpoint directory that holds these files, beside the iterations.
ASSETS_DIR = "hf_assets"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def open_weights(hf_dir: str | Path, family_name: str | None = None, mtp_layers: int | None = None) -> Safetensors:
    """Return the reader of a directory's weights, in the format of its config.json; print a line if it dequantizes.

    ``family_name``: see `families.for_hf_config`. ``mtp_layers``: without them the tensors of multi-token prediction of
    a family whose config.json leaves their number open are not read.
    """
    config = read_config(hf_dir)
    try:
        family = families.for_hf_config(config, family_name)
    except GrpoError:  # a draft model: vLLM runs more families
        family = None
    config = family.text_config(config) if family in families.READ_AS else config
    source = quantized.reader(hf_dir, config)
    if family is not None and (family.published or family.mtp_prefix):
        published, left_out = family.published or str, family.unread(config)
        if family.mtp_prefix and not mtp_layers:
            left_out = (*left_out, family.mtp_prefix)

        def name_of(name: str) -> str | None:
            found = published(name)
            return None if found is None or found.startswith(left_out) else found

        if unread := source.rename(name_of):
            print_rank_0(
                f"{hf_dir}: {len(unread)} tensors are not read, such as {unread[0]}: the model has no such part"
            )
    for name, parts in family.stacked.items() if family is not None else ():
        source.unstack(name, parts)
    if source.quantization:
        print_rank_0(
            f"{hf_dir}: weights in {source.quantization} are dequantized when they are read; config.json is written "
            "without quantization_config"
        )
    return source


def image_bounds(args: Namespace) -> dict[str, int]:
    """Return the bounds of --min-image-pixels and --max-image-pixels that are given, by transformers' names."""
    bounds = {"min_pixels": args.min_image_pixels, "max_pixels": args.max_image_pixels}
    return {name: pixels for name, pixels in bounds.items() if pixels is not None}


def copy_assets(
    source: str | Path,
    target_dir: str | Path,
    chat_template: str | None = None,
    bounds: Mapping[str, int] | None = None,
) -> None:
    """Copy tokenizer files, chat templates, config.json and generation_config.json from a directory into another.

    `source` may be a single file, such as a SentencePiece model. Nothing is copied when `source` is `target_dir`. Each
    file is replaced atomically, so a killed process leaves no partial file. The copy of config.json does not describe
    quantized weights, because this project writes none. `chat_template` replaces the templates of `source`, and
    `bounds` (`image_bounds`) the bounds of its image processor. Raises GrpoError when a file cannot be written.
    """
    source, target_dir = Path(source), Path(target_dir)
    same = source.resolve() == target_dir.resolve()  # a resumed run reads these files from its --save directory
    try:
        there = [] if same or source.is_file() or not source.exists() else sorted(source.iterdir())
        paths = [source] if source.is_file() else [path for path in there if any(map(path.match, _ASSETS))]
        target_dir.mkdir(parents=True, exist_ok=True)
        if there and chat_template is None and (source / _TEMPLATES).is_dir():
            shutil.copytree(source / _TEMPLATES, target_dir / _TEMPLATES, dirs_exist_ok=True)
        for path in paths:
            if path.is_file():
                partial = target_dir / f".{path.name}.partial"
                if path.name == "config.json" and quantized.CONFIG_KEYS & (config := read_config(path.parent)).keys():
                    kept = {key: value for key, value in config.items() if key not in quantized.CONFIG_KEYS}
                    partial.write_text(json.dumps(kept, indent=2) + "\n")
                else:
                    shutil.copyfile(path, partial)
                os.replace(partial, target_dir / path.name)
        for name in _IMAGE_SETTINGS if bounds else ():
            _set_bounds(target_dir / name, bounds or {})
        if chat_template is not None:  # transformers prefers this file to the template in tokenizer_config.json
            partial = target_dir / ".chat_template.jinja.partial"
            partial.write_text(chat_template)
            os.replace(partial, target_dir / "chat_template.jinja")
    except OSError as error:
        raise GrpoError(f"tokenizer files cannot be copied from {source} to {target_dir}: {error}") from error


def _set_bounds(path: Path, bounds: Mapping[str, int]) -> None:
    """Write the bounds of an image in pixels into a file with the settings of the image processor."""
    if not path.is_file():
        return
    whole = read_json_object(path)
    settings = whole if path.name == _IMAGE_SETTINGS[0] else whole.get("image_processor")
    if not isinstance(settings, dict):
        return
    of_videos = path.with_name(f"video_{path.name}")
    if settings is whole and not of_videos.exists():
        # transformers reads the settings of videos here, too, if they have no file; their bounds stay.
        shutil.copyfile(path, of_videos)
    settings |= dict(bounds)
    if isinstance(settings.get("size"), dict):  # transformers' other names of the same bounds
        names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
        settings["size"] |= {names[name]: pixels for name, pixels in bounds.items()}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(whole, indent=2) + "\n")
    os.replace(partial, path)


def load_hf(model_chunks: Sequence[nn.Module], args: Namespace, hf_dir: str | Path) -> None:
    """Load a Hugging Face checkpoint into the model in place; every rank reads only its own slices. Collective.

    Values are converted to the parameters' dtypes. All checks run before the first copy: GrpoError for a tensor of the
    files that the family's table does not contain, a tensor of the table that the files do not contain, a wrong shape,
    an unreadable file, or a model that differs from the table. When an optimizer holds float32 copies of the
    parameters, call `optimizer.reload_model_params()` afterwards.
    """
    weights = model_weights.table(args)
    local = model_weights.local_weights(model_chunks, weights)
    model_weights.owning_stages(weights, {weight.name for weight, _ in local})
    source = open_weights(hf_dir, args.model_family, args.mtp_num_layers)
    # Rank 0 opens all files, other ranks those that they read.
    there, description = on_rank_0(_stored, source, args, weights)
    if (own := _description(source.dir)) != description:
        names = ", ".join(name for name in own if own[name] != description[name])
        raise GrpoError(
            f"{source.dir} has another {names} on host {socket.gethostname()} than on that of rank 0: give all hosts "
            "the same files, or put them where all see them"
        )
    weights = [weights[number] for number in there]
    for weight, _ in local:
        _check_shapes(source, weight)
    check_copies(source, weights, {weight.name: model_weights.tensor_parallel(weight) for weight, _ in local})
    for weight, tensor in local:
        weight.fill(tensor, *model_weights.tensor_parallel(weight), source.read)


def _stored(source: Safetensors, args: Namespace, weights: Sequence[Weight]) -> tuple[list[int], dict[str, str]]:
    """Return the places in the table of the weights that the files contain, and what describes the files.

    All checks of the files come first.
    """
    stored = check_tensors(source, args, weights)
    check_tied(source, args)
    kept = {id(weight) for weight in stored}
    return [number for number, weight in enumerate(weights) if id(weight) in kept], _description(source.dir)


def _description(directory: Path) -> dict[str, str]:
    """Return digests of the files that say what the others contain, "" for one that is not there."""
    found = {}
    for name in ("config.json", "model.safetensors.index.json"):
        path = directory / name
        found[name] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else ""
    return found


def _check_shapes(source: Safetensors, weight: Weight) -> None:
    for name, shape in weight.hf.items():
        if source.shape(name) != shape:
            raise GrpoError(
                f"{source.dir}: tensor {name} has shape {source.shape(name)}, but the configuration says {shape}"
            )


def check_tensors(source: Safetensors, args: Namespace, weights: Sequence[Weight]) -> list[Weight]:
    """Return the table's weights that the files contain: all, except duplicates that the files omit.

    GLM-4.5 stores the duplicates of the embedding for multi-token prediction, GLM-4.6 does not. Raises GrpoError unless
    the files contain exactly the tensors of the returned weights, in dtypes that `source` reads and the table's shapes.
    """
    found = {name for name in source.names() if not _IGNORED.search(name)}
    originals = {weight.name: weight for weight in reversed(weights)}
    weights = [weight for weight in weights if originals[weight.name] is weight or found.intersection(weight.hf)]
    expected = {name: weight for weight in weights for name in weight.hf}
    if tied := model_weights.tied_head(args):
        found.discard(tied[0])  # check_tied compares it with the embedding
    for name, weight in expected.items():
        if name not in found:
            # transformers omits these layers when it saves a model, but config.json still counts them
            cure = "; set num_nextn_predict_layers to 0 in config.json" if weight.name.startswith("mtp.") else ""
            cure = "; leave out --mtp-num-layers" if cure and name.startswith("mtp.") else cure
            raise GrpoError(f"{source.dir} lacks the tensor {name}, from which {weight.name} is built{cure}")
    for name, weight in expected.items():
        _check_shapes(source, weight)
        source.dtype(name)  # raises GrpoError for an unsupported one, and for quantized weights without their scales
    if unclaimed := sorted(found - expected.keys()):
        more = f" and {len(unclaimed) - 1} more" if len(unclaimed) > 1 else ""
        raise GrpoError(f"{source.dir} holds the tensor {unclaimed[0]}{more}, which is not in the model family's table")
    return weights


def check_tied(source: Safetensors, args: Namespace) -> None:
    """Raise GrpoError when the files hold an output layer of their own, and the model ties it to the embedding."""
    tied = model_weights.tied_head(args)
    if tied is None or tied[0] not in source.names():
        return
    head, name = tied
    if source.shape(head) != source.shape(name) or not torch.equal(source.read(head), source.read(name)):
        raise GrpoError(
            f"{source.dir}: config.json ties {head} to {name}, but the files hold two different tensors; set "
            f"tie_word_embeddings to false to keep both"
        )


def check_copies(source: Safetensors, weights: Sequence[Weight], held: Mapping[str, tuple[int, int]]) -> None:
    """Raise GrpoError when the files hold two different tensors for one parameter.

    `held`: name of each parameter of this rank -> (rank, size) of the tensor parallelism that shards it.
    """
    first: dict[str, Weight] = {}
    for weight in weights:
        original = first.setdefault(weight.name, weight)
        if original is weight or weight.name not in held:
            continue
        rank, size = held[weight.name]
        shards = [torch.empty(weight.shard_shape(size)) for _ in range(2)]
        for one, shard in zip((original, weight), shards, strict=True):
            one.fill(shard, rank, size, source.read)
        if not torch.equal(*shards):
            raise GrpoError(
                f"{source.dir}: {next(iter(weight.hf))} differs from {next(iter(original.hf))}, but the model has one "
                f"parameter for both: make them equal"
            )


def save_hf(
    model_chunks: Sequence[nn.Module],
    args: Namespace,
    out_dir: str | Path,
    tokenizer_dir: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 * 2**30,
    shards: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model as a Hugging Face directory: safetensors shards, index, config.json, tokenizer. Collective.

    `tokenizer_dir`: source of the tokenizer files, of generation_config.json and of config.json's special token ids.
    `dtype`: dtype of the written weights, None for the model's; a weight whose mapping sets a dtype keeps that one.
    `shards`: this rank's tensors by the weights' names, instead of the model's (an adapter merged into them).
    All ranks must see the directory: each rank writes the tensors that it owns, one at a time (`write_export`).
    `out_dir` is always complete. Raises GrpoError on every rank when `out_dir` exists and is not a Hugging Face model
    directory (the export would replace it), or when writing fails.
    """
    config = families.for_args(args).hf_from_args(args)
    out_dir, dtype = Path(out_dir).resolve(), dtype or params_dtype(args)
    check_replaceable("--save-hf", out_dir)
    dtypes, files = plan_export(model_weights.table(args), dtype, max_shard_bytes)

    def write(writer: SafetensorsWriter) -> None:
        failure: OSError | None = None
        for name, tensor, part, parts in owned_hf_tensors(model_chunks, args, shards):
            try:
                if failure is None:
                    writer.write(name, tensor.to(dtypes[name]), part, parts)
            except OSError as error:
                failure = error  # raised after the last collective call: the other ranks still gather with this one
        if failure is not None:
            raise failure

    write_export(out_dir, files, write, config, dtype, tokenizer_dir, args.chat_template, image_bounds(args))


def plan_export(
    weights: Sequence[Weight], dtype: torch.dtype, max_shard_bytes: int
) -> tuple[dict[str, torch.dtype], list[PlannedFile]]:
    """Return (dtype of each tensor, files) for a model that is written in `dtype`; tensors are in the table's order."""
    shapes = {name: shape for weight in weights for name, shape in weight.hf.items()}
    dtypes = {name: weight.dtype or dtype for weight in weights for name in weight.hf}
    return dtypes, plan_files({name: (shape, dtypes[name]) for name, shape in shapes.items()}, max_shard_bytes)


def write_export(
    out_dir: Path,
    files: list[PlannedFile],
    write: Callable[[SafetensorsWriter], None],
    config: dict,
    dtype: torch.dtype,
    tokenizer_dir: str | Path | None,
    chat_template: str | None = None,
    bounds: Mapping[str, int] | None = None,
) -> None:
    """Write the planned files with index, checksums, config.json and tokenizer to `out_dir`. Collective.

    Each rank's `write` writes its tensors. All is written to a directory beside `out_dir`, which is renamed at the end.
    Leftovers of a killed export are deleted. Raises GrpoError on every rank when another export is under way, the disk
    has no room, or writing fails.
    """
    writer = SafetensorsWriter(out_dir.with_name(f".{out_dir.name}.partial"), files)
    checksums: dict[str, dict[int, int]] = {}

    def start() -> None:
        writer.claim()
        old = _old(out_dir)
        if old.exists() and not out_dir.exists():  # killed between the two renames of `_replace`
            os.replace(old, out_dir)
        check_space(out_dir, sum(file.size for file in files))
        writer.create()

    def add() -> dict[str, dict[int, int]]:
        write(writer)
        writer.close()
        return writer.checksums

    def finish() -> None:
        write_index(writer.directory, files)
        write_checksums(writer.directory, checksums)
        if tokenizer_dir is not None:
            copy_assets(tokenizer_dir, writer.directory, chat_template, bounds)
        _write_config(writer.directory, config, dtype)
        _replace(writer.directory, out_dir)
        writer.release()

    problem = f"{out_dir} cannot be written"
    try:
        on_rank_0(start, problem=problem)
        for found in on_all_ranks(add, problem):
            for name, parts in found.items():
                checksums.setdefault(name, {}).update(parts)
        on_rank_0(finish, problem=problem)
    except BaseException:
        writer.discard()
        raise


def check_space(target: Path, size: int) -> None:
    """Raise GrpoError unless the disk of `target` has room for `size` bytes."""
    existing = next(path for path in (target, *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise GrpoError(
            f"it needs {size / 1e9:.3g} GB, {free / 1e9:.3g} GB are free: make room or change the directory"
        )


def check_replaceable(flag: str, out_dir: str | Path, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise GrpoError if an export to ``out_dir`` would delete one of ``inputs``, or what is no export.

    It may replace a directory that is empty, or holds config.json and safetensors.
    """
    path = Path(out_dir)
    names = [file.name for file in path.iterdir()] if path.is_dir() else [""] * path.exists()
    if names and not ("config.json" in names and any(name.endswith(".safetensors") for name in names)):
        raise GrpoError(f"{flag} {path} exists and is not a Hugging Face model directory: choose another directory")
    for source in inputs:
        if source and Path(source).resolve().is_relative_to(path.resolve()):
            raise GrpoError(
                f"{flag} {path} contains {source}, which the export would replace: choose another directory"
            )


def _write_config(out_dir: Path, config: dict, dtype: torch.dtype) -> None:
    if (out_dir / "config.json").exists():
        # The arguments do not contain special token ids; config.json's other keys are derived from them.
        source = read_config(out_dir)
        config = {**config, **{key: source[key] for key in _TOKEN_IDS if key in source}}
    # transformers 5 writes "dtype"; older versions read "torch_dtype" only. Every version reads "torch_dtype".
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _replace(partial: Path, out_dir: Path) -> None:
    """Rename `partial` to `out_dir`; rename an existing one first, since os.replace needs an empty target."""
    old = _old(out_dir)
    shutil.rmtree(old, ignore_errors=True)
    if out_dir.exists():
        os.replace(out_dir, old)
    os.replace(partial, out_dir)
    shutil.rmtree(old, ignore_errors=True)


def _old(out_dir: Path) -> Path:
    """Return the name of an earlier export while it is being replaced."""
    return out_dir.with_name(f".{out_dir.name}.old")
