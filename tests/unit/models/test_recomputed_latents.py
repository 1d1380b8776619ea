"""--recompute-modules mla_up_proj: the numbers of an update without it, and nothing is compiled."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as core_random

import pretrain_grpo  # noqa: F401  first: it prepares for machines without a GPU
from megatron_grpo.parallel.initialize import initialize_distributed
from tools import made_up

MODEL = """--model-family deepseek_v3 --num-layers 2 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16
    --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --rotary-scaling-factor 4
    --original-max-position-embeddings 128 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm --vocab-size 61
    --max-position-embeddings 512 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-dtype fp32 --moe-layer-freq [0,1]
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2
    --moe-router-group-topk 1 --moe-router-topk-scaling-factor 1.5 --moe-shared-expert-intermediate-size 32
    --micro-batch-size 2 --lr 1e-2""".split()
RECOMPUTED = "--recompute-granularity selective --recompute-modules mla_up_proj".split()


def updates(*flags: str) -> list[tuple[float, float]]:
    args = made_up.parse([*MODEL, *flags], 1)
    if not parallel_state.is_initialized():
        initialize_distributed(args)
    rows, _, _ = made_up.two_updates(args, made_up.trainer(args), made_up.rollout(args))
    return [(row["loss"], row["grad_norm"]) for row in rows]


def test_the_numbers_are_the_same_without_a_compiler(one_rank, monkeypatch):
    monkeypatch.setattr(core_random, "load_inline", None)
    assert updates(*RECOMPUTED) == updates()
