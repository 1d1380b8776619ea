"""Flags and rules of rewards; reward_models/arguments.py has those of reward models."""

from argparse import Namespace
from typing import Any

from megatron_grpo.data.routing import reward_routes
from megatron_grpo.rewards.adapters import adapters
from megatron_grpo.rewards.builtin.answer_text import EXTRACTIONS, UNFINISHED
from megatron_grpo.rewards.reward_models.arguments import REWARD_MODELS
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, PATH, POSITIVE, REAL, SECONDS, FlagRow, Number, count_to
from megatron_grpo.utils.rules import flag

SANDBOXES = ("strict", "auto")

REWARDS: tuple[FlagRow, ...] = (
    ("--reward-funcs", [str], None, "names of reward functions; the reward is their weighted sum"),
    ("--reward-weights", [REAL], None, "weight of each reward function [1 each]"),
    (
        "--reward-routing",
        [str],
        None,
        "SOURCE=NAME,NAME: reward functions for the rows of this data_source [all functions]",
    ),
    ("--reward-clip", POSITIVE, None, "clip the value of each reward function to [-x, x]"),
    ("--external-plugins", [PATH], None, "Python files that register rewards, judges, losses and advantage estimators"),
    (
        "--reward-adapter",
        [str],
        None,
        "NAME=FILE.py:FUNCTION: a reward function written for verl or TRL, unchanged; use NAME in --reward-funcs",
    ),
    ("--reward-timeout", SECONDS, 10.0, "time limit of one call of a reward function, in seconds"),
    ("--reward-retries", Number(int, 0, 1000), 1, "number of retries of a failed call"),
    ("--reward-workers", count_to(1024), 1, "worker processes of each rank that scores completions"),
    *REWARD_MODELS,
    (
        "--answer-extraction",
        EXTRACTIONS,
        EXTRACTIONS[0],
        'where the answer is: in <answer> or \\boxed{}, in the last line "Answer: ..", or in any of these; a row\'s '
        "column answer_extraction replaces it",
    ),
    (
        "--unfinished-thinking",
        UNFINISHED,
        UNFINISHED[0],
        "completions whose <think> has no </think>: they have no answer (wrong), or their reasoning is read for one",
    ),
    ("--cosine-min-len-value-correct", REAL, 1.0, "cosine: reward of a right answer of length 0"),
    (
        "--cosine-max-len-value-correct",
        REAL,
        0.5,
        "cosine: reward of a right answer of --max-completion-length tokens",
    ),
    ("--cosine-min-len-value-wrong", REAL, -0.5, "cosine: reward of a wrong answer of length 0"),
    ("--cosine-max-len-value-wrong", REAL, 0.0, "cosine: reward of a wrong answer of --max-completion-length tokens"),
    ("--repetition-n-grams", COUNT, 3, "repetition: n-gram size, in words"),
    (
        "--soft-cache-length",
        COUNT,
        None,
        "soft_overlong: length of the penalty range before --max-completion-length, in tokens",
    ),
    (
        "--code-sandbox",
        SANDBOXES,
        SANDBOXES[0],
        "code: require namespaces (strict), or run generated code with limits only where they are refused (auto)",
    ),
    ("--code-timeout", SECONDS, 4.0, "code: time limit of one test, in seconds"),
    ("--code-memory", count_to(2**20), 512, "code: memory limit of each process of a test, in MiB"),
)

# The reward functions that read a flag. Without all of them, and without plug-ins that may read it, it is refused.
READ_BY = {
    "answer_extraction": ("accuracy", "cosine", "countdown"),
    "unfinished_thinking": ("accuracy", "cosine", "countdown", "gsm8k", "exact_match", "code", "tool_call"),
    "cosine_min_len_value_correct": ("cosine",),
    "cosine_max_len_value_correct": ("cosine",),
    "cosine_min_len_value_wrong": ("cosine",),
    "cosine_max_len_value_wrong": ("cosine",),
    "repetition_n_grams": ("repetition",),
    "soft_cache_length": ("soft_overlong",),
    "code_sandbox": ("code",),
    "code_timeout": ("code",),
    "code_memory": ("code",),
}


def resolve_rewards(args: Namespace) -> dict[str, Any]:
    """Return --reward-weights, by default 1 for each reward function."""
    return {"reward_weights": [1.0] * len(args.reward_funcs or [])} if args.reward_weights is None else {}


def check_rewards(args: Namespace) -> None:
    """Raise GrpoError for flags of rewards that contradict each other or that nothing reads."""
    functions = args.reward_funcs or []
    if len(set(functions)) < len(functions):
        raise GrpoError(
            f"--reward-funcs {' '.join(functions)}: name each function once; its weight is in --reward-weights"
        )
    if len(args.reward_weights) != len(functions):
        raise GrpoError(
            f"--reward-weights has {len(args.reward_weights)} values, --reward-funcs {len(functions)}: give one each"
        )
    for name in adapters(args.reward_adapter):
        if name not in functions:
            raise GrpoError(f"--reward-adapter {name}: --reward-funcs does not name it: add {name} there")
    for dest, readers in READ_BY.items():
        if dest in args.explicit and not set(readers) & set(functions) and not args.external_plugins:
            raise GrpoError(f"{flag(dest)} has no effect without --reward-funcs {' or '.join(readers)}: leave it out")
    if "soft_overlong" in functions:
        if args.soft_cache_length is None:
            raise GrpoError("--reward-funcs soft_overlong needs --soft-cache-length: the length of the penalty range")
        if args.soft_cache_length > args.max_completion_length:
            raise GrpoError(
                f"--soft-cache-length ({args.soft_cache_length}) must be at most --max-completion-length "
                f"({args.max_completion_length}), because the penalty range is the last part of the completion"
            )
    if "code" in functions and args.code_timeout >= args.reward_timeout:
        raise GrpoError(
            f"--code-timeout ({args.code_timeout:g}) must be less than --reward-timeout ({args.reward_timeout:g}), "
            "the time limit of all tests of a completion"
        )
    reward_routes(args.reward_routing, functions)
