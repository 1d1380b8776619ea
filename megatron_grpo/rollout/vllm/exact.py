"""vLLM's layers with the kernels that the trainer calls, too (``--exact-log-probs``).

vLLM lets classes of other packages take the place of its layers (``register_oot``) and of an attention backend. Nothing
is compiled: torch's compiler would fuse and reorder the sums of several layers. Decode steps run in CUDA graphs.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import (
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from megatron_grpo.models.exact import HEAD_SIZES, kernels
from megatron_grpo.models.exact.layers import rotation_of
from megatron_grpo.patches import vllm as patches
from megatron_grpo.rollout.vllm.decode_attention import DecodeAttentionBackend, DecodeMetadataBuilder
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError

ROTATIONS = RotaryEmbedding, Llama3RotaryEmbedding, YaRNScalingRotaryEmbedding, LinearScalingRotaryEmbedding
LINEARS = QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear


def register(args: Namespace) -> None:
    """Let the engine of this process compute by the kernels of `megatron_grpo.models.exact`."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{ExactAttentionBackend.__name__}")
    kernels.narrow_agrees(device())
    layers: list[tuple[Any, type]] = [
        (RMSNorm, ExactNorm), (SiluAndMul, ExactSiluAndMul), (LogitsProcessor, ExactLogits)
    ]  # fmt: skip
    layers += [(kind, _exact_linear(kind)) for kind in LINEARS]
    rotation = rotation_of(args)
    layers += [(kind, _exact_rotation(kind, rotation)) for kind in ROTATIONS]
    patches.TOKEN_LOG_PROBS.install(kernels.token_log_probs)
    for kind, ours in layers:
        op_registry_oot.pop(kind.__name__, None)  # of an earlier engine
        kind.register_oot(ours)


def options() -> dict[str, Any]:
    """Return vLLM's options for an engine with these layers."""
    return {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "custom_ops": ["all"]},
        "attention_config": {"backend": AttentionBackendEnum.FLASH_ATTN.name},  # on Blackwell vLLM prefers FlashInfer
        "disable_cascade_attn": True,
    }


def check(engine: Any) -> None:
    """Raise GrpoError if a part of vLLM's model computes by other kernels."""
    config = engine.vllm_config
    if not config.use_v2_model_runner:
        raise GrpoError(
            "--exact-log-probs needs vLLM's second model runner, where the trainer's kernel of log-probabilities takes "
            "the place of vLLM's, and vLLM chose its first one for this model: leave the flag out"
        )
    model = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    ours = [type(module).__name__ for module in model.modules()]
    for needed in ("ExactNorm", "ExactSiluAndMul", "ExactLogits", "ExactLinear", "ExactRotation"):
        if needed not in ours:
            raise GrpoError(f"--exact-log-probs: vLLM built this model without the layer {needed}: leave the flag out")
    others = {type(m).__name__ for m in model.modules() if isinstance(m, (RMSNorm, *LINEARS, *ROTATIONS))} - {
        "ExactNorm", "ExactLinear", "ExactRotation"
    }  # fmt: skip
    layers = config.compilation_config.static_forward_context.values()
    others |= {type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")} - {ExactAttention.__name__}
    if others:
        raise GrpoError(
            f"--exact-log-probs: vLLM's model has layers without exact kernels, {sorted(others)}: leave the flag out"
        )


class ExactNorm(RMSNorm):
    """The norm of `kernels.rms_norm`, with a residual that of `kernels.add_and_norm`, of heads `kernels.head_norm`."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        if x.dim() == 3:  # [tokens, heads, channels]
            return kernels.head_norm(x[:, None], self.weight.data, self.variance_epsilon)[:, 0]
        if residual is None:
            return kernels.rms_norm(x, self.weight.data, self.variance_epsilon)[0]
        return kernels.add_and_norm(x, residual, self.weight.data, self.variance_epsilon)[:2]


class ExactSiluAndMul(SiluAndMul):
    """The activation of `kernels.silu_and_mul`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.silu_and_mul(x)


class ExactLogits(LogitsProcessor):
    """Logits of `kernels.linear` in float32."""

    def _apply_head(self, lm_head, hidden_states, embedding_bias):
        return kernels.linear(hidden_states, lm_head.weight, embedding_bias, torch.float32)


class ExactLinearMethod(UnquantizedLinearMethod):
    """The product of `kernels.linear`."""

    def apply(self, layer, x, bias=None):
        return kernels.linear(x, layer.weight, bias)


def _exact_linear(kind: type) -> type:
    class ExactLinear(kind):
        """A linear layer with the product of `kernels.linear`."""

        quant_method: Any

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            if type(self.quant_method) is not UnquantizedLinearMethod:
                raise GrpoError(f"--exact-log-probs: vLLM quantizes its layers ({type(self.quant_method).__name__})")
            self.quant_method = ExactLinearMethod()

    return ExactLinear


def _exact_rotation(kind: type, rotation: Callable[[torch.device], torch.Tensor]) -> type:
    class ExactRotation(kind):
        """The rotation of `kernels.rotate`, by the angles of the trainer."""

        def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
            queries, keys = (part.unflatten(-1, (-1, self.head_size))[:, None] for part in (query, key))
            queries, keys = kernels.rotate(queries, keys, positions, rotation(query.device))
            return queries.flatten(1), keys.flatten(1)

    return ExactRotation


class ExactMetadataBuilder(DecodeMetadataBuilder):
    """What FlashAttention plans, without the plan of its kernel."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.aot_schedule = False


class ExactAttentionBackend(DecodeAttentionBackend):
    """The cache of `DecodeAttentionBackend` with the attention of `kernels.attention`."""

    @staticmethod
    def get_builder_cls() -> type[ExactMetadataBuilder]:
        """Return the class that plans a batch."""
        return ExactMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["ExactAttention"]:
        """Return the class of a layer's attention."""
        return ExactAttention


class ExactAttention(FlashAttentionImpl):
    """Attention of a layer."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if (
            self.attn_type != AttentionType.DECODER
            or self.alibi_slopes is not None
            or self.sliding_window != (-1, -1)
            or self.logits_soft_cap
            or self.sinks is not None
            or self.kv_cache_dtype not in ("auto", "bfloat16")
            or self.head_size not in HEAD_SIZES
            or self.dcp_world_size > 1
        ):
            raise GrpoError("--exact-log-probs: vLLM's model has a kind of attention without an exact kernel")
        kernels.steps_agree(self.num_heads, self.num_kv_heads, self.head_size, device())

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *of_output, **options):
        """Write the attention of a batch into ``output``."""
        meta = attn_metadata
        if meta is None:  # vLLM's profile of its memory
            return output.fill_(0)
        tokens, size = meta.num_actual_tokens, kv_cache.shape[2]
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        pages = kernels.Pages(meta.query_start_loc, meta.seq_lens, meta.block_table, size)
        kernels.attention(query[:tokens], keys, values, pages, self.scale, output[:tokens], meta.max_query_len)
        return output
