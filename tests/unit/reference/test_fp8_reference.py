"""Reference and teacher with --fp8-format: their precision, and the 8-bit copies of weights that layers keep.

The layers are stand-ins for Transformer Engine's, which are absent on a CPU: each computes with a rounded copy of its
weight, and makes it again only in the first micro-batch of a pass, which megatron-core's schedule marks.
"""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from good_args import MODEL, RUN, validated
from megatron.core.tensor_parallel import ColumnParallelLinear
from slow import slow_except

import pretrain_grpo
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel import initialize
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.reference.model_args import reference_args, teacher_args
from megatron_grpo.reference.reference_model import ReferenceModel, SwappedReference
from megatron_grpo.utils.arguments import replaced
from tools import made_up

TINY = """--model-family qwen3 --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 8 --normalization RMSNorm --swiglu --qk-layernorm
    --disable-bias-linear --vocab-size 100 --max-position-embeddings 64""".split()


@pytest.fixture
def one_process(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(forward, "check_fp8_device", lambda args: None)
    yield
    initialize.destroy_rank_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def rounding_provider(args, **place):
    """Return the model with stand-ins for layers in FP8."""
    chunk = model_provider(args, **place)
    for layer in chunk.decoder.modules():
        if isinstance(layer, ColumnParallelLinear):
            _round(layer)
    return chunk


def _round(layer: ColumnParallelLinear) -> None:
    plain, layer.is_first_microbatch, layer._fp8_workspaces = layer.forward, True, {}

    def rounded(x, *_):
        if layer.is_first_microbatch or "weight" not in layer._fp8_workspaces:
            layer._fp8_workspaces["weight"] = layer.weight.to(torch.float8_e4m3fn).to(layer.weight.dtype)
        layer.is_first_microbatch = False
        return plain(x, layer._fp8_workspaces["weight"])

    layer.forward = rounded


def copies(model: forward.Model) -> int:
    return sum(len(getattr(module, "_fp8_workspaces", ())) for chunk in model for module in chunk.modules())


def log_probs(args: Namespace, model: forward.Model, batch) -> np.ndarray:
    return forward.log_probs(args, model, pretrain_grpo.forward_step, batch)


@pytest.mark.parametrize("separate", slow_except([False], [False, True]), ids=["the policy's layers", "a second model"])
def test_the_kl_of_equal_weights_is_zero(separate, one_process):
    """At the start; and after an update of the policy the reference is the earlier policy still."""
    args = made_up.parse(TINY, 1)
    args = replaced(args, fp8_format="e4m3")  # flags are refused on a CPU
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = forward.build_model(args, rounding_provider)
    made_up.fill(model, args)
    own = reference_args(args)
    assert own.fp8_format == "e4m3" and len(forward.micro_batches(args, made_up.rollout(args), np.arange(8))) > 1
    if separate:
        reference = ReferenceModel(own, rounding_provider)
        reference.update_from(args, model)
    else:
        reference = SwappedReference(own, model)
    batch = made_up.rollout(args)

    at_start = log_probs(args, model, batch)
    np.testing.assert_array_equal(reference.log_probs(batch, model, pretrain_grpo.forward_step), at_start)
    with torch.no_grad():
        for module in model[0].modules():
            if hasattr(module, "_fp8_workspaces"):
                module.weight.mul_(1.1)
    updated = log_probs(args, model, batch)
    assert np.nanmax(np.abs(updated - at_start)) > 1e-3
    np.testing.assert_array_equal(reference.log_probs(batch, model, pretrain_grpo.forward_step), at_start)
    np.testing.assert_array_equal(log_probs(args, model, batch), updated)
    assert copies(model) == 4
    if separate:
        assert copies(reference.model) == 0, "its copies would stay on the GPU between its passes"


def test_a_teacher_computes_in_bf16(tmp_path):
    """Also one whose sizes have no kernels in FP8: a hidden size of 40 is no multiple of 16."""
    base = MODEL + RUN + " --transformer-impl transformer_engine --bf16 --dry-run --hidden-size 128 --fp8-format e4m3"
    args = validated("--teacher-load-hf t --teacher-kl-coef 1", base=base)
    sizes = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2,
        "vocab_size": args.vocab_size, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "hidden_act": "silu", "tie_word_embeddings": True, **sizes,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = replaced(args, teacher_load_hf=[str(tmp_path)])
    (own,) = teacher_args(args)
    assert own.hidden_size == 40 and own.fp8_format is None and args.fp8_format == "e4m3"
