"""What test_multi_tensor_ranks.py runs under torchrun: updates with megatron-core's loops over parameters, and ours."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import megatron.core.optimizer
import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads, optimizer

from megatron_grpo.parallel.initialize import destroy_rank_groups, initialize_distributed
from megatron_grpo.training import multi_tensor
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.offload import optimizer_tensors

MODEL = """--model-family qwen3 --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 8 --normalization RMSNorm --swiglu --disable-bias-linear
    --qk-layernorm --vocab-size 100 --max-position-embeddings 64 --micro-batch-size 2""".split()
CASES = {
    "float32": "",
    "bf16": "--bf16",
    "float32 distributed": "--use-distributed-optimizer",
    "bf16 distributed": "--bf16 --use-distributed-optimizer",
    "bf16 overlapped": "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "fp16": "--fp16 --loss-scale 64",
}
REPLACED = [
    (clip_grads, "l2_norm_impl"),
    (clip_grads, "multi_tensor_scale_impl"),
    (optimizer, "_multi_tensor_copy_this_to_that"),
    (megatron.core.optimizer, "DistributedOptimizer"),
]
OWN = [getattr(module, name) for module, name in REPLACED]  # of megatron-core


def updated(flags: list[str], ours: bool) -> tuple[list[torch.Tensor], list[dict]]:
    """Return all tensors of model and optimizer after two updates, and the metrics."""
    for (module, name), function in zip(REPLACED, OWN, strict=True):
        setattr(module, name, function)
    install = multi_tensor.install
    if not ours:
        multi_tensor.install = lambda: None
    args = made_up.parse([*MODEL, *flags, "--clip-grad", "0.01"], int(os.environ["WORLD_SIZE"]))
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    multi_tensor.install = install
    assert (clip_grads.l2_norm_impl is multi_tensor.norm) == ours
    metrics, _, _ = made_up.two_updates(args, trainer, made_up.rollout(args))
    trained = [parameter for chunk in trainer.model for parameter in chunk.parameters()]
    tensors = [tensor.detach().clone() for tensor in [*trained, *optimizer_tensors(trainer.optimizer)]]
    destroy_rank_groups()
    return tensors, metrics


def main() -> None:
    for name in sys.argv[1:]:
        (want, of_core), (got, ours) = (updated(CASES[name].split(), ours) for ours in (False, True))
        assert len(got) == len(want) > 20
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
        assert ours == of_core and ours[1]["grad_norm"] > 0.01, ours  # clipped
        os.write(1, f"equal: {name} on rank {dist.get_rank()}\n".encode())
    dist.barrier()


if __name__ == "__main__":
    run(main)
