"""The parser of all flags: every folder's, those of training below, and megatron-core's generated in ``core_flags``.

Names are Megatron-LM's where it has one. An attribute of the parsed arguments is its flag's name with underscores.
Which values go together is the business of ``validation``.
"""

import argparse
import difflib
import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_grpo.algorithm.arguments import ADVANTAGE, LOSS
from megatron_grpo.algorithm.registry import ADVANTAGES, LOSSES, Flag
from megatron_grpo.checkpointing.arguments import CHECKPOINTS
from megatron_grpo.data.arguments import CURRICULUM, DATA
from megatron_grpo.estimate.arguments import DRY_RUN
from megatron_grpo.models.arguments import MODEL
from megatron_grpo.models.config import params_dtype
from megatron_grpo.observability.arguments import LOGGING, PROFILE, TRACKERS
from megatron_grpo.parallel.arguments import PARALLELISM, TIMEOUT
from megatron_grpo.reference.arguments import REFERENCE_AND_TEACHER
from megatron_grpo.rewards.arguments import REWARDS
from megatron_grpo.rewards.registry import load_plugins
from megatron_grpo.rollout.arguments import DYNAMIC_SAMPLING, ROLLOUT, STRUCTURED_OUTPUTS
from megatron_grpo.utils.arguments import FlagRow, args_to_json, hyphens
from megatron_grpo.utils.core_flags import EXCLUDED, METAVARS, add_core_flags, core_config, help_text
from megatron_grpo.utils.errors import GrpoError, speaks_for_host
from megatron_grpo.weights.arguments import MODEL_FAMILY

BATCH_AND_DURATION: tuple[FlagRow, ...] = (
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
    ("--exit-duration-in-mins", int, None, "save and end this run, once a rollout is used up, after so many minutes"),
    ("--exit-signal-handler", bool, False, "save and end this run, once a rollout is used up, on SIGTERM"),
)

OFFLOAD: tuple[FlagRow, ...] = (
    ("--offload-model", bool, False, "move the trainer's weights to host memory"),
    ("--offload-gradients", bool, False, "free the gradient buffers"),
    ("--offload-optimizer", bool, False, "move the optimizer's state to host memory"),
)

LEARNING_RATE: tuple[FlagRow, ...] = (
    ("--lr-decay-style", ("constant", "linear", "cosine", "inverse-square-root"), "constant", "shape of the decay"),
    ("--lr-decay-iters", int, None, "updates until --min-lr is reached [all of them]"),
    ("--lr-warmup-iters", int, 0, "updates over which the rate rises from 0"),
    ("--lr-warmup-fraction", float, None, "the same as a share of --lr-decay-iters"),
    ("--start-weight-decay", float, None, "weight decay of the first update, with --weight-decay-incr-style"),
    ("--end-weight-decay", float, None, "weight decay of the last update"),
    ("--weight-decay-incr-style", ("constant", "linear", "cosine"), "constant", "how it gets from one to the other"),
)

EVALUATION: tuple[FlagRow, ...] = (
    ("--eval-interval", int, None, "evaluate when the number of updates is a multiple of this"),
    ("--val-before-train", bool, False, "evaluate before the first update"),
    ("--eval-num-generations", int, 0, "sampled completions per held-out prompt, besides the greedy one"),
    ("--eval-max-prompts", int, None, "use only the first held-out prompts [all]"),
)

# The flags of every folder, in the groups of --help.
FLAGS: dict[str, tuple[FlagRow, ...]] = {
    "batch and duration": BATCH_AND_DURATION,
    "model": (MODEL_FAMILY, *MODEL),
    "parallelism": PARALLELISM,
    "memory while the engine generates": OFFLOAD,
    "data": DATA,
    "rollout": ROLLOUT,
    "reuse and sampling": (*DYNAMIC_SAMPLING, *CURRICULUM, STRUCTURED_OUTPUTS),
    "rewards": REWARDS,
    "algorithm": LOSS,
    "advantages and KL": ADVANTAGE,
    "reference and teacher": REFERENCE_AND_TEACHER,
    "learning rate": LEARNING_RATE,
    "checkpoints": CHECKPOINTS,
    "evaluation": EVALUATION,
    "logging": (*LOGGING, *TRACKERS),
    "profiling": PROFILE,
    "running": (DRY_RUN, TIMEOUT),
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

# Attributes of the parsed arguments that are no flag.
DERIVED = ("explicit", "padded_vocab_size", "engine_decodes", "world_size", "data_parallel_size", "updates_per_rollout")

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
    groups = {}
    for title, rows in FLAGS.items():
        groups[title] = parser.add_argument_group(title)
        for name, kind, default, text, *_ in rows:
            groups[title].add_argument(name, default=default, help=help_text(text, default), **_reading(kind))
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
    for registry, title in ((LOSSES, "algorithm"), (ADVANTAGES, "advantages and KL")):
        for dest, owner in registry.owners.items():
            _add_plugin_flag(parser, groups[title], registry.flags[dest], owner)
    return parser


def _add_plugin_flag(parser: Parser, group: argparse._ArgumentGroup, flag: Flag, owner: str) -> None:
    """Add the flag that a plug-in's loss or estimator brings; GrpoError if its name is taken."""
    for action in parser._actions:
        if flag.name in action.option_strings or flag.dest == action.dest:
            taken = action.option_strings[0]
            raise GrpoError(f"{owner}: the flag {flag.name} is taken by {taken} of this program; choose another")
    if flag.dest in DERIVED:
        raise GrpoError(f"{owner}: {flag.name} cannot be a flag: args.{flag.dest} is derived; choose another")
    if not isinstance(flag.kind, tuple) and flag.kind not in (int, float, str, bool, dict, [int], [float], [str]):
        raise GrpoError(f"{owner}: {flag.name} cannot be read as {flag.kind!r}: give int, float, str, bool or choices")
    group.add_argument(flag.name, default=flag.default, help=help_text(flag.help, flag.default), **_reading(flag.kind))


def _reading(kind: Any) -> dict[str, Any]:
    """What ``add_argument`` needs to read this kind of value."""
    if kind is bool:
        return {"action": "store_true"}
    if isinstance(kind, tuple | Mapping):  # a Mapping: a registry, to which plug-ins add names
        return {"choices": tuple(kind)}
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
    The files of --external-plugins are run first, since their losses and advantages add flags: GrpoError if one fails.
    """
    words = [hyphens(word) for word in (sys.argv[1:] if argv is None else argv)]
    plugins = Parser(prog="pretrain_grpo.py", add_help=False, allow_abbrev=False)
    plugins.add_argument("--external-plugins", nargs="+", default=[], metavar=METAVARS[str])
    load_plugins(plugins.parse_known_args(words)[0].external_plugins)
    parser = build_parser()
    defaults = vars(parser.parse_args([]))
    args, unknown = parser.parse_known_args(words, Namespace(**dict.fromkeys(defaults, NOT_GIVEN)))
    if unknown:
        parser.error(_explain(unknown, parser))
    explicit = frozenset(dest for dest in defaults if getattr(args, dest) is not NOT_GIVEN)
    for dest in defaults.keys() - explicit:
        setattr(args, dest, defaults[dest])
    args.explicit = explicit
    args.padded_vocab_size = args.engine_decodes = None
    return args


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


def args_from_json(stored: dict[str, Any]) -> Namespace:
    """Arguments as a checkpoint stored them; flags that are younger than the checkpoint have their defaults."""
    args = parse_args([])
    vars(args).update(stored)
    return args


def optimizer_config_from_args(args: Namespace) -> OptimizerConfig:
    """megatron-core's ``OptimizerConfig``; GrpoError with its words when it refuses the combination."""
    return core_config(OptimizerConfig, args, params_dtype=params_dtype(args))


def ddp_config_from_args(args: Namespace) -> DistributedDataParallelConfig:
    """megatron-core's ``DistributedDataParallelConfig``; GrpoError with its words when it refuses the combination."""
    return core_config(DistributedDataParallelConfig, args)
