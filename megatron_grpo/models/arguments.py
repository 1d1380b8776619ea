"""Flags and rules of the model architecture."""

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, POSITIVE, POSITIVE_SHARE, FlagRow, count_to
from megatron_grpo.utils.rules import divides, flag, needs

MODEL: tuple[FlagRow, ...] = (
    ("--vocab-size", COUNT, None, "size of the vocabulary, as in config.json"),
    (
        "--make-vocab-size-divisible-by",
        count_to(2**20),
        128,
        "pad the vocabulary to a multiple of this value times TP",
    ),
    ("--max-position-embeddings", COUNT, None, "maximum sequence length of the model, tokens"),
    ("--seq-length", COUNT, None, "maximum length of prompt + completion, tokens [--max-position-embeddings]"),
    ("--position-embedding-type", ("rope", "none"), "rope", "kind of position embedding"),
    ("--rotary-base", COUNT, 10000, "base of the rotary frequencies (rope_theta)"),
    ("--rotary-percent", POSITIVE_SHARE, 1.0, "fraction of a head's channels with rotary embedding"),
    ("--rope-scaling", dict, None, "scaling of the rotary frequencies: rope_scaling of config.json"),
    (
        "--rotary-base-local",
        COUNT,
        None,
        "base of the rotary frequencies in sliding-window layers, without scaling [--rotary-base]",
    ),
    ("--gemma4-config", dict, None, "decoder of Gemma 4: the keys of config.json that only this family has"),
    ("--vision-config", dict, None, "vision part of the model: vision_config and the image token of config.json"),
    ("--geglu", bool, False, "a gated MLP with GELU's tanh approximation, instead of --swiglu"),
    ("--sandwich-norm", bool, False, "add norms after attention and MLP, before the residual connection"),
    (
        "--qk-layernorm-across-heads",
        bool,
        False,
        "norm the queries of all heads of a layer together, and the keys, with --qk-layernorm",
    ),
    ("--scale-embeddings", bool, False, "multiply embeddings by the square root of --hidden-size"),
    ("--attn-logit-softcapping", POSITIVE, None, "cap of attention scores: cap * tanh(score / cap)"),
    ("--final-logit-softcapping", POSITIVE, None, "cap of logits: cap * tanh(logit / cap)"),
    ("--untie-embeddings-and-output-weights", bool, False, "separate weights for the output layer and the embedding"),
    ("--squared-relu", bool, False, "an MLP without a gate, with the square of ReLU, instead of --swiglu"),
    (
        "--hybrid-layer-pattern",
        str,
        None,
        "kind of each layer, of one branch each: M Mamba-2, * attention, - MLP, E experts; with --mamba-num-heads",
    ),
    ("--quick-geglu", bool, False, "gated linear units with x sigmoid(1.702 x) in place of SwiGLU's silu"),
    ("--group-query-attention", bool, False, "grouped-query attention, with --num-query-groups"),
)

_ENGINE = "the engine does not, and the log-probabilities of trainer and engine must agree: leave it out"

Only = tuple[str, tuple[Any, ...], str]

# Attributes with a restricted set of values: (attributes, values, reason and cure).
ONLY: tuple[Only, ...] = (
    (
        "hierarchical_context_parallel_sizes",
        (None,),
        "Transformer Engine refuses packed batches with it: leave it out, and give --cp-comm-type p2p or a2a",
    ),
    (
        "overlap_moe_expert_parallel_comm delay_wgrad_compute",
        (False,),
        "megatron-core's combined schedule computes another loss than GRPO's: leave it out",
    ),
    (
        "overlap_param_gather_with_optimizer_step",
        (False,),
        "the parameter all-gather overlaps with the forward pass here: leave it out",
    ),
    ("moe_expert_capacity_factor moe_pad_expert_input_to_capacity", (None, False), "it drops tokens; " + _ENGINE),
    ("moe_input_jitter_eps", (None,), "it adds noise to the router; " + _ENGINE),
    ("moe_router_force_load_balancing", (False,), "it routes at random; " + _ENGINE),
    ("moe_apply_probs_on_input", (False,), "it applies the router's probabilities before the experts; " + _ENGINE),
    ("moe_enable_deepep", (False,), "only the dispatchers allgather and alltoall are supported: leave it out"),
    (
        "moe_router_padding_for_fp8 moe_router_padding_for_quantization",
        (False,),
        "it routes further tokens to the experts; with --fp8-format Transformer Engine pads each expert's tokens "
        "itself: leave it out",
    ),
    (
        "fp8_recipe",
        ("blockwise", "tensorwise"),
        "delayed takes its scales from earlier passes, so old and new log-probabilities of the same weights would "
        "differ; mxfp8 needs a Blackwell GPU; custom is code of your own: give blockwise or tensorwise",
    ),
    ("fp4_format", (None,), "it needs a Blackwell GPU, and training in 4 bits is not supported: leave it out"),
    (
        "fp8_param_gather fp4_param_gather",
        (False,),
        "import, export, weight sync, checkpoints and offloading read parameters in bf16: leave it out",
    ),
    (
        "hidden_dropout attention_dropout",
        (0.0,),
        "the engine has no dropout, and the log-probabilities of trainer and engine must agree: set it to 0",
    ),
)


def check_settings(args: Namespace) -> None:
    """Refuse settings that no model can have in this program."""
    check_only(args, ONLY)


def check_model(args: Namespace) -> None:
    """Refuse an incomplete architecture."""
    for dest in "num_layers hidden_size num_attention_heads vocab_size max_position_embeddings model_family".split():
        if getattr(args, dest) is None:
            raise GrpoError(f"{flag(dest)} is missing: give it, --load-hf, or a checkpoint with --use-checkpoint-args")
    needs(args, "num_query_groups", "group_query_attention", "otherwise each head has its own keys and values")
    if args.group_query_attention:
        if args.num_query_groups is None:
            raise GrpoError("--group-query-attention needs --num-query-groups, the number of key/value heads")
        divides(args, "num_attention_heads", args.num_query_groups, "--num-query-groups")
    check_delta_net(args)
    check_gemma4(args)
    check_hybrid_pattern(args)
    if args.qk_layernorm_across_heads:
        needs(args, "qk_layernorm_across_heads", "qk_layernorm", "it says what that norms")
        if args.multi_latent_attention:
            raise GrpoError("--qk-layernorm-across-heads with --multi-latent-attention: leave one of them out")
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        if groups < args.tensor_model_parallel_size:
            raise GrpoError(
                f"--qk-layernorm-across-heads with --tensor-model-parallel-size {args.tensor_model_parallel_size} and "
                f"{groups} key/value heads: ranks that share a head would count its keys several times; "
                "lower the tensor-parallel size"
            )
    if args.kv_channels is None:
        divides(args, "hidden_size", args.num_attention_heads, "--num-attention-heads, or --kv-channels be given")


def check_delta_net(args: Namespace) -> None:
    """Refuse a pattern of layers that does not fit, and heads of a gated delta net that do not divide."""
    if not args.experimental_attention_variant:
        return
    pattern = args.linear_attention_freq
    if not pattern or (isinstance(pattern, list) and len(pattern) != args.num_layers):
        raise GrpoError(
            f"--experimental-attention-variant gated_delta_net with --linear-attention-freq {pattern}: give n for "
            f"attention in every n-th layer, or a list with 1 (delta net) or 0 for each of the {args.num_layers} layers"
        )
    divides(args, "linear_num_value_heads", args.linear_num_key_heads, "--linear-num-key-heads")
    if args.transformer_impl != "local":
        raise GrpoError(
            "--experimental-attention-variant gated_delta_net needs --transformer-impl local, which has its layer"
        )


def check_gemma4(args: Namespace) -> None:
    """Refuse Gemma 4 with layers of Transformer Engine, and with ranks that would share a key/value head."""
    if not args.gemma4_config:
        return
    if args.transformer_impl != "local":
        raise GrpoError("--gemma4-config needs --transformer-impl local, which has its layers")
    for what, groups in (
        ("--num-query-groups", args.num_query_groups or args.num_attention_heads),
        ("num_global_key_value_heads of --gemma4-config", args.gemma4_config["num_global_key_value_heads"]),
    ):
        if groups % args.tensor_model_parallel_size:
            raise GrpoError(
                f"--tensor-model-parallel-size {args.tensor_model_parallel_size}: {what} ({groups}) is not a multiple "
                "of it, and ranks cannot share a key/value head of Gemma 4: lower the tensor-parallel size"
            )


def check_hybrid_pattern(args: Namespace) -> None:
    """Refuse a pattern of layers that does not fit, and heads of Mamba-2 that do not divide."""
    pattern = args.hybrid_layer_pattern
    if not pattern:
        return
    if len(pattern) != args.num_layers or not set("M*-E").issuperset(pattern) or not set("M*").intersection(pattern):
        raise GrpoError(
            f"--hybrid-layer-pattern is {pattern!r}: give M (Mamba-2), * (attention), - (MLP) or E (experts) for each "
            f"of the {args.num_layers} layers, at least one of the first two"
        )
    experts = [int(kind == "E") for kind in pattern]
    if any(experts) != bool(args.num_experts) or (any(experts) and args.moe_layer_freq != experts):
        raise GrpoError(
            f"--hybrid-layer-pattern {pattern} with --num-experts {args.num_experts} and --moe-layer-freq "
            f"{args.moe_layer_freq}: give --num-experts and --moe-layer-freq {experts} for its E, or no experts"
        )
    if args.experimental_attention_variant or args.multi_latent_attention or args.mtp_num_layers:
        raise GrpoError(
            "--hybrid-layer-pattern with --experimental-attention-variant, --multi-latent-attention or "
            "--mtp-num-layers: leave it out"
        )
    if args.mamba_num_heads is None:
        raise GrpoError("--hybrid-layer-pattern needs --mamba-num-heads")
    divides(args, "mamba_num_heads", args.mamba_num_groups, "--mamba-num-groups")
    if args.transformer_impl != "local":
        raise GrpoError("--hybrid-layer-pattern needs --transformer-impl local, which has its layers")


def resolve_model_sizes(args: Namespace) -> dict[str, Any]:
    """Return the sizes that follow from others, for an architecture that `check_model` accepts."""
    found = {"padded_vocab_size": padded_vocab_size(args)}
    if args.kv_channels is None:
        found["kv_channels"] = args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None:
        # As in Megatron-LM: SwiGLU with as many weights as a plain MLP of four times the width.
        found["ffn_hidden_size"] = int(4 * args.hidden_size * 2 / 3) // 64 * 64
    return found


def check_only(args: Namespace, rows: Iterable[Only]) -> None:
    """Refuse an attribute with a value that its row in ``rows`` does not allow."""
    for dests, values, reason in rows:
        for dest in dests.split():
            if getattr(args, dest) not in values:
                raise GrpoError(f"{flag(dest)} is {getattr(args, dest)}: {reason}")


def padded_vocab_size(args: Namespace) -> int:
    """Return the rows of the embedding: the vocabulary size, padded for an equal shard on each tensor-parallel rank."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-args.vocab_size // multiple) * multiple


Excluded = tuple[tuple[str, str], ...]  # (attribute, reason and cure)

# What --cuda-graphs cannot record.
_UNRECORDED_MODELS: Excluded = (
    ("num_experts", "the host waits for each layer's counts of tokens: leave the flag out"),
    ("multi_latent_attention", "it has not been recorded yet: leave the flag out"),
    ("mtp_num_layers", "multi-token prediction has not been recorded yet: leave the flag out"),
    ("vision_config", "the layers of a vision-language model have not been recorded yet: leave the flag out"),
    ("rotary_base_local", "two rotary embeddings in one model have not been recorded yet: leave the flag out"),
    ("attn_logit_softcapping", "the mask of soft-capped attention is made for each pack: leave the flag out"),
    ("hybrid_layer_pattern", "the chunks of Mamba-2 are made for each pack: leave the flag out"),
    ("experimental_attention_variant", "the chunks of a delta net are made for each pack: leave the flag out"),
)
_UNRECORDED: Excluded = (
    ("recompute_granularity", "recomputation has not been recorded yet: leave one of them out"),
    ("overlap_grad_reduce", "the gradients of a graph are ready together: leave one of them out"),
    ("overlap_param_gather", "a graph cannot wait for the weights of a layer: leave one of them out"),
    ("offload_model", "a graph has the addresses of the weights: leave one of them out"),
    ("offload_gradients", "a graph has the addresses of the gradients: leave one of them out"),
    ("lora_dropout", "a graph would repeat the same random numbers: leave one of them out"),
    ("cpu_offloading", "a graph has the addresses of the activations: leave one of them out"),
    ("fine_grained_activation_offloading", "a graph has the addresses of the activations: leave one of them out"),
)


def check_cuda_graphs(args: Namespace) -> None:
    """Refuse what --cuda-graphs cannot record."""
    if not args.cuda_graphs:
        return
    if args.transformer_impl != "local":
        raise GrpoError("--cuda-graphs needs --transformer-impl local: Transformer Engine's layers are not recorded")
    for dest in "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size".split():
        if getattr(args, dest) > 1:
            raise GrpoError(
                f"--cuda-graphs with {flag(dest)} {getattr(args, dest)}: only whole models are recorded, with any "
                "number of data-parallel ranks: leave the flag out"
            )
    _check_excluded(args, "cuda_graphs", _UNRECORDED)


def _needed_to_share(args: Namespace) -> str | None:
    """Return what --share-prompts needs, and this run lacks."""
    if args.transformer_impl != "local":
        return "--transformer-impl local, whose attention has keys of other sequences"
    if not args.max_tokens_per_microbatch:
        return "--max-tokens-per-microbatch, which puts a group into one micro-batch"
    return "--no-cuda-graphs: packs with shared prompts have not been recorded yet" if args.cuda_graphs else None


def resolve_share_prompts(args: Namespace) -> dict[str, Any]:
    """Return --share-prompts: unless it is given, it is off where a pack needs whole sequences."""
    if "share_prompts" in args.explicit or not _needed_to_share(args):
        return {}
    return {"share_prompts": False}


def check_share_prompts(args: Namespace) -> None:
    """Refuse --share-prompts where a pack needs whole sequences."""
    if args.share_prompts and (needed := _needed_to_share(args)):
        raise GrpoError(f"--share-prompts needs {needed}")


def share_note(args: Namespace) -> str | None:
    """Return the line of the start that says why --share-prompts is off; None if it is on or was given."""
    if args.share_prompts or "share_prompts" in args.explicit:
        return None
    return f"every sequence computes its whole prompt: --share-prompts needs {_needed_to_share(args)}"


def check_float32_parameters(args: Namespace) -> None:
    """Refuse the training of recurrent layers in 16 bits where `needs_one_dtype` says so."""
    if args.lora_rank:
        return
    if args.experimental_attention_variant:
        needs_one_dtype(args, "--experimental-attention-variant gated_delta_net")
    if args.hybrid_layer_pattern:
        needs_one_dtype(args, "--hybrid-layer-pattern")


def needs_one_dtype(args: Namespace, what: str) -> None:
    """Refuse to train A_log beside parameters of 16 bits with an optimizer that cannot save both; `what` trains it."""
    if (args.bf16 or args.fp16) and not args.use_distributed_optimizer and not args.eval_only:
        raise GrpoError(
            f"{what} in 16 bits needs --use-distributed-optimizer: A_log is float32, and megatron-core's other "
            "optimizer cannot save it beside parameters of 16 bits"
        )


def check_excluded_models(args: Namespace) -> None:
    """Refuse --cuda-graphs with a model that it does not support."""
    _check_excluded(args, "cuda_graphs", _UNRECORDED_MODELS)


def _check_excluded(args: Namespace, given: str, excluded: Excluded) -> None:
    for dest, reason in excluded if getattr(args, given) else ():
        values = getattr(args, dest)
        if any(values) if isinstance(values, list) else values:
            raise GrpoError(f"{flag(given)} with {flag(dest)}: {reason}")
