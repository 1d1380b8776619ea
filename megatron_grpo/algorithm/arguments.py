"""Flags of losses, masks, rollout importance weights, advantages and KL, and the rules about them."""

from argparse import Namespace
from typing import Any, get_args

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.kl import KL_ESTIMATORS
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.registry import TOKEN_STATISTICS, DemonstrationLosses, Entry, Level, Loss, Registry, call
from megatron_grpo.utils.arguments import Step, replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, REAL, SHARE, FlagRow
from megatron_grpo.utils.rules import excludes, flag, needs, required, was_given, within

LEVELS = get_args(Level)
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop")
REPLAY = ("disabled", "R2", "R3")

LOSS: tuple[FlagRow, ...] = (
    ("--loss-type", LOSSES.entries, "grpo", "policy loss, with its weights of tokens"),
    ("--importance-sampling-level", LEVELS, "token", "probability ratio of each token, or of its whole completion"),
    *LOSSES.flags.values(),
    (
        "--gkd-beta",
        SHARE,
        None,
        "gkd: divergence from the teacher: 0 forward KL, 1 reverse KL, between them Jensen-Shannon [0.5]",
    ),
    (
        "--gkd-logits-topk",
        COUNT,
        None,
        "gkd: number of the teacher's likely tokens; the others count as one [whole vocabulary]",
    ),
    ("--entropy-coef", NOT_NEGATIVE, 0.0, "weight of the entropy bonus"),
    (
        "--top-entropy-quantile",
        POSITIVE_SHARE,
        1.0,
        "mask all but this share of an update's tokens, those of the highest entropy",
    ),
    (
        "--clip-cov-ratio",
        POSITIVE_SHARE,
        None,
        "share of tokens to mask, drawn among those whose covariance lies between the bounds",
    ),
    ("--clip-cov-lb", REAL, 1.0, "lower bound of the covariance of advantage and log-probability"),
    ("--clip-cov-ub", REAL, 5.0, "upper bound of this covariance"),
    (
        "--kl-cov-ratio",
        POSITIVE_SHARE,
        None,
        "share of tokens, those of the largest covariance, whose change is penalised",
    ),
    ("--kl-cov-coef", POSITIVE, 1.0, "weight of that penalty, |log p(policy) - log p(old)|"),
    ("--overlong-filter", bool, False, "mask completions that were cut at --max-completion-length"),
    (
        "--off-policy-sequence-mask-delta",
        POSITIVE,
        None,
        "mask completions with a negative advantage whose mean log p(rollout) - log p(policy) exceeds this value",
    ),
    (
        "--m2po-threshold",
        POSITIVE,
        None,
        "mask tokens, largest difference first, until the mean (log p(old) - log p(rollout))^2 is below this value",
    ),
    (
        "--router-replay-mode",
        REPLAY,
        REPLAY[0],
        "replay the experts that the old policy (R2) or the engine (R3) chose",
    ),
    (
        "--rollout-importance-sampling-mode",
        IMPORTANCE_SAMPLING_MODES,
        None,
        "multiply the policy term by p(trainer) / p(engine), bounded in this way [off]",
    ),
    ("--rollout-importance-sampling-threshold", POSITIVE, None, "upper bound of these weights [2; icepop 5]"),
    (
        "--rollout-importance-sampling-lower-bound",
        NOT_NEGATIVE,
        None,
        "icepop: lower bound, below which tokens are masked [0.5]",
    ),
)

MIXTURE: tuple[FlagRow, ...] = (
    (
        "--sft-loss-type",
        DemonstrationLosses(),
        None,
        "learn demonstrations of --sft-data-path in each update of the policy, too, by this loss [off]",
    ),
    ("--sft-batch-size", COUNT, None, "sft, chord: number of demonstrations of each update"),
    (
        "--chord-mu-peak",
        SHARE,
        None,
        "sft, chord: largest weight mu of the demonstrations; the loss is (1 - mu) L(rollout) + mu L(demonstrations)",
    ),
    ("--chord-mu-valley", SHARE, None, "weight mu after --chord-mu-decay-steps [--chord-mu-peak]"),
    ("--chord-mu-warmup-steps", COUNT, None, "number of updates in which mu rises from 0 to its peak, linearly [0]"),
    (
        "--chord-mu-decay-steps",
        COUNT,
        None,
        "number of updates after these in which mu falls to its valley, by a cosine",
    ),
    ("--luffy-reward", REAL, None, "luffy: reward of a demonstration in the group of its prompt [1]"),
)

SCALES = ("group", "batch", "none")

ADVANTAGE: tuple[FlagRow, ...] = (
    ("--advantage-estimator", ADVANTAGES.entries, "grpo", "advantage estimator: docs/algorithms.md"),
    (
        "--scale-rewards",
        SCALES,
        None,
        "divide advantages by this standard deviation [grpo: group; rloo, pass_at_k: none; others: batch]",
    ),
    *ADVANTAGES.flags.values(),
    ("--beta", NOT_NEGATIVE, 0.04, "weight of the KL divergence from the reference model; with 0 there is none"),
    ("--kl-estimator", KL_ESTIMATORS, "k3", "estimator of the KL term in the loss; with --kl-in-reward it is k1"),
    ("--kl-in-reward", bool, False, "subtract the KL divergence from the reward, instead of adding it to the loss"),
)


def needs_old_log_probs(args: Namespace) -> bool:
    """Return whether a rollout needs a forward pass for log-probabilities under the old policy.

    With one update per rollout, the update computes these log-probabilities itself; then only computations on the host
    before the update need the forward pass, and adapters with dropout, which the engine does not have.
    """
    reads = (args.m2po_threshold, args.kl_in_reward, args.teacher_kl_coef)
    return args.updates_per_rollout > 1 or any(reads) or args.router_replay_mode == "R2" or bool(args.lora_dropout)


def has_reference(args: Namespace) -> bool:
    """Return whether there is a reference model: for the KL term, or for the loss."""
    return args.beta > 0 or LOSSES.get(args.loss_type).reads_reference


def may_need_scores(args: Namespace) -> bool:
    """Return whether an update can need a forward pass over its completions before it (`update_statistics`)."""
    loss = LOSSES.get(args.loss_type)
    reads = loss.update_advantages is not None or any(name in loss.parameters for name in TOKEN_STATISTICS)
    return reads or args.clip_cov_ratio is not None or args.kl_cov_ratio is not None or args.top_entropy_quantile < 1


def check_loss(args: Namespace) -> None:
    """Check the given flags of the loss; `check_ratio` follows the defaults of `resolve_loss`."""
    loss = LOSSES.get(args.loss_type)
    if loss.demonstrations:
        raise GrpoError(
            f"--loss-type {loss.name} learns demonstrations, not rollouts: give --sft-iters or --sft-loss-type, with "
            "--sft-data-path, and another --loss-type"
        )
    _check_unread_flags(args, LOSSES, loss, *_demonstrations(args))
    _check_micro_batch_flags(args, loss)
    _check_level(args, loss)
    _check_distillation(args, loss)
    if loss.reads_reference:
        for dest in CHANGE_TOKENS:
            if was_given(args, dest):
                raise GrpoError(
                    f"{flag(dest)} and --loss-type {loss.name} cannot both be given: the loss compares the sums over "
                    "whole completions of a group, and the flag changes the weights of tokens, or rewards that are "
                    "equal: leave it out"
                )
    if loss.check is not None:
        call(loss.check, {}, replaced(args, importance_sampling_level=_level(args, loss)))


# With a loss of sums over whole completions.
CHANGE_TOKENS = """rollout_importance_sampling_mode top_entropy_quantile clip_cov_ratio kl_cov_ratio m2po_threshold
    off_policy_sequence_mask_delta kl_in_reward""".split()


def _check_distillation(args: Namespace, loss: Loss) -> None:
    """Refuse flags of a teacher's distribution without it, and those that act on advantages with it alone."""
    given = f"--loss-type {loss.name}"
    for dest in ("gkd_beta", "gkd_logits_topk"):
        if was_given(args, dest) and not loss.distils:
            raise GrpoError(f"{flag(dest)} has no effect with {given}: leave it out, or give --loss-type gkd")
    if not loss.distils:
        return
    if args.teacher_kl_coef:
        raise GrpoError(
            f"{given} with --teacher-kl-coef: each learns from the teacher, by its distributions or by the sampled "
            "tokens: leave one of them out"
        )
    if not (args.teacher_load_hf or args.teacher_server):
        raise GrpoError(f"{given} needs --teacher-load-hf or --teacher-server: there is no teacher")
    if args.teacher_server and args.gkd_logits_topk is None:
        raise GrpoError(
            f"{given} with --teacher-server needs --gkd-logits-topk: a server returns its likely tokens only, not the "
            "whole vocabulary"
        )
    if "advantages" in loss.parameters:
        return
    of_advantages = "advantage_estimator scale_rewards clip_cov_ratio kl_cov_ratio off_policy_sequence_mask_delta"
    of_advantages += " kl_in_reward"
    for dest in of_advantages.split():
        if was_given(args, dest):
            raise GrpoError(f"{flag(dest)} has no effect with {given}, which reads no advantages: leave it out")


def learns_log_probs(args: Namespace) -> bool:
    """Return whether the loss has a gradient by log-probabilities or entropies, next to that of a divergence."""
    reads = LOSSES.get(args.loss_type).parameters.keys() & {"log_probs", "log_ratio"}
    return bool(reads or (args.beta > 0 and not args.kl_in_reward) or args.entropy_coef)


def _demonstrations(args: Namespace) -> list[Loss]:
    """Return the loss of demonstrations beside the rollout, if there are any."""
    return [LOSSES.get(args.sft_loss_type)] if args.sft_loss_type else []


def _check_unread_flags(args: Namespace, registry: Registry[Any], entry: Entry, *others: Entry) -> None:
    """Refuse flags that this loss or estimator (or others) do not read, and parameters without a flag."""
    parameters = {name: parameter for one in (entry, *others) for name, parameter in one.parameters.items()}
    for dest in registry.flags:
        if was_given(args, dest) and dest not in parameters:
            raise GrpoError(f"{flag(dest)} has no effect with {registry.option} {entry.name}: leave it out")
    for name, parameter in parameters.items():
        if name not in registry.inputs and not hasattr(args, name) and parameter.default is parameter.empty:
            raise GrpoError(
                f"{registry.option} {entry.name}: its parameter {name} is neither an input "
                f"({', '.join(registry.inputs)}) nor a flag: rename it, or declare {flag(name)}"
            )


def _check_micro_batch_flags(args: Namespace, loss: Loss) -> None:
    """Require --micro-batch-size with a token budget if the loss averages over blocks; refuse it for other losses."""
    given = "micro_batch_size" in args.explicit
    if not args.max_tokens_per_microbatch:
        return
    if loss.aggregation == "bnpo" and not given:
        raise GrpoError(
            f"--loss-type {loss.name} needs --micro-batch-size: it averages over blocks of this number of completions"
        )
    if loss.aggregation != "bnpo" and given:
        raise GrpoError(
            f"--micro-batch-size ({args.micro_batch_size}) and --max-tokens-per-microbatch "
            f"({args.max_tokens_per_microbatch}) cannot both be given: each sets the size of micro-batches"
        )


def _level(args: Namespace, loss: Loss) -> str:
    return args.importance_sampling_level if loss.level is None else loss.level


def _check_level(args: Namespace, loss: Loss) -> None:
    """Refuse a level of the importance ratio that the loss does not have."""
    level = args.importance_sampling_level
    if loss.level == "token" != level:
        raise GrpoError(
            f"--importance-sampling-level {level} has no effect with --loss-type {loss.name}, which defines its own "
            "ratio: leave it out"
        )
    if "importance_sampling_level" in args.explicit and loss.level not in (None, level):
        like = next(other.name for other in LOSSES.entries.values() if other.function is loss.function)
        raise GrpoError(
            f"--loss-type {loss.name} is {like} with --importance-sampling-level {loss.level}, not {level}: leave "
            "one of them out"
        )


def resolve_loss(args: Namespace) -> dict[str, Any]:
    """Return level and bounds of the importance ratio, the loss's own defaults, and whether there is a reference."""
    loss = LOSSES.get(args.loss_type)
    level = _level(args, loss)
    defaults = {"epsilon": 0.2, **loss.defaults}
    for demonstrations in _demonstrations(args):
        defaults |= demonstrations.defaults
    if _clips_sequences(level, loss) and args.epsilon is None:
        defaults |= {"epsilon": 3e-4, "epsilon_high": 4e-4}  # arXiv:2507.18071, section 5.1
    found = {dest: value for dest, value in defaults.items() if getattr(args, dest) is None}
    if loss.distils and args.gkd_beta is None:
        found["gkd_beta"] = 0.5  # TRL's
    if args.epsilon_high is None:
        found.setdefault("epsilon_high", found.get("epsilon", args.epsilon))
    return found | {"importance_sampling_level": level, "with_reference": has_reference(args)}


def _clips_sequences(level: str, loss: Loss) -> bool:
    """Return whether the ratio of a whole sequence is clipped: a geometric mean, which is close to 1."""
    return level != "token" and "epsilon" in loss.parameters


def check_ratio(args: Namespace) -> None:
    """Refuse bounds of the importance ratio that have no effect or exclude each other."""
    if _clips_sequences(args.importance_sampling_level, LOSSES.get(args.loss_type)) and args.epsilon == 0.2:
        raise GrpoError(
            "--epsilon 0.2 never clips the ratio of a sequence, a geometric mean close to 1: leave it out (3e-4, and "
            "4e-4 as --epsilon-high)"
        )
    if args.dual_clip is not None and args.dual_clip <= 1 + args.epsilon_high:
        raise GrpoError(
            f"--dual-clip ({args.dual_clip}) must be greater than 1 + --epsilon-high ({1 + args.epsilon_high:g}), the "
            "upper clip of the ratio"
        )
    _check_covariance(args)


def _check_covariance(args: Namespace) -> None:
    for dest in ("clip_cov_lb", "clip_cov_ub"):
        if dest in args.explicit and args.clip_cov_ratio is None:
            raise GrpoError(f"{flag(dest)} needs --clip-cov-ratio, the share of tokens to mask")
    if not args.clip_cov_lb < args.clip_cov_ub:
        raise GrpoError(f"--clip-cov-lb ({args.clip_cov_lb}) must be less than --clip-cov-ub ({args.clip_cov_ub})")
    needs(args, "kl_cov_coef", "kl_cov_ratio", "it is the factor of the penalty")
    excludes(args, "clip_cov_ratio", "kl_cov_ratio", "both act on the tokens of the largest covariances")
    if args.kl_cov_ratio is not None and args.updates_per_rollout == 1:
        raise GrpoError(
            "--kl-cov-ratio penalises the change of the policy since the rollout, which is zero with one update per "
            "rollout: give --steps-per-generation or --num-iterations, or use --clip-cov-ratio"
        )


def resolve_importance_sampling(args: Namespace) -> dict[str, Any]:
    """Return the default bounds of rollout importance weights."""
    mode = args.rollout_importance_sampling_mode
    bounds = {"threshold": 5.0, "lower_bound": 0.5} if mode == "icepop" else {"threshold": 2.0} if mode else {}
    dests = {f"rollout_importance_sampling_{name}": bound for name, bound in bounds.items()}
    return {dest: bound for dest, bound in dests.items() if getattr(args, dest) is None}


def check_importance_sampling(args: Namespace) -> None:
    """Raise GrpoError for bounds of rollout importance weights without effect, or out of range."""
    mode = args.rollout_importance_sampling_mode
    needs(args, "rollout_importance_sampling_threshold", "rollout_importance_sampling_mode", "it bounds its weights")
    if mode != "icepop":
        if args.rollout_importance_sampling_lower_bound is not None:
            raise GrpoError(
                "--rollout-importance-sampling-lower-bound needs --rollout-importance-sampling-mode icepop: the other "
                "modes have no lower bound"
            )
        return
    within(args, "rollout_importance_sampling_lower_bound", 0, args.rollout_importance_sampling_threshold)


def resolve_advantages(args: Namespace) -> dict[str, Any]:
    """Return --scale-rewards, by default that of the estimator."""
    scale = ADVANTAGES.get(args.advantage_estimator).scale
    return {"scale_rewards": scale if args.scale_rewards is None else args.scale_rewards}


def check_advantages(args: Namespace) -> None:
    """Raise GrpoError for flags of advantages and KL that contradict each other or have no effect."""
    entry = ADVANTAGES.get(args.advantage_estimator)
    estimator = entry.name
    if "scale_rewards" not in entry.parameters and args.scale_rewards != entry.scale:
        divides = "divides by the standard deviation over the batch" if entry.scale == "batch" else "has its own scale"
        raise GrpoError(
            f"--advantage-estimator {estimator} {divides}, so --scale-rewards {args.scale_rewards} has no effect: "
            "leave it out, or use --advantage-estimator grpo"
        )
    reads = "advantages" in LOSSES.get(args.loss_type).parameters
    if args.num_generations < 2 and entry.compares_group and reads:
        others = " or ".join(other.name for other in ADVANTAGES.entries.values() if not other.compares_group)
        raise GrpoError(
            f"--num-generations ({args.num_generations}) must be at least 2: --advantage-estimator {estimator} "
            f"compares the completions of a prompt; {others} does not"
        )
    _check_unread_flags(args, ADVANTAGES, entry)
    if entry.check is not None:
        call(entry.check, {}, args)
    _check_kl(args)
    _check_token_advantages(args)


def _check_kl(args: Namespace) -> None:
    needs(args, "kl_in_reward", "beta", "it is the KL's weight")
    needs(args, "kl_estimator", "beta", "it estimates the KL term")
    if args.kl_in_reward:
        if "kl_estimator" in args.explicit and args.kl_estimator != "k1":
            raise GrpoError(
                f"--kl-in-reward subtracts k1, which gives the gradient of the KL divergence; --kl-estimator "
                f"{args.kl_estimator} in the reward does not: leave one of them out"
            )
    elif args.kl_estimator == "k1":
        raise GrpoError(
            "--kl-estimator k1 in the loss has no effect, because its gradient has mean zero: give k2, k3 or unbiased, "
            "or use k1 with --kl-in-reward"
        )


def differ_within_completion(args: Namespace) -> str | None:
    """Return the flag that gives tokens of one completion different advantages; None if no flag does."""
    if args.teacher_kl_coef:
        return "--teacher-kl-coef"
    estimator = ADVANTAGES.get(args.advantage_estimator)
    if estimator.tokens_differ is not None:
        return call(estimator.tokens_differ, {}, args)
    return f"--advantage-estimator {estimator.name}" if estimator.per_token else None


def _check_token_advantages(args: Namespace) -> None:
    cause = differ_within_completion(args)
    if cause is None:
        return
    whole = f"--loss-type {args.loss_type}" if LOSSES.get(args.loss_type).one_advantage else None
    if args.off_policy_sequence_mask_delta is not None:
        whole = flag("off_policy_sequence_mask_delta")
    if whole:
        raise GrpoError(
            f"{whole} needs the sign of a completion's advantage, but with {cause} each token has its own advantage: "
            "leave one of them out"
        )


def check_mixture(args: Namespace) -> None:
    """Refuse demonstrations beside the rollout without data or weight, and flags that their loss does not read."""
    loss = LOSSES.get(args.sft_loss_type) if args.sft_loss_type else None
    joins = loss is not None and loss.joins_groups
    of_mu = ["chord_mu_peak", "chord_mu_valley", "chord_mu_warmup_steps", "chord_mu_decay_steps"]
    for dest in ("sft_batch_size", *of_mu, "luffy_reward"):
        needs(args, dest, "sft_loss_type", "it is of demonstrations beside the rollout")
        if loss is not None and getattr(args, dest) is not None and joins != (dest == "luffy_reward"):
            has = "joins each demonstration to the group of its prompt" if joins else "has no groups"
            raise GrpoError(f"{flag(dest)} has no effect with --sft-loss-type {loss.name}, which {has}: leave it out")
    if (args.chord_mu_valley is None) != (args.chord_mu_decay_steps is None):
        raise GrpoError("--chord-mu-valley needs --chord-mu-decay-steps, the updates until then, and the reverse")
    if loss is None:
        return
    for dest in () if args.dry_run else ("sft_data_path",) if joins else ("sft_data_path", "sft_batch_size"):
        required(args, dest, f"--sft-loss-type {loss.name} needs it")
    if not joins:
        required(args, "chord_mu_peak", f"--sft-loss-type {loss.name} needs it, such as 0.1")
    excludes(args, "sft_loss_type", "eval_only", "an evaluation makes no updates")
    excludes(args, "sft_loss_type", "rollout_only", "no update follows a rollout")
    if joins:
        if args.train_only:
            raise GrpoError(f"--sft-loss-type {loss.name} needs the prompts of the groups, which --train-only has not")
        _check_joint_advantages(args, loss.name)


def _check_joint_advantages(args: Namespace, name: str) -> None:
    """Refuse flags with which a demonstration has no place in the group of its prompt."""
    estimator = ADVANTAGES.get(args.advantage_estimator)
    others = sorted({*ADVANTAGES.inputs} & {*estimator.parameters} - {"rewards", "group_ids"})
    reasons = {
        f"--advantage-estimator {estimator.name}": f"reads {', '.join(others)}" if others else "",
        f"--loss-type {args.loss_type}": "replaces the advantages" * bool(LOSSES.get(args.loss_type).update_advantages),
        "--kl-in-reward": "changes the rewards of sampled tokens" * bool(args.kl_in_reward),
        "--teacher-kl-coef": "changes the advantages of sampled tokens" * bool(args.teacher_kl_coef),
        "--dynamic-sample": "leaves out groups of equal rewards, to which one adds another" * bool(args.dynamic_sample),
        "--environment": "decides on the prompts" * bool(args.environment),
        "--agent": "decides on the prompts" * bool(args.agent),
    }
    for given, reason in reasons.items():
        if reason:
            raise GrpoError(
                f"--sft-loss-type {name} gives a demonstration an advantage in the group of its prompt, but {given} "
                f"{reason}: leave one of them out"
            )


# The rules of losses, rollout importance weights, advantages and KL, in order.
STEPS: tuple[Step, ...] = (
    check_loss,
    resolve_loss,
    check_ratio,
    resolve_importance_sampling,
    check_importance_sampling,
    resolve_advantages,
    check_advantages,
    check_mixture,
)
