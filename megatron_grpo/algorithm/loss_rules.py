"""Rules of the flags of loss types, clipping and masks, and the defaults that depend on the loss type."""

from argparse import Namespace

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import excludes, flag, needs, positive, within

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
