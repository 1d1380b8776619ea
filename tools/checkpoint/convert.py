"""Convert a model between a Hugging Face directory and a Megatron checkpoint directory, in either direction.

    python tools/checkpoint/convert.py --hf-to-megatron --load Qwen3-0.6B --save checkpoints/qwen3 --verify
    python tools/checkpoint/convert.py --megatron-to-hf --load checkpoints/qwen3 --save Qwen3-0.6B-grpo --verify

The Megatron checkpoint is one of megatron-core's `torch_dist` format, iteration 0, weights only. It is independent of
the layout: start training from it with `--pretrained-checkpoint`, at any tensor and pipeline parallel size. Beside it,
{save}/hf_assets/ keeps config.json, generation_config.json and the tokenizer's files; an export takes them from there,
and `--tokenizer-model {save}/hf_assets` gives training its tokenizer.

Runs on the CPU, in one process, which holds the whole model. Under torchrun, with `--tensor-model-parallel-size` and
`--pipeline-model-parallel-size`, each process holds its part:

    torchrun --nproc-per-node 4 tools/checkpoint/convert.py --tensor-model-parallel-size 4 --hf-to-megatron ...

`--verify` reads what was written and compares it bit by bit; `--dry-run` prints the table (names on both sides, shapes,
layout) and writes nothing. Megatron checkpoints are trusted input: their metadata is a pickle.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU has the memory, and a conversion computes nothing

from megatron_grpo import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import torch
import torch.distributed as dist

from megatron_grpo import checkpointing, training, validation
from megatron_grpo.arguments import parse_args
from megatron_grpo.errors import GrpoError
from megatron_grpo.initialize import initialize_distributed, print_rank_0, run, set_random_seed
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.weights import families, hf, mapping
from megatron_grpo.weights.safetensors_files import Safetensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parser() -> argparse.ArgumentParser:
    """The tool's own few flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="More: the text at the top of this file.", allow_abbrev=False
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--hf-to-megatron", action="store_true", help="import a Hugging Face directory")
    direction.add_argument("--megatron-to-hf", action="store_true", help="export the newest Megatron checkpoint")
    parser.add_argument("--load", required=True, metavar="DIR", help="directory to read")
    parser.add_argument("--save", metavar="DIR", help="directory to write (replaced when it is of the same kind)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to write (that of what is read)")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="processes in TP (1)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="stages in PP (1)")
    parser.add_argument("--verify", action="store_true", help="read what was written and compare it bit by bit")
    parser.add_argument("--dry-run", action="store_true", help="print the table of weights and write nothing")
    return parser


def model_args(options: argparse.Namespace, architecture: dict, source_name: str) -> argparse.Namespace:
    """Training arguments that describe the model in this tool's layout, the padded vocabulary filled in."""
    args = parse_args(["--transformer-impl", "local"])
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.save = tp, pp, options.save
    validation.merge_architecture(args, architecture, source_name)
    args.padded_vocab_size = validation.padded_vocab_size(args)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != tp * pp:
        raise GrpoError(
            f"{world} processes for a tensor x pipeline parallel size of {tp * pp}: torchrun --nproc-per-node {tp * pp}"
        )
    if args.num_layers % pp:
        raise GrpoError(f"{args.num_layers} layers cannot be divided into {pp} equal pipeline stages")
    for weight in mapping.table(args):
        weight.shard_shape(tp)  # refuses a size that does not divide
    return args


def set_dtype(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Have the model built with parameters of this dtype."""
    args.bf16, args.fp16 = dtype is torch.bfloat16, dtype is torch.float16


def print_table(args: argparse.Namespace) -> None:
    """One line for each Megatron parameter: name, full shape, layout, axis, and the Hugging Face names and shapes."""
    for weight in mapping.table(args):
        split = "whole on each rank" if weight.axis is None else f"split over TP by {('rows', 'columns')[weight.axis]}"
        names = " + ".join(f"{name} {list(shape)}" for name, shape in weight.hf.items())
        print_rank_0(f"{weight.name} {list(weight.shard_shape(1))} [{weight.layout.__name__}, {split}] <- {names}")


def build(args: argparse.Namespace) -> training.Model:
    """The model of the arguments, in this process's part of the layout, with no weights loaded."""
    if not dist.is_initialized():
        initialize_distributed(args)
    set_random_seed(args.seed)
    return training.build_model(args, model_provider)


def hf_to_megatron(options: argparse.Namespace) -> None:
    """Import: each process reads its slices of the safetensors files, then writes its shards of the checkpoint."""
    config = hf.read_config(options.load)
    args = model_args(options, families.for_hf_config(config).args_from_hf(config), f"{options.load}/config.json")
    source = Safetensors(options.load)
    weights = mapping.table(args)
    hf.check_tensors(source, weights)
    if options.dry_run:
        return print_table(args)
    if checkpointing.latest_iteration(options.save):
        raise GrpoError(f"{options.save} holds a training run's checkpoints: choose another --save")
    first = next(iter(weights[0].hf))
    set_dtype(args, DTYPES[options.dtype] if options.dtype else source.read(first, (slice(0, 1),)).dtype)
    model = build(args)
    hf.load_hf(model, args, options.load)
    checkpointing.save_checkpoint(args, 0, model, None, None, {})
    if dist.get_rank() == 0:
        hf.copy_assets(options.load, Path(options.save) / hf.ASSETS_DIR)
    dist.barrier()
    if options.verify:
        for _, tensor in mapping.named_weights(model):
            tensor.fill_(torch.nan)
        checkpointing.load_weights(options.save, model)
        print_rank_0(f"verified: {hf.verify_hf(model, args, options.load)} tensors are the same bit by bit")


def megatron_to_hf(options: argparse.Namespace) -> None:
    """Export: each process reads its shards of the checkpoint; the first gathers and writes the safetensors files."""
    stored = checkpointing.read_checkpoint_args(options.load)
    if not stored.get("model_family"):
        raise GrpoError(f"the checkpoint {options.load} does not say its model family: it is not one of this program's")
    args = model_args(options, stored, f"the checkpoint {options.load}")
    if options.dry_run:
        return print_table(args)
    args.bf16, args.fp16 = stored["bf16"], stored["fp16"]
    if options.dtype:
        set_dtype(args, DTYPES[options.dtype])
    model = build(args)
    checkpointing.load_weights(options.load, model)
    assets = Path(options.load) / hf.ASSETS_DIR
    if not assets.is_dir():
        assets = stored.get("tokenizer_model")
    hf.save_hf(model, args, options.save, tokenizer_dir=assets)
    if options.verify:
        print_rank_0(f"verified: {hf.verify_hf(model, args, options.save)} tensors are the same bit by bit")


def convert(options: argparse.Namespace) -> None:
    """Do what the flags say, and report."""
    if not options.save and not options.dry_run:
        raise GrpoError("--save is missing: name the directory to write")
    if options.save and Path(options.save).resolve() == Path(options.load).resolve():
        raise GrpoError(f"--save and --load are the same directory ({options.load})")
    start = time.monotonic()
    (hf_to_megatron if options.hf_to_megatron else megatron_to_hf)(options)
    if not options.dry_run:
        print_rank_0(f"{options.load} -> {options.save} in {time.monotonic() - start:.1f} s")


def main() -> None:
    """Parse and convert; `run` turns a GrpoError into one message and exit code 1."""
    options = build_parser().parse_args()
    run(lambda: convert(options))


if __name__ == "__main__":
    main()
