"""The dry run's report: layout against megatron-core's rank generator, sizes against transformers' own model."""

import pytest

from megatron_grpo import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import torch
from megatron.core.parallel_state import RankGenerator
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from megatron_grpo.arguments import parse_args
from megatron_grpo.dry_run import GIB, dry_run_report, layers, memory, parameters, ranks
from megatron_grpo.validation import validate_args

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
}
FLAGS = """
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --kv-channels 32 --vocab-size 1024 --max-position-embeddings 2048 --normalization RMSNorm
    --swiglu --disable-bias-linear --transformer-impl local --dry-run --global-batch-size 64
"""
QWEN3_0_6B = """
    --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
    --vocab-size 151936 --max-position-embeddings 40960 --transformer-impl local --dry-run --global-batch-size 64
    --model-family qwen3
"""


def arguments(flags: str, world_size: int):
    args = parse_args(flags.split())
    validate_args(args, world_size)
    return args


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config, flags",
    [
        (Qwen3Config, "--model-family qwen3 --qk-layernorm"),
        (Qwen2Config, "--model-family qwen2 --add-qkv-bias"),
        (LlamaConfig, "--model-family llama"),
    ],
)
def test_parameters_are_those_of_transformers(config, flags, tied):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(**SHAPE, tie_word_embeddings=tied))
    flags = FLAGS + flags + ("" if tied else " --untie-embeddings-and-output-weights")
    assert parameters(arguments(flags, 1), 0) == sum(p.numel() for p in model.parameters())


def test_qwen3_0_6b_has_its_published_size():
    assert parameters(arguments(QWEN3_0_6B, 1), 0) == 596_049_920


def test_parallel_ranks_hold_the_whole_model_and_copies_of_norms_and_tied_embedding():
    args = arguments(QWEN3_0_6B + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", 8)
    held = 2 * sum(parameters(args, stage) for stage in range(4))
    norms = 28 * (2 * 1024 + 2 * 128) + 1024  # a second time, on the other tensor-parallel rank
    padding = 128 * 1024  # the vocabulary is padded to a multiple of 128 x 2
    assert held == 596_049_920 + norms + padding + (151936 * 1024 + padding)


@pytest.mark.parametrize("tp, pp, dp", [(1, 1, 4), (2, 2, 2), (4, 2, 1), (2, 1, 3)])
def test_coordinates_are_megatron_cores(tp, pp, dp):
    flags = f"--model-family llama --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    args = arguments(FLAGS + flags + f" --global-batch-size {24 * dp}", tp * pp * dp)
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    table = ranks(args, tp * pp * dp)
    assert [rank.rank for rank in table] == list(range(tp * pp * dp))
    for name in ("tp", "pp", "dp"):
        for group in generator.get_ranks(name):  # a group has its ranks in the order of their coordinate
            assert [getattr(table[rank], name) for rank in group] == list(range(len(group)))


def test_layers_and_engine_replicas():
    args = arguments(QWEN3_0_6B + "--pipeline-model-parallel-size 4 --vllm-tensor-parallel-size 2", 8)
    assert [layers(args, stage) for stage in range(4)] == [(0, 6), (7, 13), (14, 20), (21, 27)]
    assert [(rank.replica, rank.replica_tp) for rank in ranks(args, 8)[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    "flags, bytes_per_parameter",  # Megatron-LM's documentation of the distributed optimizer, d = 4
    [
        ("--bf16", 18),
        ("--bf16 --use-distributed-optimizer", 6 + 12 / 4),
        ("--bf16 --grad-reduce-in-bf16", 16),
        ("", 16),
        ("--use-distributed-optimizer", 8 + 8 / 4),
    ],
)
def test_training_state_has_the_documented_bytes_per_parameter(flags, bytes_per_parameter):
    args = arguments(QWEN3_0_6B + flags, 4)
    estimate = memory(args, 4, 0)
    state = estimate.parameters + estimate.gradients + estimate.optimizer
    assert state == pytest.approx(bytes_per_parameter * 596_049_920)


def test_activations_follow_tokens_layers_and_recomputation():
    def activations(flags, world_size=1, stage=0):
        return memory(arguments(QWEN3_0_6B + flags, world_size), world_size, stage).activations

    # 28 layers, 1024 tokens, 2 bytes: 4 x 1024 + 3 x 2048 + 4 x 1024 + 3 x 3072 numbers for each token.
    assert activations("--bf16") == 28 * 1024 * 2 * (4096 + 6144 + 4096 + 9216)
    assert activations("") == 2 * activations("--bf16")
    assert activations("--bf16 --micro-batch-size 4") == 4 * activations("--bf16")
    full = "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert activations(full) == 28 * 1024 * 2 * 1024
    # Stage 0 of 2 has two micro-batches on their way, through half of the layers.
    assert activations("--bf16 --pipeline-model-parallel-size 2", 2) == activations("--bf16")
    assert activations("--bf16 --pipeline-model-parallel-size 2", 2, 1) == activations("--bf16") / 2


def test_the_report_has_everything_and_abbreviates_large_worlds():
    report = dry_run_report(arguments(QWEN3_0_6B + "--bf16 --pipeline-model-parallel-size 2", 4), 4)
    assert "dp_size" in report and "4 / (1 x 2 x 1)" in report
    assert "embedding, layers 0-13" in report and "layers 14-27, final norm, output layer" in report
    assert f"engine: {596_049_920 * 2 / GIB:.2f} of weights" in report
    assert "reference policy" in report
    assert "reference policy" not in dry_run_report(arguments(QWEN3_0_6B + "--beta 0", 1), 1)

    many = dry_run_report(arguments(QWEN3_0_6B + "--global-batch-size 256", 256), 256)
    assert "192 more ranks" in many and "\n   255 " in many and len(many.splitlines()) < 100
