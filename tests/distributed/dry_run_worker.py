"""Builds the models of LAYOUTS, and compares them with what the dry run says of them; test_dry_run_ranks.py.

torchrun --nproc-per-node 4 tests/distributed/dry_run_worker.py RESULTS_FILE few|others
"""

import json
import os
import sys
from pathlib import Path

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.estimate.memory import Plan
from megatron_grpo.lora.attach import attach
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.resolve import resolve_args

COMMON = "--normalization RMSNorm --swiglu --disable-bias-linear --transformer-impl local --dry-run "
TINY = f"""
    --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --kv-channels 8 --vocab-size 100
    --make-vocab-size-divisible-by 8 --max-position-embeddings 2048 --global-batch-size 64 --lr 1e-3 --train-iters 1
    --use-distributed-optimizer {COMMON}
"""
GROUPS = "--group-query-attention --num-query-groups 2 --qk-layernorm --num-layers 4"
EXPERTS = " --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
YARN = json.dumps(
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1},
    separators=(",", ":"),
)
FAMILIES = {
    "dense": f"--model-family qwen3 {GROUPS}",
    "moe": f"--model-family qwen3_moe {GROUPS} {EXPERTS}",
    "mla": f"""--model-family deepseek_v3 --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8
        --qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --num-layers 5 --moe-layer-freq ([0]*2+[1]*3) {EXPERTS}
        --moe-shared-expert-intermediate-size 16 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --mtp-num-layers 1""",
    "gpt_oss": f"""--model-family gpt_oss --group-query-attention --num-query-groups 2 --num-layers 4 {EXPERTS}
        --no-swiglu --quick-geglu --add-bias-linear --add-qkv-bias --softmax-type learnable --window-size 7,0
        --window-attn-skip-freq 2 --activation-func-clamp-value 7 --glu-linear-offset 1 --ffn-hidden-size 16
        --norm-epsilon 1e-5 --rope-scaling {YARN} --untie-embeddings-and-output-weights""",
}
TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
LORA = "--lora-rank 4 --lora-target-modules all-linear all-router"
UNTIED = "--untie-embeddings-and-output-weights"
# (family, layout on 4 ranks); by default only the few, which have each family, each size and each split of stages
LAYOUTS = {
    "few": [
        ("dense", f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 {UNTIED} --bf16"),
        (
            "dense",
            f"{PP} 4 --num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        ),
        ("dense", f"{PP} 2 --decoder-first-pipeline-num-layers 1 --context-parallel-size 2"),
        ("moe", f"{TP} 2 --sequence-parallel {EP} 2 {PP} 1 --moe-grouped-gemm"),
        ("gpt_oss", f"{TP} 2 --sequence-parallel {EP} 2 --expert-tensor-parallel-size 1"),
        ("mla", f"{TP} 2 {PP} 2 --sequence-parallel --decoder-last-pipeline-num-layers 2 {UNTIED}"),
        ("mla", f"{EP} 2 {PP} 2 --pipeline-model-parallel-layout Ettt|ttmL --mtp-loss-scaling-factor 0.1 {UNTIED}"),
        # adapters; in the second the first two stages train nothing
        ("mla", f"{TP} 2 --sequence-parallel {EP} 2 {LORA} --lora-use-dora --lora-modules-to-save lm_head {UNTIED}"),
        ("dense", f"{PP} 4 --num-layers 4 --bf16 --lora-rank 4 --lora-target-modules .*layers.[23].*"),
    ],
    "others": [
        ("dense", f"{TP} 2 {PP} 2"),
        ("moe", f"{TP} 2 --sequence-parallel {EP} 2 --expert-tensor-parallel-size 1 {UNTIED}"),
        ("moe", f"{TP} 2 --sequence-parallel --expert-tensor-parallel-size 1"),
        ("moe", f"{EP} 4 --moe-layer-freq 2"),
        ("moe", f"{EP} 2 {PP} 2 --num-virtual-stages-per-pipeline-rank 2"),
        ("gpt_oss", f"{EP} 2 {PP} 2 --num-virtual-stages-per-pipeline-rank 2 --moe-grouped-gemm"),
        (
            "mla",
            f"{PP} 2 --pipeline-model-parallel-layout Et|tt|t|tmL --num-virtual-stages-per-pipeline-rank 2 {UNTIED}",
        ),
    ],
}


def arguments(flags: str, world_size: int):
    return resolve_args(parse_args(flags.split()), world_size)


def build(family: str, layout: str) -> dict:
    """On every rank: the parameters of the model that is built, by kind, its layers, and the optimizer's numbers."""
    args = arguments(f"{TINY} {FAMILIES[family]} {layout}", int(os.environ["WORLD_SIZE"]))
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = forward.build_model(args, model_provider)
    if args.lora_rank:
        attach(args, model)
    chunks = [chunk.module if args.bf16 else chunk for chunk in model]
    counts = dict.fromkeys(("dense", "experts", "frozen"), 0)
    for chunk in chunks:
        for parameter in chunk.parameters():
            kind = "dense" if getattr(parameter, "allreduce", True) else "experts"
            counts[kind if parameter.requires_grad else "frozen"] += parameter.numel()
    layers = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks]
    _, optimizer, _ = train_step.setup_optimizer(args, model)
    numbers = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    expected = Plan(args)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    memory = expected.memory(stage)
    parallel_state.destroy_model_parallel()
    return {
        "layout": f"{family}: {layout}",
        "built": counts,
        "expected": expected.parameters(stage)._asdict(),
        "layers": layers,
        "expected layers": [list(chunk.layers) for chunk in expected.stages[stage]],
        "optimizer": numbers,
        # 8 bytes of moments for each, and with bf16 the float32 copy's 4
        "expected optimizer": memory.optimizer / (12 if args.bf16 else 8),
    }


def main() -> None:
    results = [build(family, layout) for family, layout in LAYOUTS[sys.argv[2]]]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(list(zip(*everyone, strict=True))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
