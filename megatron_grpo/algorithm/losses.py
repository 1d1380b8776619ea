"""Policy losses: L of each token, for each loss type.

The whole loss of one optimizer update is

    loss = sum over completions i, tokens t of  w[i,t] * (m[i,t] L[i,t] + beta * KL[i,t] - entropy_coef * H[i,t])

with L from this module, m from `importance_sampling` and `masks`, KL from `kl` and w from `weighting`. The tensors are
flat, [t]: the label tokens of one packed micro-batch in order, without padding. A pack holds whole completions;
``completion`` [t] is the number of the completion of each token, below t.

Everywhere d = log_probs - old_log_probs is the log of the ratio rho = exp(d) between the policy being trained and the
old policy, the weights before the first update on the rollout. With a single update per rollout rho is 1.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_grpo.algorithm.groups import members_of_groups
from megatron_grpo.algorithm.registry import LOSSES, Flag, Level, PolicyLoss, register_loss
from megatron_grpo.utils.errors import GrpoError

# exp(20) is about 5e8, far above any useful ratio. A larger exponent can overflow to inf in float32, and inf times the
# zero gradient of the clipped branch is nan. Values inside the bound do not change.
MAX_LOG_RATIO = 20.0

# fipo's sum omits future tokens with a discount below this value, which is far below float32's resolution of the sum.
NEGLIGIBLE = 1e-12

# A loss reads the flags that are parameters of its function.
LOSSES.declare(
    Flag(
        "--epsilon",
        float,
        None,
        "lower clip range of the probability ratio [0.2; gmpo 0.4; ratio of a sequence 3e-4]",
        positive=True,
        within=(0, 1),
    ),
    Flag(
        "--epsilon-high",
        float,
        None,
        "upper clip range; cispo: upper bound of the ratio itself [--epsilon; ratio of a sequence 4e-4]",
        positive=True,
    ),
    Flag("--dual-clip", float, None, "upper bound of the ratio for tokens with a negative advantage", positive=True),
    Flag("--tau-pos", float, 1.0, "sapo: sharpness of the gate for positive advantages", positive=True),
    Flag("--tau-neg", float, 1.05, "sapo: sharpness of the gate for other advantages", positive=True),
    Flag(
        "--fipo-decay-rate", float, 32.0, "fipo: half-life, in tokens, of the influence of later tokens", positive=True
    ),
    Flag("--fipo-clip-range", float, 0.2, "fipo: largest distance of a token's weight from 1", within=(0, 1)),
    Flag(
        "--fipo-safety-threshold",
        float,
        4.0,
        "fipo: ratio above which a token with a negative advantage has a weight of at most 1",
        positive=True,
    ),
    Flag("--real-tau", float, 0.5, "real: temperature of the scores", positive=True),
    Flag("--dpo-beta", float, None, "dpo: beta, the factor of the log-ratios to the reference [0.1]", positive=True),
    Flag("--luffy-gamma", float, None, "luffy: gamma of the shaped probability p / (p + gamma) [0.1]", positive=True),
)


def completion_mean(values: Tensor, completion: Tensor) -> Tensor:
    """Return the mean of ``values`` [t] over the completion of each token, [t]."""
    # t slots: at least as many as completions, without a synchronisation to count them.
    sums = torch.zeros_like(values).index_add(0, completion, values)
    counts = torch.zeros_like(values).index_add(0, completion, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[completion]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, completion: Tensor, level: Level) -> Tensor:
    """Return the log of the importance ratio of each token, [t].

        token           d
        sequence        mean of d over the completion: all its tokens share one ratio, and are clipped together
        sequence_token  the same value, with the gradient of the token's own log-probability

    Args:
        log_probs: [t], under the policy being trained; carries the gradient.
        old_log_probs: [t].
        completion: [t].
        level: one of the three.

    Source: sequence and sequence_token: GSPO and GSPO-token (Zheng et al. 2025, arXiv:2507.18071, eq. 7 and 13).
    """
    difference = log_probs - old_log_probs
    if level == "token":
        return difference
    mean = completion_mean(difference, completion)
    return mean if level == "sequence" else mean.detach() + log_probs - log_probs.detach()


@register_loss("gspo", aggregation="grpo", level="sequence", example="--epsilon 0.01 --epsilon-high 0.02")
@register_loss("dr_grpo", aggregation="dr_grpo", example="--dual-clip 1.3")
@register_loss("dapo", aggregation="dapo", example="--epsilon-high 0.28 --dual-clip 1.5")
@register_loss("bnpo", aggregation="bnpo", example="--micro-batch-size 4")
@register_loss("grpo", aggregation="grpo", example=None)
def clipped_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    epsilon: float,
    epsilon_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return PPO's clipped loss, which grpo, bnpo, dapo, dr_grpo, gspo and (before its weights) fipo use.

        L = -min(min(rho, dual_clip) A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)

    A > 0 raises the probability until rho > 1 + epsilon_high; A < 0 lowers it until rho < 1 - epsilon. A clipped token
    has no gradient. The minimum makes the bound one-sided: a token whose ratio moved in the *wrong* direction is not
    clipped, so later updates can correct it. For such a token with A < 0, ``dual_clip`` (above 1 + epsilon_high) bounds
    the loss, L <= -dual_clip A.

    Args:
        log_ratio: [t], of `log_ratio`; carries the gradient. At 0 in value the gradient is REINFORCE's, -A d log_probs.
        advantages: [t], A of the completion that each token belongs to.
        epsilon: lower clip range.
        epsilon_high: upper clip range; equal to epsilon in PPO and GRPO, larger in DAPO ("clip-higher").
        dual_clip: bound of the unclipped branch, or None.

    Returns:
        PolicyLoss; a token is clipped if the minimum is the clipped branch (not if dual_clip bounds the other branch).

    Source: PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7); GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3); two
    bounds: DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.1); dual clip:
    Ye et al. 2020, arXiv:1912.09729; INTELLECT-2 (2025, arXiv:2505.07291) calls it delta.
    """
    ratio = _exp(log_ratio)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    unclipped = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    loss = -torch.minimum(unclipped * advantages, clipped * advantages)
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return PolicyLoss(loss, low.to(loss), high.to(loss))


@register_loss("sapo", aggregation="grpo")
def sapo_loss(log_ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> PolicyLoss:
    """Return SAPO's loss, which has a soft gate instead of the clip.

        L = -(4 / tau) sigmoid(tau (rho - 1)) A,    tau = tau_pos where A > 0, else tau_neg

    At rho = 1 the gradient is that of rho A; it fades on both sides of 1, faster with a larger tau.
    ``log_ratio`` and ``advantages`` are [t]; nothing is clipped.

    Source: Gao et al. 2025, "Soft adaptive policy optimization", arXiv:2511.20347, eq. 5 and 6.
    """
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    loss = -(4 / tau) * torch.sigmoid(tau * (_exp(log_ratio) - 1)) * advantages
    return PolicyLoss(loss)


@register_loss(
    "gmpo", aggregation="grpo", level="token", defaults={"epsilon": 0.4}, one_advantage=True, example="--epsilon 0.1"
)
def gmpo_loss(
    log_ratio: Tensor, advantages: Tensor, completion: Tensor, epsilon: float, epsilon_high: float
) -> PolicyLoss:
    """Return GMPO's loss: the geometric mean of the completion's ratios, each clipped in log space.

    The clip is one-sided, in the direction of A:

        c_t = s min(s d_t, s clip(d_t, -epsilon, epsilon_high)),  s = sign(A)
        L   = -A exp(mean of c over the completion), at each of its tokens

    Args:
        log_ratio: [t], d of each token.
        advantages: [t].
        completion: [t].
        epsilon, epsilon_high: in log space: the ratio lies between exp(-epsilon) and exp(epsilon_high).

    Source: Zhao et al. 2025, "Geometric-mean policy optimization", arXiv:2507.20673, eq. 4.
    """
    sign = advantages.sign()
    clipped = log_ratio.clamp(-epsilon, epsilon_high)
    # s min(s d, s c) is the smaller of the two for A > 0 and the larger for A < 0; for A = 0 the gradient is 0.
    bounded = sign * torch.minimum(sign * log_ratio, sign * clipped)
    loss = -advantages * _exp(completion_mean(bounded, completion))
    low = (log_ratio < -epsilon) & (advantages < 0)
    high = (log_ratio > epsilon_high) & (advantages > 0)
    return PolicyLoss(loss, low.to(loss), high.to(loss))


def real_advantages(
    scores: npt.NDArray[np.float64],
    advantages: npt.NDArray[np.floating],
    group_ids: npt.NDArray[np.int64],
    real_tau: float,
) -> npt.NDArray[np.float32]:
    """Return REAL's advantages: the gradient of a classification loss (right against wrong) of each group.

        loss = mean over groups of  log(1 + sum over positives e^(-s / tau)) + log(1 + sum over negatives e^(s / tau))

    with s_i the mean of d over completion i. The result is A_i = -(n / groups) d loss' / d s_i, loss' the sum of a
    group, so that -A_i d_t, averaged over tokens and then over the n completions, has the gradient of the loss. Its
    value is not that of the loss.

    Args:
        scores: [n], s at the weights of this gradient.
        advantages: [n]; positives are those above 0, negatives all others; NaN for a completion without a reward,
            which is neither.
        group_ids: [n].
        real_tau: temperature, tau.

    Returns:
        [n]; 0 in a group without both, and for completions without a reward.

    Source: "Rewards as labels: revisiting RLVR from a classification perspective" (2026), arXiv:2602.05630; groups
    without both, and the sign, as in ms-swift.
    """
    result = np.zeros(len(scores))
    groups = members_of_groups(group_ids)
    for group in groups:
        members = group[~np.isnan(advantages[group])]
        for sign, side in ((1, members[advantages[members] > 0]), (-1, members[advantages[members] <= 0])):
            if len(side) in (0, len(members)):
                continue
            logits = -sign * scores[side] / real_tau
            peak = max(logits.max(), 0.0)
            mass = np.exp(logits - peak)
            result[side] = sign / real_tau * mass / (np.exp(-peak) + mass.sum())
    return (result * (len(scores) / max(len(groups), 1))).astype(np.float32)


def _needs_a_group(loss: str) -> Callable[[int], None]:
    """Return the check of a loss that compares the completions of a prompt."""

    def check(num_generations: int) -> None:
        if num_generations == 1:
            raise GrpoError(
                f"--loss-type {loss} compares the completions of a prompt: --num-generations (1) must be at least 2"
            )

    return check


@register_loss(
    "real",
    aggregation="grpo",
    level="token",
    check=_needs_a_group("real"),
    update_advantages=real_advantages,
    one_advantage=True,
)
def real_loss(log_probs: Tensor, advantages: Tensor) -> PolicyLoss:
    """Return REAL's loss: `reinforce_loss` with the advantages of `real_advantages` (which names the source), [t]."""
    return reinforce_loss(log_probs, advantages)


def _check_cispo(epsilon_high: float | None) -> None:
    if epsilon_high is None or epsilon_high < 1:
        raise GrpoError(
            "--loss-type cispo bounds the ratio itself by --epsilon-high, which must be at least 1: give "
            "--epsilon-high 5"
        )


@register_loss("cispo", aggregation="dapo", check=_check_cispo, example="--epsilon-high 1.1")
def cispo_loss(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, epsilon_high: float) -> PolicyLoss:
    """Return CISPO's loss: the ratio is a bounded weight without gradient, so that every token has a gradient.

        L = -sg(min(rho, epsilon_high)) A log_probs

    ``epsilon_high`` is the bound itself, not its distance from 1; the other arguments are [t]. clip_high marks the
    tokens whose ratio is bounded, for any sign of A.

    Source: MiniMax-M1 (2025, arXiv:2506.13585, section 3.1).
    """
    ratio = _exp(log_ratio.detach())
    loss = -ratio.clamp(max=epsilon_high) * advantages * log_probs
    return PolicyLoss(loss, torch.zeros_like(ratio), (ratio > epsilon_high).to(loss))


def fipo_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    completion: Tensor,
    half_life: float,
    clip_range: float,
    safety_threshold: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return FIPO's weight of the clipped loss of each token, from the log-ratios of the later tokens.

        f_t = exp(sum over k >= t of gamma^(k - t) d_k),  gamma = 2^(-1 / half_life), over the completion's tokens
              clamped to [1, 1 + clip_range]; where A < 0 and rho_t > safety_threshold, to [1 - clip_range, 1]

    Tokens with rho > dual_clip leave the sum. The distance k - t counts tokens in the loss.

    Args:
        log_ratio: [t], d of each token.
        advantages: [t].
        completion: [t], each completion's tokens contiguous and in order.
        half_life: distance in tokens that halves the influence of a later token.
        clip_range: width of the clamp.
        safety_threshold: ratio above which the weight of a token with A < 0 is at most 1.
        dual_clip: see above; None keeps all tokens.

    Returns:
        [t], without gradient.

    Source: "FIPO: future-KL influenced policy optimization" (2026), arXiv:2603.19835; the values are ms-swift's.
    """
    moved = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = moved.exp()
    future = moved if dual_clip is None else moved.where(ratio <= dual_clip, 0.0)
    # Doubling windows: sum over [t, t + 2s) = sum over [t, t + s) + gamma^s sum over [t + s, t + 2s).
    step, gamma = 1, 2.0 ** (-1.0 / half_life)
    while step < len(future) and gamma**step > NEGLIGIBLE:
        same = completion[step:] == completion[:-step]
        behind = torch.where(same, future[step:], 0.0) * gamma**step
        future = torch.cat([future[:-step] + behind, future[-step:]])
        step *= 2
    weight = future.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unsafe = (advantages < 0) & (ratio > safety_threshold)
    return torch.where(unsafe, weight.clamp(1 - clip_range, 1.0), weight.clamp(1.0, 1 + clip_range))


@register_loss("fipo", aggregation="dapo", level="token")
def fipo_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    completion: Tensor,
    epsilon: float,
    epsilon_high: float,
    dual_clip: float | None,
    fipo_decay_rate: float,
    fipo_clip_range: float,
    fipo_safety_threshold: float,
) -> PolicyLoss:
    """Return FIPO's loss: `clipped_loss` times `fipo_weights`, which document arguments and source."""
    clipped = clipped_loss(log_ratio, advantages, epsilon, epsilon_high, dual_clip)
    limits = fipo_decay_rate, fipo_clip_range, fipo_safety_threshold
    weights = fipo_weights(log_ratio, advantages, completion, *limits, dual_clip)
    return clipped._replace(loss=weights * clipped.loss)


@register_loss("reinforce", aggregation="dapo", level="token", example="--entropy-coef 0.2")
def reinforce_loss(log_probs: Tensor, advantages: Tensor) -> PolicyLoss:
    """Return REINFORCE's loss, L = -A log_probs, [t] each, without ratio and clip.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
    """
    return PolicyLoss(-advantages * log_probs)


def dpo_pairs(
    advantages: npt.NDArray[np.floating], lengths: npt.NDArray[np.int64], group_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the completions with the highest and the lowest advantage of each group, [pairs, 2].

    The first of equals. A group without a difference has no pair; completions without a reward (NaN) or without a token
    in the loss (``lengths`` 0) are left out. Arguments: [n].
    """
    pairs = np.zeros((0, 2), np.int64)
    for group in members_of_groups(group_ids):
        members = group[~np.isnan(advantages[group]) & (lengths[group] > 0)]
        if len(members) and np.ptp(advantages[members]) > 0:
            pair = members[[advantages[members].argmax(), advantages[members].argmin()]]
            pairs = np.vstack([pairs, pair])
    return pairs


def dpo_advantages(
    over_reference: npt.NDArray[np.float64],
    advantages: npt.NDArray[np.floating],
    lengths: npt.NDArray[np.int64],
    group_ids: npt.NDArray[np.int64],
    dpo_beta: float,
) -> npt.NDArray[np.float32]:
    """Return the advantages with which `reinforce_loss`, averaged over all tokens, has the gradient of DPO's loss.

        loss = mean over pairs (w, l) of  -log sigmoid(m),    m = dpo_beta (s_w - s_l)

    with s_i the sum over completion i of log p(policy) - log p(reference). The gradient by log p(policy) is
    -dpo_beta sigmoid(-m) / pairs at each token of w, and its negative at each of l. A token's weight is 1 / T, with T
    the tokens of the update. So A_w = -A_l = dpo_beta sigmoid(-m) T / pairs, and A = 0 without a pair. A forward pass
    at the weights of this update gives s: the gradient is exact in all packings and parallel configurations. The value
    of the loss is the metric dpo/loss; that of the tokens' losses has no meaning.

    Args:
        over_reference: [n], s.
        advantages: [n]; `dpo_pairs` chooses by them.
        lengths: [n], tokens in the loss.
        group_ids: [n].
        dpo_beta: beta.

    Returns:
        [n].

    Source: Rafailov et al. 2023, "Direct preference optimization", arXiv:2305.18290, equation 7, as TRL's loss_type
    "sigmoid" has it; pairs of one's own samples: Guo et al. 2024, "Direct language model alignment from online AI
    feedback", arXiv:2402.04792.
    """
    result = np.zeros(len(advantages))
    pairs = dpo_pairs(advantages, lengths, group_ids)
    if len(pairs):
        margins = _dpo_margins(over_reference, pairs, dpo_beta)
        pulls = dpo_beta * np.exp(-np.logaddexp(0, margins)) * lengths.sum() / len(pairs)
        result[pairs] = np.stack([pulls, -pulls], 1)
    return result.astype(np.float32)


def _dpo_margins(
    over_reference: npt.NDArray[np.float64], pairs: npt.NDArray[np.int64], dpo_beta: float
) -> npt.NDArray[np.float64]:
    """Return m of `dpo_advantages` [pairs]."""
    return dpo_beta * (over_reference[pairs[:, 0]] - over_reference[pairs[:, 1]])


def dpo_metrics(
    over_reference: npt.NDArray[np.float64],
    advantages: npt.NDArray[np.floating],
    lengths: npt.NDArray[np.int64],
    group_ids: npt.NDArray[np.int64],
    dpo_beta: float,
) -> dict[str, float]:
    """Return DPO's loss, mean margin and fraction of positive margins of an update's pairs: `dpo_advantages`."""
    pairs = dpo_pairs(advantages, lengths, group_ids)
    if not len(pairs):
        return {"dpo/pairs": 0}
    margins = _dpo_margins(over_reference, pairs, dpo_beta)
    return {
        "dpo/pairs": len(pairs),
        "dpo/loss": float(np.logaddexp(0, -margins).mean()),
        "dpo/margin": float(margins.mean()),
        "dpo/accuracy": float((margins > 0).mean()),
    }


@register_loss(
    "dpo",
    aggregation="dapo",
    level="token",
    check=_needs_a_group("dpo"),
    defaults={"dpo_beta": 0.1},
    update_advantages=dpo_advantages,
    update_metrics=dpo_metrics,
    one_advantage=True,
)
def dpo_loss(log_probs: Tensor, advantages: Tensor) -> PolicyLoss:
    """Return DPO's loss: `reinforce_loss` with the advantages of `dpo_advantages` (which names the source), [t]."""
    return reinforce_loss(log_probs, advantages)


@register_loss("gkd", aggregation="dapo", level="token", example=None)
def gkd_loss(divergence: Tensor) -> PolicyLoss:
    """Return the loss of generalised knowledge distillation, L = D(teacher, policy), [t], nats.

    D is a KL or Jensen-Shannon divergence (--gkd-beta) of the distributions at the token, over the whole vocabulary or
    the teacher's likely tokens (--gkd-logits-topk): models/divergence.py has the formulas. There is no ratio, no clip
    and no advantage. On the policy's own completions this is on-policy distillation, on recorded ones supervised.

    Source: Agarwal et al. 2024, "On-policy distillation of language models", arXiv:2306.13649, equation 1; the average
    is over the tokens of an update, as in TRL (there: of each completion, then over completions).
    """
    return PolicyLoss(divergence)


@register_loss("sft", aggregation="dapo", level="token", demonstrations=True, example=None)
def sft_loss(log_probs: Tensor) -> PolicyLoss:
    """Return the loss of supervised learning, L = -log_probs, [t]: the cross-entropy of the demonstrated tokens, nats.

    There is no ratio, no clip and no advantage. --sft-iters selects it.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback",
    arXiv:2203.02155, section 3.5.
    """
    return PolicyLoss(-log_probs)


@register_loss("chord", aggregation="dapo", level="token", demonstrations=True, example=None)
def chord_loss(log_probs: Tensor) -> PolicyLoss:
    """Return CHORD's loss of demonstrated tokens, whose weight phi is largest where the policy is undecided, [t].

        L = -sg(p (1 - p)) log_probs,    p = exp(log_probs)

    Tokens that the policy knows (p near 1), and tokens far from it (p near 0), have little weight. The weights are not
    normalised: the mean is over the tokens.

    Source: Zhang et al. 2025, "On-policy RL meets off-policy experts", arXiv:2508.11408, section 3.3 (CHORD-phi).
    """
    p = log_probs.detach().exp()
    return PolicyLoss(-p * (1 - p) * log_probs)


@register_loss(
    "luffy",
    aggregation="dapo",
    level="token",
    demonstrations=True,
    defaults={"luffy_gamma": 0.1},
    example=None,
)
def luffy_loss(log_probs: Tensor, advantages: Tensor, luffy_gamma: float) -> PolicyLoss:
    """Return LUFFY's loss of demonstrated tokens: the importance ratio p / 1, shaped and without a clip, [t].

        L = -A f(p),    f(p) = p / (p + gamma),    p = exp(log_probs)

    f'(p) p = gamma p / (p + gamma)^2 is largest at p = gamma: the shaping raises the gradient of improbable tokens,
    which is that of p itself without it. A is the advantage of the demonstration in the group of its prompt.

    Source: Yan et al. 2025, "Learning to reason under off-policy guidance", arXiv:2504.14945, eq. 6 to 8.
    """
    p = log_probs.exp()
    return PolicyLoss(-advantages * p / (p + luffy_gamma))


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
