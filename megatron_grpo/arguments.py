"""Flags: ours in the tables below, megatron-core's generated in ``core_flags``; how they are read, printed, handed on.

Names are Megatron-LM's where it has one. An attribute of the parsed arguments is its flag's name with underscores.
Which values go together is the business of ``validation``.
"""

import argparse
import difflib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_grpo.advantage_flags import ADVANTAGE_FLAGS
from megatron_grpo.algorithm.losses import Level
from megatron_grpo.algorithm.weighting import LOSS_TYPES
from megatron_grpo.core_flags import EXCLUDED, METAVARS, add_core_flags, core_config, help_text
from megatron_grpo.errors import speaks_for_host
from megatron_grpo.frozen_flags import FROZEN_FLAGS
from megatron_grpo.profiling import PROFILE
from megatron_grpo.reward_flags import REWARDS
from megatron_grpo.sampling_flags import CHOICE, ENDS, WEIGHT_DECAY
from megatron_grpo.weights.families import FAMILIES

# One row a flag: (name, kind, default, help). A kind is int, float or str; bool for a switch; [str] or [float] for one
# or more values; a tuple of strings for a choice; dict for a JSON object. Brackets in a help text: what it is when it
# is not given.
Row = tuple[str, Any, Any, str]

BALANCING = ("static", "dynamic")
REPLAY = ("disabled", "R2", "R3")
LEVELS = get_args(Level)
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop")
DTYPES = ("bfloat16", "float16", "float32")
ENGINES = ("vllm", "megatron", "sglang")
VLLM_MODES = ("colocate", "server")
WEIGHT_SYNC = ("nccl", "m2n", "sparse", "checkpoint", "gloo")
TOKENIZERS = ("HuggingFaceTokenizer", "SentencePieceTokenizer")

FLAGS: dict[str, tuple[Row, ...]] = {
    "batch and duration": (
        ("--micro-batch-size", int, 1, "completions in a micro-batch of one data-parallel rank"),
        ("--max-tokens-per-microbatch", int, None, "pack micro-batches up to so many tokens, whatever their number"),
        ("--global-batch-size", int, None, "completions in an update [generation batch / steps, or micro batch x DP]"),
        ("--num-generations", int, 8, "completions sampled for each prompt: GRPO's group"),
        ("--steps-per-generation", int, 1, "updates made from one rollout, each on its own share of the completions"),
        ("--generation-batch-size", int, None, "completions in a rollout [global batch x --steps-per-generation]"),
        ("--num-iterations", int, 1, "how often the completions of a rollout are gone through"),
        ("--train-iters", int, None, "updates to make; give this or --num-epochs"),
        ("--num-epochs", float, None, "passes over the training prompts to make; give this or --train-iters"),
        ("--exit-interval", int, None, "save and end this run when the number of updates is a multiple of this"),
        ("--seed", int, 1234, "seed of weights, order of prompts and sampling"),
        *ENDS,
    ),
    "model": (
        ("--model-family", tuple(FAMILIES), None, "names and layout of the weights [--load-hf's]"),
        ("--vocab-size", int, None, "size of the vocabulary, as in config.json"),
        ("--make-vocab-size-divisible-by", int, 128, "pad the vocabulary to a multiple of this times TP"),
        ("--max-position-embeddings", int, None, "longest sequence that the model is made for, tokens"),
        ("--seq-length", int, None, "bound of prompt + completion, tokens [--max-position-embeddings]"),
        ("--position-embedding-type", ("rope",), "rope", "kind of position embedding"),
        ("--rotary-base", int, 10000, "base of the rotary frequencies (rope_theta)"),
        ("--rotary-percent", float, 1.0, "share of a head's dimensions that is rotated"),
        ("--rope-scaling", dict, None, "scaling of the rotary frequencies: rope_scaling of config.json"),
        (
            "--rotary-base-local",
            int,
            None,
            "base of rotary frequencies in layers with a window, unscaled [--rotary-base]",
        ),
        ("--geglu", bool, False, "a gated MLP with GELU's tanh approximation, instead of --swiglu"),
        ("--sandwich-norm", bool, False, "norms behind attention and MLP too, before the residual is added"),
        ("--scale-embeddings", bool, False, "multiply embeddings by the square root of --hidden-size"),
        ("--attn-logit-softcapping", float, None, "cap of attention scores: cap * tanh(score / cap)"),
        ("--final-logit-softcapping", float, None, "cap of logits: cap * tanh(logit / cap)"),
        ("--untie-embeddings-and-output-weights", bool, False, "an output layer of its own, apart from the embedding"),
        ("--quick-geglu", bool, False, "gated linear units with x sigmoid(1.702 x) in place of SwiGLU's silu"),
        ("--group-query-attention", bool, False, "grouped-query attention, with --num-query-groups"),
    ),
    "parallelism": (
        ("--num-layers-per-virtual-pipeline-stage", int, None, "layers of a virtual stage, instead of their number"),
        ("--use-tp-pp-dp-mapping", bool, False, "rank order TP-CP-EP-PP-DP instead of TP-CP-EP-DP-PP"),
    ),
    "memory while the engine generates": (
        ("--offload-model", bool, False, "move the trainer's weights to host memory"),
        ("--offload-gradients", bool, False, "free the gradient buffers"),
        ("--offload-optimizer", bool, False, "move the optimizer's state to host memory"),
    ),
    "data": (
        ("--train-data-path", [str], None, "JSON-lines or Parquet files of training prompts"),
        ("--valid-data-path", [str], None, "JSON-lines or Parquet files of held-out prompts"),
        ("--prompt-key", str, "prompt", 'column of the prompt, a string or chat messages; else "messages"'),
        ("--system-prompt", str, None, "system message put before every prompt"),
        ("--max-prompt-length", int, 512, "most tokens of a prompt"),
        (
            "--truncation-strategy",
            ("raise", "left", "delete"),
            "raise",
            "longer prompts: refuse, cut on the left, or leave out",
        ),
        ("--no-shuffle", bool, False, "take the prompts in the order of the files"),
        ("--tokenizer-type", TOKENIZERS, TOKENIZERS[0], "kind of tokenizer"),
        ("--tokenizer-model", str, None, "directory or file of the tokenizer [--load-hf]"),
    ),
    "rollout": (
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
        ("--vllm-enforce-eager", bool, False, "no CUDA graphs in the engine"),
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
    ),
    "reuse and sampling": CHOICE,
    "rewards": REWARDS,
    "algorithm": (
        ("--loss-type", LOSS_TYPES, "grpo", "the policy's loss, and how tokens are weighted in it"),
        ("--importance-sampling-level", LEVELS, "token", "whose probability ratio: a token's or its completion's"),
        ("--epsilon", float, None, "clip range of the probability ratio, downwards [0.2; gmpo 0.4]"),
        ("--epsilon-high", float, None, "clip range upwards; cispo: the bound of the ratio itself [--epsilon]"),
        ("--delta", float, None, "bound of the ratio where the clip leaves it open (advantage < 0)"),
        ("--dual-clip", float, None, "the same under PPO's name: the loss is at most -it x advantage"),
        ("--tau-pos", float, 1.0, "sapo: sharpness of the gate where the advantage is positive"),
        ("--tau-neg", float, 1.05, "sapo: sharpness of the gate elsewhere"),
        ("--fipo-decay-rate", float, 32.0, "fipo: tokens after which a later token counts half"),
        ("--fipo-clip-range", float, 0.2, "fipo: how far a token's weight may leave 1"),
        ("--fipo-safety-threshold", float, 4.0, "fipo: ratio above which a token to be lowered is not strengthened"),
        ("--real-tau", float, 0.5, "real: temperature of the scores"),
        ("--entropy-coef", float, 0.0, "weight of the entropy, which is subtracted from the loss"),
        ("--top-entropy-quantile", float, 1.0, "learn from this share of an update's tokens, of the highest entropy"),
        ("--clip-cov-ratio", float, None, "leave out so large a share of tokens, drawn by their covariance"),
        ("--clip-cov-lb", float, 1.0, "least covariance of advantage and log-probability of such a token"),
        ("--clip-cov-ub", float, 5.0, "largest covariance of such a token"),
        ("--kl-cov-ratio", float, None, "penalise the movement of the share of tokens of the largest covariance"),
        ("--kl-cov-coef", float, 1.0, "factor of that penalty, |log p(new) - log p(old)|"),
        ("--overlong-filter", bool, False, "leave completions cut at --max-completion-length out of the loss"),
        (
            "--off-policy-sequence-mask-delta",
            float,
            None,
            "leave out completions to be lowered whose mean log p(engine) - log p(new) is above it",
        ),
        (
            "--m2po-threshold",
            float,
            None,
            "leave out tokens until the mean (log p(old) - log p(engine))^2 is below it",
        ),
        (
            "--router-replay-mode",
            REPLAY,
            REPLAY[0],
            "reuse the experts that the old policy (R2) or the engine (R3) chose",
        ),
        (
            "--rollout-importance-sampling-mode",
            CORRECTIONS,
            None,
            "weigh the policy term by p(trainer) / p(engine), bounded in this way [no weights]",
        ),
        ("--rollout-importance-sampling-threshold", float, None, "the weights' upper bound [2; for icepop 5]"),
        ("--rollout-importance-sampling-lower-bound", float, None, "icepop masks tokens below it [0.5]"),
    ),
    "advantages and KL": ADVANTAGE_FLAGS,
    "reference and teacher": FROZEN_FLAGS,
    "learning rate": (
        ("--lr-decay-style", ("constant", "linear", "cosine", "inverse-square-root"), "constant", "shape of the decay"),
        ("--lr-decay-iters", int, None, "updates until --min-lr is reached [all of them]"),
        ("--lr-warmup-iters", int, 0, "updates over which the rate rises from 0"),
        ("--lr-warmup-fraction", float, None, "the same as a share of --lr-decay-iters"),
        *WEIGHT_DECAY,
    ),
    "checkpoints": (
        ("--save", str, None, "directory for checkpoints, metrics and completions"),
        ("--load", str, None, "directory to resume from, when it holds a checkpoint"),
        ("--save-interval", int, None, "save when the number of updates is a multiple of this; always at the end"),
        ("--max-checkpoints-to-keep", int, None, "delete the oldest beyond this many [keep all]"),
        ("--pretrained-checkpoint", str, None, "Megatron checkpoint to take the first weights from"),
        ("--load-hf", str, None, "Hugging Face model directory to take the first weights, shape and tokenizer from"),
        ("--save-hf", str, None, "directory of the Hugging Face export at the end [{save}/hf_model]"),
        ("--no-save-hf", bool, False, "no Hugging Face export at the end"),
        ("--finetune", bool, False, "take only the weights of --load, and start from update 0"),
        ("--use-checkpoint-args", bool, False, "take the model's shape from the checkpoint"),
        ("--no-load-optim", bool, False, "do not restore the optimizer from --load"),
        ("--no-load-rng", bool, False, "do not restore the random state from --load"),
    ),
    "evaluation": (
        ("--eval-interval", int, None, "evaluate when the number of updates is a multiple of this"),
        ("--val-before-train", bool, False, "evaluate before the first update"),
        ("--eval-num-generations", int, 0, "sampled completions per held-out prompt, besides the greedy one"),
        ("--eval-max-prompts", int, None, "use only the first held-out prompts [all]"),
    ),
    "logging": (
        ("--log-interval", int, 1, "updates between two lines"),
        ("--tensorboard-dir", str, None, "directory for TensorBoard"),
        ("--wandb-project", str, None, "Weights & Biases project"),
        ("--wandb-exp-name", str, None, "Weights & Biases run name"),
        ("--num-completions-to-log", int, 8, "completions of a rollout that are written to {save}/completions.jsonl"),
    ),
    "profiling": PROFILE,
    "running": (
        ("--dry-run", bool, False, "print the batch arithmetic, the layout and the memory, and end"),
        ("--distributed-timeout-minutes", int, 10, "minutes after which a hanging collective ends the run"),
    ),
}

# Flags of Megatron-LM scripts that have nothing to change here: (takes a value, why they may stay in a script).
ACCEPTED: dict[str, tuple[bool, str]] = {
    "--use-mcore-models": (False, "megatron-core's models are the only ones"),
    "--use-flash-attn": (False, "packed batches always take a flash kernel on a GPU"),
    "--use-rotary-position-embeddings": (False, "rotary embeddings are the only ones"),
    "--no-position-embedding": (False, "rotary embeddings are the only ones"),
    "--attention-softmax-in-fp32": (False, "the attention kernels always compute it in float32"),
    "--no-masked-softmax-fusion": (False, "the attention kernels compute the softmax themselves"),
    "--no-persist-layer-norm": (False, "the persistent kernel of apex is not used"),
    "--no-async-tensor-model-parallel-allreduce": (False, "megatron-core ignores it"),
    "--cross-entropy-loss-fusion": (False, "the head computes log-probabilities in chunks, with its own backward"),
    "--log-entropy": (False, "the entropy over the vocabulary is always reported"),
    "--cross-entropy-fusion-impl": (True, "the head computes log-probabilities in chunks, with its own backward"),
}

# Never printed, saved or logged.
SECRET = ("vllm_server_api_key", "sglang_server_api_key")

NOT_GIVEN = object()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, printed by the first process of each host, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """End the program."""
        if speaks_for_host():
            print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


class Accept(argparse.Action):
    """Note that a flag of ``ACCEPTED`` was given."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Append the flag's name to ``args.accepted``."""
        given = namespace.accepted if isinstance(namespace.accepted, list) else []
        namespace.accepted = [*given, option_string]


def build_parser() -> Parser:
    """The parser of every flag: ours group by group, then megatron-core's section by section."""
    parser = Parser(
        prog="pretrain_grpo.py",
        usage="torchrun --nproc-per-node N pretrain_grpo.py [flags]",
        description="GRPO on Megatron-Core and vLLM. docs/arguments.md says how the batch sizes hang together.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36),
        allow_abbrev=False,
    )
    for title, rows in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, kind, default, text in rows:
            group.add_argument(name, default=default, help=help_text(text, default), **_reading(kind))
    add_core_flags(parser)
    synonyms = parser.add_argument_group("from Megatron-LM scripts")
    synonyms.add_argument(
        "--recompute-activations",
        action="store_const",
        const="selective",
        dest="recompute_granularity",
        help="the same as --recompute-granularity selective",
    )
    synonyms.add_argument(
        "--moe-layer-recompute",
        action="store_true",
        help="the same as --recompute-granularity selective --recompute-modules moe",
    )
    for name, (takes_value, reason) in ACCEPTED.items():
        synonyms.add_argument(
            name,
            action=Accept,
            nargs=None if takes_value else 0,
            dest="accepted",
            default=[],
            metavar="S",
            help=f"no effect: {reason}",
        )
    return parser


def _reading(kind: Any) -> dict[str, Any]:
    """What ``add_argument`` needs to read this kind of value."""
    if kind is bool:
        return {"action": "store_true"}
    if isinstance(kind, tuple):
        return {"choices": kind}
    if isinstance(kind, list):
        return {"type": kind[0], "nargs": "+", "metavar": METAVARS[kind[0]]}
    if kind is dict:
        return {"type": json_object, "metavar": "JSON"}
    return {"type": kind, "metavar": METAVARS[kind]}


def json_object(text: str) -> dict[str, Any]:
    """Read ``{"rope_type": "linear", "factor": 8.0}``; ValueError for anything but an object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {text}")
    return value


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    """Parse flags (those of the command line by default); ``args.explicit`` holds the attributes that were given.

    Underscores are taken for hyphens in names. An error, such as an unknown flag, ends the program with exit code 2.
    """
    parser = build_parser()
    defaults = vars(parser.parse_args([]))
    words = [hyphens(word) for word in (sys.argv[1:] if argv is None else argv)]
    args, unknown = parser.parse_known_args(words, Namespace(**dict.fromkeys(defaults, NOT_GIVEN)))
    if unknown:
        parser.error(_explain(unknown, parser))
    explicit = frozenset(dest for dest in defaults if getattr(args, dest) is not NOT_GIVEN)
    for dest in defaults.keys() - explicit:
        setattr(args, dest, defaults[dest])
    args.explicit = explicit
    args.padded_vocab_size = args.engine_decodes = None
    return args


def hyphens(word: str) -> str:
    """A word of the command line, with the underscores of a flag's name (not of its value) turned into hyphens."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _explain(unknown: Sequence[str], parser: Parser) -> str:
    """One line about what was not understood: why there is no such flag, or which was meant."""
    flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), None)
    if flag is None:
        return f"unexpected argument {unknown[0]!r}: a value without its flag, or one value too many"
    reason = EXCLUDED.get(flag[2:].replace("-", "_")) or EXCLUDED.get(flag[2:].removeprefix("no-").replace("-", "_"))
    if reason:
        return f"{flag} is not a flag of this program: {reason}"
    close = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.6)
    return f"unknown flag {flag}; " + (f"did you mean {close[0]}?" if close else "--help lists all flags")


def print_args(args: Namespace) -> None:
    """Print every argument once, sorted, in Megatron-LM's manner; a star marks those that were given."""
    print("------------------------ arguments (* given) ------------------------")
    for dest, value in sorted(args_to_json(args).items()):
        print(f"{'*' if dest in args.explicit else ' '} {dest} {'.' * (48 - len(dest))} {value}")
    for flag in args.accepted:
        print(f"note: {flag} has no effect: {ACCEPTED[flag][1]}")
    print("---------------------------------------------------------------------", flush=True)


def server_urls(args: Namespace) -> list[str]:
    """Addresses of the servers that generate; none for an engine in the training processes."""
    if args.rollout_engine == "sglang":
        return args.sglang_server_base_url or []
    return (args.vllm_server_base_url or []) if args.vllm_mode == "server" else []


def args_to_json(args: Namespace) -> dict[str, Any]:
    """The arguments as JSON's types, to be stored with a checkpoint (all but ``explicit`` and keys)."""
    left_out = ("explicit", *SECRET)
    return json.loads(json.dumps({dest: value for dest, value in vars(args).items() if dest not in left_out}))


def args_from_json(stored: dict[str, Any]) -> Namespace:
    """Arguments as a checkpoint stored them; flags that are younger than the checkpoint have their defaults."""
    args = parse_args([])
    vars(args).update(stored)
    return args


def params_dtype(args: Namespace) -> torch.dtype:
    """The dtype of parameters and activations: --bf16, --fp16, else float32."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def transformer_config_from_args(args: Namespace) -> TransformerConfig:
    """megatron-core's ``TransformerConfig`` (for latent attention its subclass); GrpoError with its words when it
    refuses the combination.
    """
    dtype = params_dtype(args)
    derived = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "gated_linear_unit": args.swiglu or args.geglu or args.quick_geglu,
        "activation_func": _activation(args),
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        # The other dispatcher gathers equally many tokens from each rank: its packs are padded to one length.
        "variable_seq_lengths": args.pipeline_model_parallel_size > 1 and args.moe_token_dispatcher_type != "allgather",
        # Not with gloo: a send that is under way reads the memory that this frees, and the next stage gets garbage.
        "deallocate_pipeline_outputs": torch.cuda.is_available(),
        "cuda_graph_scope": [],  # no graphs; its default means the same, with a warning
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "moe_enable_routing_replay": args.router_replay_mode != "disabled",
    }
    if not args.multi_latent_attention:
        return core_config(TransformerConfig, args, **derived)
    return core_config(
        MLATransformerConfig, args, **derived, rotary_base=args.rotary_base, rotary_percent=args.rotary_percent
    )


def _activation(args: Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation function of the MLP, of its gate where it has one."""
    if args.swiglu:
        return F.silu
    if args.quick_geglu:
        return quick_gelu
    # --geglu is the tanh approximation, which fused kernels compute under F.gelu's name.
    fused = args.bias_activation_fusion or args.use_te_activation_func
    return fast_gelu if args.geglu and not fused else F.gelu


def optimizer_config_from_args(args: Namespace) -> OptimizerConfig:
    """megatron-core's ``OptimizerConfig``; GrpoError with its words when it refuses the combination."""
    return core_config(OptimizerConfig, args, params_dtype=params_dtype(args))


def ddp_config_from_args(args: Namespace) -> DistributedDataParallelConfig:
    """megatron-core's ``DistributedDataParallelConfig``; GrpoError with its words when it refuses the combination."""
    return core_config(DistributedDataParallelConfig, args)
