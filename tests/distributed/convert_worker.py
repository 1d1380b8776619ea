"""What test_convert_ranks.py runs under torchrun: conversions by two processes, and the trainer's side of them."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
from convert_tool import load_tool
from toy_checkpoints import build, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch

from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.parallel.initialize import destroy_rank_groups, initialize_distributed, set_random_seed
from megatron_grpo.training import train_step
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import hf, model_weights

LAYOUTS = {
    "llama TP2": {"tensor_model_parallel_size": 2},
    "llama PP2": {"pipeline_model_parallel_size": 2},
    "qwen3_moe EP2": {"expert_model_parallel_size": 2, "moe_grouped_gemm": True},
    "qwen3_moe TP2": {"tensor_model_parallel_size": 2},
}


def layout(args) -> None:
    """Have megatron-core's groups in the layout of the arguments."""
    destroy_rank_groups()
    initialize_distributed(args)
    set_random_seed(1)


def trained(root: Path, family: str, name: str) -> None:
    """Load the converted checkpoint in a layout, where it must be what load_hf gives, and save it with an optimizer."""
    args = toy_args(root / family, lr=1e-3, train_iters=1, use_distributed_optimizer=True, **LAYOUTS[name])
    layout(args)
    model, expected = build(args), build(args)
    checkpoint.load_weights(root / f"{family} converted", model)
    hf.load_hf(expected, args, root / family)
    pairs = zip(model_weights.named_weights(model), model_weights.named_weights(expected), strict=True)
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs), name
    args = replaced(args, save=str(root / name))
    chunks, optimizer, scheduler = train_step.setup_optimizer(args, model)
    checkpoint.save_checkpoint(args, 3, chunks, optimizer, scheduler, {})
    os.write(1, f"{name}: loaded\n".encode())


def main(root: Path) -> None:
    """Two processes import; models in their layouts load that and train; two processes export what was trained."""
    tool = load_tool()
    convert = lambda *words: tool.convert(tool.build_parser().parse_args([str(word) for word in words]))  # noqa: E731
    tp2 = ("--tensor-model-parallel-size", 2)
    for family, flags in {"llama": tp2, "qwen3_moe": (*tp2, "--expert-tensor-parallel-size", 1)}.items():
        convert("--hf-to-megatron", "--load", root / family, "--save", root / f"{family} converted", "--verify", *flags)
    for name in LAYOUTS:
        trained(root, name.split()[0], name)
        convert("--megatron-to-hf", "--load", root / name, "--save", root / f"{name} back")


if __name__ == "__main__":
    run(lambda: main(Path(sys.argv[1])))
