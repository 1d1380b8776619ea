"""Gated delta net, the linear attention of Qwen3-Next and Qwen3.5, over packed sequences.

Source: Yang et al., Gated Delta Networks, arXiv 2412.06464; in chunks as in Yang et al., arXiv 2406.06484.

The functions are pure; `GatedDeltaNet` is the layer. Heads are grouped by their keys: ``a`` key heads, each with ``r``
value heads.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from megatron_grpo.models.config import delta_net_sizes
from megatron_grpo.models.norm import rms_norm
from megatron_grpo.models.recurrence import Recurrence, RecurrentLayer, State, causal_convolution, chunks_of
from megatron_grpo.utils.device import to_device

KERNEL_DTYPES = torch.bfloat16, torch.float16  # other numbers are computed by plain torch


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: Sequence[int],
    before: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o ``[t, a, r, d_v]``, the last state of each sequence ``[n, a, r, d_k, d_v]``) of the gated delta rule.

    Within each sequence, for every value head, with alpha_t = exp(``log_decay``_t) (arXiv 2412.06464, equation 10,
    where S is transposed):

        S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t / sqrt(d_k)

    ``q``, ``k`` ``[t, a, d_k]``; ``v`` ``[t, a, r, d_v]``; ``log_decay`` (0 or less) and ``beta`` ``[t, a, r]``. S
    begins with ``before``, or with zeros. Computed in at least float32, in chunks of `CHUNK` tokens (section 3.3):
    with the sums G_i of the log decays from a chunk's begin, the corrections u_i = beta_i (v_i - what S recalls for
    k_i) of a chunk solve a triangular system,

        u_i + sum_{j<i} beta_i exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i)

    and S enters the next chunk as exp(G_last) S + sum_i exp(G_last - G_i) k_i u_i^T. ``o`` has the dtype of ``v``.
    """
    chunks = chunks_of(tuple(cu_seqlens), v.device)
    dtype = torch.promote_types(v.dtype, torch.float32)
    sequences, (_, a, r, d_v), d_k = len(cu_seqlens) - 1, v.shape, k.shape[-1]
    state = v.new_zeros(sequences, a, r, d_k, d_v, dtype=dtype) if before is None else before.to(dtype)
    if not chunks.number:  # no tokens: the result still depends on the inputs, so that they have a gradient
        return v * (beta * log_decay)[..., None].to(v.dtype) + 0 * (q + k).sum().to(v.dtype), state
    key = chunks.cut(k, dtype)[:, :, None]  # [chunks, a, 1, size, d_k]
    query, value = chunks.cut(q * d_k**-0.5, dtype)[:, :, None], chunks.cut(v, dtype)
    beta = chunks.cut(beta[..., None], dtype)  # [chunks, a, r, size, 1]
    decay, from_begin, to_end = chunks.decays(chunks.cut(log_decay[..., None], dtype))
    system = beta * (key @ key.mT) * decay  # the diagonal is not read
    right = torch.cat((beta * value, beta * from_begin * key), -1)
    own, recalled = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split((d_v, d_k), -1)
    within, read, written = (query @ key.mT) * decay, from_begin * query, (to_end * key).mT
    out, state = chunks.recurrence(state, own, recalled, read, within, written, from_begin[..., -1:, :])
    return out.to(v.dtype), state


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(sum(x^2) + 1e-6) over the last dimension, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_net(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    key_size: int,
    cu_seqlens: Sequence[int],
    before: State | None = None,
) -> tuple[torch.Tensor, State]:
    """Return (outputs ``[t, a, r, d_v]``, `State`) of convolution, silu and `gated_delta_rule`.

    ``qkv`` ``[t, a, 2 d_k + r d_v]`` has the query, the key and the r values of each key head; ``weight`` ``[a, 2 d_k
    + r d_v, width]``; ``log_decay`` and ``beta`` ``[t, a, r]``; ``key_size`` is d_k. Queries and keys have unit length.
    """
    if len(qkv) and qkv.is_cuda and _has_kernels(qkv.dtype):
        return _by_kernels(qkv, weight, log_decay, beta, key_size, cu_seqlens, before)
    inputs, memory = (None, None) if before is None else before
    mixed, inputs = causal_convolution(qkv.flatten(1), weight.flatten(0, 1), cu_seqlens, inputs)
    q, k, v = F.silu(mixed).view(qkv.shape).split(_sizes(qkv, key_size), -1)
    v = v.unflatten(-1, (log_decay.shape[2], -1))
    out, memory = gated_delta_rule(unit_length(q), unit_length(k), v, log_decay, beta, cu_seqlens, memory)
    return out, State(inputs, memory)


@lru_cache  # each layer asks in each pass, and a package that is absent is looked for in all of sys.path
def _has_kernels(dtype: torch.dtype) -> bool:
    return dtype in KERNEL_DTYPES and find_spec("fla") is not None


def kernels(dtype: torch.dtype) -> str:
    """Return what computes `delta_net` in tensors of this dtype on this device, for the log."""
    if not (torch.cuda.is_available() and _has_kernels(dtype)):
        return "plain torch"
    package = "flash-linear-attention"
    return package if _rule_has_kernel() else f"{package} (convolution) and plain torch (Triton's recurrence is wrong)"


def _sizes(qkv: torch.Tensor, key_size: int) -> tuple[int, int, int]:
    """Return the channels of a key head: of its query, its key and its values."""
    return key_size, key_size, qkv.shape[2] - 2 * key_size


def _by_kernels(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    key_size: int,
    cu_seqlens: Sequence[int],
    before: State | None,
) -> tuple[torch.Tensor, State]:
    """Compute `delta_net` by the kernels of flash-linear-attention."""
    from fla.modules.causal_conv1d import causal_conv1d  # Triton, and with it these kernels, exist with a GPU only
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    offsets = _offsets(tuple(cu_seqlens), qkv.device)
    heads, per_key = log_decay.shape[1:]
    # Their state has one more input, which no later output depends on, and has the channels before the inputs.
    inputs = None if before is None else F.pad(before.inputs.mT, (1, 0)).contiguous()
    mixed, inputs = causal_conv1d(
        qkv.flatten(1)[None],
        weight.flatten(0, 1).contiguous(),
        initial_state=inputs,
        output_final_state=True,
        activation="silu",
        **offsets,
    )
    inputs = inputs[..., 1:].mT
    q, k, v = mixed[0].view(qkv.shape).split(_sizes(qkv, key_size), -1)
    v = v.unflatten(-1, (per_key, -1))
    if not _rule_has_kernel():
        memory = None if before is None else before.memory
        out, memory = gated_delta_rule(unit_length(q), unit_length(k), v, log_decay, beta, cu_seqlens, memory)
        return out, State(inputs, memory)
    out, memory = chunk_gated_delta_rule(
        q[None].contiguous(),
        k[None].contiguous(),
        v.flatten(1, 2)[None].contiguous(),
        log_decay.flatten(1)[None],
        beta.flatten(1)[None],
        initial_state=None if before is None else before.memory.flatten(1, 2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **offsets,
    )
    return out[0].unflatten(1, (heads, per_key)), State(inputs, memory.unflatten(1, (heads, per_key)))


@lru_cache(maxsize=1)
def _rule_has_kernel() -> bool:
    """Whether the rule has a kernel here: those of Triton 3.4 to 3.7.0 give wrong gradients on Hopper GPUs.

    https://github.com/fla-org/flash-linear-attention/issues/640; the package refuses them without TileLang.
    """
    import triton  # absent without a GPU

    is_hopper, found = torch.cuda.get_device_capability()[0] == 9, Version(triton.__version__)
    return not (is_hopper and Version("3.4") <= found < Version("3.7.1")) or find_spec("tilelang") is not None


@lru_cache(maxsize=8)  # the kernels remember what they derive from these tensors: the layers of a micro-batch share it
def _offsets(cu_seqlens: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    on_host = torch.tensor(cu_seqlens)
    return {"cu_seqlens": to_device(on_host, device), "cu_seqlens_cpu": on_host}


def gated_norm(out: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm(``out``) silu(``gate``) ``[..., d]``, computed in at least float32; ``weight`` ``[d]``."""
    exact = torch.promote_types(out.dtype, torch.float32)
    return (rms_norm(out.to(exact), weight.to(exact), eps, False) * F.silu(gate.to(exact))).to(out.dtype)


class GatedDeltaNet(RecurrentLayer):
    """The layer in the place of self-attention: y = W_o (RMSNorm(o) silu(z)), o of `delta_net`.

    q, k, v, z and the scalars b, a of each value head are one projection of the input; beta = sigmoid(b) and log_decay
    = -exp(A_log) softplus(a + dt_bias). Names and flags are those of megatron-core's layer (``--linear-num-key-heads``,
    ...), whose projection has another order of lines. The groups are the key heads.
    """

    sizes_of = staticmethod(delta_net_sizes)

    def __init__(self, config: TransformerConfig, *args: Any, **more: Any):
        super().__init__(config, *args, **more)
        self.out_norm.weight = torch.nn.Parameter(torch.ones(self.value_size, **self.options))
        if config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                self.A_log.data.uniform_(0.01, 16).log_()

    def recurrence(
        self, mixed: torch.Tensor, scalars: torch.Tensor, groups: slice
    ) -> tuple[Recurrence, Sequence[torch.Tensor]]:
        """Return `delta_net` of some of this rank's key heads, and its inputs qkv, log_decay and beta."""
        b, a = scalars.split(self.heads_per_group, -1)
        weight, exact = self.conv_weight(groups), torch.promote_types(a.dtype, torch.float32)
        steps = F.softplus(a.to(exact) + self.by_group(self.dt_bias, groups))
        log_decay = -self.by_group(self.A_log, groups).exp() * steps

        def compute(tokens: Sequence[torch.Tensor], offsets: tuple[int, ...], before: State | None):
            qkv, own_decay, beta = tokens
            return delta_net(qkv, weight, own_decay, beta, self.key_size, offsets, before)

        return compute, (mixed, log_decay, b.to(exact).sigmoid())

    def norm(self, out: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return `gated_norm`."""
        # Each tensor-parallel rank has other heads: the gradient of the norm's weight is the sum over them.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        return gated_norm(out, gates, weight, self.config.layernorm_epsilon)
