"""The tokens that truncation keeps, from the processed log-probabilities that vLLM returns."""

import numpy as np
import numpy.typing as npt

from megatron_grpo.utils.errors import GrpoError


def kept_token_ids(ids: npt.NDArray, log_probs: npt.NDArray) -> npt.NDArray[np.int32]:
    """Return the tokens with a probability above 0, int32 ``[tokens, k]``: the sampled one first, -1 at the end.

    ``ids`` and ``log_probs`` are ``[tokens, 1 + k]``: of the sampled token, and of the k likeliest tokens after
    temperature and truncation, in this order. vLLM keeps all tokens that tie with the k-th; of more than k tokens the
    sampled one is returned, and the likeliest others. Raises GrpoError if a sampled token has probability 0.
    """
    kept = np.where(np.isneginf(log_probs), -1, ids).astype(np.int32)
    if (kept[:, 0] < 0).any():
        token = ids[int((kept[:, 0] < 0).argmax()), 0]
        raise GrpoError(
            f"vLLM sampled token {token}, which its own truncation excludes, so that the kept tokens are unknown: "
            "report this with the flags of the run and the versions in the banner, or add --no-top-k-replay"
        )
    others = np.where(kept[:, 1:] == kept[:, :1], -1, kept[:, 1:])
    others = np.take_along_axis(others, np.argsort(others < 0, axis=1, kind="stable"), axis=1)
    return np.concatenate([kept[:, :1], others[:, :-1]], axis=1)
