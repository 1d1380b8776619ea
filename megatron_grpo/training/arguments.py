"""The parser of all flags: those of every folder, of training (below), and of megatron-core (``core_flags``).

A flag that exists in Megatron-LM has the same name here. An attribute of the parsed arguments has its flag's name with
underscores. ``resolve`` checks combinations of values, and has what follows from them.
"""

import argparse
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_grpo.algorithm.arguments import ADVANTAGE, LOSS, MIXTURE
from megatron_grpo.algorithm.registry import ADVANTAGES, LOSSES, Flag
from megatron_grpo.checkpointing.arguments import CHECKPOINTS
from megatron_grpo.data.arguments import CURRICULUM, DATA, SFT
from megatron_grpo.environments.arguments import ENVIRONMENTS
from megatron_grpo.estimate.arguments import DRY_RUN
from megatron_grpo.lora.arguments import ADAPTER_FILES, LORA
from megatron_grpo.models.arguments import MODEL
from megatron_grpo.models.config import params_dtype
from megatron_grpo.observability.arguments import LOGGING, PROFILE, TRACKERS, WATCHDOG
from megatron_grpo.parallel.arguments import PARALLELISM, TIMEOUT
from megatron_grpo.reference.arguments import REFERENCE_AND_TEACHER
from megatron_grpo.rewards.arguments import REWARDS
from megatron_grpo.rewards.registry import load_plugins
from megatron_grpo.rollout.arguments import (
    DYNAMIC_SAMPLING,
    LEDGER,
    PARTIAL_ROLLOUTS,
    PLACED,
    ROLLOUT,
    STRUCTURED_OUTPUTS,
)
from megatron_grpo.training.command_line import Accept, Parser, parse_words, plugin_files
from megatron_grpo.utils.arguments import Arguments, args_to_json, hyphens, replaced
from megatron_grpo.utils.core_flags import add_core_flags, core_config, core_flags, help_text
from megatron_grpo.utils.core_names import ACCEPTED
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flag_values import METAVARS, json_object
from megatron_grpo.utils.flags import (
    COUNT,
    COUNT_OR_0,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    REAL,
    SECONDS,
    SHARE,
    TEXT,
    FlagRow,
    Number,
)
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.utils.rules import check_value, flag
from megatron_grpo.vision.arguments import VISION
from megatron_grpo.weights.arguments import MODEL_FAMILY

BATCH_AND_DURATION: tuple[FlagRow, ...] = (
    ("--micro-batch-size", COUNT, 1, "completions in a micro-batch of one data-parallel rank"),
    ("--max-tokens-per-microbatch", COUNT, None, "token budget of a packed micro-batch; replaces --micro-batch-size"),
    (
        "--share-prompts",
        bool,
        True,
        "compute once what sequences of a micro-batch begin with alike, such as the prompt of a group; off with "
        "Transformer Engine's layers, CUDA graphs, and without --max-tokens-per-microbatch",
    ),
    (
        "--cuda-graphs",
        bool,
        False,
        "record the layers of a micro-batch as CUDA graphs, so that the GPU does not wait for launches",
    ),
    ("--global-batch-size", COUNT, None, "completions in an update [generation batch / steps, or micro batch x DP]"),
    ("--num-generations", COUNT, 8, "completions of each prompt: the size of GRPO's group"),
    ("--steps-per-generation", COUNT, 1, "updates per pass over a rollout, each on its own share of the completions"),
    (
        "--no-shuffle-completions",
        bool,
        False,
        "divide a rollout into updates of whole groups, in order; --loss-type real and bnpo always do",
    ),
    ("--generation-batch-size", COUNT, None, "completions in a rollout [global batch x --steps-per-generation]"),
    ("--num-iterations", COUNT, 1, "passes over the completions of a rollout"),
    ("--train-iters", COUNT, None, "number of updates; give this or --num-epochs"),
    ("--num-epochs", POSITIVE, None, "passes over the training prompts; give this or --train-iters"),
    ("--exit-interval", COUNT, None, "save and end this run when the number of updates is a multiple of this"),
    ("--seed", Number(int, 0, 2**31), 1234, "seed of weights, prompt order and sampling"),
    (
        "--exit-duration-in-mins",
        COUNT,
        None,
        "save and end this run after this time, at the end of a rollout's updates",
    ),
    (
        "--exit-signal-handler",
        bool,
        False,
        "save and end this run on SIGTERM and SIGUSR1, within the rollout or at the end of its updates",
    ),
    (
        "--on-bad-update",
        ("stop", "skip", "restore"),
        "stop",
        "on a loss or gradient norm that is not finite or spikes: end the run, leave out the update, or also load the "
        "newest checkpoint again",
    ),
    (
        "--bad-update-factor",
        Number(float, 1, 1e9, above=True),
        None,
        "a spike: a gradient norm or loss above so many times the median of the last 100 updates [no spike is bad]",
    ),
    ("--exit-grace-seconds", SECONDS, 25.0, "seconds from the signal to the end of this run, saved or not"),
)

OFFLOAD: tuple[FlagRow, ...] = (
    (
        "--offload-model",
        bool,
        False,
        "move the trainer's weights to host memory; beside a colocated vLLM, only what it needs",
    ),
    ("--offload-gradients", bool, False, "free the gradient buffers"),
    (
        "--offload-optimizer",
        bool,
        False,
        "move the optimizer's state to host memory; beside a colocated vLLM, only what it needs",
    ),
)

LEARNING_RATE: tuple[FlagRow, ...] = (
    ("--lr-decay-style", ("constant", "linear", "cosine", "inverse-square-root"), "constant", "shape of the decay"),
    ("--lr-decay-iters", COUNT, None, "updates until --min-lr is reached [all of them]"),
    ("--lr-warmup-iters", COUNT_OR_0, 0, "updates over which the rate rises from 0"),
    ("--lr-warmup-fraction", SHARE, None, "warm-up as a share of --lr-decay-iters"),
    (
        "--start-weight-decay",
        NOT_NEGATIVE,
        None,
        "weight decay of the first update, with --weight-decay-incr-style",
    ),
    ("--end-weight-decay", NOT_NEGATIVE, None, "weight decay of the last update"),
    (
        "--weight-decay-incr-style",
        ("constant", "linear", "cosine"),
        "constant",
        "change from start to end",
    ),
)

EVALUATION: tuple[FlagRow, ...] = (
    ("--eval-interval", COUNT, None, "evaluate when the number of updates is a multiple of this"),
    ("--val-before-train", bool, False, "evaluate before the first update"),
    (
        "--eval-only",
        bool,
        False,
        "evaluate --load or --load-hf once, without training: print a table, and append it to {save}/evaluation.json",
    ),
    ("--eval-num-generations", COUNT_OR_0, 0, "sampled completions per held-out prompt, in addition to the greedy one"),
    ("--eval-max-prompts", COUNT, None, "use only the first held-out prompts of each file [all]"),
    (
        "--eval-correct-reward",
        REAL,
        1.0,
        "a held-out completion is correct if its first reward function returns at least this",
    ),
    (
        "--eval-completions-to-log",
        COUNT_OR_0,
        8,
        "number of prompts, the first of each held-out file; every evaluation writes their completions to "
        "{save}/eval_completions.jsonl",
    ),
)

# The flags of every folder, in the groups of --help.
FLAGS: dict[str, tuple[FlagRow, ...]] = {
    "batch and duration": BATCH_AND_DURATION,
    "model": (MODEL_FAMILY, *MODEL),
    "parallelism": PARALLELISM,
    "memory while the engine generates": OFFLOAD,
    "data": DATA,
    "supervised warm-up": SFT,
    "demonstrations beside the rollout": MIXTURE,
    "images": VISION,
    "rollout": ROLLOUT,
    "reuse and sampling": (*DYNAMIC_SAMPLING, *PARTIAL_ROLLOUTS, *PLACED, *CURRICULUM, STRUCTURED_OUTPUTS),
    "ledger": LEDGER,
    "environments": ENVIRONMENTS,
    "rewards": REWARDS,
    "algorithm": LOSS,
    "advantages and KL": ADVANTAGE,
    "reference and teacher": REFERENCE_AND_TEACHER,
    "low-rank adapters": (*LORA, *ADAPTER_FILES),
    "learning rate": LEARNING_RATE,
    "checkpoints": CHECKPOINTS,
    "evaluation": EVALUATION,
    "logging": (*LOGGING, *TRACKERS),
    "profiling": PROFILE,
    "running": (*DRY_RUN, TIMEOUT, *WATCHDOG),
}

# Attributes of the parsed arguments that are not flags.
DERIVED = (
    "explicit",
    "repeated",
    "padded_vocab_size",
    "engine_decodes",
    "engine_sees_videos",
    "end_token_ids",
    "started",
    "world_size",
    "data_parallel_size",
    "updates_per_rollout",
    "with_reference",
    "lora_base",
)


def build_parser() -> Parser:
    """Return the parser of every flag: ours by group, then megatron-core's by section."""
    parser = Parser(
        prog="pretrain_grpo.py",
        usage="torchrun --nproc-per-node N pretrain_grpo.py [flags]",
        description="GRPO on Megatron-Core and vLLM. docs/arguments.md explains the batch sizes.",
    )
    groups = {}
    for title, rows in FLAGS.items():
        groups[title] = parser.add_argument_group(title)
        for name, kind, default, text, *_ in rows:
            groups[title].add_argument(name, default=default, help=help_text(text, default), **_value_options(kind))
    groups["checkpoints"].add_argument(
        "--no-save-hf",
        action="store_const",
        const=False,
        dest="save_hf",
        help="do not export to Hugging Face format at the end of the run",
    )
    groups["checkpoints"].add_argument(
        "--no-load",
        action="store_const",
        const=None,
        dest="load",
        help="start at update 0: takes back an earlier --load, as of a launch script",
    )
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
        "--no-recompute-activations",
        action="store_const",
        const=None,
        dest="recompute_granularity",
        help="recompute nothing: takes back an earlier --recompute-granularity with its method, layers and modules",
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
    for registry, title in ((LOSSES, "algorithm"), (ADVANTAGES, "advantages and KL")):
        for dest, owner in registry.owners.items():
            _add_plugin_flag(parser, groups[title], registry.flags[dest], owner)
    for group in (*groups.values(), synonyms):
        _add_opposites(parser, group)
    return parser


def _add_opposites(parser: Parser, group: argparse._ArgumentGroup) -> None:
    """Add the flag that takes each switch back: a launch script's --x is undone by a later --no-x, --no-x by --x."""
    for action in list(group._group_actions):
        (name,) = action.option_strings
        opposite = "--" + name[5:] if name.startswith("--no-") else "--no-" + name[2:]
        if action.const is True and opposite not in parser._option_string_actions:
            group.add_argument(
                opposite,
                help=argparse.SUPPRESS,
                action="store_const",
                const=False,
                dest=action.dest,
                default=False,
            )


def _add_plugin_flag(parser: Parser, group: argparse._ArgumentGroup, flag: Flag, owner: str) -> None:
    """Add the flag of a plug-in's loss or estimator; GrpoError if the name is in use."""
    for action in parser._actions:
        if flag.name in action.option_strings or flag.dest == action.dest:
            taken = action.option_strings[0]
            raise GrpoError(f"{owner}: the flag {flag.name} is taken by {taken} of this program; choose another")
    if flag.dest in DERIVED:
        raise GrpoError(f"{owner}: {flag.name} cannot be a flag: args.{flag.dest} is derived; choose another")
    if not isinstance(flag.kind, tuple) and flag.kind not in (int, float, str, bool, dict, [int], [float], [str]):
        raise GrpoError(f"{owner}: {flag.name} cannot be read as {flag.kind!r}: give int, float, str, bool or choices")
    group.add_argument(
        flag.name, default=flag.default, help=help_text(flag.help, flag.default), **_value_options(flag.kind)
    )


def _value_options(kind: Any) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for this kind of value."""
    if kind is bool:
        return {"action": "store_true"}
    if isinstance(kind, tuple | Mapping):  # a Mapping is a registry, to which plug-ins add names
        return {"choices": tuple(kind)}
    if isinstance(kind, list):
        return {**_value_options(kind[0]), "nargs": "+"}
    if kind is dict:
        return {"type": json_object, "metavar": "JSON"}
    plain = kind.type if isinstance(kind, Number) else str if kind in (PATH, TEXT) else kind
    return {"type": plain, "metavar": METAVARS[plain]}


@lru_cache(maxsize=1)
def _parser_with(plugins: str) -> Parser:
    """Return the parser, made anew if ``plugins``, a text of the registered losses and estimators, has changed."""
    return build_parser()


def parse_args(argv: Sequence[str] | None = None) -> Arguments:
    """Parse flags (by default of the command line); ``args.explicit`` holds the attributes of the given flags.

    Underscores in flag names are read as hyphens. An error, such as an unknown flag, exits with code 2. The files of
    --external-plugins run first, because their losses and advantages add flags; GrpoError if a file fails.
    """
    words = [hyphens(word) for word in (sys.argv[1:] if argv is None else argv)]
    load_plugins(plugin_files(words))
    args = parse_words(_parser_with(repr([(list(r.entries), r.flags, r.owners) for r in (LOSSES, ADVANTAGES)])), words)
    check_values(args)
    unknown = dict.fromkeys(("padded_vocab_size", "engine_decodes", "engine_sees_videos", "started"))
    return replaced(args, **unknown, end_token_ids=())


def flag_kinds() -> dict[str, Any]:
    """Return the kind of every flag with a value or a switch, by its name."""
    kinds = {name: kind for rows in FLAGS.values() for name, kind, *_ in rows}
    kinds |= {row.name: row.values for registry in (LOSSES, ADVANTAGES) for row in registry.flags.values()}
    return kinds | {core.option: core.kind for core in core_flags().values()}


def check_values(args: Namespace) -> None:
    """Raise GrpoError for a number outside its flag's range, an empty text, and a path that is too long."""
    for name, kind in flag_kinds().items():
        dest = name[2:].replace("-", "_")
        core = core_flags().get(dest)
        if core is None or getattr(args, dest) != core.default:  # a text's default may be empty
            check_value(name, kind, getattr(args, dest))


def print_args(args: Namespace, everything: bool) -> None:
    """Print the given arguments, and notes about those without an effect.

    ``everything``: print all arguments, sorted, in Megatron-LM's format; a star marks the given ones.
    """
    values = sorted(args_to_json(args).items())
    if everything:
        print_rank_0("------------------------ arguments (* given) ------------------------")
        for dest, value in values:
            print_rank_0(f"{'*' if dest in args.explicit else ' '} {dest} {'.' * (48 - len(dest))} {value}")
        print_rank_0("---------------------------------------------------------------------")
    else:
        given = " ".join(f"{dest}={value}" for dest, value in values if dest in args.explicit)
        width = shutil.get_terminal_size(fallback=(120, 24)).columns
        text = f"given (--print-arguments shows all {len(values)}): {given}"
        print_rank_0(textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    for name in args.accepted:
        print_rank_0(f"note: {name} has no effect: {ACCEPTED[name][1]}")
    for dest in ("init_method_std", "embedding_init_method_std"):
        if dest in args.explicit and (args.load_hf or args.load or args.pretrained_checkpoint):
            print_rank_0(f"note: {flag(dest)} has no effect: the initial weights are loaded")
    if args.repeated:
        print_rank_0(f"note: set more than once, the last value counts: {', '.join(args.repeated)}")


def optimizer_config_from_args(args: Namespace) -> OptimizerConfig:
    """Return megatron-core's ``OptimizerConfig``; GrpoError with its message if it rejects the combination.

    Without a recipe: megatron-core reads it for parameters that are stored in 8 bits, and then holds the main
    parameters itself, beside those of Transformer Engine's Adam.
    """
    return core_config(OptimizerConfig, args, params_dtype=params_dtype(args), fp8_recipe=None)


def ddp_config_from_args(args: Namespace) -> DistributedDataParallelConfig:
    """Return megatron-core's ``DistributedDataParallelConfig``; GrpoError with its message if it rejects it."""
    return core_config(DistributedDataParallelConfig, args)
