"""Rules of the flags of advantages and KL, and the defaults that depend on the estimator."""

from argparse import Namespace

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag, needs

# --scale-rewards where it is not given, and what else an estimator takes.
DEFAULT_SCALE = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
    "pass_at_k": "none",
}
OWN_SCALE = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def check_advantages(args: Namespace) -> None:
    """Refuse what does not go together, and fill in defaults."""
    estimator = args.advantage_estimator
    if args.scale_rewards is None:
        args.scale_rewards = DEFAULT_SCALE[estimator]
    if estimator in OWN_SCALE and args.scale_rewards != "batch":
        raise GrpoError(
            f"--advantage-estimator {estimator} divides by the standard deviation over the batch, so --scale-rewards "
            f"{args.scale_rewards} has no effect: leave it out, or take --advantage-estimator grpo"
        )
    if args.scale_rewards == "gdpo":
        _check_gdpo(args)
    if (estimator == "pass_at_k") != (args.pass_at_k is not None):
        raise GrpoError(
            "--pass-at-k and --advantage-estimator pass_at_k go together: one says of how many completions the best "
            "counts, the other learns for it"
        )
    if args.pass_at_k is not None and not 2 <= args.pass_at_k <= args.num_generations:
        raise GrpoError(
            f"--pass-at-k ({args.pass_at_k}) must lie between 2 and --num-generations ({args.num_generations}): the "
            "best of k is looked for among the completions of a prompt, and for k = 1 there is --advantage-estimator "
            "rloo"
        )
    if not 0 < args.gamma <= 1:
        raise GrpoError(f"--gamma ({args.gamma}) must be greater than 0 and at most 1")
    if "gamma" in args.explicit and estimator != "reinforce_plus_plus":
        raise GrpoError(
            f"--gamma has no effect with --advantage-estimator {estimator}, which gives a completion's tokens one "
            "advantage: leave it out, or take reinforce_plus_plus"
        )
    _check_kl(args)
    _check_token_advantages(args)


def _check_gdpo(args: Namespace) -> None:
    if args.advantage_estimator != "grpo":
        raise GrpoError(
            f"--scale-rewards gdpo normalises over groups and then over the batch, whatever --advantage-estimator "
            f"{args.advantage_estimator} would make of the rewards: leave one of them out"
        )
    if args.reward_funcs and len(args.reward_funcs) < 2:
        raise GrpoError(
            "--scale-rewards gdpo normalises several reward functions apart from each other, and --reward-funcs names "
            "one: give --scale-rewards group, which is the same up to a constant"
        )
    if args.kl_in_reward:
        raise GrpoError(
            "--kl-in-reward and --scale-rewards gdpo cannot both be given: gdpo normalises each reward function by "
            "itself, and never forms the sum that the KL would be subtracted from"
        )


def _check_kl(args: Namespace) -> None:
    if args.beta < 0:
        raise GrpoError(f"--beta ({args.beta}) must not be negative")
    needs(args, "kl_in_reward", "beta", "it is the KL's weight")
    needs(args, "kl_estimator", "beta", "without the KL term there is nothing to estimate")
    if args.kl_in_reward:
        if "kl_estimator" in args.explicit and args.kl_estimator != "k1":
            raise GrpoError(
                f"--kl-in-reward subtracts k1, whose gradient is that of the KL divergence; --kl-estimator "
                f"{args.kl_estimator} in the reward would give that of something else: leave one of them out"
            )
        if args.advantage_estimator == "pass_at_k":
            raise GrpoError(
                "--kl-in-reward and --advantage-estimator pass_at_k cannot both be given: only the best of k counts, "
                "so the others would leave the reference at no cost: leave the KL in the loss"
            )
    elif args.kl_estimator == "k1":
        raise GrpoError(
            "--kl-estimator k1 in the loss does nothing: its gradient has mean zero. Give k2, k3 or unbiased, or "
            "--kl-in-reward, where k1 is right"
        )


def differ_within_completion(args: Namespace) -> str | None:
    """The flag, if one is given, by which tokens of one completion get different advantages."""
    if args.teacher_kl_coef:
        return "--teacher-kl-coef"
    if args.advantage_estimator != "reinforce_plus_plus":
        return None
    return "--kl-in-reward" if args.kl_in_reward else "--gamma" if args.gamma < 1 else None


def _check_token_advantages(args: Namespace) -> None:
    if args.num_generations == 1 and args.loss_type == "real":
        raise GrpoError(
            "--loss-type real tells a prompt's good completions from its bad ones: --num-generations (1) must be at "
            "least 2"
        )
    cause = differ_within_completion(args)
    if cause is None:
        return
    whole = f"--loss-type {args.loss_type}" if args.loss_type in ("gmpo", "real") else None
    if args.off_policy_sequence_mask_delta is not None:
        whole = flag("off_policy_sequence_mask_delta")
    if whole:
        raise GrpoError(
            f"{whole} asks whether a completion's advantage is positive, but with {cause} each token has its own: "
            "leave one of them out"
        )
