"""Flags and rules of rollouts: engines, servers, sampling, weight sync, dynamic sampling."""

import re
from argparse import Namespace
from math import ceil
from typing import Any
from urllib.parse import urlsplit

import torch

from megatron_grpo.algorithm.registry import ADVANTAGES, LOSSES
from megatron_grpo.data.arguments import check_budgets
from megatron_grpo.data.constraints import compile_error
from megatron_grpo.data.sampling_params import constraint_refused, uses_engine_log_probs
from megatron_grpo.lora.targets import is_router, linear_layers, targets
from megatron_grpo.models.config import has_recurrence
from megatron_grpo.parallel.arguments import check_heads
from megatron_grpo.rollout.exact_log_probs import EXACT_LOG_PROBS
from megatron_grpo.rollout.speculation import check_draft, check_speculation, method_of
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.batch_sizes import longest_in_words, longest_sequence
from megatron_grpo.utils.device import needs_gpu
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flag_values import integer_or_auto
from megatron_grpo.utils.flags import (
    COUNT,
    COUNT_OR_0,
    MOST,
    PATH,
    POSITIVE,
    POSITIVE_SHARE,
    SECONDS,
    SHARE,
    FlagRow,
    Number,
)
from megatron_grpo.utils.packages import require
from megatron_grpo.utils.rules import excludes, flag, needs, required, was_given

BALANCING = ("static", "dynamic")
DTYPES = ("bfloat16", "float16", "float32")
ENGINES = ("vllm", "megatron", "sglang")
VLLM_MODES = ("colocate", "server")
LORA_SYNC = ("adapter", "merged")
LARGEST_SLOT = 512  # rank of vLLM's adapters
WEIGHT_SYNC = ("nccl", "ipc", "sparse", "checkpoint")
# Families whose tensors are vLLM's parameters, or parts of them (`weight_sync.nccl.runtime_places`).
SPARSE_FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "glm", "glm4", "gemma2", "gemma3_text")

ROLLOUT: tuple[FlagRow, ...] = (
    ("--rollout-engine", ENGINES, "vllm", "engine that generates; megatron: the training model itself"),
    ("--vllm-mode", VLLM_MODES, "colocate", "vLLM in the training processes (colocate), or servers over HTTP"),
    ("--vllm-server-base-url", [str], None, "vLLM servers, such as http://host:8000"),
    ("--vllm-server-api-key", str, None, "key of the vLLM servers [VLLM_API_KEY in the environment]"),
    ("--vllm-server-timeout", SECONDS, 240.0, "seconds without progress after which a server is excluded"),
    ("--sglang-server-base-url", [str], None, "SGLang servers, such as http://host:30000"),
    ("--sglang-server-api-key", str, None, "key of the SGLang servers [SGLANG_API_KEY in the environment]"),
    ("--sglang-server-timeout", SECONDS, 240.0, "seconds without progress after which a server is excluded"),
    ("--weight-sync-method", WEIGHT_SYNC, None, "how servers get weights [nccl on GPUs, else checkpoint]"),
    ("--weight-sync-dir", PATH, None, "directory shared with servers, for checkpoint [/dev/shm on one host]"),
    ("--vllm-tensor-parallel-size", COUNT, 1, "ranks of one engine replica"),
    (
        "--vllm-gpu-memory-utilization",
        POSITIVE_SHARE,
        0.3,
        "share of the GPU's memory for the engine's weights and cache",
    ),
    (
        "--vllm-max-model-len",
        COUNT,
        None,
        "longest sequence of the engine [--max-prompt-length + --max-completion-length]",
    ),
    (
        "--vllm-max-num-seqs",
        COUNT,
        None,
        "concurrent completions of an engine replica or of a server [its share of a rollout, 256 to 512]",
    ),
    (
        "--inference-max-requests",
        COUNT,
        256,
        "concurrent completions of a replica of --rollout-engine megatron",
    ),
    (
        "--sleep-level",
        Number(int, 0, 2),
        0,
        "between rollouts the engine keeps 0: weights and cache, 1: weights on the host, 2: neither",
    ),
    ("--vllm-dtype", DTYPES, None, "dtype of the engine's weights and activations [the trainer's]"),
    ("--vllm-quantization", ("fp8",), None, "the engine quantizes its weights at every sync"),
    (
        "--vllm-enable-expert-parallel",
        bool,
        False,
        "each rank of a replica has whole experts instead of a slice of every expert",
    ),
    (
        "--vllm-speculative-config",
        dict,
        None,
        "speculative decoding of a colocated engine, as vllm serve has it: ngram, suffix, draft_model or mtp",
    ),
    ("--vllm-engine-kwargs", dict, None, "more arguments of vllm.LLM; they override the flags"),
    ("--vllm-enforce-eager", bool, False, "no CUDA graphs in the engine; always on a CPU"),
    (
        "--vllm-enable-prefix-caching",
        bool,
        True,
        "the engine computes once what requests begin with alike, such as the prompt of a group and earlier turns; off "
        "with recurrent layers and with --router-replay-mode R3",
    ),
    ("--max-completion-length", COUNT, 512, "maximal tokens of a completion"),
    ("--temperature", Number(float, 0.01, 2), 1.0, "sampling temperature; the trainer's log-probabilities use it, too"),
    ("--top-p", POSITIVE_SHARE, 1.0, "sample from the likeliest tokens whose probabilities sum to this"),
    ("--top-k", Number(int, -1, MOST), -1, "sample from this many of the likeliest tokens; -1: from all"),
    (
        "--no-top-k-replay",
        bool,
        False,
        "log-probabilities over the whole vocabulary although --top-k and others truncate it in the rollout",
    ),
    ("--min-p", SHARE, 0.0, "sample from tokens with at least this share of the likeliest token's probability"),
    (
        "--repetition-penalty",
        POSITIVE,
        1.0,
        "divides the logits of tokens in prompt or completion (multiplies negative logits)",
    ),
    ("--presence-penalty", Number(float, -2, 2), 0.0, "subtracted from the logits of tokens in the completion"),
    (
        "--frequency-penalty",
        Number(float, -2, 2),
        0.0,
        "subtracted from a token's logit for each occurrence in the completion",
    ),
    ("--stop-words", [str], None, "strings that end a completion; special tokens of the tokenizer, too"),
    (
        "--stop-token-ids",
        [COUNT_OR_0],
        None,
        "more tokens that end a completion, beside those of generation_config.json",
    ),
    ("--ignore-eos", bool, False, "continue after the model's end tokens (for benchmarks)"),
    (
        "--rollout-balancing",
        BALANCING,
        BALANCING[0],
        "dynamic: a replica with free slots draws the next prompt",
    ),
    (
        "--lora-weight-sync",
        LORA_SYNC,
        None,
        "what the engine receives of a LoRA run: the adapter alone, or the weights merged with it [adapter where an "
        "engine of this launch can hold it]",
    ),
    ("--no-check-lora-sync", bool, False, "do not read the adapter back from the engine after every sync"),
    ("--check-weight-sync", bool, False, "compare the engine with the trainer after every weight sync"),
    (
        "--mismatch-sample-rate",
        SHARE,
        1.0,
        "share of rollouts with log-probabilities of the engine, for the mismatch metrics",
    ),
    (
        "--mismatch-limit",
        POSITIVE,
        None,
        "mismatch/mean_abs above which the run ends [0.001 in float32, 0.2 in 16 bits, 1 with --vllm-quantization "
        "or --fp8-format]",
    ),
    EXACT_LOG_PROBS,
)

DYNAMIC_SAMPLING: tuple[FlagRow, ...] = (
    ("--dynamic-sample", bool, False, "replace groups whose rewards are all equal by groups of new prompts"),
    (
        "--dynamic-sample-reward",
        [str],
        None,
        "reward functions in whose weighted sum the rewards of a group must differ [all except soft_overlong and "
        "repetition]",
    ),
    ("--max-resample-times", COUNT, 3, "successive replacements of a group before a group without signal is kept"),
    (
        "--over-sampling-ratio",
        Number(float, 1, 100),
        1.0,
        "start this multiple of the prompts; keep the groups that complete first",
    ),
)

WEIGHT_UPDATE = ("interrupt", "drain", "keep")

PLACED: tuple[FlagRow, ...] = (
    (
        "--rollout-ranks",
        Number(integer_or_auto, 0, MOST),
        0,
        "number of ranks, counted from the last, that run vLLM engines, or drive vLLM servers, while the others train; "
        "auto: the fastest split, by the times of the run that is resumed, else by an estimate",
    ),
    (
        "--weight-update",
        WEIGHT_UPDATE,
        WEIGHT_UPDATE[0],
        "running completions at new weights: interrupt: continue with a new KV cache, drain: finish first, keep: "
        "continue with the old KV cache; needs --rollout-ranks, or keep --partial-rollouts",
    ),
)

PARTIAL_ROLLOUTS: tuple[FlagRow, ...] = (
    (
        "--partial-rollouts",
        bool,
        False,
        "end a rollout when enough groups are complete; the next one continues the others",
    ),
    (
        "--max-staleness",
        COUNT_OR_0,
        0,
        "syncs between the start of a completion and the batch that trains on it, at most; needs --partial-rollouts "
        "or --rollout-ranks",
    ),
)

LEDGER: tuple[FlagRow, ...] = (
    (
        "--ledger",
        PATH,
        None,
        "directory for finished groups and batches, from which a killed run goes on "
        "[{save}/ledger with --max-staleness, else none]",
    ),
    (
        "--replay-rollouts",
        PATH,
        None,
        "repeat the training of the run that wrote this ledger (or --save directory), without an engine",
    ),
    (
        "--train-only",
        PATH,
        None,
        "train on the groups of this ledger (or --save directory), with any algorithm, without an engine",
    ),
    ("--rollout-only", bool, False, "write --train-iters' rollouts into the ledger, without updates or checkpoints"),
)

STRUCTURED_OUTPUTS: FlagRow = (
    "--structured-outputs-regex",
    str,
    None,
    "regular expression that every completion must match",
)

# Flags of an engine in the training processes; a server is configured by its own flags.
ENGINES_OWN = (
    "vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_max_model_len vllm_enforce_eager "
    "vllm_enable_prefix_caching vllm_dtype vllm_quantization vllm_enable_expert_parallel vllm_engine_kwargs "
    "vllm_speculative_config sleep_level"
).split()


def _kind_of_servers(args: Namespace) -> str | None:
    return "sglang" if args.rollout_engine == "sglang" else "vllm" if args.vllm_mode == "server" else None


def _on_one_host(args: Namespace, kind: str) -> bool:
    """Return whether all servers run on rank 0's host, as far as their addresses tell it."""
    urls = getattr(args, f"{kind}_server_base_url") or []
    return all(urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1") for url in urls)


def resolve_prefix_caching(args: Namespace) -> dict[str, Any]:
    """Return --vllm-enable-prefix-caching: unless it is given, it is off for recurrent layers and replayed experts."""
    if "vllm_enable_prefix_caching" in args.explicit or not (has_recurrence(args) or args.router_replay_mode == "R3"):
        return {}
    return {"vllm_enable_prefix_caching": False}


def keeps_prefixes(args: Namespace) -> bool:
    """Return whether vLLM's engines of the launch keep what requests begin with alike."""
    given = args.vllm_engine_kwargs or {}
    return bool(given.get("enable_prefix_caching", args.vllm_enable_prefix_caching))


def resolve_weight_sync(args: Namespace) -> dict[str, Any]:
    """Return the defaults of --weight-sync-method with servers, and of --weight-sync-dir with servers on one host."""
    kind = _kind_of_servers(args)
    if kind is None:
        return {}
    # The machine of a dry run need not be that of the run.
    on_gpus = torch.cuda.is_available() or args.dry_run
    method = args.weight_sync_method or ("nccl" if on_gpus and args.lora_weight_sync != "adapter" else "checkpoint")
    shared = "/dev/shm" if method == "checkpoint" and _on_one_host(args, kind) else None
    return {"weight_sync_method": method, "weight_sync_dir": args.weight_sync_dir or shared}


def _check_servers(args: Namespace) -> None:
    """Check the flags of engines over HTTP; the servers themselves are checked when the engine is built."""
    kind = _kind_of_servers(args)
    url_flag = f"{kind}_server_base_url"
    for dest in ("base_url", "api_key", "timeout"):
        if f"vllm_server_{dest}" in args.explicit and kind != "vllm":
            raise GrpoError(f"{flag(f'vllm_server_{dest}')} needs --rollout-engine vllm --vllm-mode server")
        if f"sglang_server_{dest}" in args.explicit and kind != "sglang":
            raise GrpoError(f"{flag(f'sglang_server_{dest}')} needs --rollout-engine sglang")
    if kind is None:
        for dest in ("weight_sync_method", "weight_sync_dir"):
            if dest in args.explicit:
                raise GrpoError(
                    f"{flag(dest)} needs servers: an engine in the training processes has direct access to the weights"
                )
        return
    if kind == "sglang" and "vllm_mode" in args.explicit:
        raise GrpoError("--vllm-mode and --rollout-engine sglang cannot both be given: SGLang is always a server here")
    if not args.dry_run:
        required(args, url_flag, "name the servers, such as http://127.0.0.1:8000")
    urls = [urlsplit(url) for url in getattr(args, url_flag) or []]
    for url in urls:
        if (
            url.scheme not in ("http", "https")
            or not url.hostname
            or url.query
            or url.path.rstrip("/") not in ("", "/v1")
        ):
            raise GrpoError(
                f"{flag(url_flag)}: {url.hostname or 'a value'} is not a server's address: give http://HOST:PORT"
            )
        if url.username or url.password:
            raise GrpoError(f"{flag(url_flag)} must not contain a password: addresses are printed and saved")
    if len({(url.hostname, url.port) for url in urls}) < len(urls):
        raise GrpoError(f"{flag(url_flag)} names a server twice: give each server once")
    for dest in ENGINES_OWN:
        if was_given(args, dest) and (kind, dest) != ("sglang", "sleep_level"):
            raise GrpoError(
                f"{flag(dest)} is for an engine in the training processes: set it when you start the server"
            )
    _check_weight_sync(args, kind)


def _check_weight_sync(args: Namespace, kind: str) -> None:
    method = args.weight_sync_method
    if method == "ipc":
        if kind != "sglang":
            raise GrpoError("--weight-sync-method ipc is for --rollout-engine sglang: give nccl or checkpoint")
        if not _on_one_host(args, kind):
            raise GrpoError("--weight-sync-method ipc needs servers on rank 0's host, as http://127.0.0.1: give nccl")
    if method != "checkpoint":
        if not args.dry_run and not torch.cuda.is_available():
            raise needs_gpu(f"--weight-sync-method {method}", "give checkpoint")
        if kind == "sglang" and method not in ("nccl", "ipc"):
            raise GrpoError(f"--weight-sync-method {method} is vLLM's: give nccl, ipc or checkpoint")
        if kind == "vllm" and not args.dry_run:
            require(f"--weight-sync-method {method}, whose sender is vLLM's,", "vllm", instead="give checkpoint")
        if args.weight_sync_dir is not None:
            raise GrpoError("--weight-sync-dir needs --weight-sync-method checkpoint: no other method writes files")
        return
    if args.weight_sync_dir is None:
        raise GrpoError(
            "--weight-sync-dir is missing: with servers on other hosts, --weight-sync-method checkpoint needs a "
            "directory that they share with rank 0, under one path"
        )


# Arguments of vllm.LLM that must follow from the trainer's configuration.
OURS = {"model", "load_format", "distributed_executor_backend", "skip_tokenizer_init", "tokenizer", "logprobs_mode"}
OURS |= {"tensor_parallel_size", "enable_return_routed_experts", "enable_sleep_mode", "max_model_len", "seed"}
OURS |= {"enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"}
OURS |= {"fully_sharded_loras", "speculative_config"}
# Arguments that store keys and values outside the cache that a weight sync clears.
KEEP_OLD_CACHE = {"kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"}


def check_rollout(args: Namespace) -> None:
    """Raise GrpoError for invalid engine and sampling flags."""
    _check_servers(args)
    _check_megatron_engine(args)
    if args.top_k != -1 and args.top_k < 1:
        raise GrpoError(f"--top-k ({args.top_k}) must be at least 1, or -1 for all tokens")
    check_replicas(args)
    of_experts = args.vllm_enable_expert_parallel or (args.vllm_engine_kwargs or {}).get("enable_expert_parallel")
    if of_experts and not args.dry_run and not torch.cuda.is_available():
        raise needs_gpu("--vllm-enable-expert-parallel", "vLLM's CPU build crashes with it, leave it out")
    if args.vllm_quantization and not args.dry_run and not torch.cuda.is_available():
        raise needs_gpu(f"--vllm-quantization {args.vllm_quantization}", "leave it out")
    ours = sorted(OURS.intersection(args.vllm_engine_kwargs or {}))
    if ours:
        raise GrpoError(f"--vllm-engine-kwargs: {', '.join(ours)} is set by this program: leave it out")
    keeping = sorted(KEEP_OLD_CACHE.intersection(args.vllm_engine_kwargs or {}))
    if keeping:
        raise GrpoError(
            f"--vllm-engine-kwargs: {', '.join(keeping)} would keep keys and values of earlier weights over a weight "
            "sync: leave it out"
        )
    if args.sleep_level and not args.dry_run and not torch.cuda.is_available():
        raise needs_gpu("--sleep-level", "on a CPU no engine can free its memory, leave it out")
    _check_log_probs(args)
    check_speculation(args)
    if args.rollout_balancing == "dynamic" and not has_colocated_vllm(args):
        raise GrpoError("--rollout-balancing dynamic is for colocated vLLM: other engines have no idle replicas")
    if args.check_weight_sync and args.rollout_engine == "megatron":
        raise GrpoError("--check-weight-sync needs an engine with weights of its own: leave it out")
    if args.stop_token_ids and args.ignore_eos:
        raise GrpoError("--stop-token-ids cannot go with --ignore-eos, which ends completions by length: leave one out")
    if args.stop_words and args.tokenizer_type != "HuggingFaceTokenizer":
        raise GrpoError("--stop-words needs a HuggingFaceTokenizer: the engine finds them in the text that it decodes")


def check_model_of_engine(args: Namespace) -> None:
    """Raise GrpoError for a model that the engine cannot hold. Call after `check_rollout`."""
    check_heads(args, args.vllm_tensor_parallel_size, "--vllm-tensor-parallel-size")
    if args.vllm_enable_expert_parallel and not args.num_experts:
        raise GrpoError("--vllm-enable-expert-parallel needs a mixture of experts: leave it out")
    # Their loaders copy into parameters that have no memory during vLLM's reload. SGLang's of files has not been tried.
    of_gpt_oss = has_servers(args) and args.model_family == "gpt_oss"
    if of_gpt_oss and (args.rollout_engine == "vllm" or args.weight_sync_method == "checkpoint"):
        raise GrpoError(
            f"--weight-sync-method {args.weight_sync_method} with --model-family gpt_oss: a server's reload of the "
            "weights loses the sinks and experts: give --vllm-mode colocate, or --rollout-ranks"
        )
    if has_servers(args) and args.rollout_engine == "vllm" and args.model_family == "minimax_m2":
        raise GrpoError(
            "--vllm-mode server with --model-family minimax_m2: a server's reload of the weights fails at its norms "
            "(their loaders have no names, which vLLM reads): give --vllm-mode colocate, or --rollout-ranks"
        )
    if args.weight_sync_method == "sparse" and args.model_family not in SPARSE_FAMILIES:
        raise GrpoError(
            f"--weight-sync-method sparse with --model-family {args.model_family}: its tensors are not those of vLLM's "
            "parameters, which the servers change: give nccl"
        )
    check_draft(args)


def check_replicas(args: Namespace) -> None:
    """Raise GrpoError if the ranks are no whole number of engine replicas."""
    width = args.vllm_tensor_parallel_size
    ranks, what = (args.rollout_ranks, "--rollout-ranks") if args.rollout_ranks else (args.world_size, "world_size")
    if ranks % width:
        raise GrpoError(f"{what} ({ranks}) must be divisible by --vllm-tensor-parallel-size ({width})")


def resolve_lora_weight_sync(args: Namespace) -> dict[str, Any]:
    """Return the default of --lora-weight-sync, for adapters that `check_lora` accepts."""
    if not args.lora_rank or args.rollout_engine == "megatron" or args.lora_weight_sync:
        return {}
    # A server takes adapters only if it has been started for them.
    return {"lora_weight_sync": "merged" if has_servers(args) or adapter_refused(args) else "adapter"}


def check_lora_weight_sync(args: Namespace) -> None:
    """Raise GrpoError for an adapter that the engine cannot hold."""
    for dest in ("lora_weight_sync", "no_check_lora_sync"):
        needs(args, dest, "lora_rank", "there is no adapter")
    if not args.lora_rank:
        return
    if args.rollout_engine == "megatron":
        for dest in ("lora_weight_sync", "no_check_lora_sync"):
            if was_given(args, dest):
                raise GrpoError(f"{flag(dest)} needs an engine with weights of its own: leave it out")
        return
    if args.lora_weight_sync == "adapter" and (reason := adapter_refused(args)):
        raise GrpoError(f"--lora-weight-sync adapter: {reason}; give merged, or leave it out")
    if args.no_check_lora_sync and args.lora_weight_sync == "merged":
        raise GrpoError("--no-check-lora-sync needs --lora-weight-sync adapter: merged weights are not read back")


def adapter_refused(args: Namespace) -> str | None:
    """Return the reason why the engine cannot hold the run's adapter; None if it can."""
    if args.rollout_engine == "sglang":
        return "SGLang's servers receive whole weights"
    if method_of(args) == "mtp":
        return "adapters have not been checked with drafts of multi-token prediction"
    if has_servers(args) and args.weight_sync_method != "checkpoint":
        return f"servers read an adapter's files, and --weight-sync-method is {args.weight_sync_method}, not checkpoint"
    if has_servers(args) and args.lora_base_dtype == "fp8":
        return "servers hold the base of their own files, and not the one of --lora-base-dtype fp8"
    if has_servers(args) and args.rollout_ranks:
        return "servers of --rollout-ranks receive whole weights"
    if args.lora_rank > LARGEST_SLOT:
        return f"the largest rank of vLLM's adapters is {LARGEST_SLOT}"
    if args.lora_use_dora:
        return "vLLM has no DoRA"
    if args.lora_modules_to_save:
        return "an adapter does not contain the weights of --lora-modules-to-save"
    if args.multi_latent_attention:
        return "vLLM multiplies the matrices of latent attention before use, without their adapters"
    if args.experimental_attention_variant:
        return "adapters of models with gated delta nets have not been checked in vLLM"
    if args.vllm_quantization:
        return "--vllm-quantization quantizes the weights that are sent"
    if args.num_experts and not torch.cuda.is_available() and not args.dry_run:
        return "vLLM runs mixtures of experts with adapters on GPUs alone"
    in_float32 = args.vllm_dtype == "float32" or not (args.vllm_dtype or args.bf16 or args.fp16)
    if in_float32 and torch.cuda.is_available():
        return "vLLM's kernels for adapters are for 16 bits"
    layers, modules = linear_layers(args), targets(args)
    if any(name.endswith(".in_proj") for name in modules):
        return "vLLM divides an adapter of Mamba's in_proj into parts, which cannot be read back"
    keys_as_values = args.gemma4_config and args.gemma4_config["attention_k_eq_v"]
    if keys_as_values and any(name.endswith(".k_proj") for name in modules):
        return "vLLM does not add an adapter of k_proj to values that are keys"
    if any(is_router(layers[name]) for name in modules):
        return "vLLM has no adapters of routers"
    if any(".experts." in name or ".shared_expert" in name for name in modules):
        return "adapters of experts cannot be read back from the slots of vLLM's fused experts"
    if args.model_family in ("glm", "glm4") and any(name.endswith(".gate_up_proj") for name in modules):
        return f"vLLM has no adapter of {args.model_family}'s gate_up_proj"
    return None


def lora_note(args: Namespace) -> str | None:
    """Return the line that says what the engine receives of a LoRA run; None without adapters or engine weights."""
    if not args.lora_weight_sync:
        return None
    if args.lora_weight_sync == "adapter" and has_servers(args):
        checked = "" if args.no_check_lora_sync else ", which must change their log-probabilities at every sync"
        return f"LoRA: the servers load the adapter from files{checked}; their base is their own"
    if args.lora_weight_sync == "adapter":
        checked = "" if args.no_check_lora_sync else ", and it is read back after every sync"
        return f"LoRA: the engine receives the adapter alone{checked}"
    reason = None if "lora_weight_sync" in args.explicit else adapter_refused(args)
    if has_servers(args) and not reason:
        reason = "servers load adapters only with --lora-weight-sync adapter"
    return "LoRA: the engine receives the weights merged with the adapter" + (f", because {reason}" if reason else "")


def probability_changes(args: Namespace) -> list[str]:
    """Return the flags, with their values, that change the sampling and not the trainer's log-probabilities."""
    off = {"top_p": 1, "top_k": -1, "min_p": 0}
    off |= {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    return [f"{flag(dest)} {getattr(args, dest)}" for dest, value in off.items() if getattr(args, dest) != value]


def replays_top_k(args: Namespace) -> bool:
    """Return whether the engine returns the tokens that truncation keeps, for log-probabilities over these tokens only.

    vLLM returns the log-probabilities of up to max_logprobs tokens; a server's limit is checked when it is connected.
    """
    limit = (args.vllm_engine_kwargs or {}).get("max_logprobs", 20) if args.vllm_mode == "colocate" else -1
    return (
        args.rollout_engine == "vllm"
        and not args.no_top_k_replay
        and 1 <= args.top_k <= (args.vocab_size or args.top_k)
        and (limit == -1 or args.top_k <= limit)
        and not args.structured_outputs_regex
        and not any("penalty" in change for change in probability_changes(args))
    )


def engine_changes(args: Namespace) -> list[str]:
    """Return the flags, with their values, that the engine's log-probabilities include and the trainer's do not."""
    changing = probability_changes(args)
    if args.rollout_engine != "vllm":  # after penalties and before truncation, at every temperature
        return [change for change in changing if "penalty" in change]
    return [] if args.temperature == 1 or replays_top_k(args) else changing


def not_measured(args: Namespace) -> str | None:
    """Return the line that says why a run has no mismatch metrics although no flag asks for that; None if it has."""
    changes = engine_changes(args)
    if not changes or "mismatch_sample_rate" in args.explicit:
        return None
    return (
        f"mismatch is not measured: the engine's log-probabilities would include {', '.join(changes)}, and the "
        "trainer's do not (docs/log_probabilities.md)"
    )


def resolve_mismatch_sample_rate(args: Namespace) -> dict[str, Any]:
    """Return --mismatch-sample-rate 0 if no flag needs the engine's log-probabilities and they are not comparable."""
    unread = "mismatch_sample_rate" not in args.explicit and not uses_engine_log_probs(args)
    return {"mismatch_sample_rate": 0.0} if unread and engine_changes(args) else {}


def _check_log_probs(args: Namespace) -> None:
    """Raise GrpoError for flags that violate the log-probability contract of rollout/engine.py."""
    if args.no_top_k_replay and (args.rollout_engine != "vllm" or args.top_k == -1):
        raise GrpoError("--no-top-k-replay needs --rollout-engine vllm and --top-k: otherwise there is no replay")
    if args.teacher_server and replays_top_k(args):
        raise GrpoError(
            f"--teacher-server with --top-k {args.top_k}: the server returns log-probabilities over the whole "
            "vocabulary, the trainer's are over the kept tokens: give --teacher-load-hf, or add --no-top-k-replay"
        )
    if LOSSES.get(args.loss_type).distils and replays_top_k(args):
        raise GrpoError(
            f"--loss-type {args.loss_type} with --top-k {args.top_k}: distributions are compared over the whole "
            "vocabulary, the trainer's log-probabilities are over the kept tokens: add --no-top-k-replay"
        )
    changes, user = engine_changes(args), uses_engine_log_probs(args)
    if not changes:
        return
    if user or args.mismatch_sample_rate > 0:
        cure = f"leave out {user}" if user else "leave out --mismatch-sample-rate"
        if args.rollout_engine != "vllm":
            cure = f"leave out the penalties, or {cure}"
        elif not any("penalty" in change for change in changes):
            cure = f"give --temperature 1, or --top-k within vLLM's max_logprobs (20), or {cure}"
        else:
            cure = f"give --temperature 1, or {cure}"
        raise GrpoError(
            f"{', '.join(changes)} with --rollout-engine {args.rollout_engine} --temperature {args.temperature}: the "
            f"engine's log-probabilities would include them, and could not be compared with the trainer's: {cure}"
        )


def _check_megatron_engine(args: Namespace) -> None:
    if args.rollout_engine != "megatron":
        if "inference_max_requests" in args.explicit:
            raise GrpoError("--inference-max-requests needs --rollout-engine megatron; vLLM has --vllm-max-num-seqs")
        return
    theirs = sorted(dest for dest in args.explicit if dest.startswith("vllm_") and was_given(args, dest))
    if theirs:
        raise GrpoError(f"{flag(theirs[0])} is vLLM's, and --rollout-engine megatron runs without vLLM: leave it out")
    for dest, reason in (
        ("sleep_level", "its cache is always freed between rollouts"),
        ("offload_model", "it generates with the trainer's weights"),
        ("cpu_offloading", "Transformer Engine would offload activations during generation, too"),
        ("fine_grained_activation_offloading", "activations would be offloaded during generation, too"),
    ):
        if getattr(args, dest):
            raise GrpoError(f"{flag(dest)} cannot be used with --rollout-engine megatron: {reason}; leave it out")
    if args.router_replay_mode == "R3":
        raise GrpoError(
            "--router-replay-mode R3 cannot be used with --rollout-engine megatron, whose routers are the trainer's: "
            "leave it out with one update per rollout, otherwise give R2"
        )


def has_servers(args: Namespace) -> bool:
    """Return whether the engine is servers; a dry run need not name them."""
    return args.rollout_engine == "sglang" or (args.rollout_engine, args.vllm_mode) == ("vllm", "server")


def has_colocated_vllm(args: Namespace) -> bool:
    """Return whether the engine is vLLM in the training processes."""
    return (args.rollout_engine, args.vllm_mode) == ("vllm", "colocate")


def server_urls(args: Namespace) -> list[str]:
    """Return the URLs of the servers; none for an engine in the training processes."""
    if args.rollout_engine == "sglang":
        return args.sglang_server_base_url or []
    return (args.vllm_server_base_url or []) if args.vllm_mode == "server" else []


def streams_of_a_rank(args: Namespace, world_size: int) -> int:
    """Return how many answers of servers a rank receives at a time, of ``world_size`` trainers."""
    width = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    receivers = args.rollout_ranks or world_size // width
    return -(-args.vllm_max_num_seqs * len(server_urls(args)) // receivers)


def urls_of_replica(args: Namespace, replica: int) -> list[str]:
    """Return the addresses of the servers that a replica of --rollout-ranks drives; none if it is an engine itself."""
    return server_urls(args)[replica :: args.rollout_ranks]


def resolve_lengths(args: Namespace) -> dict[str, Any]:
    """Return the default of --vllm-max-model-len: the longest sequence."""
    return {"vllm_max_model_len": longest_sequence(args)} if args.vllm_max_model_len is None else {}


def check_lengths(args: Namespace) -> None:
    """Raise GrpoError for sequences too long for engine or micro-batches."""
    check_budgets(args)
    for dest in ("seq_length", "vllm_max_model_len"):
        _check_longest(args, dest)


def check_positions(args: Namespace) -> None:
    """Raise GrpoError for sequences too long for the model. Call after `check_lengths`."""
    _check_longest(args, "max_position_embeddings")
    if args.vllm_max_model_len > args.max_position_embeddings:
        raise GrpoError(
            f"--vllm-max-model-len ({args.vllm_max_model_len}) must be at most --max-position-embeddings "
            f"({args.max_position_embeddings})"
        )


def _check_longest(args: Namespace, dest: str) -> None:
    limit, longest = getattr(args, dest), longest_sequence(args)
    if limit is not None and longest > limit:
        raise GrpoError(f"{longest_in_words(args)} = {longest} must be at most {flag(dest)} ({limit})")


def check_dynamic_sampling(args: Namespace) -> None:
    """Raise GrpoError for invalid combinations of dynamic sampling, over-sampling and balancing."""
    needs(args, "max_resample_times", "dynamic_sample", "it limits the replacements of a group")
    needs(args, "dynamic_sample_reward", "dynamic_sample", "it says which rewards of a group must differ")
    for name in args.dynamic_sample_reward or []:
        if name not in (args.reward_funcs or []):
            raise GrpoError(
                f'--dynamic-sample-reward has "{name}", which is not among --reward-funcs '
                f"{' '.join(args.reward_funcs or [])}: add it there, with a --reward-weights of 0 if it is no reward"
            )
    if args.dynamic_sample and not ADVANTAGES.get(args.advantage_estimator).compares_group:
        raise GrpoError(
            f"--dynamic-sample replaces groups whose rewards are all equal, but --advantage-estimator "
            f"{args.advantage_estimator} compares over the whole batch and learns from them too: leave one of them out"
        )
    if args.rollout_balancing != "dynamic":
        return
    for dest, given in (("dynamic_sample", args.dynamic_sample), ("over_sampling_ratio", args.over_sampling_ratio > 1)):
        if given:
            raise GrpoError(
                f"{flag(dest)} and --rollout-balancing dynamic cannot both be given: each replica selects within its "
                "fixed share of the rollout"
            )


def check_partial_rollouts(args: Namespace) -> None:
    """Raise GrpoError for flags that cannot go with completions of several rollouts."""
    if args.max_staleness and not (args.partial_rollouts or args.rollout_ranks or args.replay_rollouts):
        raise GrpoError(
            f"--max-staleness {args.max_staleness} needs --partial-rollouts or --rollout-ranks: without them a rollout "
            "finishes every completion that it starts"
        )
    if not args.partial_rollouts:
        return
    if not args.max_staleness:
        raise GrpoError(
            "--partial-rollouts needs --max-staleness of at least 1: with 0 every completion must be finished in the "
            "rollout that starts it"
        )
    if has_servers(args):
        raise GrpoError(
            "--partial-rollouts needs an engine in the training processes: give --vllm-mode colocate or "
            "--rollout-engine megatron"
        )
    if not LOSSES.get(args.loss_type).reads_reference:
        required(
            args,
            "rollout_importance_sampling_mode",
            "--partial-rollouts trains on tokens of older weights, whose importance weights must be bounded: give "
            "token_truncate",
        )
    if args.weight_update == "drain":
        raise GrpoError(
            "--weight-update drain and --partial-rollouts cannot both be given: a drained engine has finished every "
            "completion; give keep, or leave it out"
        )
    keeps = args.weight_update == "keep"
    if keeps and args.rollout_engine != "vllm":
        raise GrpoError(
            "--weight-update keep with --partial-rollouts needs --rollout-engine vllm: leave one of them out"
        )
    if keeps and args.sleep_level:
        raise GrpoError(
            f"--weight-update keep and --sleep-level {args.sleep_level} cannot both be given: a sleeping engine has no "
            "KV cache; give --sleep-level 0"
        )
    counted = "a continued completion is a new request, which counts tokens from its own start only"
    for dest, given, reason in (
        ("dynamic_sample", args.dynamic_sample, "it replaces groups within a rollout"),
        ("over_sampling_ratio", args.over_sampling_ratio > 1, "it throws away what partial rollouts continue"),
        ("rollout_balancing", args.rollout_balancing == "dynamic", "each replica continues its own completions"),
        ("presence_penalty", args.presence_penalty, counted),
        ("frequency_penalty", args.frequency_penalty, counted),
        ("router_replay_mode", args.router_replay_mode == "R3", "it needs the experts of one rollout; give R2"),
    ):
        if given:
            raise GrpoError(f"{flag(dest)} and --partial-rollouts cannot both be given: {reason}")


def recorded_in(args: Namespace) -> str | None:
    """Return the directory of the ledger that replaces all rollouts of this run; None if an engine generates."""
    return args.replay_rollouts or args.train_only


def resolve_ledger(args: Namespace) -> dict[str, Any]:
    """Return the default of --ledger, in --save, for a run that needs one."""
    needed = args.save and (args.max_staleness or args.rollout_only) and not recorded_in(args)
    return {"ledger": f"{args.save}/ledger"} if needed and not args.ledger else {}


def check_ledger(args: Namespace) -> None:
    """Raise GrpoError for contradictory uses of ledgers."""
    excludes(args, "replay_rollouts", "train_only", "a replay repeats the recorded run, with its own flags")
    for dest in ("replay_rollouts", "train_only"):
        excludes(args, "ledger", dest, "it generates nothing to write")
        excludes(args, "rollout_only", dest, "one needs an engine, the other has none")
        excludes(args, dest, "rollout_ranks", "there are no engines: give the training ranks alone")
    excludes(args, "train_only", "dynamic_sample", "no groups are sampled: leave groups out of the recorded data")
    excludes(args, "train_only", "reward_clip", "the rewards are recorded: clip them there")
    excludes(args, "rollout_only", "rollout_ranks", "no trainer needs ranks of its own: leave the second out")
    excludes(args, "rollout_only", "partial_rollouts", "the weights do not change, and nothing becomes stale")
    for dest in ("save_interval", "eval_interval", "async_save", "save_adapter"):
        excludes(args, "rollout_only", dest, "there are no updates to save or evaluate")
    if args.rollout_only and not recorded_in(args):
        required(args, "ledger", "--rollout-only writes nothing else; give it, or --save")


def resolve_max_num_seqs(args: Namespace) -> dict[str, Any]:
    """Return the default of --vllm-max-num-seqs: what a replica or a server has of a rollout, from 256 to 512.

    Fewer would cut a rollout into waves. 512 is the size of vLLM's largest CUDA graph, and from 256 on it has one for
    each multiple of 16; 256 is for evaluations, and for --rollout-balancing dynamic, which needs completions that wait.
    """
    if args.vllm_max_num_seqs is not None:
        return {}
    share = 0
    if args.rollout_balancing == "static":
        engines = len(server_urls(args)) or (args.rollout_ranks or args.world_size) // args.vllm_tensor_parallel_size
        batches = 1 + args.max_staleness if args.rollout_ranks else 1  # these engines begin the next ones meanwhile
        prompts = args.generation_batch_size // args.num_generations * args.over_sampling_ratio * batches
        share = ceil(prompts / max(engines, 1)) * args.num_generations
        share = -(-share // 16) * 16
    most = (args.vllm_engine_kwargs or {}).get("max_num_batched_tokens", 512)  # vLLM demands as many of these
    if type(most) is not int:
        raise GrpoError(f"--vllm-engine-kwargs: max_num_batched_tokens is {most!r} and must be a whole number")
    return {"vllm_max_num_seqs": min(max(share, 256), max(most, 256), 512)}


def max_num_seqs_of(args: Namespace, rollout_ranks: int) -> int:
    """Return what --vllm-max-num-seqs would be with this --rollout-ranks."""
    if "vllm_max_num_seqs" in args.explicit:
        return args.vllm_max_num_seqs
    found = resolve_max_num_seqs(replaced(args, rollout_ranks=rollout_ranks, vllm_max_num_seqs=None))
    return found["vllm_max_num_seqs"]


def resolve_placed(args: Namespace) -> dict[str, Any]:
    """Return the default of --vllm-gpu-memory-utilization for engines on ranks of their own."""
    if not args.rollout_ranks or args.vllm_mode == "server" or "vllm_gpu_memory_utilization" in args.explicit:
        return {}
    return {"vllm_gpu_memory_utilization": 0.9}  # the GPU is the engine's alone


def check_placed(args: Namespace) -> None:
    """Raise GrpoError for flags that cannot go with engines on ranks of their own."""
    if not args.partial_rollouts:
        needs(args, "weight_update", "rollout_ranks", "other engines are empty when they receive weights")
    if not args.rollout_ranks:
        return
    if args.rollout_engine != "vllm":
        raise GrpoError("--rollout-ranks runs vLLM on these ranks, or drives its servers: leave --rollout-engine out")
    if args.vllm_mode == "server":
        _check_placed_servers(args)
    alone = "the engine shares no GPU with the trainer"
    for dest, reason in (
        ("partial_rollouts", "give --max-staleness alone, which continues what new weights interrupt"),
        ("sleep_level", alone),
        ("offload_model", alone),
        ("offload_gradients", alone),
        ("offload_optimizer", alone),
        ("check_weight_sync", "with --max-staleness the engines are probed at all new weights"),
    ):
        if getattr(args, dest):
            raise GrpoError(f"{flag(dest)} and --rollout-ranks cannot both be given: {reason}")
    if args.over_sampling_ratio > 1:
        raise GrpoError(
            "--over-sampling-ratio and --rollout-ranks cannot both be given: the engines finish every group"
        )
    if args.rollout_balancing == "dynamic":
        raise GrpoError("--rollout-balancing dynamic and --rollout-ranks cannot both be given: they always balance")
    if not args.max_staleness:
        return
    if not LOSSES.get(args.loss_type).reads_reference:  # it compares with the reference, whatever sampled
        required(
            args,
            "rollout_importance_sampling_mode",
            f"--max-staleness {args.max_staleness} trains on tokens of older weights, whose importance weights must be "
            "bounded: give token_truncate",
        )
    counted = "a completion that an evaluation or a resume interrupts is a new request, which counts from its start"
    for dest in ("presence_penalty", "frequency_penalty"):
        if getattr(args, dest):
            raise GrpoError(f"{flag(dest)} and --rollout-ranks with --max-staleness cannot both be given: {counted}")
    if args.router_replay_mode == "R3" and args.weight_update != "drain":
        raise GrpoError(
            "--router-replay-mode R3 needs --weight-update drain: it needs the experts of one set of weights"
        )


def _check_placed_servers(args: Namespace) -> None:
    """Raise GrpoError for flags that cannot go with servers which ranks of --rollout-ranks drive."""
    if args.rollout_ranks > len(server_urls(args)) and (server_urls(args) or not args.dry_run):
        raise GrpoError(
            f"--rollout-ranks {args.rollout_ranks} is more than the {len(server_urls(args))} servers of "
            "--vllm-server-base-url: each of these ranks drives servers of its own"
        )
    if args.weight_sync_method != "checkpoint":
        raise GrpoError(
            "--rollout-ranks with --vllm-mode server needs --weight-sync-method checkpoint: these ranks have no GPU"
        )
    alone = "a continued completion is a new request to a server"
    for dest, given, reason in (
        ("stop_words", args.stop_words, f"{alone}, which sees no stop word across its begin"),
        ("presence_penalty", args.presence_penalty, f"{alone}, which counts tokens from its own start only"),
        ("frequency_penalty", args.frequency_penalty, f"{alone}, which counts tokens from its own start only"),
        ("top_k", replays_top_k(args), "their streams have no kept tokens; add --no-top-k-replay"),
    ):
        if given:
            raise GrpoError(f"{flag(dest)} and --rollout-ranks with servers cannot both be given: {reason}")


def resolve_decoding(args: Namespace) -> dict[str, Any]:
    """Return whether the engine decodes tokens, as far as the flags tell it; rows of the data can ask for it, too."""
    return {"engine_decodes": bool(args.stop_words or args.structured_outputs_regex)}


def check_structured_outputs(args: Namespace) -> None:
    """Raise GrpoError for a constraint that the engine cannot enforce."""
    if args.structured_outputs_regex is None:
        return
    try:
        re.compile(args.structured_outputs_regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise GrpoError(f"--structured-outputs-regex {args.structured_outputs_regex!r}: {error}") from error
    why_not = constraint_refused(args)
    if why_not:
        raise GrpoError(f"--structured-outputs-regex {why_not}")
    if failed := compile_error("regex", args.structured_outputs_regex):
        raise GrpoError(
            f"--structured-outputs-regex {args.structured_outputs_regex!r}: vLLM cannot compile it: {failed}"
        )
