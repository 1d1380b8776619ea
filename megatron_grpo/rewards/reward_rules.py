"""Rules of the flags of rewards."""

from argparse import Namespace

from megatron_grpo.data.routing import reward_routes
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag, positive, required

# Which reward function reads a flag; without it, and without plugins that might, the flag would do nothing.
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
    """Refuse what does not go together, and fill in the weights."""
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
