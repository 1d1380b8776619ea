"""Convert a Hugging Face directory to a Megatron checkpoint and back, one tensor at a time; compare the two.

No model is built: model_weights.table lists the parameters; torch_dist.py, torch_dist_writer.py and
safetensors_files.py read and write them. Each process handles a share of the parameters, of about equal bytes, and
holds one of them at a time. Functions that read or write files of both formats are collective.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from megatron_grpo.checkpointing import checkpoint_directory
from megatron_grpo.checkpointing.convert import torch_dist_writer
from megatron_grpo.checkpointing.convert.torch_dist import Checkpoint
from megatron_grpo.checkpointing.run_lock import RunLock
from megatron_grpo.models.gpt import model_provider, packed_seq_params
from megatron_grpo.parallel.agreement import on_all_ranks, on_rank_0
from megatron_grpo.parallel.initialize import set_random_seed
from megatron_grpo.utils.arguments import args_to_json, replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import families, hf, model_weights
from megatron_grpo.weights.families.mla import set_latent_epsilon
from megatron_grpo.weights.parameter_mapping import Weight
from megatron_grpo.weights.safetensors_files import Safetensors, SafetensorsWriter

Part = tuple[str, tuple[int, ...], Tensor]  # name, index of the expert if the tensor holds all experts, tensor

_TOKENS = 16
LOGITS_TOLERANCE = 1e-3  # of the largest logit, in float32


def write_dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in a model that is written in `dtype`."""
    return weight.dtype or dtype


def distinct(weights: Sequence[Weight]) -> list[Weight]:
    """Return the table without the duplicates that Hugging Face files hold of some parameters."""
    return list({weight.name: weight for weight in reversed(weights)}.values())[::-1]


def share(weights: Sequence[Weight], dtype: torch.dtype, rank: int, world_size: int) -> list[Weight]:
    """Return the parameters, adjacent in the table, that this rank writes: about equal bytes for each rank."""
    sizes = [size_of([weight], dtype) for weight in weights]
    total, before, mine = sum(sizes), 0, []
    for weight, size in zip(weights, sizes, strict=True):
        if before * world_size // total == rank:
            mine.append(weight)
        before += size
    return mine


def size_of(weights: Sequence[Weight], dtype: torch.dtype) -> int:
    """Return the bytes of these parameters in a model that is written in `dtype`."""
    return sum(prod(weight.shard_shape(1)) * write_dtype(weight, dtype).itemsize for weight in weights)


def hf_to_megatron(
    args: Namespace, weights: Sequence[Weight], source: Safetensors, root: Path, dtype: torch.dtype
) -> None:
    """Write the tensors of `source` as iteration 0 under `root`, in chunks for the parallel configuration of `args`.

    Copies tokenizer and config.json to {root}/hf_assets. Raises GrpoError on every rank, and removes the partial
    checkpoint, when a tensor cannot be read or writing fails. Chunks: see torch_dist_writer.
    """
    distinct_weights = distinct(weights)
    with contextlib.ExitStack() as ending:

        def start() -> Path:
            ending.callback(RunLock(root).release)
            checkpoint_directory.clean_up(root)  # leftovers of a killed conversion use the disk
            hf.check_space(root, size_of(distinct_weights, dtype))
            return checkpoint_directory.start(root, 0)

        def finish() -> None:
            hf.copy_assets(source.dir, root / hf.ASSETS_DIR)
            checkpoint_directory.publish(temporary, args_to_json(args))

        problem = f"{root} cannot be written"
        temporary = on_rank_0(start, problem=problem)
        try:
            mine = share(distinct_weights, dtype, dist.get_rank(), dist.get_world_size())
            with _progress("writing", size_of(distinct_weights, dtype)) as bar:
                torch_dist_writer.write(temporary, args, distinct_weights, mine, source.read, dtype, bar.update)
            on_rank_0(finish, problem=problem)
        except BaseException:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise


def megatron_to_hf(
    args: Namespace,
    weights: Sequence[Weight],
    source: Checkpoint,
    out_dir: Path,
    dtype: torch.dtype,
    assets: str | Path | None,
    max_shard_bytes: int = 4 * 2**30,
    merge: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Write the checkpoint's tensors as a Hugging Face directory; an existing `out_dir` is replaced.

    `assets`: source of tokenizer files, generation_config.json and special token ids. `merge(name, tensor)`: the tensor
    that is written in place of one. Raises GrpoError as hf_to_megatron does.
    """
    places = source.places(args, weights)

    def parts(weight: Weight) -> Iterator[Part]:
        for name, index, tensor in _hf_parts(weight, source.read(places[weight.name])):
            yield name, index, tensor if merge is None or index else merge(name, tensor)

    write_hf(args, weights, parts, out_dir, dtype, assets, max_shard_bytes)


def write_hf(
    args: Namespace,
    weights: Sequence[Weight],
    parts_of: Callable[[Weight], Iterable[Part]],
    out_dir: Path,
    dtype: torch.dtype,
    assets: str | Path | None,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write a Hugging Face directory as megatron_to_hf does; `parts_of` returns a weight's Hugging Face tensors."""
    out_dir = out_dir.resolve()
    config = families.for_args(args).hf_from_args(args)
    dtypes, files = hf.plan_export(weights, dtype, max_shard_bytes)

    def write(writer: SafetensorsWriter) -> None:
        with _progress("writing", size_of(weights, dtype)) as bar:
            for weight in share(weights, dtype, dist.get_rank(), dist.get_world_size()):
                for name, index, tensor in parts_of(weight):
                    part, parts = (index[0], weight.hf[name][0]) if index else (0, 1)
                    writer.write(name, tensor.to(dtypes[name]), part, parts)
                bar.update(size_of([weight], dtype))

    hf.write_export(out_dir, files, write, config, dtype, assets, bounds=hf.image_bounds(args))


def verify(
    args: Namespace, weights: Sequence[Weight], checkpoint: Checkpoint, source: Safetensors, dtype: torch.dtype
) -> int:
    """Compare all tensors of both formats bit for bit, in the `dtype` that was written.

    Returns the number of compared Hugging Face tensors. Each rank compares a share. Raises GrpoError, which names the
    first tensor that differs.
    """
    weights = hf.check_tensors(source, args, weights)
    places = checkpoint.places(args, weights)

    def compare() -> set[str]:
        names = set()
        with _progress("verifying", size_of(weights, dtype)) as bar:
            for weight in share(weights, dtype, dist.get_rank(), dist.get_world_size()):
                for name, index, tensor in _hf_parts(weight, checkpoint.read(places[weight.name])):
                    given = source.read(name, (*index, slice(None)))
                    written = write_dtype(weight, dtype)
                    if not torch.equal(_bits(given.to(written)), _bits(tensor.to(written))):
                        raise GrpoError(f"tensor {name} differs from {weight.name} in {checkpoint.directory}")
                    names.add(name)
                bar.update(size_of([weight], dtype))
        return names

    return len(set().union(*on_all_ranks(compare, f"{source.dir} is not the checkpoint's model")))


def _hf_parts(weight: Weight, tensor: Tensor) -> list[Part]:
    """Return (name, index of the expert if the tensor holds all experts, tensor) for each part of a full parameter."""
    index = (weight.expert,) if weight.all_experts and weight.expert is not None else ()
    return [(name, index, part) for name, part in zip(weight.hf, weight.split([tensor]), strict=True)]


def compare_logits(
    args: Namespace, weights: Sequence[Weight], checkpoint: Checkpoint, source: Safetensors, dtype: torch.dtype
) -> str:
    """Compare the logits of transformers' model of `source` and of this project's model of the checkpoint.

    Both run a few tokens in float32, with weights rounded to `dtype`, the one that was written. Returns the result as
    text, or the reason why there is none: both models must fit into the available memory. Raises GrpoError when the
    logits differ by more than LOGITS_TOLERANCE.
    """
    return on_rank_0(
        _compare_logits, args, weights, checkpoint, source, dtype, problem=f"{source.dir} is another model"
    )


@torch.no_grad()
def _compare_logits(
    args: Namespace, weights: Sequence[Weight], checkpoint: Checkpoint, source: Safetensors, dtype: torch.dtype
) -> str:
    copies = 3 if source.quantization else 2  # transformers' model is made from a dictionary of dequantized tensors
    need, available = copies * size_of(distinct(weights), torch.float32), psutil.virtual_memory().available
    if need > available:
        return f"logits were not compared: two float32 models need {need / 1e9:.1f} GB, {available / 1e9:.1f} are free"

    tokens = torch.randint(args.vocab_size, (_TOKENS,), generator=torch.Generator().manual_seed(0))
    model = _transformers_model(source, with_tower=bool(args.vision_config))
    exact = {_end(name) for weight in weights if weight.dtype is not None for name in weight.hf}  # A_log
    for name, parameter in model.named_parameters():
        if _end(name) not in exact:
            parameter.copy_(parameter.to(dtype))
    theirs = model(tokens[None]).logits[0]
    del model
    ours = _logits(args, weights, checkpoint, tokens, dtype)[:, : args.vocab_size]
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    found = f"the logits of {_TOKENS} tokens differ from transformers' by at most {difference:.2g} of {largest:.3g}"
    if not difference <= LOGITS_TOLERANCE * largest:
        raise GrpoError(found)
    return found


def _end(name: str) -> str:
    """Return the last two parts of a tensor's name, which files and transformers have in common."""
    return ".".join(name.split(".")[-2:])


def _transformers_model(source: Safetensors, with_tower: bool) -> nn.Module:
    """Return transformers' model of the source, in float32."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns about the multi-token-prediction layers, which it ignores
    # Other attention implementations lack features of some models: soft caps, sinks.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if not source.quantization:
        model_class = AutoModelForImageTextToText if with_tower else AutoModelForCausalLM
        model = model_class.from_pretrained(source.dir, **options).eval()
    else:
        config = AutoConfig.from_pretrained(source.dir)
        del config.quantization_config  # transformers refuses FP8 with smaller blocks at the edges
        tensors = {name: source.read(name) for name in source.names()}
        classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if with_tower else MODEL_FOR_CAUSAL_LM_MAPPING
        model = classes[type(config)].from_pretrained(None, config=config, state_dict=tensors, **options)
    set_latent_epsilon(model, model.config.get_text_config())
    return model


def _logits(
    args: Namespace, weights: Sequence[Weight], checkpoint: Checkpoint, tokens: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the logits [tokens, padded vocabulary] of the checkpoint's model, built in this process only."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    alone = replaced(
        args,
        **dict.fromkeys(("bf16", "fp16", "perform_initialization"), False),
        **dict.fromkeys(sizes, 1),
        **dict.fromkeys(("expert_tensor_parallel_size", "mtp_num_layers"), None),
    )
    set_random_seed(alone.seed)
    model = model_provider(alone, pre_process=True, post_process=True).eval()
    places, by_name = checkpoint.places(args, weights), {weight.name: weight for weight in weights}
    for name, tensor in model_weights.named_weights([model]):
        tensor.copy_(checkpoint.read(places[name]).to(write_dtype(by_name[name], dtype)))
    pack = packed_seq_params(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens), "local")
    positions = torch.arange(len(tokens))[None]
    return model(tokens[None], positions, attention_mask=None, packed_seq_params=pack)[0]


def _progress(title: str, size: int) -> tqdm:
    """Return a progress bar of rank 0's bytes; without a terminal it prints one line every 30 seconds."""
    wait = 0.0 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=size // dist.get_world_size(),
        desc=title,
        unit="B",
        unit_scale=True,
        disable=dist.get_rank() > 0,
        delay=wait,
        mininterval=max(wait, 0.2),
        leave=False,
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
