"""Logits and log-probabilities of the sampled tokens, as the colocated vLLM computes them (``--exact-log-probs``)."""

import torch
import torch.distributed as dist

from megatron_grpo.models.exact import kernels

# Ranks exchange the logits of so many tokens at once. With a vocabulary of 152k each of two ranks then has 0.3 to 0.5
# GiB more than the logits of a chunk. Their gradient, which comes later, is larger.
WHOLE_ROWS = 512


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits ``hidden`` ``[t, h]`` times ``weight`` ``[v, h]`` transposed, float32 ``[t, v]``.

    Rows have the alignment of vLLM's, whose vocabulary is padded.
    """
    if not len(weight):  # a rank may have padding alone
        return _rows(hidden, len(hidden), 0)
    return kernels.linear(hidden, weight, dtype=torch.float32, multiple=kernels.LOGITS_ROW)


def _rows(like: torch.Tensor, count: int, columns: int) -> torch.Tensor:
    width = -(-columns // kernels.LOGITS_ROW) * kernels.LOGITS_ROW
    return like.new_empty(count, width, dtype=torch.float32)[:, :columns]


def log_probs_of_shards(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float,
    columns: list[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return `token_log_probs` given this rank's columns ``[t, columns[rank]]`` of the logits; equal on all ranks.

    Each rank of ``group`` receives whole rows for a share of the tokens, and sends its results to the others. One rank
    alone divides ``logits`` by ``temperature``.
    """
    if len(columns) == 1:
        return token_log_probs(logits, token_ids, temperature)
    parts = zip(logits.split(WHOLE_ROWS), token_ids.split(WHOLE_ROWS), strict=True)
    return torch.cat([_of_part(*part, temperature, columns, group) for part in parts])


def _of_part(logits, token_ids, temperature, columns, group) -> torch.Tensor:
    rank, share = group.rank(), -(-len(logits) // len(columns))
    counts = [min(share, max(0, len(logits) - number * share)) for number in range(len(columns))]
    sizes = [counts[rank] * width for width in columns], [count * columns[rank] for count in counts]
    received = logits.new_empty(sum(sizes[0]))
    dist.all_to_all_single(received, logits.reshape(-1), *sizes, group=group)
    rows = _rows(logits, counts[rank], sum(columns))
    for to, part in zip(rows.split(columns, 1), received.split(sizes[0]), strict=True):
        to.copy_(part.view(to.shape))
    own = logits.new_zeros(share)
    if counts[rank]:
        own[: counts[rank]] = token_log_probs(rows, token_ids[rank * share :][: counts[rank]], temperature)
    everywhere = logits.new_empty(share * len(columns))
    dist.all_gather_into_tensor(everywhere, own, group=group)
    return everywhere[: len(logits)]


def token_log_probs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probability of each of ``token_ids`` ``[t]``, given float32 ``logits`` ``[t, v]``.

    With a temperature vLLM's kernel divides the logits by it, in place.
    """
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    if temperature != 1:
        slots = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        apply_temperature(logits, slots, torch.full((1,), temperature, dtype=torch.float32, device=logits.device))
    return kernels.token_log_probs(logits, token_ids[:, None])[:, 0]
