"""Convert a model between a Hugging Face directory and a Megatron checkpoint directory, in either direction.

    python tools/checkpoint/convert.py --hf-to-megatron --load Qwen3-0.6B --save checkpoints/qwen3 --verify
    python tools/checkpoint/convert.py --megatron-to-hf --load checkpoints/qwen3 --save Qwen3-0.6B-grpo --verify
    python tools/checkpoint/convert.py --hf-to-hf --merge-lora runs/a/adapter --load Qwen3-0.6B --save merged

The Megatron checkpoint has megatron-core's `torch_dist` format, iteration 0 and weights only. Start training from it
with `--pretrained-checkpoint`, in any parallel configuration. {save}/hf_assets/ holds config.json,
generation_config.json and the tokenizer's files; an export copies them, and `--tokenizer-model {save}/hf_assets` is the
tokenizer for training. With the parallel configuration of the training (`--tensor-model-parallel-size` and so on) the
tensors are written as its shards, so that each rank reads only its own shard. `auto` writes whole tensors, which each
rank reads and slices.

Every checkpoint of this format can be exported, of any parallel configuration, with or without the parameter names of
Transformer Engine. Checkpoints of Megatron-LM do not store the model family: give `--hf-config DIR`, a directory with
the config.json and the tokenizer of the model. (Megatron-LM loads the checkpoints of this tool with
`--dist-ckpt-strictness log_unexpected`.)

A Hugging Face directory in FP8 or MXFP4 is dequantized on import (docs/models.md); an export is never quantized.

The tool runs on the CPU and holds one tensor at a time. Under torchrun each process converts a share:

    torchrun --nproc-per-node 8 tools/checkpoint/convert.py --hf-to-megatron --tensor-model-parallel-size 4 ...

`--merge-lora DIR` merges an adapter into the base weights that are read: W + s B A, computed in float32 and rounded
once. DIR holds PEFT's files, or is the --save directory of a run with --lora-rank: its newest checkpoint is then read.

`--verify` reads the written files and compares them bit by bit; it also compares the logits of both models on a few
tokens if two float32 models fit into memory. `--dry-run` prints the parameter mapping (names on both sides, shapes,
tensor layout, the process that writes it) and writes nothing. Megatron checkpoints are trusted input: their metadata is
a pickle.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the host has more memory, and a conversion needs no computation

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import torch
from megatron.core import parallel_state

from megatron_grpo.checkpointing import checkpoint_directory
from megatron_grpo.checkpointing.convert import conversion, torch_dist
from megatron_grpo.checkpointing.convert.torch_dist_writer import tensor_parallel_size
from megatron_grpo.lora import base, files
from megatron_grpo.lora.merge import Merge
from megatron_grpo.lora.table import adapter_table
from megatron_grpo.lora.targets import saved_weights
from megatron_grpo.models.arguments import padded_vocab_size
from megatron_grpo.parallel.agreement import on_rank_0
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights import families, hf, model_weights
from megatron_grpo.weights.arguments import resolve_architecture
from megatron_grpo.weights.parameter_mapping import Weight
from megatron_grpo.weights.safetensors_files import PytorchBin, Safetensors, check_checksums

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
EXPERT_TENSOR = "expert_tensor_parallel_size"
# Arguments in Megatron-LM's checkpoints that the shapes of the tensors do not determine.
NOT_IN_SHAPES = (
    "num_attention_heads num_query_groups kv_channels normalization norm_epsilon swiglu position_embedding_type "
    "rotary_base rotary_percent"
).split()
NOT_IN_SHAPES_OF_EXPERTS = "moe_router_topk moe_router_score_function moe_router_pre_softmax".split()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the tool's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--hf-to-megatron", action="store_true", help="import a Hugging Face directory")
    direction.add_argument("--megatron-to-hf", action="store_true", help="export the newest Megatron checkpoint")
    direction.add_argument("--hf-to-hf", action="store_true", help="only with --merge-lora: both are Hugging Face's")
    parser.add_argument("--merge-lora", metavar="DIR", help="adapter to merge into the weights of an export")
    parser.add_argument("--load", required=True, metavar="DIR", help="directory to read")
    parser.add_argument(
        "--save", metavar="DIR", help="directory to write (an existing one of the same kind is replaced)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to write [the dtype of the source]")
    parser.add_argument("--hf-config", metavar="DIR", help="config.json and tokenizer of a Megatron-LM checkpoint")
    parser.add_argument(
        "--model-family",
        metavar="NAME",
        help="qwen3_5_text or qwen3_5_moe_text: read the language model of a directory of Qwen3.5 alone",
    )
    parser.add_argument(
        "--mtp-num-layers",
        type=_size,
        metavar="N",
        help="1: read the layer of multi-token prediction of Qwen3.5 and Qwen3-Next, too",
    )
    parser.add_argument(
        "--pytorch-bin", action="store_true", help="read pytorch_model.bin instead of safetensors, tensors only"
    )
    for name in (*SIZES, EXPERT_TENSOR):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(
            flag, type=_size, default="auto", metavar="N", help="size in the training that reads the checkpoint [auto]"
        )
    parser.add_argument("--verify", action="store_true", help="read the written files and compare them bit by bit")
    parser.add_argument("--dry-run", action="store_true", help="print the parameter mapping and write nothing")
    return parser


def _size(text: str) -> int | str:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor auto")
    return text if text == "auto" else int(text)


def model_args(options: argparse.Namespace, architecture: Mapping[str, Any], source_name: str) -> argparse.Namespace:
    """Return training arguments with the model and the parallel configuration of the checkpoint."""
    args = replaced(parse_args(["--transformer-impl", "local"]), save=options.save)
    args = replaced(args, **resolve_architecture(args, architecture, source_name))
    given = {name: size for name in (*SIZES, EXPERT_TENSOR) if (size := getattr(options, name)) != "auto"}
    if given and not options.hf_to_megatron:
        raise GrpoError("a Hugging Face directory has no parallel configuration: leave the parallel sizes out")
    args = replaced(args, **given)
    if args.num_layers % args.pipeline_model_parallel_size:
        raise GrpoError(
            f"{args.num_layers} layers cannot be divided into {args.pipeline_model_parallel_size} equal pipeline "
            "stages: change --pipeline-model-parallel-size"
        )
    if (args.num_experts or 1) % args.expert_model_parallel_size:
        raise GrpoError(
            f"{args.num_experts or 'no'} experts cannot be divided over {args.expert_model_parallel_size} ranks: "
            "change --expert-model-parallel-size"
        )
    if EXPERT_TENSOR in given and not args.num_experts:
        raise GrpoError("--expert-tensor-parallel-size has no effect on a model without experts: leave it out")
    if args.expert_tensor_parallel_size is None:
        args = replaced(args, expert_tensor_parallel_size=args.tensor_model_parallel_size)
    return replaced(args, padded_vocab_size=padded_vocab_size(args))


def args_of(options: argparse.Namespace, directory: str) -> argparse.Namespace:
    """Return `model_args` for the model of a Hugging Face directory."""
    config, name = hf.read_config(directory), options.model_family
    family = families.for_hf_config(config, name)
    if name not in (None, family.name):
        raise GrpoError(f"--model-family {name}: {directory} has the family {family.name}: leave the flag out")
    found = family.args_from_hf(config)
    if options.mtp_num_layers:
        if not family.mtp_prefix:
            raise GrpoError(f"--mtp-num-layers: family {family.name} reads their number from config.json: leave it out")
        found["mtp_num_layers"] = options.mtp_num_layers
    return model_args(options, found, f"{directory}/config.json")


def table(args: argparse.Namespace) -> Sequence[Weight]:
    """Return the parameter mapping of the model; raise GrpoError for a tensor that cannot be split."""
    weights = model_weights.table(args)
    for weight in weights:
        weight.shard_shape(tensor_parallel_size(args, weight))
    return weights


def with_dtype(args: argparse.Namespace, dtype: torch.dtype) -> argparse.Namespace:
    """Return the arguments for parameters of this dtype."""
    return replaced(args, bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16)


def print_table(weights: Sequence[Weight], places: Mapping[str, object], dtype: torch.dtype) -> None:
    """Print one line for each Megatron parameter.

    A line has the place in the checkpoint, the full shape, the tensor layout, the axis, the process that writes it, and
    the Hugging Face names and shapes.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for rank in range(world):
        for weight in conversion.share(weights, dtype, rank, world):
            split = (
                "whole on each rank" if weight.axis is None else f"split over TP by {('rows', 'columns')[weight.axis]}"
            )
            layout = f"[{weight.layout.__name__}, {split}, by process {rank}]"
            names = " + ".join(f"{name} {list(shape)}" for name, shape in weight.hf.items())
            print_rank_0(f"{places[weight.name]} {list(weight.shard_shape(1))} {layout} - {names}")


def start() -> None:
    """Join the process group, which megatron-core needs even for a single process."""
    if not parallel_state.model_parallel_is_initialized():
        initialize_distributed(parse_args([]))


def verify(
    args: argparse.Namespace, weights: Sequence[Weight], checkpoint: Path, source: Safetensors, dtype: torch.dtype
) -> None:
    """Compare source and written files on disk: all tensors, then the logits."""
    written = torch_dist.Checkpoint(checkpoint)
    count = conversion.verify(args, weights, written, source, dtype)
    print_rank_0(f"verified: {count} tensors are equal bit by bit")
    if checked := on_rank_0(check_checksums, source, problem=f"{source.dir} is damaged"):
        print_rank_0(f"checksums: {checked} tensors in {source.dir} have the checksums of their writer")
    print_rank_0(conversion.compare_logits(args, weights, written, source, dtype))


def hf_to_megatron(options: argparse.Namespace) -> int:
    """Import a Hugging Face directory; return the number of bytes written."""
    args = args_of(options, options.load)
    source = (
        PytorchBin(options.load)
        if options.pytorch_bin
        else hf.open_weights(options.load, args.model_family, args.mtp_num_layers)
    )
    weights = hf.check_tensors(source, args, table(args))
    dtype = DTYPES[options.dtype] if options.dtype else source.dtype(next(iter(weights[0].hf)))
    args = with_dtype(args, dtype)
    if options.dry_run:
        print_table(weights, torch_dist.written_places(args, weights), dtype)
        return 0
    root = Path(options.save)
    if checkpoint_directory.latest_iteration(root):
        raise GrpoError(f"{root} holds a training run's checkpoints: give another --save")
    check_one_each(source, args, weights)
    start()
    conversion.hf_to_megatron(args, weights, source, root, dtype)
    if options.verify:
        verify(args, weights, checkpoint_directory.find(root)[1], source, dtype)
    return conversion.size_of(conversion.distinct(weights), dtype)


def megatron_to_hf(options: argparse.Namespace) -> int:
    """Export the newest Megatron checkpoint; return the number of bytes written."""
    _, directory = checkpoint_directory.find(options.load)
    checkpoint_directory.verify(directory)
    checkpoint = torch_dist.Checkpoint(directory)
    checkpoint_directory.refuse_adapter(directory)
    stored = checkpoint_directory.stored_args(directory)
    if options.hf_config:
        args = args_of(options, options.hf_config)
        check_agreement(args, stored or checkpoint.megatron_lm_args(), directory, options.hf_config)
        assets: str | Path | None = options.hf_config
    elif options.model_family:
        raise GrpoError("--model-family describes a Hugging Face directory: leave it out, or give --hf-config")
    elif stored.get("model_family"):
        args = model_args(options, stored, f"the checkpoint {options.load}")
        assets = checkpoint_directory.run_directory(options.load) / hf.ASSETS_DIR
        if not Path(assets).is_dir():
            assets = stored.get("tokenizer_model")
        if assets is None or not Path(assets).exists():
            print_rank_0(
                f"{options.load} has no {hf.ASSETS_DIR}: the export has no tokenizer (--hf-config DIR has one)"
            )
    else:
        raise GrpoError(
            f"the checkpoint {options.load} does not store its model family (those of Megatron-LM never do): give "
            "--hf-config DIR, a Hugging Face directory with the config.json and the tokenizer of the model"
        )
    embedding = checkpoint.tensors.get("embedding.word_embeddings.weight")
    if embedding is not None:
        # It is padded for the parallel configuration of its writer.
        args = replaced(args, padded_vocab_size=embedding.size[0])
    weights = table(args)
    places = checkpoint.places(args, weights)
    first = checkpoint.tensors[places[weights[0].name][0].key].properties.dtype
    dtype = DTYPES[options.dtype] if options.dtype else first
    args = with_dtype(args, dtype)
    if options.dry_run:
        print_table(weights, {name: " + ".join(map(str, where)) for name, where in places.items()}, dtype)
        return 0
    out_dir = Path(options.save)
    hf.check_replaceable("--save", out_dir, (options.load, options.merge_lora, assets))
    start()
    args, merge = adapter(options, args)
    conversion.megatron_to_hf(args, weights, checkpoint, out_dir, dtype, assets, merge=merge)
    if options.verify:
        verify(args, weights, directory, Safetensors(out_dir), dtype)
    return conversion.size_of(weights, dtype)


def check_one_each(source: Safetensors, args: argparse.Namespace, weights: Sequence[Weight]) -> None:
    """Raise GrpoError when the files hold two different tensors for one parameter."""
    hf.check_tied(source, args)
    hf.check_copies(source, weights, {weight.name: (0, 1) for weight in weights})


def hf_to_hf(options: argparse.Namespace) -> int:
    """Write a Hugging Face directory with an adapter merged into its weights; return the number of bytes written."""
    args = args_of(options, options.load)
    source, out_dir = hf.open_weights(options.load, args.model_family, args.mtp_num_layers), Path(options.save)
    weights = hf.check_tensors(source, args, table(args))
    check_one_each(source, args, weights)
    dtype = DTYPES[options.dtype] if options.dtype else source.dtype(next(iter(weights[0].hf)))
    args = with_dtype(args, dtype)
    args, merge = adapter(options, args)
    assert merge is not None  # --hf-to-hf is refused without --merge-lora
    hf.check_replaceable("--save", out_dir, (options.load, options.merge_lora))

    def parts(weight: Weight) -> Iterator[conversion.Part]:
        for name in weight.hf:
            index = (weight.expert,) if weight.all_experts and weight.expert is not None else ()
            tensor = source.read(name, (*index, slice(None)))
            yield name, index, tensor if index else merge(name, tensor)

    start()
    conversion.write_hf(args, weights, parts, out_dir, dtype, options.load)
    return conversion.size_of(weights, dtype)


def adapter(options: argparse.Namespace, args: argparse.Namespace) -> tuple[argparse.Namespace, Merge | None]:
    """Return the arguments with the settings of --merge-lora's adapter, and its merge; None without the flag."""
    if not options.merge_lora:
        return args, None
    directory = Path(options.merge_lora)
    if checkpoint_directory.latest_iteration(directory) is None:
        args = replaced(args, **files.resolve_adapter(args, directory))
        dtype = getattr(torch, files.read_base(directory)["params_dtype"])
        return args, Merge(args, files.open_adapter(args, directory), dtype)
    _, found = checkpoint_directory.find(directory)
    checkpoint_directory.verify(found)
    stored = checkpoint_directory.read_checkpoint_args(directory)
    args = replaced(args, **base.resolve_stored(args, stored))
    if not args.lora_rank:
        raise GrpoError(f"--merge-lora {directory} holds checkpoints of a run without --lora-rank: there is no adapter")
    checkpoint = torch_dist.Checkpoint(found)
    experts = {name: weight.expert for weight in adapter_table(args) for name in weight.hf}
    of_run = args
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in checkpoint.tensors:  # padded for its parallel configuration
            of_run = replaced(args, padded_vocab_size=checkpoint.tensors[key].size[0])
    saved = {name: weight for weight in saved_weights(of_run) for name in weight.hf}

    def read(name: str) -> torch.Tensor:
        if name in saved:
            weight = saved[name]
            whole = checkpoint.read(checkpoint.find(args, weight))
            return dict(zip(weight.hf, weight.split([whole]), strict=True))[name]
        if (expert := experts[name]) is None:
            return checkpoint.read([torch_dist.Place(f"lora.{name}")])
        key = f"lora.{name}".replace(f".experts.{expert}.", ".experts.")
        return checkpoint.read([torch_dist.Place(key, (expert,), (args.num_experts,))])

    return args, Merge(args, read, getattr(torch, stored["lora_base"]["dtype"]))


def check_agreement(args: argparse.Namespace, stored: Mapping[str, Any], directory: Path, hf_config: str) -> None:
    """Refuse a config.json that contradicts the arguments with which the checkpoint was trained."""
    stored = dict(stored)
    if not stored.get("group_query_attention"):
        stored["num_query_groups"] = stored.get("num_attention_heads")  # Megatron-LM stores its default, 1
    llama3 = (args.rope_scaling or {}).get("rope_type") == "llama3"
    here = {**vars(args), "use_rope_scaling": llama3, "rope_scaling_factor": (args.rope_scaling or {}).get("factor")}
    names = NOT_IN_SHAPES + (NOT_IN_SHAPES_OF_EXPERTS if args.num_experts else [])
    names += ["use_rope_scaling"] + ["rope_scaling_factor"] * llama3
    if args.multi_latent_attention:
        names = [name for name in names if name not in ("num_query_groups", "kv_channels")]
    for name in names:
        if None not in (here[name], stored.get(name)) and here[name] != stored[name]:
            raise GrpoError(
                f"{directory} was trained with {name} {stored[name]}, but {hf_config}/config.json has {here[name]}: "
                "give the --hf-config of this model"
            )


def convert(options: argparse.Namespace) -> None:
    """Convert in the direction of the flags, and print size and duration."""
    if not options.save and not options.dry_run:
        raise GrpoError("--save is missing: give the directory to write")
    if options.save and Path(options.save).resolve() == Path(options.load).resolve():
        raise GrpoError(f"--save and --load are the same directory ({options.load}): give another --save")
    if options.merge_lora and (options.hf_to_megatron or options.verify or options.dry_run):
        raise GrpoError("--merge-lora goes with --megatron-to-hf and --hf-to-hf, without --verify and --dry-run")
    if options.hf_to_hf and not options.merge_lora:
        raise GrpoError("--hf-to-hf needs --merge-lora: without an adapter there is nothing to convert")
    if options.pytorch_bin and not options.hf_to_megatron:
        raise GrpoError("--pytorch-bin goes with --hf-to-megatron only: leave it out")
    if options.hf_config and not options.megatron_to_hf:
        raise GrpoError(
            "--hf-config goes with --megatron-to-hf only; --load has a config.json of its own: leave it out"
        )
    if options.verify and options.dry_run:
        raise GrpoError("--verify reads what was written, and --dry-run writes nothing: leave one of them out")
    before = time.monotonic()
    directions = {"hf_to_megatron": hf_to_megatron, "megatron_to_hf": megatron_to_hf, "hf_to_hf": hf_to_hf}
    size = next(function for name, function in directions.items() if getattr(options, name))(options)
    seconds = time.monotonic() - before
    if not options.dry_run:
        rate = f"{size / 1e9:.2f} GB in {seconds:.1f} s, {size / 1e6 / seconds:.0f} MB/s"
        print_rank_0(f"{options.load} -> {options.save}: {rate}")


def main() -> None:
    """Parse the command line and convert; `run` turns a GrpoError into one message and exit code 1."""
    options = build_parser().parse_args()

    def converted() -> None:
        try:
            convert(options)
        except OSError as error:  # a directory that cannot be looked at
            raise GrpoError(f"{error}: correct the path, or its permissions") from error

    run(converted)


if __name__ == "__main__":
    main()
