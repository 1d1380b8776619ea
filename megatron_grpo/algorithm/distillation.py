"""On-policy distillation: log-probabilities of the policy's completions under a teacher, as advantages."""

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def on_policy_distillation(
    advantages: Float32,
    teacher_log_probs: Float32,
    old_log_probs: Float32,
    response_mask: npt.NDArray[np.uint8],
    coefficient: float,
) -> Float32:
    """Return the advantage of each token plus the teacher's term: A_t + C (log p(teacher) - log p(old policy)).

    The mean of the second term over tokens sampled by the policy is -C KL(policy || teacher) per token. The term lowers
    tokens that are less likely under the teacher than under the policy, independently of the completion's reward.

    Args:
        advantages: [total], of the rewards; zeros for distillation alone.
        teacher_log_probs: [total], of the sampled tokens under the teacher.
        old_log_probs: [total], under the policy that sampled.
        response_mask: [total], 1 on the tokens in the loss.
        coefficient: C.

    Returns:
        [total], 0 on tokens that are not in the loss, NaN where a log-probability is NaN or infinite.

    Source: Thinking Machines Lab 2025, "On-policy distillation"; the divergence is that of Gu et al. 2023, "MiniLLM",
    arXiv:2306.08543.
    """
    in_loss = response_mask == 1
    result = np.zeros(len(response_mask))
    with np.errstate(invalid="ignore"):
        difference = teacher_log_probs[in_loss].astype(np.float64) - old_log_probs[in_loss]
    result[in_loss] = advantages[in_loss] + coefficient * np.where(np.isfinite(difference), difference, np.nan)
    return result.astype(np.float32)
