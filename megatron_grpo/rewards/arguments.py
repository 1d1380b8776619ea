"""Flags and rules of rewards; reward_models/arguments.py has those of reward models."""

from argparse import Namespace

from megatron_grpo.data.routing import reward_routes
from megatron_grpo.rewards.reward_models.arguments import REWARD_MODELS
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import FlagRow
from megatron_grpo.utils.rules import flag, positive, required

SANDBOXES = ("auto", "strict")

REWARDS: tuple[FlagRow, ...] = (
    ("--reward-funcs", [str], None, "names of reward functions; the reward is their weighted sum"),
    ("--reward-weights", [float], None, "a weight for each of them [1 each]"),
    (
        "--reward-routing",
        [str],
        None,
        "SOURCE=NAME,NAME: functions that score the rows of a data_source [all functions]",
    ),
    ("--reward-clip", float, None, "clip the value of each function to between minus this and this"),
    ("--external-plugins", [str], None, "Python files that register rewards, judges, losses and advantage estimators"),
    ("--reward-timeout", float, 10.0, "seconds that one call of a reward function may take"),
    ("--reward-retries", int, 1, "how often a failed call is retried"),
    ("--reward-workers", int, 1, "worker processes on each rank that scores"),
    *REWARD_MODELS,
    ("--cosine-min-len-value-correct", float, 1.0, "cosine: reward of a right answer of length 0"),
    ("--cosine-max-len-value-correct", float, 0.5, "cosine: of a right answer as long as --max-completion-length"),
    ("--cosine-min-len-value-wrong", float, -0.5, "cosine: of a wrong answer of length 0"),
    ("--cosine-max-len-value-wrong", float, 0.0, "cosine: of a wrong answer as long as --max-completion-length"),
    ("--repetition-n-grams", int, 3, "repetition: length in words of the sequences that should not repeat"),
    ("--soft-cache-length", int, None, "soft_overlong: tokens before --max-completion-length that get a penalty"),
    ("--code-sandbox", SANDBOXES, SANDBOXES[0], "code: the strongest isolation available, or require namespaces"),
    ("--code-timeout", float, 4.0, "code: seconds that one test may take"),
    ("--code-memory", int, 512, "code: MiB that a process of a test may have"),
)

# The reward function that reads a flag. Without it, and without plug-ins that may read it, the flag is refused.
READ_BY = {
    "cosine_min_len_value_correct": "cosine",
    "cosine_max_len_value_correct": "cosine",
    "cosine_min_len_value_wrong": "cosine",
    "cosine_max_len_value_wrong": "cosine",
    "repetition_n_grams": "repetition",
    "soft_cache_length": "soft_overlong",
    "code_sandbox": "code",
    "code_timeout": "code",
    "code_memory": "code",
}


def check_rewards(args: Namespace) -> None:
    """Check the flags of rewards, and fill in the weights."""
    required(args, "reward_funcs", "name at least one reward function")
    functions = args.reward_funcs or []
    if len(set(functions)) < len(functions):
        raise GrpoError(f"--reward-funcs {' '.join(functions)}: name each once, and weigh it by --reward-weights")
    if args.reward_weights is None:
        args.reward_weights = [1.0] * len(functions)
    if len(args.reward_weights) != len(functions):
        raise GrpoError(
            f"--reward-weights has {len(args.reward_weights)} values, --reward-funcs {len(functions)}: give one each"
        )
    positive(args, "reward_timeout reward_workers reward_clip repetition_n_grams soft_cache_length code_timeout")
    positive(args, "code_memory")
    if args.reward_retries < 0:
        raise GrpoError(f"--reward-retries ({args.reward_retries}) must not be negative")
    for dest, function in READ_BY.items():
        if dest in args.explicit and function not in functions and not args.external_plugins:
            raise GrpoError(f"{flag(dest)} has no effect without --reward-funcs {function}: leave it out")
    if "soft_overlong" in functions:
        if args.soft_cache_length is None:
            raise GrpoError("--reward-funcs soft_overlong needs --soft-cache-length: where the punishment begins")
        if args.soft_cache_length > args.max_completion_length:
            raise GrpoError(
                f"--soft-cache-length ({args.soft_cache_length}) must be at most --max-completion-length "
                f"({args.max_completion_length}): it is the last part of it"
            )
    if "code" in functions and args.code_timeout >= args.reward_timeout:
        raise GrpoError(
            f"--code-timeout ({args.code_timeout:g}) must be less than --reward-timeout ({args.reward_timeout:g}), "
            "within which all tests of a completion are run"
        )
    reward_routes(args.reward_routing, functions)
