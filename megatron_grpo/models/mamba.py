"""Mamba-2, the state-space layer of Nemotron-H, over packed sequences.

Source: Dao and Gu, Transformers are SSMs, arXiv 2405.21060. The functions are pure; `MambaMixer` is the layer. Heads
come in groups: ``a`` groups, each with ``r`` heads that read and write their states by the same two vectors.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.models.config import mamba_sizes
from megatron_grpo.models.recurrence import Recurrence, RecurrentLayer, State, causal_convolution, chunks_of

_STEP = 1e-3, 0.1  # range of the steps of a model with random weights


def state_space(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    steps: torch.Tensor,
    rate: torch.Tensor,
    cu_seqlens: Sequence[int],
    before: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y ``[t, a, r, p]``, the last state of each sequence ``[n, a, r, d, p]``) of the state-space recurrence.

    Within each sequence, for every head, with its rate A < 0 (arXiv 2405.21060, section 7, where S is transposed):

        S_t = exp(steps_t A) S_{t-1} + steps_t b_t x_t^T,    y_t = S_t^T c_t

    ``x`` ``[t, a, r, p]``; ``b``, ``c`` ``[t, a, d]``; ``steps`` ``[t, a, r]``; ``rate`` ``[a, r]``. S begins with
    ``before``, or with zeros. Computed in at least float32, in chunks (section 6): within a chunk by the products of
    its tokens, from chunk to chunk by S. y has the dtype of ``x``.
    """
    chunks = chunks_of(tuple(cu_seqlens), x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    sequences, (_, a, r, p), d = len(cu_seqlens) - 1, x.shape, b.shape[-1]
    state = x.new_zeros(sequences, a, r, d, p, dtype=dtype) if before is None else before.to(dtype)
    if not chunks.number:  # no tokens: the result still depends on the inputs, so that they have a gradient
        return x * (steps * rate)[..., None].to(x.dtype) + 0 * (b + c).sum().to(x.dtype), state
    key, query = (chunks.cut(vectors, dtype)[:, :, None] for vectors in (b, c))  # [chunks, a, 1, size, d]
    own = chunks.cut(x.to(dtype) * steps[..., None], dtype)
    decay, from_begin, to_end = chunks.decays(chunks.cut((steps * rate)[..., None], dtype))
    within, read, written = (query @ key.mT) * decay, from_begin * query, (to_end * key).mT
    out, state = chunks.recurrence(state, own, None, read, within, written, from_begin[..., -1:, :])
    return out.to(x.dtype), state


def mamba(
    mixed: torch.Tensor,
    steps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state_size: int,
    cu_seqlens: Sequence[int],
    before: State | None = None,
) -> tuple[torch.Tensor, State]:
    """Return (outputs ``[t, a, r, p]``, `State`) of convolution, silu, `state_space` and the skip connection.

    ``mixed`` ``[t, a, r p + 2 d]`` has the inputs x of each group's heads, b and c; ``weight`` ``[a, r p + 2 d,
    width]`` and ``bias`` ``[a, r p + 2 d]`` are the convolution's; ``steps`` ``[t, a, r]``, ``rate`` and ``skip`` ``[a,
    r]``; ``state_size`` is d. The output is y + skip x.
    """
    inputs, memory = (None, None) if before is None else before
    convolved, inputs = causal_convolution(mixed.flatten(1), weight.flatten(0, 1), cu_seqlens, inputs, bias.flatten())
    x, b, c = F.silu(convolved).view(mixed.shape).split((mixed.shape[2] - 2 * state_size, state_size, state_size), -1)
    x = x.unflatten(-1, (steps.shape[2], -1))
    y, memory = state_space(x, b, c, steps, rate, cu_seqlens, memory)
    return (y + skip[..., None] * x).to(x.dtype), State(inputs, memory)


def gated_group_norm(out: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm over each group of ``out`` silu(``gates``) ``[t, a, r, p]``, times ``weight`` ``[a, r, p]``.

    Computed in at least float32.
    """
    exact = torch.promote_types(out.dtype, torch.float32)
    x = out.to(exact) * F.silu(gates.to(exact))
    return (F.rms_norm(x, x.shape[-2:], eps=eps) * weight.to(exact)).to(out.dtype)


class MambaMixer(RecurrentLayer):
    """The layer in the place of self-attention: y = W_o RMSNorm(o silu(z)), o of `mamba`.

    z, x, b, c and the scalar dt of each head are one projection of the input; steps = softplus(dt + dt_bias), rate =
    -exp(A_log), skip = D. transformers has a lower bound of the steps in addition (``time_step_min``), which the
    engine and Megatron-LM do not have.
    """

    sizes_of = staticmethod(mamba_sizes)
    D: torch.nn.Parameter

    def __init__(self, config: TransformerConfig, *args: Any, **more: Any):
        super().__init__(config, *args, **more)
        self.conv1d.bias = self.of_groups(torch.zeros(self.groups * self.mixed, **self.options))
        self.D = self.of_groups(torch.ones(self.heads, **self.options))
        self.out_norm.weight = self.of_groups(torch.ones(self.heads * self.value_size, **self.options))
        if config.perform_initialization:  # as megatron-core's mixer
            with tensor_parallel.get_cuda_rng_tracker().fork():
                self.A_log.data.uniform_(1, 16).log_()
                first, last = (torch.tensor(step).log().item() for step in _STEP)
                steps = torch.empty_like(self.A_log).uniform_(first, last).exp()
                self.dt_bias.data.copy_(steps + (-torch.expm1(-steps)).log())  # the inverse of softplus

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what is mixed, the gates and the scalars of the projection ``[t, a, c]``; the gates come first."""
        gates, mixed, scalars = projected.split((self.gates, self.mixed, self.scalars), -1)
        return mixed, gates, scalars

    def recurrence(
        self, mixed: torch.Tensor, scalars: torch.Tensor, groups: slice
    ) -> tuple[Recurrence, Sequence[torch.Tensor]]:
        """Return `mamba` of some of this rank's groups, and its inputs mixed and steps."""
        exact = torch.promote_types(scalars.dtype, torch.float32)
        steps = F.softplus(scalars.to(exact) + self.by_group(self.dt_bias, groups))
        weight = self.conv_weight(groups)
        bias = cast(torch.Tensor, self.conv1d.bias).view(self.groups, -1)[groups]
        rate, skip = -self.by_group(self.A_log, groups).exp(), self.by_group(self.D, groups)

        def compute(tokens: Sequence[torch.Tensor], offsets: tuple[int, ...], before: State | None):
            own, own_steps = tokens
            return mamba(own, own_steps, weight, bias, rate, skip, self.key_size, offsets, before)

        return compute, (mixed, steps)

    def norm(self, out: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return `gated_group_norm`."""
        weight = cast(torch.Tensor, self.out_norm.weight).view(out.shape[1:])
        return gated_group_norm(out, gates, weight, self.config.layernorm_epsilon)
