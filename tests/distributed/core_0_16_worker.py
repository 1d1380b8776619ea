"""What test_core_0_16.py runs under torchrun on two ranks: checkpoints that megatron-core 0.16.1 wrote, resumed.

    core_0_16_worker.py resume ROOT own|another     loads each checkpoint in its layout, or in another one
    core_0_16_worker.py record ROOT                 wrote them with megatron-core 0.16.1, resumed, and recorded

Recorded are what a load restores (a checksum of each tensor of a checkpoint that is saved after it) and the update that
follows.
"""

import json
import os
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent)]
from checkpoint_worker import fill, say

# checkpoint_worker installs the CPU layer, which comes before megatron.core.
# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

import pretrain_grpo
from megatron_grpo.checkpointing import checkpoint, checkpoint_directory
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import destroy_rank_groups, initialize_distributed, set_random_seed
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.training.update_flops import UpdateFlops
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights.stream import stream_hf
from tools import check_parallel, made_up

COMMON = """--num-layers 4 --hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 2 --group-query-attention
    --num-query-groups 2 --kv-channels 4 --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm
    --vocab-size 32 --make-vocab-size-divisible-by 2 --max-position-embeddings 64 --transformer-impl local --lr 1e-2
    --lr-decay-style linear --lr-warmup-iters 1 --clip-grad 1 --train-iters 9 --global-batch-size 4 --num-generations 2
    --max-tokens-per-microbatch 64 --max-prompt-length 8 --max-completion-length 8 --beta 0.1
    --reward-funcs exact_match --train-data-path unused --tokenizer-model unused --no-save-hf""".split()
DENSE = "--model-family qwen3"
EXPERTS = """--model-family qwen3_moe --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 4
    --untie-embeddings-and-output-weights"""
SHARDED = "--use-distributed-optimizer"
# name of the folder -> (flags, layout that wrote it, another layout)
CHECKPOINTS = {
    "data_parallel": (f"{DENSE} {SHARDED} --bf16", "DP2", "TP2 SP"),
    "tensor_parallel": (DENSE, "TP2 SP", "CP2"),
    "pipeline_parallel": (f"{DENSE} {SHARDED}", "PP2 VPP2", "DP2"),
    "expert_parallel": (f"{EXPERTS} {SHARDED}", "EP2", "PP2 VPP2"),
}
UPDATES = [np.arange(0, 4), np.arange(4, 8), np.arange(2, 6)]


def enter(flags, layout, root, fresh=False):
    """Return arguments and a trainer in a layout."""
    words = [*COMMON, *flags.split(), *check_parallel.flags_of(layout), "--save", root, "--load", root]
    args = parse_args([str(word) for word in words])
    args = resolve_args(args, int(os.environ["WORLD_SIZE"]))
    if dist.is_initialized():
        destroy_rank_groups()
    initialize_distributed(args)
    set_random_seed(1)
    model = forward.build_model(args, model_provider)
    if fresh:
        fill(model, args, "weight")
    parts = dict(zip(("model", "optimizer", "scheduler"), train_step.setup_optimizer(args, model), strict=True))
    parts |= {"bad_updates": BadUpdates("stop", None, None), "flops": UpdateFlops(args, None)}
    return args, SimpleNamespace(**parts, iteration=0)


def parts_of(trainer):
    return trainer.model, trainer.optimizer, trainer.scheduler


def write(name, root):
    """Write a checkpoint after two updates of a made-up model by a made-up rollout, and the rollout."""
    flags, layout, _ = CHECKPOINTS[name]
    args, trainer = enter(flags, layout, root / name, fresh=True)
    batch = made_up.off_policy(args, trainer, made_up.rollout(args))
    if dist.get_rank() == 0:
        (root / name).mkdir(parents=True)
        batch.save(root / name / "rollout.npz")
    for samples in UPDATES[:2]:
        pretrain_grpo.update(args, trainer, batch, samples)
    with forward.parameters_complete(trainer.model):
        checkpoint.save_checkpoint(args, 2, *parts_of(trainer), {"rollouts": 2})


def resume(name, layout, root, again):
    """Load a checkpoint, save what was loaded, and update once more; return what was found."""
    args, trainer = enter(CHECKPOINTS[name][0], layout, root / name)
    iteration, extra = checkpoint.load_checkpoint(args, *parts_of(trainer))
    args = replaced(args, save=str(again))
    steps = sorted({group["step"] for group in trainer.optimizer.param_groups if "step" in group})
    found = {"iteration": iteration, "extra": extra, "scheduler": trainer.scheduler.num_steps, "steps": steps}
    with forward.parameters_complete(trainer.model):
        checkpoint.save_checkpoint(args, iteration, *parts_of(trainer), extra)
    stored = dist_checkpointing.load_plain_tensors(str(checkpoint_directory.find(again)[1]))
    tensors = {key: value for key, value in stored.items() if torch.is_tensor(value)}
    for key in tensors:  # the padding of the vocabulary depends on the layout
        if "word_embeddings" in key or "output_layer" in key:
            tensors[key] = tensors[key][: args.vocab_size]
    found["tensors"] = {
        key: zlib.crc32(value.contiguous().view(torch.uint8).numpy().tobytes()) for key, value in tensors.items()
    }
    batch = RolloutBatch.load(root / name / "rollout.npz")
    row = pretrain_grpo.update(args, trainer, batch, UPDATES[2])
    found["update"] = {key: row[key] for key in ("loss", "grad_norm", "kl", "entropy", "ratio/max", "lr")}
    with forward.parameters_complete(trainer.model):
        weights = {key: weight.double() for key, weight in stream_hf(trainer.model, args)}
    found["weights"] = {key: [float(weight.sum()), float(weight.norm())] for key, weight in weights.items()}
    return found


def report(root, record, chosen):
    for name, (_, *layouts) in CHECKPOINTS.items():
        if record:
            write(name, root)
        for layout in layouts[chosen]:
            found = resume(name, layout, root, root / f"{name} in {layout}")
            if dist.get_rank() == 0:
                if record:
                    (root / name / f"{layout}.json").write_text(json.dumps(found, indent=1))
                say(f"found {json.dumps([name, layout, found])}")


if __name__ == "__main__":
    case, directory, *which = sys.argv[1:]
    sys.argv[1:] = []
    chosen = {"own": slice(1), "another": slice(1, 2)}[which[0]] if which else slice(2)
    run(lambda: report(Path(directory), case == "record", chosen))
