"""The rules about reuse and sampling (flags: sampling_flags.py); validation.py applies them."""

import re
from argparse import Namespace

from megatron_grpo.data.sampling_params import constraint_refused
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag, needs, positive, required, within


def check_sampling(args: Namespace) -> None:
    """Refuse what does not go together, and fill in what follows; GrpoError."""
    _check_choice(args)
    within(args, "min_pass_rate", 0, 1)
    within(args, "max_pass_rate", 0, 1)
    low, high = args.min_pass_rate, args.max_pass_rate
    if low is not None and high is not None and low > high:
        raise GrpoError(f"--min-pass-rate ({low}) must be at most --max-pass-rate ({high}): no prompt would be left")
    _check_structured_outputs(args)
    args.engine_decodes = bool(args.stop_words or args.structured_outputs_regex)
    _check_ends(args)
    _check_weight_decay(args)


def _check_choice(args: Namespace) -> None:
    positive(args, "max_resample_times")
    needs(args, "max_resample_times", "dynamic_sample", "it is how often a group is replaced")
    within(args, "over_sampling_ratio", 1, 100)
    if args.dynamic_sample and args.advantage_estimator == "reinforce_plus_plus":
        raise GrpoError(
            "--dynamic-sample replaces groups whose rewards are all alike, but --advantage-estimator "
            "reinforce_plus_plus compares over the whole batch and learns from them too: leave one of them out"
        )
    if args.rollout_balancing != "dynamic":
        return
    for dest, given in (("dynamic_sample", args.dynamic_sample), ("over_sampling_ratio", args.over_sampling_ratio > 1)):
        if given:
            raise GrpoError(
                f"{flag(dest)} and --rollout-balancing dynamic cannot both be given: each replica chooses within a "
                "share of the rollout that is known beforehand"
            )


def _check_structured_outputs(args: Namespace) -> None:
    if args.structured_outputs_regex is None:
        return
    try:
        re.compile(args.structured_outputs_regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise GrpoError(f"--structured-outputs-regex {args.structured_outputs_regex!r}: {error}") from error
    why_not = constraint_refused(args)
    if why_not:
        raise GrpoError(f"--structured-outputs-regex {why_not}")


def _check_ends(args: Namespace) -> None:
    positive(args, "exit_duration_in_mins")
    for dest in ("exit_duration_in_mins", "exit_signal_handler"):
        needs(args, dest, "save", "what the run has learnt would be lost")


def _check_weight_decay(args: Namespace) -> None:
    ends = ("start_weight_decay", "end_weight_decay")
    for dest in ends:
        value = getattr(args, dest)
        if value is not None and value < 0:
            raise GrpoError(f"{flag(dest)} ({value}) must not be negative")
        if args.weight_decay_incr_style == "constant" and value is not None:
            raise GrpoError(f"{flag(dest)} needs --weight-decay-incr-style linear or cosine: else it is constant")
        if args.weight_decay_incr_style != "constant":
            required(args, dest, f"--weight-decay-incr-style {args.weight_decay_incr_style} goes from there to there")
            if "weight_decay" in args.explicit:
                raise GrpoError(f"--weight-decay and {flag(dest)} cannot both be given: each says what it is")
