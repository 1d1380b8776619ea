"""Logits and log-probabilities of the sampled tokens, as the colocated vLLM computes them (``--exact-log-probs``)."""

import torch

from megatron_grpo.models.exact import kernels


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits ``hidden`` ``[t, h]`` times ``weight`` ``[v, h]`` transposed, float32 ``[t, v]``.

    Rows have the alignment of vLLM's, whose vocabulary is padded.
    """
    width = -(-len(weight) // kernels.LOGITS_ROW) * kernels.LOGITS_ROW
    out = hidden.new_empty(len(hidden), width, dtype=torch.float32)[:, : len(weight)]
    return kernels.linear(hidden, weight, out=out)


def token_log_probs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probability of each of ``token_ids`` ``[t]``, given float32 ``logits`` ``[t, v]``: vLLM's kernel.

    With a temperature the logits are divided by vLLM's kernel, too, in a copy.
    """
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    if temperature != 1:
        width = logits.stride(0)
        logits = logits.new_empty(len(logits), width)[:, : logits.shape[1]].copy_(logits)
        slots = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        apply_temperature(logits, slots, torch.full((1,), temperature, dtype=torch.float32, device=logits.device))
    return compute_token_logprobs(logits, token_ids[:, None])[:, 0]
