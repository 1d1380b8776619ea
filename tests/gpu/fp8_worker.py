"""What tests/gpu/test_fp8.py runs on one GPU: updates in FP8 beside bf16. Prints "FP8 {json}" with what it measured.

torchrun --nproc-per-node 1 tests/gpu/fp8_worker.py DIRECTORY [dense|more]
"""

import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

for folder in ".", "tests/helpers", "tests/gpu":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / folder))
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # a resumed run is compared bit for bit

from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import torch
from test_updates import EXPERTS, MODEL

import pretrain_grpo
from megatron_grpo.checkpointing.checkpoint import load_checkpoint, save_checkpoint
from megatron_grpo.models import forward, router_replay
from megatron_grpo.models.fp8_training import free_fp8_weights
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.reference.reference_model import SwappedReference
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.offload import gradient_tensors

LENGTHS = [200, 37, 150, 91, 256, 64, 5, 180]  # of 8 completions: no pack is a multiple of 16 by itself
FP8 = "--fp8-format e4m3"


def start(flags: str):
    """Return (arguments, trainer, rollout, completions) of a run with these flags."""
    size = made_up.size_flags(len(LENGTHS), max(LENGTHS))
    flags = f"--transformer-impl transformer_engine --micro-batch-size 4 --lr 1e-3 {flags}"
    args = made_up.parse([*MODEL, *size, *flags.split()], 1)
    initialize_distributed(args)
    return args, made_up.trainer(args), *made_up.one_update(args, LENGTHS)


def log_probs(args, trainer, batch, chosen) -> torch.Tensor:
    scores = forward.scores(args, trainer.model, pretrain_grpo.forward_step, batch, chosen)
    return torch.from_numpy(scores[0]).nan_to_num()


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for chunk in trainer.model for p in chunk.parameters()])


@contextlib.contextmanager
def products():
    """Count the products of Transformer Engine's dense layers by the number of their operands in FP8."""
    from transformer_engine.pytorch.module import layernorm_linear, linear
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    counts, original = Counter(), linear.general_gemm

    def counted(a, b, *arguments, **options):
        counts[isinstance(a, QuantizedTensorStorage) + isinstance(b, QuantizedTensorStorage)] += 1
        return original(a, b, *arguments, **options)

    linear.general_gemm = layernorm_linear.general_gemm = counted
    try:
        yield counts
    finally:
        linear.general_gemm = layernorm_linear.general_gemm = original


def updated(flags: str, routed_experts=None) -> dict:
    """Run one update; return log-probabilities before and after it, its gradient, metrics, and counts of products.

    With R2 all passes use ``routed_experts``, or without these the experts that the first pass chose.
    """
    args, trainer, batch, chosen = start(flags)
    batch.routed_experts = routed_experts
    unchanged = contextlib.nullcontext(lambda batch: batch)
    with router_replay.recording(args, trainer.model) if routed_experts is None else unchanged as with_experts:
        before = log_probs(args, trainer, batch, chosen)
    batch = with_experts(batch)
    with products() as counts:
        metrics = pretrain_grpo.update(args, trainer, batch, chosen)
    gradient = torch.cat([tensor.flatten() for tensor in gradient_tensors(trainer.model)]).cpu()
    after = log_probs(args, trainer, batch, chosen)
    allocated = torch.cuda.memory_allocated()
    free_fp8_weights(trainer.model)
    freed = allocated - torch.cuda.memory_allocated()
    again = log_probs(args, trainer, batch, chosen)
    free_fp8_weights(trainer.model)
    made_up.release(trainer)
    return {
        "before": before, "after": after, "gradient": gradient, "loss": metrics["loss"], "freed": freed,
        "routed_experts": batch.routed_experts,
        "fresh": torch.equal(after, again), "products": {str(key): value for key, value in counts.items()},
    }  # fmt: skip


def compared(found: dict, plain: dict) -> dict:
    """Return distances of a run from another one."""
    moved = [found[name] - plain[name] for name in ("before", "after")]
    cosine = torch.nn.functional.cosine_similarity(found["gradient"].double(), plain["gradient"].double(), dim=0)
    in_loss = plain["before"] != 0
    return {
        "mean": [move[in_loss].abs().mean().item() for move in moved],
        "largest": [move.abs().max().item() for move in moved],
        "cosine": cosine.item(),
        **{name: found[name] for name in ("loss", "fresh", "freed", "products")},
    }


def resumed(directory: str, flags: str) -> bool:
    """Return whether an update after a resume gives the weights of the run that went on, bit for bit."""
    places = f"--save {directory} --load {directory} {flags}"
    args, trainer, batch, chosen = start(places)
    pretrain_grpo.update(args, trainer, batch, chosen)
    save_checkpoint(args, 1, trainer.model, trainer.optimizer, trainer.scheduler, {})
    pretrain_grpo.update(args, trainer, batch, chosen)
    want = weights(trainer)
    made_up.release(trainer)
    args, trainer, batch, chosen = start(places)
    load_checkpoint(args, trainer.model, trainer.optimizer, trainer.scheduler)
    pretrain_grpo.update(args, trainer, batch, chosen)
    same = torch.equal(weights(trainer), want)
    made_up.release(trainer)
    return same


def crossed(directory: str, first: str, second: str) -> bool:
    """Return whether a run with ``second`` loads the weights that a run with ``first`` saved, and goes on."""
    args, trainer, batch, chosen = start(f"--save {directory} {first}")
    pretrain_grpo.update(args, trainer, batch, chosen)
    save_checkpoint(args, 1, trainer.model, trainer.optimizer, trainer.scheduler, {})
    want = weights(trainer)
    made_up.release(trainer)
    args, trainer, batch, chosen = start(f"--load {directory} {second}")
    load_checkpoint(args, trainer.model, trainer.optimizer, trainer.scheduler)
    same = torch.equal(weights(trainer), want)
    pretrain_grpo.update(args, trainer, batch, chosen)
    moved = bool(weights(trainer).isfinite().all()) and not torch.equal(weights(trainer), want)
    made_up.release(trainer)
    return same and moved


def formats(trainer) -> list[str]:
    """Return the formats of the gradients in the layers of Transformer Engine."""
    modules = (module for chunk in trainer.model for module in chunk.modules())
    in_fp8 = (module for module in modules if getattr(module, "_fp8_workspaces", None))
    return sorted({str(quantizer.dtype) for module in in_fp8 for quantizer in module.quantizers["scaling_bwd"]})


def formats_after_load(directory: str, flags: str) -> list[str]:
    """Return the formats of the gradients in a run that loads a checkpoint."""
    args, trainer, batch, chosen = start(f"--load {directory} {flags}")
    load_checkpoint(args, trainer.model, trainer.optimizer, trainer.scheduler)
    pretrain_grpo.update(args, trainer, batch, chosen)
    found = formats(trainer)
    made_up.release(trainer)
    return found


def reference_is_the_first_policy(flags: str) -> bool:
    """Return whether a reference has the log-probabilities of the policy at the start, then and after an update."""
    args, trainer, batch, chosen = start(flags)
    reference, policy = SwappedReference(args, trainer.model), log_probs(args, trainer, batch, chosen)
    same = []
    for _ in range(2):
        with reference.ready(trainer.model) as ready:
            same.append(torch.equal(log_probs(ready.args, ready, batch, chosen), policy))
        pretrain_grpo.update(args, trainer, batch, chosen)
    moved = not torch.equal(log_probs(args, trainer, batch, chosen), policy)
    made_up.release(trainer)
    return all(same) and moved


def dense(directory: str) -> dict:
    """Both recipes beside bf16, checkpoints, and the reference."""
    plain = updated("")
    results = {"bf16": compared(plain, plain)}
    for name, flags in (
        ("blockwise", FP8),
        ("blockwise hybrid", "--fp8-format hybrid"),
        ("tensorwise", "--fp8-format hybrid --fp8-recipe tensorwise"),
    ):
        results[name] = compared(updated(flags), plain)
        print(name, results[name], flush=True)
    results["resumed"] = resumed(f"{directory}/same", FP8)
    results["to bf16"] = crossed(f"{directory}/down", FP8, "")
    results["from bf16"] = crossed(f"{directory}/up", "", FP8)
    results["formats"] = [formats_after_load(f"{directory}/same", flags) for flags in (FP8, "--fp8-format hybrid")]
    results["reference"] = reference_is_the_first_policy(FP8)
    return results


def more(directory: str) -> dict:
    """What changes where and how often layers compute: recomputation, adapters, experts, layers in bf16."""
    results, quantized = {}, updated(FP8)
    whole = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    parts = "--recompute-granularity selective --recompute-modules mlp"
    for name, flags, beside in (
        ("recompute full", f"{FP8} {whole}", quantized),
        ("recompute mlp", f"{FP8} {parts}", quantized),
        ("no transpose cache", f"{FP8} --disable-parameter-transpose-cache", quantized),
        ("fused gradients", f"{FP8} --use-distributed-optimizer --gradient-accumulation-fusion", quantized),
        ("edges in bf16", f"{FP8} --first-last-layers-bf16", updated("")),
        ("adapter", f"{FP8} --lora-rank 8", updated("--lora-rank 8")),
    ):
        results[name] = compared(updated(flags), beside)
        print(name, results[name], flush=True)
    experts = " ".join([*EXPERTS, "--moe-grouped-gemm"])
    plain = updated(f"{experts} --router-replay-mode R2")
    results["experts"] = compared(updated(f"{FP8} {experts} --router-replay-mode R2", plain["routed_experts"]), plain)
    results["experts loaded"] = crossed(f"{directory}/experts", f"{FP8} {experts}", f"{FP8} {experts}")
    return results


def main() -> None:
    directory, part = sys.argv[1:]
    results = {"dense": dense, "more": more}[part](directory)
    print("FP8", json.dumps(results), flush=True)


if __name__ == "__main__":
    run(main)
