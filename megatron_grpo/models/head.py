"""Log-probability and entropy of tokens, from hidden states and an output weight sharded over tensor-parallel ranks.

For a token with hidden state h and logits z = W h / temperature over the vocabulary:

    log p(y) = z_y - logsumexp(z)            entropy = logsumexp(z) - sum_v p_v z_v

Logits are made ``chunk`` tokens at a time, in the forward pass and once more in the backward pass, so that no
``[tokens, vocabulary]`` tensor is ever held; ranks exchange four numbers a token, never the vocabulary. The gradients

    d log p(y) / d z_v = 1[v = y] - p_v      d entropy / d z_v = -p_v (log p_v + entropy)

need no communication, because each rank owns its columns. (A plain ``all_reduce`` under autograd would give the right
loss and wrong gradients.)
"""

import torch
import torch.distributed as dist

CHUNK = 2048  # tokens: with a vocabulary of 152k one chunk of float32 logits is 1.2 GiB


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy of its distribution, float32 ``[t]`` each, equal on every rank of ``group``.

    ``hidden`` is ``[t, h]`` (the same on every rank), ``weight`` this rank's ``[V/tp, h]`` rows, ``labels`` ``[t]``. Rows at
    or past ``vocab_size`` are padding and get no probability. The gradient of ``hidden`` is this rank's partial sum.
    """
    return _LogProbs.apply(hidden, weight, labels, temperature, vocab_size, group, chunk)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, vocab_size, group, chunk):
        ctx.set_materialize_grads(False)
        first = dist.get_rank(group) * len(weight) if group is not None else 0
        padding = min(max(0, first + len(weight) - vocab_size), len(weight))
        log_z, entropy, chosen = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(3))
        for rows in _chunks(len(labels), chunk):
            logits = _logits(hidden[rows], weight, temperature)
            _fill_padding(logits, padding, float("-inf"))
            peak = logits.amax(-1)
            _reduce(peak, dist.ReduceOp.MAX, group)
            logits -= peak[:, None]
            mass = logits.exp()
            _fill_padding(logits, padding, 0.0)  # their mass is 0, and 0 * -inf would be nan
            own, column = _own_columns(labels[rows], first, len(weight))
            target = logits.gather(1, column[:, None])[:, 0] * own
            sums = torch.stack([mass.sum(-1), target, mass.mul_(logits).sum(-1)])
            _reduce(sums, dist.ReduceOp.SUM, group)
            log_mass = sums[0].log()
            log_z[rows] = log_mass + peak
            chosen[rows] = sums[1] - log_mass
            entropy[rows] = log_mass - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.options = temperature, first, padding, chunk
        return chosen, entropy

    @staticmethod
    def backward(ctx, grad_chosen, grad_entropy):
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        temperature, first, padding, chunk = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(labels), chunk):
            log_p = _logits(hidden[rows], weight, temperature).sub_(log_z[rows, None])
            _fill_padding(log_p, padding, float("-inf"))
            p = log_p.exp()
            coefficient = torch.zeros_like(log_z[rows])
            if grad_chosen is not None:
                coefficient -= grad_chosen[rows]
            if grad_entropy is not None:
                _fill_padding(log_p, padding, 0.0)
                grad = p * (coefficient[:, None] - grad_entropy[rows, None] * (log_p + entropy[rows, None]))
            else:
                grad = p.mul_(coefficient[:, None])
            if grad_chosen is not None:
                own, column = _own_columns(labels[rows], first, len(weight))
                grad.scatter_add_(1, column[:, None], (grad_chosen[rows] * own)[:, None])
            grad = (grad if temperature == 1.0 else grad / temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _chunks(count: int, size: int):
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _fill_padding(columns: torch.Tensor, padding: int, value: float) -> None:
    if padding:
        columns[:, -padding:] = value


def _own_columns(labels: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether this rank holds each label, and the label's column here (0 where it does not)."""
    own = (labels >= first) & (labels < first + count)
    return own, (labels - first) * own


def _reduce(tensor: torch.Tensor, op, group) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group=group)
