"""Speculative decoding of a colocated vLLM (``--vllm-speculative-config``): its methods, and what it excludes."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_grpo.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_config
from megatron_grpo.utils.packages import require
from megatron_grpo.utils.rules import flag
from megatron_grpo.weights import families
from megatron_grpo.weights.arguments import default_architecture, resolve_architecture

FLAG = "--vllm-speculative-config"
METHODS = ("ngram", "suffix", "draft_model", "mtp")
WITHOUT_MODEL = ("ngram", "suffix")
_Rule = tuple[Callable[[Any], bool], str]
_POSITIVE: _Rule = (lambda value: type(value) is int and value > 0, "a whole number above 0")
# What suffix decoding takes, and what a value must be.
_OF_SUFFIX: dict[str, _Rule] = {
    "num_speculative_tokens": _POSITIVE,
    "suffix_decoding_max_tree_depth": _POSITIVE,
    "suffix_decoding_max_cached_requests": (lambda value: type(value) is int, "a whole number"),
    "suffix_decoding_max_spec_factor": (
        lambda value: type(value) in (int, float) and value >= 0,
        "0 or a number above",
    ),
    "suffix_decoding_min_token_prob": (lambda value: type(value) in (int, float) and 0 <= value <= 1, "from 0 to 1"),
}
# Keys that are known to keep the distribution of the samples, for methods with a model that drafts.
_KEYS = {"method", "model", "num_speculative_tokens", "draft_sample_method"}


def method_of(args: Namespace) -> str | None:
    """Return the method of drafting; None without speculative decoding."""
    config = args.vllm_speculative_config
    return config.get("method", "draft_model" if config.get("model") else None) if config else None


def draft_directory(args: Namespace) -> str | None:
    """Return the directory of the draft model; None if no other model drafts."""
    return args.vllm_speculative_config["model"] if method_of(args) == "draft_model" else None


def draft_args(args: Namespace) -> Namespace | None:
    """Return the arguments of the draft model's architecture; None if no other model drafts, or for another family."""
    directory = draft_directory(args)
    if not directory:
        return None
    config = read_config(directory)
    try:
        theirs = families.for_hf_config(config).args_from_hf(config)
    except GrpoError:  # vLLM runs more families than the trainer
        return None
    plain: dict[str, Any] = {"explicit": frozenset(), "vllm_speculative_config": None, "lora_rank": None}
    own = replaced(args, **plain | default_architecture())
    own = replaced(own, **resolve_architecture(own, theirs, f"{directory}/config.json"))
    return replaced(
        own,
        kv_channels=own.kv_channels or own.hidden_size // own.num_attention_heads,
        padded_vocab_size=-(-own.vocab_size // 64) * 64,  # as vLLM pads it
    )


def longest_of_engine(args: Namespace) -> int:
    """Return the engine's longest sequence: --vllm-max-model-len, and room behind it for drafts where the model has it.

    vLLM drafts for no sequence while one of them is within a draft of the longest length: without the room, every
    completion that nears its limit would stop the drafts of all.
    """
    config = args.vllm_speculative_config or {}
    tokens = config.get("num_speculative_tokens")
    if tokens is None and method_of(args) == "suffix":  # vLLM's default
        tokens = config.get("suffix_decoding_max_tree_depth", 24)
    room = 2 * tokens if isinstance(tokens, int) else 0
    most = args.max_position_embeddings
    if (args.rope_scaling or {}).get("rope_type") == "longrope":  # as `check_rope` says
        most = min(most, args.rope_scaling["original_max_position_embeddings"])
    return max(args.vllm_max_model_len, min(args.vllm_max_model_len + room, most))


def mtp_prefixes(args: Namespace) -> tuple[str, ...]:
    """Return the prefixes of the names of multi-token-prediction tensors, if these layers draft; else ()."""
    if method_of(args) != "mtp":
        return ()
    if prefix := families.for_args(args).mtp_prefix:
        return (prefix,)
    return tuple(f"model.layers.{args.num_layers + layer}." for layer in range(args.mtp_num_layers))


def check_speculation(args: Namespace) -> None:
    """Raise GrpoError for a method that cannot draft, and for flags that do not work with drafts."""
    if (
        args.rollout_engine == "vllm"
        and args.vllm_mode == "colocate"
        and os.environ.get("ARCTIC_INFERENCE_ENABLED") == "1"
    ):
        raise GrpoError(
            "ARCTIC_INFERENCE_ENABLED=1: arctic-inference would replace vLLM's model runner; unset the variable, which "
            "vLLM's suffix decoding does not need"
        )
    config = args.vllm_speculative_config
    if not config:
        return
    method = method_of(args)
    if method not in METHODS:
        raise GrpoError(f"{FLAG}: method is {method!r}: give one of {', '.join(METHODS)}")
    if (acceptance := config.get("rejection_sample_method", "standard")) != "standard":
        raise GrpoError(
            f"{FLAG}: rejection_sample_method is {acceptance!r}: leave it out, because only the standard method is "
            "known to keep the distribution of the samples"
        )
    if method == "suffix":
        for key, value in config.items():
            if key in ("method", "rejection_sample_method"):
                continue
            is_right, wanted = _OF_SUFFIX.get(key, (lambda _: False, "left out: suffix decoding does not know it"))
            if not is_right(value):
                raise GrpoError(f"{FLAG}: {key} is {value!r} and must be {wanted}")
        if not args.dry_run:
            require(f"{FLAG} with method suffix", "arctic_inference", instead="give ngram")
    if method not in WITHOUT_MODEL:
        _check_model_that_drafts(args, config)
    for dest, given, reason in (
        ("min_p", args.min_p, "vLLM has no min_p with drafts"),
        ("stop_words", args.stop_words, "vLLM keeps tokens of a draft behind a stop word"),
        (
            "router_replay_mode",
            args.router_replay_mode == "R3",
            "experts of rejected drafts are reported, too; give R2",
        ),
    ):
        if given:
            raise GrpoError(f"{flag(dest)} and {FLAG} cannot both be given: {reason}")


def _check_model_that_drafts(args: Namespace, config: dict[str, Any]) -> None:
    method = method_of(args)
    if others := sorted(config.keys() - _KEYS):
        raise GrpoError(f"{FLAG}: {', '.join(others)} is not known to work with method {method}: leave it out")
    if args.vllm_quantization:
        raise GrpoError(
            f"--vllm-quantization and {FLAG} with method {method} cannot both be given: drafts of quantized weights "
            "have not been checked; leave one of them out"
        )
    if method == "mtp":
        if args.sleep_level == 2:
            raise GrpoError(
                f"--sleep-level 2 and {FLAG} with method mtp cannot both be given: vLLM would drop the buffers of "
                "these layers; give --sleep-level 1"
            )
        if config.get("model"):
            raise GrpoError(f"{FLAG}: method mtp drafts with layers of the policy: leave model out")
        return
    directory = config.get("model")
    if not isinstance(directory, str) or not Path(directory, "config.json").is_file():
        raise GrpoError(
            f"{FLAG}: model is {directory!r}: give the local directory of the draft model, with config.json and "
            "safetensors files (hf download NAME --local-dir DIR)"
        )
    sizes = read_config(directory)
    if sizes.get("quantization_config"):
        raise GrpoError(
            f"{FLAG}: the draft model {directory} is quantized, which has not been checked: give one in 16 bits"
        )


def check_draft(args: Namespace) -> None:
    """Raise GrpoError for a policy without the layers, or without the vocabulary, that draft."""
    if method_of(args) == "mtp" and not args.mtp_num_layers:
        optional = "--mtp-num-layers 1, " if families.for_args(args).mtp_prefix else ""
        raise GrpoError(
            f"{FLAG}: method is mtp, but the model has no multi-token-prediction layers (--mtp-num-layers): give "
            f"{optional}ngram or draft_model"
        )
    directory = draft_directory(args)
    if directory and (theirs := read_config(directory).get("vocab_size")) != args.vocab_size:
        raise GrpoError(
            f"{FLAG}: the draft model {directory} has vocab_size {theirs}, the policy has {args.vocab_size}: give a "
            "draft model with the policy's tokenizer"
        )


def check_draft_tokenizer(args: Namespace, tokenizer: Tokenizer) -> None:
    """Raise GrpoError if the draft model's directory holds a tokenizer with other token ids than the policy's."""
    directory = draft_directory(args)
    if not directory or not isinstance(tokenizer, HuggingFaceTokenizer) or not HuggingFaceTokenizer.is_in(directory):
        return
    if HuggingFaceTokenizer(directory).vocabulary() != tokenizer.vocabulary():
        raise GrpoError(
            f"{FLAG}: the draft model {directory} has another tokenizer than {tokenizer.directory}: give a draft model "
            "with the same token ids"
        )
