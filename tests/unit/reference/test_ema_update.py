"""EMA updates of the reference (--sync-ref-model) of a policy in 16 bits, against a loop of the formula in float64."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from slow import slow_except
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import pretrain_grpo
from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel import initialize
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.reference.model_args import reference_args, teacher_args
from megatron_grpo.reference.reference_model import ReferenceModel, SwappedReference
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights.stream import stream_hf
from tools import made_up

TINY = """--model-family qwen3 --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 8 --normalization RMSNorm --swiglu --qk-layernorm
    --disable-bias-linear --vocab-size 100 --max-position-embeddings 64 --beta 0.1""".split()
EXPERTS = """--model-family qwen3_moe --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32
    --moe-grouped-gemm""".split()
EMA = "--sync-ref-model --ref-model-sync-steps 2".split()
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the largest relative error of one rounding


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    initialize.destroy_rank_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def policy_and_reference(*flags: str, separate: bool):
    """Return arguments, policy and reference; the second is a model of its own or shares the policy's modules."""
    args = made_up.parse([*TINY, *flags], 1)
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = forward.build_model(args, model_provider)
    made_up.fill(model, args)
    return args, model, reference_of(args, model, separate)


def reference_of(args, model, separate: bool):
    own = reference_args(args)
    if not separate:
        return SwappedReference(own, model)
    reference = ReferenceModel(own, model_provider)
    reference.update_from(args, model)
    return reference


@torch.no_grad()
def train(model, generator: torch.Generator) -> None:
    """Change every weight by about a hundredth of the mean size."""
    for chunk in model:
        for tensor in chunk.parameters():
            step = torch.randn(tensor.shape, generator=generator) * tensor.float().abs().mean().cpu() * 1e-2
            tensor.copy_(tensor.float().cpu() + step)


def weights(args, model) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in stream_hf(model, args)}


def used(reference, policy) -> dict[str, torch.Tensor]:
    """Return the weights of the reference's pass."""
    with reference.ready(policy) as ready:
        return weights(ready.args, ready.model)


AVERAGES = [(0.6, ["--bf16"]), (0.1, ["--bf16", *EXPERTS]), (0.01, ["--bf16"]), (0.01, ["--fp16"])]


@pytest.mark.parametrize(
    "separate",
    [pytest.param(False, id="the policy's modules"), pytest.param(True, id="a second model", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("share", "flags"), slow_except([AVERAGES[1]], AVERAGES))
def test_the_average_is_that_of_the_formula(share, flags, separate):
    args, model, reference = policy_and_reference(*flags, *EMA, separate=separate)
    first = weights(args, model)
    expected, generator = {name: tensor.double() for name, tensor in first.items()}, torch.Generator().manual_seed(1)
    for _ in range(60):
        train(model, generator)
        reference.ema_update(args, model, share)
        for name, tensor in weights(args, model).items():
            expected[name] = share * tensor.double() + (1 - share) * expected[name]
    policy = weights(args, model)
    for name, tensor in used(reference, model).items():
        error = (tensor.double() - expected[name]).abs()
        limit = expected[name].abs() * HALF_ULP[tensor.dtype] + 2.0**-25  # fp16: half of its smallest number
        assert (error <= limit * (1 + 1e-4)).all(), name
        assert not torch.equal(tensor, first[name])
    assert all(torch.equal(tensor, policy[name]) for name, tensor in weights(args, model).items())


@pytest.mark.parametrize("separate", [False, True], ids=["the policy's modules", "a second model"])
def test_a_resumed_average_is_the_same_bit_for_bit(separate, tmp_path):
    args, model, reference = policy_and_reference("--bf16", *EXPERTS, *EMA, separate=separate)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        train(model, generator)
        reference.ema_update(args, model, 0.01)
    before = weights(args, model)
    reference.save(tmp_path / "reference", model)
    stored = FileSystemReader(tmp_path / "reference").read_metadata().state_dict_metadata.values()
    assert {item.properties.dtype for item in stored if isinstance(item, TensorStorageMetadata)} == {torch.float32}
    resumed = reference_of(args, model, separate)
    resumed.load(tmp_path / "reference", model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(args, model).items())
    for _ in range(3):  # the float32 values are the same, or these would differ
        train(model, generator)
        for one in (reference, resumed):
            one.ema_update(args, model, 0.01)
    ours, theirs = ([tensor for chunk in hosts(one) for tensor in chunk] for one in (resumed, reference))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert resumed.updated


def hosts(reference) -> list[list[torch.Tensor]]:
    if isinstance(reference, SwappedReference):
        return reference.weights.weights
    return [list(forward.weight_tensors(chunk)) for chunk in reference.model]


@pytest.mark.parametrize("separate", [False, True], ids=["the policy's modules", "a second model"])
def test_an_average_of_an_earlier_version_is_loaded(separate, tmp_path):
    """It was stored in bfloat16."""
    args, model, reference = policy_and_reference("--bf16", *EMA, separate=separate)
    expected = weights(args, model)
    checkpoint.save_weights(tmp_path / "reference", model)
    train(model, torch.Generator().manual_seed(1))
    reference.load(tmp_path / "reference", model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in used(reference, model).items())
    assert {tensor.dtype for chunk in hosts(reference) for tensor in chunk if tensor.is_floating_point()} == {
        torch.float32
    }


@pytest.mark.parametrize("separate", [False, True], ids=["the policy's modules", "a second model"])
def test_biases_of_experts_are_not_rounded(separate, tmp_path):
    """From the start, and after a resume, whose model is new; none has computed a forward pass."""
    flags = """--bf16 --model-family glm4_moe --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32
        --moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --untie-embeddings-and-output-weights --rotary-percent 0.5""".split()

    def biases(found) -> list[torch.Tensor]:
        return [tensor for name, tensor in found.items() if "bias" in name]

    args, model, reference = policy_and_reference(*flags, separate=separate)
    policy = dict(model[0].named_buffers())
    for name in [name for name in policy if name.endswith("expert_bias")]:
        policy[name].copy_(torch.tensor([8.01, -8.03, 8.05, 0.1]))
    reference.ema_update(args, model, 1.0)
    reference.save(tmp_path / "reference", model)
    fresh = forward.build_model(args, model_provider)
    made_up.fill(fresh, args)
    resumed = reference_of(args, fresh, separate)
    resumed.load(tmp_path / "reference", fresh)
    for found in (used(reference, model), used(resumed, fresh)):
        assert len(biases(found)) == 2
        assert all(tensor.tolist() == pytest.approx([8.01, -8.03, 8.05, 0.1], rel=1e-6) for tensor in biases(found))


def test_a_reference_that_is_not_averaged_stays_in_16_bits():
    args, model, reference = policy_and_reference("--bf16", separate=False)
    assert {tensor.dtype for tensor in hosts(reference)[0]} == {torch.bfloat16}
    batch = made_up.rollout(args)
    found = reference.log_probs(batch, model, pretrain_grpo.forward_step)
    np.testing.assert_array_equal(found, forward.log_probs(args, model, pretrain_grpo.forward_step, batch))


def test_a_teacher_beside_an_averaged_reference_stays_in_16_bits(tmp_path):
    args, _, _ = policy_and_reference("--bf16", *EMA, separate=False)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2,
        "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_size": 32,
        "hidden_act": "silu", "tie_word_embeddings": True, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = replaced(args, teacher_load_hf=[str(tmp_path)])
    teacher = ReferenceModel(*teacher_args(args), model_provider)
    assert {tensor.dtype for tensor in hosts(teacher)[0]} == {torch.bfloat16}
