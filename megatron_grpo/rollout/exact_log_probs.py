"""Rules of ``--exact-log-probs``: what trainer and colocated vLLM compute by the same kernels, and the check of it."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from megatron_grpo.models.exact import HEAD_SIZES, MOST_HEADS
from megatron_grpo.parallel.arguments import query_groups
from megatron_grpo.utils.device import needs_gpu
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import FlagRow
from megatron_grpo.utils.rules import flag

EXACT_LOG_PROBS: FlagRow = (
    "--exact-log-probs",
    bool,
    False,
    "trainer and colocated vLLM compute log-probabilities by the same kernels, equal bit for bit; a difference ends "
    "the run",
)

FAMILIES = "qwen2", "qwen3", "llama"
ENGINE_ARGUMENTS = "max_num_batched_tokens", "enable_chunked_prefill", "block_size", "kv_cache_memory_bytes"

CURE = "Leave --exact-log-probs out to train without it"

_KERNEL = "it has no kernel that trainer and engine share"
_TENSOR = "a sum over two ranks is rounded once, and those over more have an order in each algorithm: give 1 or 2"
_TRUNCATED = "the trainer has no kernel of vLLM's truncated or penalized distributions: leave it out"

# (attributes, supported values, what is missing and the cure)
SUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("rollout_engine", ("vllm",), "only vLLM's layers can take the kernels: give vllm"),
    ("vllm_mode", ("colocate",), "a server builds its layers without the kernels: give colocate"),
    ("bf16", (True,), "the kernels are for bfloat16: give --bf16"),
    ("vllm_dtype", (None, "bfloat16"), "the kernels are for bfloat16: leave it out"),
    ("vllm_quantization", (None,), "products of 8 bits have no common kernel: leave it out"),
    ("fp8_format fp4_format", (None,), "products of 8 or 4 bits have no common kernel: leave it out"),
    ("transformer_impl", ("local",), "Transformer Engine's layers have kernels of their own: give local"),
    ("attention_backend", ("auto", "local", "flash"), "it has no output that the engine's equals: give local"),
    ("tensor_model_parallel_size vllm_tensor_parallel_size", (1, 2), _TENSOR),
    ("context_parallel_size", (1,), "the keys of other ranks come in another order: give 1"),
    ("cuda_graphs", (False,), "the layers have not been recorded with these kernels: leave it out"),
    (
        "cpu_offloading fine_grained_activation_offloading",
        (False,),
        "the layers have not been checked with offloaded activations: leave it out",
    ),
    ("lora_rank", (None, 0), "an engine adds an adapter, or rounds merged weights, as the trainer does not"),
    ("model_family", FAMILIES, f"supported are {', '.join(FAMILIES)}"),
    ("kv_channels", HEAD_SIZES, "the kernel of attention is for heads of 64 or 128 channels"),
    ("num_experts", (None, 0), "products of experts have no common kernel"),
    ("window_size", (None,), "sliding windows have no common kernel"),
    ("mtp_num_layers", (None, 0), "multi-token prediction has not been checked: give 0"),
    (
        "vision_config gemma4_config hybrid_layer_pattern experimental_attention_variant rotary_base_local "
        "attn_logit_softcapping final_logit_softcapping",
        (None,),
        _KERNEL,
    ),
    ("softmax_type", ("vanilla",), "sinks have no common kernel"),
    ("position_embedding_type", ("rope",), _KERNEL),
    ("rotary_percent", (1.0,), "the kernel rotates whole heads"),
    (
        "multi_latent_attention rotary_interleaved add_bias_linear apply_layernorm_1p attention_output_gate geglu "
        "squared_relu quick_geglu sandwich_norm qk_layernorm_across_heads scale_embeddings",
        (False,),
        _KERNEL,
    ),
    ("swiglu", (True,), "the kernel is of SwiGLU"),
    ("vllm_speculative_config", (None,), "a step of drafts has several logits of a sequence: leave it out"),
    ("rollout_ranks", (0,), "engines on ranks of their own have not been run with the kernels: give 0"),
    ("max_staleness", (0,), "tokens of earlier weights have other log-probabilities: give 0"),
    ("mismatch_sample_rate", (1.0,), "every rollout is compared: leave it out"),
    ("top_p", (1.0,), _TRUNCATED),
    ("top_k", (-1,), _TRUNCATED),
    ("min_p presence_penalty frequency_penalty", (0.0,), _TRUNCATED),
    ("repetition_penalty", (1.0,), _TRUNCATED),
    ("structured_outputs_regex", (None,), _TRUNCATED),
    ("rollout_only", (False,), "a run without updates compares nothing"),
    ("train_only", (None,), "recorded completions are not compared"),
)


def check_exact_log_probs(args: Namespace) -> None:
    """Refuse --exact-log-probs with what trainer and engine do not compute by the same kernels."""
    if not args.exact_log_probs:
        return
    for dests, values, missing in SUPPORTED:
        for dest in dests.split():
            if (value := getattr(args, dest)) not in values:
                raise GrpoError(f"--exact-log-probs with {flag(dest)} {value}: {missing}. {CURE}")
    tp, of_engine = args.tensor_model_parallel_size, args.vllm_tensor_parallel_size
    if tp != of_engine:
        raise GrpoError(
            f"--exact-log-probs with --tensor-model-parallel-size {tp} and --vllm-tensor-parallel-size {of_engine}: "
            f"shards of other sizes have other sums: give {tp} to both. {CURE}"
        )
    if (groups := query_groups(args)) < tp:
        raise GrpoError(
            f"--exact-log-probs with --num-query-groups {groups} and --tensor-model-parallel-size {tp}: ranks that "
            f"share the heads of a key have no common kernel: give 1 to --tensor-model-parallel-size and "
            f"--vllm-tensor-parallel-size. {CURE}"
        )
    if args.loss_type == "dpo":
        raise GrpoError(f"--exact-log-probs with --loss-type dpo: its updates compare no log-probabilities. {CURE}")
    if (heads := args.num_attention_heads // groups) > MOST_HEADS:
        raise GrpoError(
            f"--exact-log-probs with {heads} heads of each key head: the kernel of attention takes {MOST_HEADS}. {CURE}"
        )
    size = (args.vllm_engine_kwargs or {}).get("block_size", 16)
    if type(size) is not int or size < 16 or size & (size - 1):
        raise GrpoError(
            f"--exact-log-probs with --vllm-engine-kwargs: block_size is {size!r} and must be 16, 32, 64, ... for the "
            "kernel of attention"
        )
    for name in args.vllm_engine_kwargs or {}:
        if name not in ENGINE_ARGUMENTS:
            raise GrpoError(
                f"--exact-log-probs with --vllm-engine-kwargs: {name!r} may choose other kernels; allowed are "
                f"{', '.join(ENGINE_ARGUMENTS)}: leave it out"
            )
    if (scaling := args.rope_scaling) and scaling["rope_type"] == "longrope":
        raise GrpoError("--exact-log-probs with --rope-scaling: LongRoPE has no common kernel. " + CURE)
    if not args.dry_run and (not torch.cuda.is_available() or torch.version.hip is not None):
        raise needs_gpu("--exact-log-probs (Triton's kernels)", "leave it out")


def check_equal(update: int, row: Mapping[str, float]) -> None:
    """Raise GrpoError if a token of an update has another log-probability than in the engine; ``row``: its metrics.

    The row has no difference if no token is in the loss (--overlong-filter). A token in the loss without a number of
    the engine has ended the update.
    """
    if row.get("mismatch/max_abs", 0.0) == 0:
        return
    raise GrpoError(
        f"--exact-log-probs: in update {update} a token's log-probability in the trainer differs from the engine's by "
        f"up to {row['mismatch/max_abs']:.3g} nats (mean {row.get('mismatch/mean_abs', float('nan')):.3g}). "
        "A rank trains on completions of other ranks: GPUs of two kinds, or two versions of torch or Triton, can "
        "differ. tools/check_engine.py --layers finds the first tensor that differs. " + CURE
    )
