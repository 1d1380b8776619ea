"""Log-probability and entropy of tokens, from hidden states and an output weight sharded over tensor-parallel ranks.

For a token with hidden state h and logits z = W h / temperature over the vocabulary:

    log p(y) = z_y - logsumexp(z)            entropy = logsumexp(z) - sum_v p_v z_v

(with soft-capped logits z = cap tanh(W h / cap) / temperature).

Logits are computed for ``chunk`` tokens at a time: no ``[tokens, vocabulary]`` tensor in float32 is ever stored. The
forward pass also computes d log p / d z and d log p / d h, which the backward pass scales by the loss's gradient of
log p: three matrix products, and two if W is frozen (adapters). If W is trained, d log p / d z is kept for ``KEPT``
chunks; for the others, and if the loss has the entropy, the backward pass makes the logits again. On a GPU the float32
arithmetic is compiled into kernels that keep it in registers. Ranks exchange four numbers for each token, never the
vocabulary. The gradients

    d log p(y) / d z_v = 1[v = y] - p_v      d entropy / d z_v = -p_v (log p_v + entropy)

need no communication, because each rank holds its own columns. (A plain ``all_reduce`` under autograd would give the
right loss and wrong gradients.)

If a token was sampled from a truncated distribution, the sums over v are over its kept tokens only. The logits of the
kept tokens are gathered from those of the vocabulary, and all other arithmetic is on ``[tokens, k]``.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType

import torch
import torch.distributed as dist

from megatron_grpo.models.softcap import soft_cap
from megatron_grpo.models.weight_gradients import add_product, placeholder

CHUNK = 4096  # tokens; with a vocabulary of 152k the logits of a chunk take 2.3 GiB
KEPT = 4  # chunks that keep d log p / d z, in the weight's dtype: 4.6 GiB in 16 bits with a vocabulary of 152k
# Logit of a token outside the kept set. Its probability is exactly 0, and so is p log p, which would be NaN with -inf.
OUTSIDE = -1e30


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits ``hidden`` ``[t, h]`` times ``weight`` ``[v, h]`` transposed, float32 ``[t, v]``.

    The engine computes the same. On a GPU the sums of a 16-bit product stay in float32: rounding to bf16 would change a
    logit of 20 by up to 0.06.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return (hidden @ weight.T).float()


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk: int = CHUNK,
    cap: float | None = None,
    kept_token_ids: torch.Tensor | None = None,
    entropy_gradient: bool = True,
    accumulate: bool = False,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each label and the entropy of its distribution, float32 ``[t]`` each.

    The results are equal on every rank of ``group``. ``hidden`` is ``[t, h]`` (the same on every rank), ``weight`` this
    rank's shard ``[V/tp, h]``, ``labels`` ``[t]``. Rows at or after ``vocab_size`` are padding and get no probability;
    ``cap`` soft-caps the logits. The gradient of ``hidden`` is this rank's partial sum.

    ``kept_token_ids`` ``[t, k]`` (-1 pads) are the tokens of each label's distribution, the label among them; a row
    of -1 is the whole vocabulary, as is None. ``entropy_gradient``: False promises a loss without the entropy, which
    saves a product; the backward pass fails if the promise is broken. ``accumulate``: add the gradient of ``weight`` to
    ``weight.main_grad`` (`weight_gradients`). ``exact``: the log-probabilities are those of vLLM, bit for bit
    (`exact.head`), without ``cap`` and ``kept_token_ids``.
    """
    options = temperature, vocab_size, group, chunk, cap, entropy_gradient, accumulate, exact
    if kept_token_ids is None:
        return _LogProbs.apply(hidden, weight, labels, None, *options)
    whole = (kept_token_ids < 0).all(-1)
    if not whole.any():
        return _LogProbs.apply(hidden, weight, labels, kept_token_ids, *options)
    rows = whole.nonzero()[:, 0], (~whole).nonzero()[:, 0]
    parts = [
        _LogProbs.apply(hidden[at], weight, labels[at], kept, *options)
        for at, kept in zip(rows, (None, kept_token_ids[rows[1]]), strict=True)
    ]
    order = torch.cat(rows).argsort()
    log_probs, entropy = (torch.cat(values)[order] for values in zip(*parts, strict=True))
    return log_probs, entropy


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        labels,
        kept,
        temperature,
        vocab_size,
        group,
        chunk,
        cap,
        entropy_gradient,
        accumulate,
        exact,
    ):
        ctx.set_materialize_grads(False)
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        columns = [min(max(0, vocab_size - number * len(weight)), len(weight)) for number in range(ranks)]
        first, rows = rank * len(weight), columns[rank]  # the other rows are padding
        log_z, entropy, chosen = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(3))
        of_hidden, ctx.trained = ctx.needs_input_grad[:2]
        # The tokens whose gradient is made here; the first ones if the weight is trained.
        early = (
            0 if entropy_gradient or not of_hidden else min(len(labels), KEPT * chunk if ctx.trained else len(labels))
        )
        of_logits, gradient = [], hidden.new_empty(early, hidden.shape[1])  # of log p
        own = _exact_head() if exact else None
        divisor = temperature if own and ranks == 1 else 1.0  # the exact head divides whole rows in place
        inner = temperature / divisor
        for part in chunks(len(labels), chunk):
            product = own.float32_logits if own else None
            at = _Chunk(hidden[part], weight, labels[part], None if kept is None else kept[part], first, rows, product)
            logits, inner_cap = at.logits, cap
            if at.mine is not None:
                logits, inner_cap = soft_cap(logits, cap).masked_fill(~at.mine, OUTSIDE), None
            empty = logits.shape[1] == 0
            if own:  # log Z instead of the largest logit saves a pass over the logits
                chosen[part] = own.log_probs_of_shards(logits, labels[part], temperature, columns, group)
                peak = _of_labels(logits, at.column) / inner
                reduce(peak, dist.ReduceOp.SUM, group)
                peak -= chosen[part]
            else:
                peak = torch.full_like(log_z[part], float("-inf")) if empty else _peak(logits, temperature, inner_cap)
                reduce(peak, dist.ReduceOp.MAX, group)
            sums = _sums(logits, peak, at.column, inner, inner_cap)
            reduce(sums, dist.ReduceOp.SUM, group)
            mass, target, moment = sums
            log_z[part] = mass.log() + peak
            if not own:
                chosen[part] = target - mass.log()
            entropy[part] = mass.log() - moment / mass
            if part.start < early:
                grad = at.gradient(log_z[part], None, torch.full_like(mass, 1 / divisor), None, inner, cap)
                gradient[part] = grad @ weight[:rows]
                of_logits += [grad] * ctx.trained
                del grad
            del at, logits  # before those of the next chunk
        ctx.main_grad = weight.main_grad if accumulate and ctx.trained else None
        ctx.save_for_backward(hidden, weight, labels, kept, log_z, entropy, gradient, *of_logits)
        ctx.options = temperature, first, rows, chunk, cap
        return chosen, entropy

    @staticmethod
    def backward(ctx, grad_chosen, grad_entropy):
        hidden, weight, labels, kept, log_z, entropy, gradient, *of_logits = ctx.saved_tensors
        temperature, first, rows, chunk, cap = ctx.options
        zeros = torch.zeros_like(log_z)  # autograd passes None for a zero gradient
        grad_chosen = zeros if grad_chosen is None else grad_chosen
        if len(gradient) and grad_entropy is not None:  # without a wait for the GPU
            torch._assert_async((grad_entropy == 0).all(), "the loss has an entropy, and entropy_gradient is False")
        grad_entropy = zeros if grad_entropy is None else grad_entropy
        grad_hidden = torch.empty_like(hidden)
        grad_weight = ctx.main_grad
        if ctx.trained and grad_weight is None:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for number, part in enumerate(chunks(len(labels), chunk)):
            if part.start < len(gradient):
                scale = grad_chosen[part, None]
                grad_hidden[part] = gradient[part] * scale
                if grad_weight is not None:
                    add_product(grad_weight[:rows], of_logits[number], (hidden[part] * scale).to(hidden.dtype))
                continue
            at = _Chunk(hidden[part], weight, labels[part], None if kept is None else kept[part], first, rows)
            grad = at.gradient(log_z[part], entropy[part], grad_chosen[part], grad_entropy[part], temperature, cap)
            grad_hidden[part] = grad @ weight[:rows]
            if grad_weight is not None:
                add_product(grad_weight[:rows], grad, hidden[part])
            del at, grad
        if ctx.main_grad is not None:
            grad_weight = placeholder(weight)
        return grad_hidden, grad_weight if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 10


def _exact_head() -> ModuleType:
    """Return the module of `exact`; Triton, which it imports, exists with a GPU only."""
    from megatron_grpo.models.exact import head

    return head


class _Chunk:
    """The logits of a chunk of tokens over this rank's ``rows`` of the vocabulary, or over their kept tokens.

    ``logits`` ``[t, rows]`` or ``[t, k]``, before the soft cap; ``column`` ``[t]`` of each label, negative or too large
    if another rank holds it; ``mine`` ``[t, k]``: kept tokens that this rank holds, None without kept tokens.
    """

    def __init__(self, hidden, weight, labels, kept, first: int, rows: int, product: Callable | None = None):
        self._weight, self._rows = weight, rows
        self.columns = self.mine = None
        if kept is None:
            self.logits, self.column = (product or float32_logits)(hidden, weight[:rows]), labels - first
        else:
            self.logits, self.columns, self.mine = _kept_logits(hidden, weight, kept - first, rows)
            self.column = _column(kept, labels, self.mine)

    def gradient(self, log_z, entropy, grad_chosen, grad_entropy, temperature: float, cap: float | None):
        """Return the gradient ``[t, rows]`` of this rank's logits, in the weight's dtype."""
        upstream = grad_chosen, grad_entropy
        dtype = self._weight.dtype
        values = _gradient(self.logits, log_z, entropy, self.column, *upstream, temperature, cap, dtype)
        if self.mine is None:
            return values
        whole = values.new_zeros(len(values), len(self._weight))
        return whole.scatter_add_(1, self.columns, values.where(self.mine, 0))[:, : self._rows]


def _kept_logits(hidden, weight, columns, rows: int):
    """Return (logits, columns of this rank's logits, True where this rank holds the token), ``[t, k]`` each.

    ``columns`` ``[t, k]`` are token ids relative to this rank's first one. Where another rank holds the token, and for
    pads, column and logit have no meaning.
    """
    mine = (columns >= 0) & (columns < rows)
    columns = columns.long().clamp(0, len(weight) - 1)
    return float32_logits(hidden, weight).gather(1, columns), columns, mine


def _column(kept, labels, mine):
    """Return the position ``[t]`` of each label among its kept tokens; -1 if another rank holds the label."""
    is_label = (kept == labels[:, None]) & mine
    return torch.where(is_label.any(-1), is_label.int().argmax(-1), -1)


def fused(function):
    """Compile elementwise work over logits into one kernel on a GPU; vocabularies of CPU runs are small.

    The number of tokens differs from call to call. The vocabulary is a constant of the kernel, which divides by it for
    every logit.
    """
    if not torch.cuda.is_available():
        return function
    compiled = torch.compile(function)

    @wraps(function)
    def call(*arguments):
        for argument in arguments:
            if torch.is_tensor(argument):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return call


@fused
def _peak(logits, temperature: float, cap: float | None):
    return soft_cap(logits.amax(-1), cap) / temperature


def _of_labels(logits, column):
    """Return the logit of each label ``[t]``; 0 if another rank holds the label."""
    if logits.shape[1] == 0:
        return logits.new_zeros(len(logits))
    mine = (column >= 0) & (column < logits.shape[1])
    return logits.gather(1, column.where(mine, 0)[:, None])[:, 0].where(mine, 0.0)


@fused
def _sums(logits, peak, column, temperature: float, cap: float | None):
    """Return this rank's share of sum exp(z - peak), z_y - peak, and sum exp(z - peak) (z - peak): ``[3, t]``."""
    z = soft_cap(logits, cap) / temperature - peak[:, None]
    mass = z.exp()
    return torch.stack([mass.sum(-1), torch.where(_is_label(column, z), z, 0.0).sum(-1), (mass * z).sum(-1)])


@fused
def _gradient(
    logits, log_z, entropy, column, grad_chosen, grad_entropy, temperature: float, cap: float | None, dtype: torch.dtype
):
    """Return the gradient of this rank's logits, in ``dtype``; ``grad_entropy`` None: the entropy has none."""
    capped = soft_cap(logits, cap)
    log_p = capped / temperature - log_z[:, None]
    p = log_p.exp()
    grad = torch.where(_is_label(column, p), 1.0 - p, -p) * grad_chosen[:, None]
    if grad_entropy is not None:
        grad = grad - p * (log_p + entropy[:, None]) * grad_entropy[:, None]
    if cap is not None:
        grad = grad * (1 - (capped / cap) ** 2)  # derivative of cap * tanh(x / cap)
    return (grad / temperature).to(dtype)


def _is_label(column, logits):
    """Return a mask of each token's label among the logits; all False if another rank holds the label."""
    return torch.arange(logits.shape[1], device=logits.device) == column[:, None]


def chunks(count: int, size: int):
    """Return the slices of ``size`` tokens, the last one smaller, of ``count`` tokens."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def reduce(tensor: torch.Tensor, op, group) -> None:
    """All-reduce a tensor in place over the tensor-parallel ranks; nothing with one rank, or None."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group=group)
