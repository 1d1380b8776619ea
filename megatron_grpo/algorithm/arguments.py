"""Flags of losses, masks, rollout importance weights, advantages and KL, and the rules about them."""

from argparse import Namespace
from typing import get_args

from megatron_grpo.algorithm.advantages import ESTIMATORS
from megatron_grpo.algorithm.kl import KL_ESTIMATORS
from megatron_grpo.algorithm.losses import Level
from megatron_grpo.algorithm.weighting import LOSS_TYPES
from megatron_grpo.utils.arguments import Row
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import excludes, flag, needs, positive, within

LEVELS = get_args(Level)
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop")
REPLAY = ("disabled", "R2", "R3")

LOSS: tuple[Row, ...] = (
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
)

SCALES = ("group", "batch", "none", "gdpo")

ADVANTAGES: tuple[Row, ...] = (
    ("--advantage-estimator", ESTIMATORS, "grpo", "how rewards become advantages: docs/algorithms.md"),
    (
        "--scale-rewards",
        SCALES,
        None,
        "divide advantages by whose standard deviation [grpo: group; rloo, pass_at_k: none; others: batch]",
    ),
    ("--pass-at-k", int, None, "pass_at_k: learn to solve a prompt with the best of so many completions"),
    ("--gamma", float, 1.0, "reinforce_plus_plus: discount of what is still to come, per token"),
    ("--beta", float, 0.04, "weight of the KL divergence from the reference; 0 builds no reference"),
    ("--kl-estimator", KL_ESTIMATORS, "k3", "form of the KL term in the loss; --kl-in-reward: k1"),
    ("--kl-in-reward", bool, False, "subtract the KL divergence from the reward, instead of adding it to the loss"),
)

# Which flags a loss type reads; given with another one they would do nothing.
CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "fipo")
READ_BY = {
    "epsilon": (*CLIPPED, "gmpo"),
    "epsilon_high": (*CLIPPED, "gmpo", "cispo"),
    "delta": CLIPPED,
    "dual_clip": CLIPPED,
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "fipo_decay_rate": ("fipo",),
    "fipo_clip_range": ("fipo",),
    "fipo_safety_threshold": ("fipo",),
    "real_tau": ("real",),
}
# Loss types of which the ratio's level is a part.
OWN_LEVEL = ("gmpo", "fipo", "real", "reinforce")


def needs_old_log_probs(args: Namespace) -> bool:
    """Whether a rollout begins with a pass for log-probabilities under the weights that sampled it.

    With one update they are the update's own, so that only what is decided before it, or read by the host, needs them.
    """
    reads = (args.rollout_importance_sampling_mode, args.m2po_threshold, args.kl_in_reward, args.teacher_kl_coef)
    return args.updates_per_rollout > 1 or any(reads) or args.router_replay_mode == "R2"


def check_loss(args: Namespace) -> None:
    """Refuse what does not go together, and fill in defaults."""
    positive(
        args, "epsilon epsilon_high delta dual_clip tau_pos tau_neg fipo_decay_rate fipo_safety_threshold real_tau"
    )
    positive(args, "clip_cov_ratio kl_cov_ratio kl_cov_coef m2po_threshold top_entropy_quantile")
    positive(args, "off_policy_sequence_mask_delta")
    for dest in ("epsilon", "fipo_clip_range", "clip_cov_ratio", "kl_cov_ratio", "top_entropy_quantile"):
        within(args, dest, 0, 1)
    if args.entropy_coef < 0:
        raise GrpoError(f"--entropy-coef ({args.entropy_coef}) must not be negative")
    for dest, readers in READ_BY.items():
        if dest in args.explicit and args.loss_type not in readers:
            raise GrpoError(f"{flag(dest)} has no effect with --loss-type {args.loss_type}: leave it out")
    _check_ratio(args)
    _check_covariance(args)


def _check_ratio(args: Namespace) -> None:
    """Levels and ranges of the importance ratio."""
    if args.loss_type in OWN_LEVEL and args.importance_sampling_level != "token":
        raise GrpoError(
            f"--importance-sampling-level {args.importance_sampling_level} has no effect with --loss-type "
            f"{args.loss_type}, which has a form of its own: leave it out"
        )
    if args.loss_type == "gspo":
        if "importance_sampling_level" in args.explicit and args.importance_sampling_level != "sequence":
            raise GrpoError(
                f"--loss-type gspo is grpo with --importance-sampling-level sequence, not "
                f"{args.importance_sampling_level}: leave one of them out"
            )
        args.importance_sampling_level = "sequence"
    if args.loss_type == "cispo" and (args.epsilon_high is None or args.epsilon_high < 1):
        raise GrpoError(
            "--loss-type cispo bounds the ratio itself by --epsilon-high, which must be at least 1: give "
            "--epsilon-high 5"
        )
    if args.epsilon is None:
        args.epsilon = 0.4 if args.loss_type == "gmpo" else 0.2
    if args.epsilon_high is None:
        args.epsilon_high = args.epsilon
    sequences = args.importance_sampling_level != "token" and args.loss_type in CLIPPED
    if sequences and args.epsilon == 0.2:
        raise GrpoError(
            "--epsilon 0.2 never clips the ratio of a sequence, a geometric mean that hardly leaves 1: give --epsilon "
            "3e-4 --epsilon-high 4e-4"
        )
    excludes(args, "delta", "dual_clip", "they are the same bound of the loss where the advantage is negative")
    for dest in ("delta", "dual_clip"):
        bound = getattr(args, dest)
        if bound is not None and bound <= 1 + args.epsilon_high:
            raise GrpoError(
                f"{flag(dest)} ({bound}) must be greater than 1 + --epsilon-high ({1 + args.epsilon_high:g}), where "
                "the ratio is clipped already"
            )


def _check_covariance(args: Namespace) -> None:
    for dest in ("clip_cov_lb", "clip_cov_ub"):
        if dest in args.explicit and args.clip_cov_ratio is None:
            raise GrpoError(f"{flag(dest)} needs --clip-cov-ratio: how many tokens are left out")
    if not args.clip_cov_lb < args.clip_cov_ub:
        raise GrpoError(f"--clip-cov-lb ({args.clip_cov_lb}) must be less than --clip-cov-ub ({args.clip_cov_ub})")
    needs(args, "kl_cov_coef", "kl_cov_ratio", "it is the factor of the penalty")
    excludes(args, "clip_cov_ratio", "kl_cov_ratio", "both act on the tokens of the largest covariances")
    if args.kl_cov_ratio is not None and args.updates_per_rollout == 1:
        raise GrpoError(
            "--kl-cov-ratio penalises how far the policy has moved since the rollout, and with one update per rollout "
            "that is nowhere: give --steps-per-generation or --num-iterations, or --clip-cov-ratio"
        )


def check_corrections(args: Namespace) -> None:
    """Refuse bounds without what they bound, and fill in defaults."""
    mode = args.rollout_importance_sampling_mode
    needs(args, "rollout_importance_sampling_threshold", "rollout_importance_sampling_mode", "it bounds its weights")
    positive(args, "rollout_importance_sampling_threshold")
    if mode and args.rollout_importance_sampling_threshold is None:
        args.rollout_importance_sampling_threshold = 5.0 if mode == "icepop" else 2.0
    if mode != "icepop":
        if args.rollout_importance_sampling_lower_bound is not None:
            raise GrpoError(
                "--rollout-importance-sampling-lower-bound needs --rollout-importance-sampling-mode icepop: the other "
                "modes have no lower bound"
            )
        return
    if args.rollout_importance_sampling_lower_bound is None:
        args.rollout_importance_sampling_lower_bound = 0.5
    within(args, "rollout_importance_sampling_lower_bound", 0, args.rollout_importance_sampling_threshold)


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
