"""Flags of a valid run, and their validation with further flags."""

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.resolve import resolve_args

MODEL = """
    --model-family qwen3 --num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 8
    --group-query-attention --num-query-groups 4 --kv-channels 16 --qk-layernorm --normalization RMSNorm --swiglu
    --disable-bias-linear --vocab-size 1000 --max-position-embeddings 2048 --transformer-impl local
"""
RUN = """
    --train-data-path train.jsonl --tokenizer-model tokenizer --reward-funcs exact_match --lr 1e-6 --train-iters 20
    --global-batch-size 64
"""


def validated(flags: str, world_size: int = 8, base: str = MODEL + RUN):
    """Return parsed and validated arguments; ``flags`` override those of ``base``."""
    return resolve_args(parse_args(f"{base} {flags}".split()), world_size)


def without(flag: str) -> str:
    """Return the flags MODEL and RUN without one flag and its values."""
    words = (MODEL + RUN).split()
    start = words.index(flag)
    end = next((i for i in range(start + 1, len(words)) if words[i].startswith("--")), len(words))
    return " ".join(words[:start] + words[end:])


MOE = "--model-family qwen3_moe --num-experts 8"
