"""Flags of the frozen models beside the policy, reference and teacher: rows as in ``arguments``."""

from typing import Any

_SIZES = (
    ("tensor-model-parallel-size", "tensor-parallel ranks of the {}"),
    ("pipeline-model-parallel-size", "pipeline stages of the {}"),
    ("context-parallel-size", "context-parallel ranks of the {}"),
    ("expert-model-parallel-size", "ranks that share out the {}'s experts"),
)


def _layout(prefix: str, model: str) -> tuple[tuple[str, Any, Any, str], ...]:
    sizes = tuple((f"--{prefix}-{size}", int, None, f"{text.format(model)} [the policy's]") for size, text in _SIZES)
    experts = (
        f"--{prefix}-expert-tensor-parallel-size",
        int,
        None,
        f"ranks that cut each expert of the {model} [TP]",
    )
    return (*sizes, experts)


FROZEN_FLAGS: tuple[tuple[str, Any, Any, str], ...] = (
    ("--ref-load", str, None, "Megatron checkpoint of the reference policy [the first weights]"),
    ("--ref-load-hf", str, None, "Hugging Face model directory of the reference policy [the first weights]"),
    *_layout("ref", "reference"),
    ("--ref-micro-batch-size", int, None, "completions in a micro-batch of the reference [the policy's]"),
    (
        "--logprobs-max-tokens-per-microbatch",
        int,
        None,
        "token budget of passes without gradients: old policy, reference, teacher [--max-tokens-per-microbatch]",
    ),
    ("--sync-ref-model", bool, False, "let the reference follow the policy"),
    ("--ref-model-sync-steps", int, 512, "updates between two moves of the reference"),
    ("--ref-model-mixup-alpha", float, 0.6, "reference = it x policy + (1 - it) x reference"),
    ("--teacher-load-hf", str, None, "Hugging Face model directory of a teacher with the policy's tokenizer"),
    *_layout("teacher", "teacher"),
    ("--teacher-server", str, None, "vLLM server that computes the teacher's log-probabilities"),
    ("--teacher-server-timeout", float, 240.0, "seconds that the server may take for one completion"),
    ("--teacher-kl-coef", float, None, "weight of log p(teacher) - log p(old) in the advantage of each token"),
)
