"""Divergence of the policy's distribution from a teacher's, for each token, with both vocabularies sharded over ranks.

With the policy's probabilities q, the teacher's p, and the mixture m = beta p + (1 - beta) q:

    beta = 0      D = KL(p, q) = sum_v p_v log(p_v / q_v)           forward KL
    beta = 1      D = KL(q, p)                                      reverse KL
    else          D = beta KL(p, m) + (1 - beta) KL(q, m)           generalised Jensen-Shannon divergence

Source: Agarwal et al. 2024, "On-policy distillation of language models", arXiv:2306.13649, section 2 and equation 1.
With D_v = d D / d q_v + constant, the gradient by the policy's logits is q_v (D_v - sum_u q_u D_u) / temperature:

    forward KL: D_v = -p_v / q_v     reverse KL: D_v = log(q_v / p_v)     else: D_v = (1 - beta) log(q_v / m_v)

The sum is over the whole vocabulary, or over the teacher's k most likely tokens and one class of all other tokens, the
tail, whose probabilities are the sums of theirs. So q and p keep their normalisers; D of the classes is at most that of
the vocabulary, and equal to it for k = vocabulary. (TRL's ``loss_add_tail`` is the same; ms-swift normalises both
distributions over the k tokens, so that the mass outside has no gradient; verl leaves the tail's term out.)

The logits of both models are made for ``CHUNK`` tokens at a time, and the gradient of the policy's logits in the same
pass, as in `head`, whose remarks on ranks and gradients apply. Ranks exchange eight numbers for each token.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megatron_grpo.models.head import chunks, float32_logits, fused, reduce
from megatron_grpo.models.softcap import soft_cap
from megatron_grpo.models.weight_gradients import add_product, placeholder

CHUNK = 1024  # tokens; with a vocabulary of 152k the logits of a model take 0.6 GiB
KEPT = 16  # chunks that keep the gradient of the logits for that of the weight; the others make the logits again
TINY = 1e-37  # least probability of the policy's tail, so that its logarithm is finite


class Head(NamedTuple):
    """A teacher's output layer, on a rank of the policy."""

    weight: torch.Tensor  # [rows, h], the teacher's rows of the tokens that the policy's shard has
    cap: float | None = None  # soft cap of the logits


class WholeVocabulary(NamedTuple):
    """A teacher's distributions over the vocabulary: hidden states ``[t, h]`` before its output layer."""

    hidden: torch.Tensor
    head: Head


class TopK(NamedTuple):
    """A teacher's k most likely tokens ``[t, k]``, and log-probabilities of these and the tail ``[t, k + 1]``."""

    token_ids: torch.Tensor
    log_probs: torch.Tensor


class _Options(NamedTuple):
    beta: float
    temperature: float
    first: int  # token of this rank's first row
    rows: int  # without padding
    group: dist.ProcessGroup | None
    cap: float | None
    chunk: int


def vocab_parallel_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: WholeVocabulary | TopK,
    beta: float,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk: int = CHUNK,
    cap: float | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Return the divergence from the teacher for each token, float32 ``[t]``, nats; equal on every rank of ``group``.

    ``hidden`` ``[t, h]``, ``weight`` ``[V/tp, h]`` and the other arguments are those of `vocab_parallel_log_probs`. The
    teacher's logits are divided by the same temperature; its vocabulary has the same size, with any padding.
    """
    first = dist.get_rank(group) * len(weight) if group is not None else 0
    rows = min(max(0, vocab_size - first), len(weight))
    options = _Options(beta, temperature, first, rows, group, cap, chunk)
    return _Divergence.apply(hidden, weight, teacher, options, accumulate)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, teacher, options, accumulate):
        ctx.trained = ctx.needs_input_grad[1]
        values = hidden.new_empty(len(hidden), dtype=torch.float32)
        gradient, of_logits = torch.empty_like(hidden), []
        for number, part in enumerate(chunks(len(hidden), options.chunk)):
            values[part], grad = _of_chunk(hidden[part], weight, teacher, part, options, any(ctx.needs_input_grad))
            if grad is not None:
                gradient[part] = grad @ weight[: options.rows]
                of_logits += [grad] * (ctx.trained and number < KEPT)
            del grad
        ctx.main_grad = weight.main_grad if accumulate and ctx.trained else None
        ctx.save_for_backward(hidden, weight, gradient, *of_logits)
        ctx.teacher, ctx.options = teacher, options
        return values

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, gradient, *of_logits = ctx.saved_tensors
        grad_weight, rows = ctx.main_grad, ctx.options.rows
        if ctx.trained and grad_weight is None:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        scale = upstream[:, None]
        for number, part in enumerate(chunks(len(hidden), ctx.options.chunk) if ctx.trained else ()):
            if number < len(of_logits):
                grad = of_logits[number]
            else:
                _, grad = _of_chunk(hidden[part], weight, ctx.teacher, part, ctx.options, True)
            add_product(grad_weight[:rows], grad, (hidden[part] * scale[part]).to(hidden.dtype))
            del grad
        if ctx.main_grad is not None:
            grad_weight = placeholder(weight)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return (gradient * scale).to(hidden.dtype), of_weight, None, None, None


def _of_chunk(hidden, weight, teacher, part, options: _Options, with_gradient: bool):
    """Return (divergence [t], its gradient by this rank's logits [t, rows] in the weight's dtype, or None)."""
    logits = float32_logits(hidden, weight[: options.rows])
    if isinstance(teacher, TopK):
        classes = _Classes(logits, teacher.token_ids[part], teacher.log_probs[part], options)
        return classes.divergence, classes.gradient(weight.dtype) if with_gradient else None
    theirs = float32_logits(teacher.hidden[part], teacher.head.weight[: options.rows])
    beta, temperature, caps = options.beta, options.temperature, (options.cap, teacher.head.cap)
    both = list(zip((logits, theirs), caps, strict=True))
    peaks = torch.stack([_peak(values, temperature, cap) for values, cap in both])
    reduce(peaks, dist.ReduceOp.MAX, options.group)
    masses = [_mass(values, peak, temperature, cap) for (values, cap), peak in zip(both, peaks, strict=True)]
    log_z = torch.stack(masses)
    reduce(log_z, dist.ReduceOp.SUM, options.group)
    log_z = log_z.log() + peaks
    sums = _sums(logits, theirs, *log_z, beta, temperature, *caps)
    reduce(sums, dist.ReduceOp.SUM, options.group)
    gradient = None
    if with_gradient:
        gradient = _gradient(logits, theirs, *log_z, sums[1], beta, temperature, *caps, weight.dtype)
    return sums[0], gradient


def _peak(logits, temperature: float, cap: float | None):
    if logits.shape[1] == 0:  # this rank has padding only
        return logits.new_full((len(logits),), float("-inf"))
    return soft_cap(logits.amax(-1), cap) / temperature


@fused
def _mass(logits, peak, temperature: float, cap: float | None):
    return (soft_cap(logits, cap) / temperature - peak[:, None]).exp().sum(-1)


def _of_class(log_q, log_p, beta: float):
    """Return (term of the divergence, d D / d q up to a constant) of classes; the latter is 0 for the forward KL."""
    if beta == 0:
        return log_p.exp() * (log_p - log_q), torch.zeros_like(log_q)
    if beta == 1:
        ratio = log_q - log_p
        return log_q.exp() * ratio, ratio
    mean = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    ratio = log_q - mean
    term = beta * log_p.exp() * (log_p - mean) + (1 - beta) * log_q.exp() * ratio
    return term, (1 - beta) * ratio


@fused
def _sums(logits, theirs, log_z, log_z_theirs, beta: float, temperature: float, cap: float | None, cap_theirs):
    """Return this rank's shares of D and of sum q D_v: ``[2, t]``."""
    log_q = soft_cap(logits, cap) / temperature - log_z[:, None]
    log_p = soft_cap(theirs, cap_theirs) / temperature - log_z_theirs[:, None]
    terms, slopes = _of_class(log_q, log_p, beta)
    return torch.stack([terms.sum(-1), (log_q.exp() * slopes).sum(-1)])


@fused
def _gradient(
    logits,
    theirs,
    log_z,
    log_z_theirs,
    mean_slope,
    beta: float,
    temperature: float,
    cap,
    cap_theirs,
    dtype: torch.dtype,
):
    """Return the gradient of D by this rank's logits, ``[t, rows]`` in ``dtype``."""
    log_q = soft_cap(logits, cap) / temperature - log_z[:, None]
    log_p = soft_cap(theirs, cap_theirs) / temperature - log_z_theirs[:, None]
    if beta == 0:
        grad = log_q.exp() - log_p.exp()
    else:
        grad = log_q.exp() * (_of_class(log_q, log_p, beta)[1] - mean_slope[:, None])
    return (grad * _slope_of_cap(logits, cap) / temperature).to(dtype)


def _slope_of_cap(logits, cap: float | None):
    """Return the derivative of cap * tanh(x / cap)."""
    return 1.0 if cap is None else 1 - (soft_cap(logits, cap) / cap) ** 2


class _Classes:
    """The teacher's tokens and the tail, of a chunk of tokens: `TopK`.

    Each rank has the columns of its own tokens. The columns of others' go to one more column, which is dropped.
    """

    def __init__(self, logits, token_ids, log_probs, options: _Options):
        self._logits, self._options = logits, options
        rows, temperature, beta = options.rows, options.temperature, options.beta
        columns = token_ids.long() - options.first
        mine = (columns >= 0) & (columns < rows)
        self._columns = columns.where(mine, rows)
        z = soft_cap(logits, options.cap) / temperature
        peak = _peak(z, 1.0, None)
        reduce(peak, dist.ReduceOp.MAX, options.group)
        own = z.gather(1, self._columns.clamp(max=rows - 1)) if rows else torch.zeros_like(log_probs[:, :-1])
        mass = pad(z.sub_(peak[:, None]).exp_(), (0, 1))  # in place: the logits of a chunk are large
        del z
        total = mass.sum(-1)
        tail = mass.scatter_(1, self._columns, 0.0).sum(-1)
        sums = torch.stack([total, tail])
        reduce(sums, dist.ReduceOp.SUM, options.group)
        self._log_z = sums[0].log() + peak
        log_q_tail = (sums[1] / sums[0]).clamp(min=TINY).log()
        del mass
        self._log_q, self._log_p = own - self._log_z[:, None], log_probs[:, :-1]
        terms, self._slopes = _of_class(self._log_q, self._log_p, beta)
        shares = torch.stack([terms, self._log_q.exp() * self._slopes]).where(mine, 0.0).sum(-1)
        reduce(shares, dist.ReduceOp.SUM, options.group)
        of_tail, self._tail_slope = _of_class(log_q_tail, log_probs[:, -1], beta)
        self.divergence, self._mean_slope = shares + torch.stack([of_tail, log_q_tail.exp() * self._tail_slope])
        self._tail_ratio = (log_probs[:, -1] - log_q_tail).exp()

    def gradient(self, dtype: torch.dtype):
        """Return the gradient of D by this rank's logits, ``[t, rows]`` in ``dtype``."""
        rows, temperature, cap = self._options.rows, self._options.temperature, self._options.cap
        q = (soft_cap(self._logits, cap) / temperature).sub_(self._log_z[:, None]).exp_()
        if self._options.beta == 0:
            of_tail, of_tokens = 1 - self._tail_ratio, self._log_q.exp() - self._log_p.exp()
        else:
            of_tail = self._tail_slope - self._mean_slope
            of_tokens = self._log_q.exp() * (self._slopes - self._mean_slope[:, None])
        grad = pad(q.mul_(of_tail[:, None]), (0, 1))
        del q
        grad = grad.scatter_(1, self._columns, of_tokens)[:, :rows]
        return grad.mul_(_slope_of_cap(self._logits, cap)).div_(temperature).to(dtype)


def vocab_parallel_top_k(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk: int = CHUNK,
    cap: float | None = None,
) -> TopK:
    """Return the ``k`` most likely tokens of each distribution, and the tail; the arguments are those of the policy's.

    ``k`` is at most ``vocab_size``. A tail without mass has the log-probability log(`TINY`).
    """
    size = group.size() if group is not None else 1
    first = dist.get_rank(group) * len(weight) if group is not None else 0
    rows = min(max(0, vocab_size - first), len(weight))
    all_ids, all_log_probs = [hidden.new_zeros(0, k, dtype=torch.int32)], [hidden.new_zeros(0, k + 1).float()]
    for part in chunks(len(hidden), chunk):
        z = soft_cap(float32_logits(hidden[part], weight[:rows]), cap) / temperature
        # Ranks with fewer than k tokens add tokens without mass, which no other rank has.
        values, columns = z.topk(min(k, rows), -1)
        missing = k - values.shape[1]
        values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
        ids = torch.nn.functional.pad(columns + first, (0, missing), value=-1)
        if size > 1:
            values, ids = _gathered(values, group), _gathered(ids, group)
        values, order = values.topk(k, -1)  # equal on all ranks
        ids, peak = ids.gather(1, order), values[:, 0].clone()
        mass = torch.cat([(z - peak[:, None]).exp(), z.new_zeros(len(z), 1)], 1)
        own = ids - first
        inside = own.where((own >= 0) & (own < rows), rows)
        sums = torch.stack([mass.sum(-1), mass.scatter_(1, inside, 0.0).sum(-1)])
        reduce(sums, dist.ReduceOp.SUM, group)
        log_z = sums[0].log() + peak
        tail = (sums[1] / sums[0]).clamp(min=TINY).log()
        all_ids.append(ids.int())
        all_log_probs.append(torch.cat([values - log_z[:, None], tail[:, None]], 1))
    return TopK(torch.cat(all_ids), torch.cat(all_log_probs))


def _gathered(values, group):
    """Return the columns of all ranks, ``[t, ranks k]``."""
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, 1)
