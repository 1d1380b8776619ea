"""The layers of ``--transformer-impl transformer_engine``, with CPU modules in place of Transformer Engine's own.

What megatron-core and this project put together from them computes the updates of ``local``.
"""

import pytest
import torch

import pretrain_grpo  # noqa: F401  first: it prepares for machines without a GPU

# isort: split
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_grpo.models import layer_specs
from megatron_grpo.models.attention import PackedAttention
from megatron_grpo.models.experts import GroupedExperts
from megatron_grpo.models.norm import RMSNorm, rms_norm
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.utils.arguments import replaced
from tools import made_up

MODEL = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --kv-channels 16 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --vocab-size 61 --max-position-embeddings 512 --max-tokens-per-microbatch 512 --lr 1e-2""".split()
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm --moe-router-dtype fp32"


class Norm(RMSNorm):
    """In place of Transformer Engine's norm."""


class NormAndLinear(ColumnParallelLinear):
    """In place of Transformer Engine's linear layer with the norm of its input."""

    def __init__(self, inputs: int, outputs: int, *, config, **more):
        super().__init__(inputs, outputs, config=config, **more)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(inputs, dtype=config.params_dtype))

    def forward(self, x, *more):
        return super().forward(rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon, False), *more)


class Modules(LocalSpecProvider):
    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return NormAndLinear

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        return Norm

    def core_attention(self):
        return PackedAttention


@pytest.fixture
def substitutes(monkeypatch, one_process):
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", Modules, raising=False)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", Norm, raising=False)
    monkeypatch.setattr(layer_specs, "_norm", lambda _: Norm)
    yield
    parallel_state.destroy_model_parallel()


def updates(implementation: str, *flags: str) -> tuple[list[tuple[float, float]], set[type]]:
    """Return (loss, gradient norm) of two updates, and the classes of the model's modules."""
    args = made_up.parse([*MODEL, *flags], 1)
    if not parallel_state.is_initialized():
        initialize_distributed(args)
    args = replaced(args, transformer_impl=implementation)  # after the checks, which ask for a GPU
    trainer = made_up.trainer(args)
    rows, _, _ = made_up.two_updates(args, trainer, made_up.rollout(args))
    kinds = {type(module) for chunk in trainer.model for module in chunk.modules()}
    return [(row["loss"], row["grad_norm"]) for row in rows], kinds


@pytest.mark.parametrize(
    "flags",
    [
        "--model-family llama",
        "--model-family qwen3 --qk-layernorm",
        f"--model-family qwen3_moe --qk-layernorm {EXPERTS}",
        f"--model-family qwen3_moe --qk-layernorm {EXPERTS} --moe-token-dispatcher-type allgather",
    ],
)
def test_updates_are_those_of_local(substitutes, flags):
    want, _ = updates("local", *flags.split())
    got, kinds = updates("transformer_engine", *flags.split())
    assert NormAndLinear in kinds and (GroupedExperts in kinds) == ("moe" in flags)
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5) and theirs[1] > 0
