"""Flags of the policy's loss, its masks and its corrections; the rules are in ``loss_rules``."""

from typing import Any, get_args

from megatron_grpo.algorithm.losses import Level
from megatron_grpo.algorithm.weighting import LOSS_TYPES

LEVELS = get_args(Level)
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop")
REPLAY = ("disabled", "R2", "R3")

# Rows of ``arguments.FLAGS``.
LOSS_FLAGS: tuple[tuple[str, Any, Any, str], ...] = (
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
