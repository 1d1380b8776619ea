"""Flags of the engines that generate, and of the weights' way to them; the rules are in ``rollout_rules``."""

from typing import Any

BALANCING = ("static", "dynamic")
DTYPES = ("bfloat16", "float16", "float32")
ENGINES = ("vllm", "megatron", "sglang")
VLLM_MODES = ("colocate", "server")
WEIGHT_SYNC = ("nccl", "ipc", "m2n", "sparse", "checkpoint", "gloo")

# Rows of ``arguments.FLAGS``.
ROLLOUT_FLAGS: tuple[tuple[str, Any, Any, str], ...] = (
    ("--rollout-engine", ENGINES, "vllm", "what generates; megatron: the training model itself"),
    ("--vllm-mode", VLLM_MODES, "colocate", "vLLM in the training processes, or servers over HTTP"),
    ("--vllm-server-base-url", [str], None, "vLLM servers, such as http://host:8000"),
    ("--vllm-server-api-key", str, None, "key of the vLLM servers [VLLM_API_KEY in the environment]"),
    ("--vllm-server-timeout", float, 240.0, "seconds without a sign of life after which a server is given up"),
    ("--sglang-server-base-url", [str], None, "SGLang servers, such as http://host:30000"),
    ("--sglang-server-api-key", str, None, "key of the SGLang servers [SGLANG_API_KEY in the environment]"),
    ("--sglang-server-timeout", float, 240.0, "seconds without a sign of life after which a server is given up"),
    ("--weight-sync-method", WEIGHT_SYNC, None, "how servers get weights [nccl on GPUs, else checkpoint]"),
    ("--weight-sync-dir", str, None, "directory shared with servers, for checkpoint [/dev/shm on one host]"),
    ("--vllm-tensor-parallel-size", int, 1, "ranks of one engine replica"),
    ("--vllm-gpu-memory-utilization", float, 0.3, "share of the GPU's memory for the engine's weights and cache"),
    ("--vllm-max-model-len", int, None, "longest sequence of the engine [longest prompt + completion]"),
    ("--vllm-max-num-seqs", int, 256, "completions that a replica generates, or a server is given, at a time"),
    (
        "--inference-max-requests",
        int,
        256,
        "completions that a replica of --rollout-engine megatron makes at a time",
    ),
    ("--sleep-level", int, 0, "between rollouts: 0 keeps weights and cache, 1 weights on the host, 2 neither"),
    ("--vllm-dtype", DTYPES, None, "type of the engine's weights and activations [the trainer's]"),
    ("--vllm-quantization", ("fp8",), None, "the engine quantizes its weights as they come"),
    (
        "--vllm-enable-expert-parallel",
        bool,
        False,
        "the ranks of a replica share out experts instead of cutting each",
    ),
    ("--vllm-engine-kwargs", dict, None, "more arguments of vllm.LLM, which win over the flags"),
    ("--vllm-enforce-eager", bool, False, "no CUDA graphs in the engine; on a CPU always so"),
    ("--vllm-enable-prefix-caching", bool, False, "compute the prefix that prompts share once"),
    ("--max-completion-length", int, 512, "most tokens of a completion"),
    ("--temperature", float, 1.0, "sampling temperature; training uses the same"),
    ("--top-p", float, 1.0, "sample from the most likely tokens with this probability together"),
    ("--top-k", int, -1, "sample from this many most likely tokens; -1: from all"),
    ("--min-p", float, 0.0, "sample from tokens at least this likely relative to the likeliest"),
    (
        "--repetition-penalty",
        float,
        1.0,
        "factor against tokens that prompt or completion have: logit / it, or x it if negative",
    ),
    ("--presence-penalty", float, 0.0, "subtracted from the logits of tokens that the completion has"),
    ("--frequency-penalty", float, 0.0, "subtracted for each time that the completion has the token"),
    ("--stop-words", [str], None, "strings that end a completion"),
    ("--ignore-eos", bool, False, "go on after the end-of-sequence token (for benchmarks)"),
    (
        "--rollout-balancing",
        BALANCING,
        BALANCING[0],
        "dynamic: prompts go to replicas as they free up, unrepeatably",
    ),
    ("--check-weight-sync", bool, False, "compare the engine with the trainer after every weight sync"),
    ("--mismatch-sample-rate", float, 1.0, "share of rollouts in which engine and trainer are compared"),
)
