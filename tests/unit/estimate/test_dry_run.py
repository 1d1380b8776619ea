"""The dry run's report: counts against models that are built and published sizes, layouts against megatron-core's rank
generator, memory against arithmetic by hand.
"""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from bad_input_runs import launch
from dry_run_worker import COMMON, EP, EXPERTS, FAMILIES, PP, TINY, TP, UNTIED, arguments

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import torch
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.estimate.dry_run import GIB, dry_run_report, ranks
from megatron_grpo.estimate.memory import Plan
from megatron_grpo.estimate.throughput import ModelFlops
from megatron_grpo.training.update_flops import computed

REPO = Path(__file__).resolve().parents[3]
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
}
FLAGS = f"""
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --kv-channels 32 --vocab-size 1024 --max-position-embeddings 2048 --global-batch-size 64
    {COMMON}
"""
QWEN3_0_6B = f"""
    --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --qk-layernorm --vocab-size 151936 --max-position-embeddings 40960
    --global-batch-size 64 --model-family qwen3 {COMMON}
"""
LLAMA_8B = f"""
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --vocab-size 128256 --max-position-embeddings 131072
    --untie-embeddings-and-output-weights --global-batch-size 64 --model-family llama {COMMON}
"""


def plan(flags: str, world_size: int = 1) -> Plan:
    return Plan(arguments(flags, world_size))


# ---- counts


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
    here = plan(FLAGS + flags + ("" if tied else f" {UNTIED}"))
    assert here.parameters(0).total == here.whole_model() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("flags, published", [(QWEN3_0_6B, 596_049_920), (LLAMA_8B, 8_030_261_248)])
def test_published_sizes(flags, published):
    """Larger models: tests/unit/docs/test_examples.py."""
    assert plan(flags).whole_model() == plan(flags).parameters(0).total == published


def test_parallel_ranks_hold_the_whole_model_and_copies_of_norms_and_tied_embedding():
    here = plan(QWEN3_0_6B + f"{TP} 2 {PP} 4", 8)
    held = 2 * sum(here.parameters(stage).total for stage in range(4))
    norms = 28 * (2 * 1024 + 2 * 128) + 1024  # a second time, on the other tensor-parallel rank
    padding = 128 * 1024  # the vocabulary is padded to a multiple of 128 x 2
    assert held == 596_049_920 + norms + padding + (151936 * 1024 + padding)


# ---- ranks


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("tp, cp, pp, dp", [(1, 1, 1, 4), (2, 1, 2, 2), (4, 1, 2, 1), (2, 2, 2, 3)])
def test_coordinates_are_megatron_cores(tp, cp, pp, dp, order):
    world = tp * cp * pp * dp
    flags = f" --model-family llama {TP} {tp} {PP} {pp} --context-parallel-size {cp} --global-batch-size {24 * dp}"
    args = arguments(FLAGS + flags + " --use-tp-pp-dp-mapping" * order.endswith("pp-dp"), world)
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    check_groups(ranks(args, world), generator, ("tp", "cp", "pp", "dp"))


@pytest.mark.parametrize(
    "order, etp, ep", [("tp-cp-ep-dp-pp", 1, 4), ("tp-cp-ep-dp-pp", 2, 2), ("tp-cp-ep-pp-dp", 1, 2)]
)
def test_coordinates_of_experts_are_megatron_cores(order, etp, ep):
    """A stage of 2 x 4 ranks, two stages; experts divide them in their own way."""
    flags = f" {FAMILIES['moe']} {TP} 2 --sequence-parallel {PP} 2 {EP} {ep} --expert-tensor-parallel-size {etp}"
    args = arguments(TINY + flags + " --use-tp-pp-dp-mapping" * order.endswith("pp-dp"), 16)
    generator = RankGenerator(tp=etp, ep=ep, dp=16 // (2 * etp * ep), pp=2, cp=1, order=order)
    check_groups(ranks(args, 16), generator, ("ep", "pp"))


def check_groups(table, generator: RankGenerator, names) -> None:
    assert [rank.rank for rank in table] == list(range(len(table)))
    for name in names:
        for group in generator.get_ranks(name):  # a group has its ranks in the order of their coordinate
            assert [getattr(table[rank], name) for rank in group] == list(range(len(group)))


def test_engine_replicas_are_blocks_of_ranks():
    args = arguments(QWEN3_0_6B + "--pipeline-model-parallel-size 4 --vllm-tensor-parallel-size 2", 8)
    assert [(rank.replica, rank.replica_tp) for rank in ranks(args, 8)[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_ranks_of_engines_are_listed_behind_the_trainers():
    args = arguments(QWEN3_0_6B + "--rollout-ranks 4 --vllm-tensor-parallel-size 2 --global-batch-size 96", 12)
    assert args.data_parallel_size == 12  # without those of the engines
    report = dry_run_report(args, 12)
    assert re.search(r"^ +11 .*- +0-27$", report, re.M)
    assert re.findall(r"^ +(1[2-5]) +(\d) +(\d)  (.*)$", report, re.M) == [
        ("12", "1", "4", "0, its rank 0"),
        ("13", "1", "5", "0, its rank 1"),
        ("14", "1", "6", "1, its rank 0"),
        ("15", "1", "7", "1, its rank 1"),
    ]
    assert "on each of 4 GPUs of its own" in report and "use 0.9 of the GPU" in report


def test_replicas_of_the_training_model_are_its_layout():
    """Those that share experts, here two tensor-parallel groups, are one; pipeline stages have the same replicas."""
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --rollout-engine megatron"
    table = ranks(arguments(QWEN3_0_6B + flags, 8), 8)
    assert [(rank.replica, rank.replica_tp) for rank in table] == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
    flags = f"{EXPERTS} --model-family qwen3_moe --tensor-model-parallel-size 2 --sequence-parallel "
    flags += "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --rollout-engine megatron"
    table = ranks(arguments(QWEN3_0_6B + flags, 8), 8)
    assert [rank.replica for rank in table] == [0] * 4 + [1] * 4


def test_the_cache_of_the_training_model():
    """Keys and values of 28 layers, 8 heads of 128 channels on 2 ranks, 100 sequences of 64 + 64 tokens, in bf16."""
    flags = "--rollout-engine megatron --inference-max-requests 100 --max-prompt-length 64 --max-completion-length 64"
    args = arguments(QWEN3_0_6B + f"--bf16 --tensor-model-parallel-size 2 {flags}", 2)
    cache = 2 * 28 * (8 // 2) * 128 * 100 * 128 * 2
    assert Plan(args).cache(0) == cache
    assert f"engine: the training model, with a cache of {cache / GIB:.2f}" in dry_run_report(args, 2)


# ---- memory


@pytest.mark.parametrize(
    "flags, bytes_per_parameter",  # Megatron-LM's documentation of the distributed optimizer, d = 4
    [
        ("--bf16", 18),
        ("--bf16 --use-distributed-optimizer", 6 + 12 / 4),
        ("--bf16 --grad-reduce-in-bf16", 16),
        ("", 16),
        ("--use-distributed-optimizer", 8 + 8 / 4),
        ("--use-distributed-optimizer --context-parallel-size 2", 8 + 8 / 4),  # over DP x CP
    ],
)
def test_training_state_has_the_documented_bytes_per_parameter(flags, bytes_per_parameter):
    estimate = plan(QWEN3_0_6B + flags, 4).memory(0)
    state = estimate.parameters + estimate.gradients + estimate.optimizer
    assert state == pytest.approx(bytes_per_parameter * 596_049_920)


def test_experts_share_out_their_state_over_their_own_copies():
    """EP 4 on 8 ranks: two copies of each expert, eight of everything else; 12 bytes of state with bf16."""
    here = plan(f"{TINY} {FAMILIES['moe']} {EP} 4 --bf16", 8)
    experts = 4 * (8 // 4) * 3 * 32 * 16  # layers, experts on a rank, three matrices
    count = here.parameters(0)
    assert count.experts == experts
    assert here.memory(0).optimizer == 12 * (count.dense / 8 + experts / 2)


def test_frozen_prediction_layers_have_no_gradient_and_no_state():
    trained = plan(f"{TINY} {FAMILIES['mla']} --mtp-loss-scaling-factor 0.1")
    frozen = plan(f"{TINY} {FAMILIES['mla']}")
    left_out = frozen.parameters(0).frozen
    assert left_out > 0 and trained.parameters(0).total == frozen.parameters(0).total
    assert trained.memory(0).gradients - frozen.memory(0).gradients == 4 * left_out
    assert trained.memory(0).optimizer - frozen.memory(0).optimizer == 8 * left_out


@pytest.mark.parametrize(
    "flags, on_device, on_host",
    [
        ("--optimizer-cpu-offload --bf16", 4, 16),  # the float32 copy of the weights stays
        ("--optimizer-cpu-offload --bf16 --optimizer-offload-fraction 0.5", 8, 8),
        ("--optimizer-cpu-offload", 0, 16),
        ("--use-precision-aware-optimizer --bf16", 2 + 8, 0),  # the other 2 bytes are the parameter's
        ("--use-precision-aware-optimizer --bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", 2 + 2 + 2, 0),
        ("--use-precision-aware-optimizer --bf16 --main-params-dtype fp16", 2 + 8, 0),
        ("--use-precision-aware-optimizer --bf16 --optimizer-cpu-offload", 0, 16),
    ],
)
@pytest.mark.parametrize("layers", ["local", "transformer_engine"])  # Transformer Engine is absent here
def test_optimizer_state_in_other_types_and_places(layers, flags, on_device, on_host):
    flags = QWEN3_0_6B + f"--use-distributed-optimizer --transformer-impl {layers} --beta 0 {flags}"
    estimate = plan(flags).memory(0)
    assert estimate.optimizer == on_device * 596_049_920
    assert estimate.host == on_host * 596_049_920


def test_what_leaves_while_the_engine_generates():
    def stays(flags):
        memory = plan(QWEN3_0_6B + f"--bf16 --beta 0 {flags}").memory(0)
        return memory.stays / 596_049_920, memory.host / 596_049_920

    assert stays("") == (18, 0)
    assert stays("--offload-model") == (16, 2)
    assert stays("--offload-gradients") == (14, 0)  # they come back as zeros
    assert stays("--offload-optimizer") == (6, 12)
    assert stays("--offload-model --offload-gradients --offload-optimizer") == (0, 14)


FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"


def activations(flags, world_size=1, stage=0):
    return plan(QWEN3_0_6B + flags, world_size).memory(stage).activations


def test_activations_follow_tokens_layers_and_recomputation():
    # 1024 tokens, 2 bytes; a layer keeps 4 x 1024 + 3 x 2048 + 4 x 1024 + 3 x 3072 numbers for each token.
    layer = 1024 * 2 * (4096 + 6144 + 4096 + 9216)
    assert activations("--bf16") == 28 * layer
    assert activations("") == 2 * activations("--bf16")
    assert activations("--bf16 --micro-batch-size 4") == 4 * activations("--bf16")
    # Recomputed: the inputs of the layers, and the one that the backward pass is in.
    assert activations(f"--bf16 {FULL} uniform") == 28 * 1024 * 2 * 1024 + layer
    assert activations(f"--bf16 {FULL} block") == 1024 * 2 * 1024 + 27 * layer + layer
    mlp = 1024 * 2 * 3 * 3072
    selective = "--bf16 --recompute-granularity selective --recompute-modules mlp"
    assert activations(selective) == 28 * (layer - mlp) + mlp
    # Tensor parallelism splits what is inside attention and feed-forward, sequence parallelism the rest.
    assert activations(f"--bf16 {TP} 2", 2) == 28 * 1024 * 2 * (4096 + (6144 + 4096 + 9216) / 2)
    assert activations(f"--bf16 {TP} 2 --sequence-parallel", 2) == 28 * layer / 2
    # Context parallelism halves the tokens; `local` gathers keys and values.
    assert activations("--bf16 --context-parallel-size 2", 2) == 28 * (layer + 1024 * 2 * 2 * 1024) / 2


def test_norms_behind_attention_and_mlp_keep_their_inputs():
    shape = "--group-query-attention --num-query-groups 2 --num-layers 4 --rotary-percent 0.5 --rotary-interleaved"
    without, sandwiched = (
        plan(f"{TINY} {shape} --model-family {family}").memory(0).activations
        for family in ("glm", "glm4 --sandwich-norm")
    )
    assert sandwiched - without == 4 * 1024 * 4 * 2 * 32  # layers, tokens, bytes, two of the hidden size


def test_activations_of_micro_batches_in_flight():
    whole = activations("--bf16")
    # Stage 0 of 2 has two micro-batches on their way, through half of the layers.
    assert activations(f"--bf16 {PP} 2", 2) == whole
    assert activations(f"--bf16 {PP} 2", 2, 1) == whole / 2
    assert activations(f"--bf16 {PP} 2 --global-batch-size 8 --micro-batch-size 8", 2) == 8 * whole / 2  # one only
    # Interleaved: 2 (2 - 0 - 1) + (2 - 1) 2 + 1 = 5 quarters of the layers on stage 0, 3 on stage 1.
    virtual = f"--bf16 {PP} 2 --num-virtual-stages-per-pipeline-rank 2"
    assert activations(virtual, 2) == 5 * whole / 4
    assert activations(virtual, 2, 1) == 3 * whole / 4


@pytest.mark.parametrize("stages, virtual", [(4, 1), (2, 2), (4, 7)])
def test_micro_batches_in_flight_are_megatron_cores(stages, virtual, monkeypatch):
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    here = plan(QWEN3_0_6B + f"{PP} {stages} --num-virtual-stages-per-pipeline-rank {virtual}", stages)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: stages)
    size = virtual if virtual > 1 else None
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: size)
    for stage in range(stages):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        _, _, warmup, _ = get_pp_rank_microbatches(64, virtual, stages)
        assert here.in_flight(stage) == (warmup + 1) / virtual


def test_activations_of_experts_and_latent_attention():
    def layers(flags, world_size):
        return plan(TINY + flags, world_size).memory(0).activations / (1024 * 4)

    # 2 of 8 experts for each token: two copies of its 32 numbers, and 3 x 16 in each expert.
    attention = 4 * 32 + 3 * 32 + 4 * 16
    assert layers(FAMILIES["moe"], 1) == 4 * (attention + 2 * (32 + 3 * 16))
    assert layers(f"{FAMILIES['moe']} {EP} 2", 2) == 4 * (attention + 2 * (32 + 3 * 16))  # tokens go as many as come
    moe = f"{FAMILIES['moe']} {TP} 2 --sequence-parallel {EP} 2 --expert-tensor-parallel-size"
    assert layers(f"{moe} 1", 2) == 4 * (attention + 2 * (32 + 3 * 16)) / 2
    # Expert tensor parallelism splits the experts and gathers the tokens.
    assert layers(f"{moe} 2", 4) == 4 * (attention + 2 * (2 * 32 + 3 * 16)) / 2
    # 4 heads, keys and queries of 16, values of 8 padded to 16; latents of 16 (twice: norms), of 16 and 8 for rope.
    latent = 4 * 32 + 4 * (16 + 16 + (8 + 8) + 16 + 16 + 16 + 8) + 2 * 16 + 2 * 16 + 8
    sparse = 2 * (32 + 3 * 16) + 3 * 16  # with a shared expert
    assert layers(FAMILIES["mla"], 1) == 5 * latent + 2 * 3 * 48 + 3 * sparse


TE = "--bf16 --transformer-impl transformer_engine"
TENSORWISE = f"{TE} --fp8-format hybrid --fp8-recipe tensorwise"
QKV, PROJ, FC1, FC2 = 1024 * (16 + 2 * 8) * 128, 16 * 128 * 1024, 1024 * 2 * 3072, 3072 * 1024


def fp8(flags, world_size=1, stage=0, shape=QWEN3_0_6B):
    """Return (8-bit copies of weights, saved inputs that are smaller than in bf16), in bytes."""
    found = plan(f"{shape} {flags}", world_size).memory(stage)
    plain = plan(re.sub("--fp8-(format|recipe) [a-z0-9]+|--first-last-layers-bf16", "", f"{shape} {flags}"), world_size)
    bf16 = plain.memory(stage)
    assert (found.stays, found.host, found.head) == (bf16.stays, bf16.host, bf16.head)
    return found.parameters - bf16.parameters, bf16.activations - found.activations


def test_fp8_copies_weights_and_saves_inputs_in_a_byte():
    """A layer saves the inputs of QKV and of the MLP's two matrices in FP8, the output of attention in bf16."""
    weights, inputs = QKV + PROJ + FC1 + FC2, 1024 * (1024 + 1024 + 3072)
    assert fp8(TENSORWISE) == (28 * 2 * weights, 28 * inputs)
    report = dry_run_report(arguments(f"{QWEN3_0_6B} {TENSORWISE}", 1), 1)
    assert f"params: {28 * 2 * weights / GIB:.2f} are 8-bit copies for --fp8-format" in report
    scales = inputs * 4 / 128
    assert fp8(f"{TE} --fp8-format e4m3") == (28 * 2 * weights, 28 * (inputs - scales))
    assert fp8(f"{TENSORWISE} --first-last-layers-bf16") == (26 * 2 * weights, 26 * inputs)
    assert fp8(f"{TENSORWISE} --lora-rank 8") == (28 * 2 * weights, 0)  # adapters save them in bf16
    # Two micro-batches are in flight on the first stage. Sequence parallelism splits the inputs, too.
    assert fp8(f"{TENSORWISE} {PP} 2", 2) == (14 * 2 * weights, 2 * 14 * inputs)
    assert fp8(f"{TENSORWISE} {TP} 2 --sequence-parallel", 2) == (28 * weights, 28 * inputs / 2)
    # What is recomputed is stored for one layer only.
    assert fp8(f"{TENSORWISE} {FULL} uniform") == (28 * 2 * weights, inputs)


def test_fp8_copies_that_are_not_kept_between_micro_batches():
    """The backward pass needs them: each micro-batch in flight has its own, a recomputed layer only while it runs."""
    weights, inputs = QKV + PROJ + FC1 + FC2, 1024 * (1024 + 1024 + 3072)
    flags = f"{TENSORWISE} --disable-parameter-transpose-cache"
    assert fp8(flags) == (0, 28 * (inputs - 2 * weights))
    assert fp8(f"{flags} {PP} 2", 2) == (0, 2 * 14 * (inputs - 2 * weights))
    assert fp8(f"{flags} {FULL} uniform") == (0, inputs - 2 * weights)


def test_fp8_of_experts_and_latent_attention():
    """1024 tokens, two experts of 16 for each; the router, which is not quantized, saves the second norm's output."""
    attention, experts = 32 * (32 + 2 * 16) + 32 * 32, 4 * 3 * 32 * 16
    moe = f"{FAMILIES['moe']} {EP} 2 {TENSORWISE}"
    assert fp8(moe, 2, shape=TINY) == (4 * 2 * (attention + experts), 4 * 1024 * (32 + 2 * (32 + 16)))
    # Two projections save a copy of the first norm's output each: as many bytes as one in bf16.
    latent = 32 * 16 + 16 * 4 * (8 + 16) + 32 * (16 + 16) + 16 * 4 * (8 + 8) + 4 * 8 * 32
    shared, dense = 3 * 32 * 16, 3 * 32 * 48
    weights = 5 * latent + 2 * dense + 3 * (8 * 3 * 32 * 16 + shared)
    inputs = 5 * (16 + 16) + 2 * (32 + 48) + 3 * (2 * (32 + 16) + 16)
    mla = f"{FAMILIES['mla']} --qk-pos-emb-head-dim 16 {TENSORWISE}"
    assert fp8(mla, shape=TINY) == (2 * weights, 1024 * inputs)
    # A trained prediction layer is as the last one, and has a projection of two inputs of 32.
    trained = fp8(f"{mla} --mtp-loss-scaling-factor 0.1", shape=TINY)[0]
    assert trained == 2 * (weights + latent + 8 * 3 * 32 * 16 + shared + 2 * 32 * 32)


@pytest.mark.parametrize(
    "flags, measured",
    [("", 102.5), ("--fp8-format e4m3", 105.4), ("--fp8-format hybrid --fp8-recipe tensorwise", 105.2)],
)
def test_the_peak_of_a_measured_update(flags, measured):
    """Qwen3-4B's shape on one H200: docs/performance/updates.md, "Training in FP8"."""
    shape = f"""
        --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
        --num-query-groups 8 --kv-channels 128 --qk-layernorm --vocab-size 151936 --max-position-embeddings 40960
        --global-batch-size 256 --model-family qwen3 --max-tokens-per-microbatch 8192 --use-distributed-optimizer
        --lr 1e-3 --train-iters 1 {COMMON} {TE}
    """
    found = plan(f"{shape} {flags}").memory(0)
    assert found.total / GIB == pytest.approx(measured, rel=0.01)
    # The differences are smaller than the error of the whole: FP8 needs 2.9 and 2.7 GiB more.
    assert (found.total - plan(shape).memory(0).total) / GIB == pytest.approx(measured - 102.5, abs=0.2)


# ---- the report


def test_the_report_has_everything_and_abbreviates_large_worlds():
    report = dry_run_report(arguments(QWEN3_0_6B + f"--bf16 {PP} 2", 4), 4)
    assert "dp_size" in report and "4 / (1 x 2 x 1)" in report
    assert "embedding, layers 0-13" in report and "layers 14-27, final norm, output layer" in report
    assert f"engine: {596_049_920 * 2 / GIB:.2f} of weights on each rank (--vllm-tensor-parallel-size 1)" in report
    assert "reference model" in report
    assert "reference model" not in dry_run_report(arguments(QWEN3_0_6B + "--beta 0", 1), 1)

    many = dry_run_report(arguments(QWEN3_0_6B + "--global-batch-size 256", 256), 256)
    assert "192 more ranks" in many and "\n   255 " in many and len(many.splitlines()) < 100


def test_a_thousand_ranks_take_seconds(capfd):
    """The whole program; the last rank is the last of DP 32 in the last stage."""
    start = time.monotonic()
    assert launch("pretrain_grpo.py", [*QWEN3_0_6B.split(), *f"{TP} 8 {PP} 4".split()], world_size=1024) == 0
    assert re.search(r"^ +1023 +7 +0 +0 +31 +3 ", capfd.readouterr().out, re.M)
    assert time.monotonic() - start < 120  # 4 on a machine that does nothing else


def test_an_engine_that_sleeps_needs_room_only_beside_what_stays_of_the_trainer():
    def needed(flags: str) -> float:
        report = dry_run_report(arguments(QWEN3_0_6B + flags, 1), 1)
        return float(re.search(r"a GPU must have ([\d.]+)", report)[1])

    args = arguments(QWEN3_0_6B, 1)
    memory, share = Plan(args).memory(0), args.vllm_gpu_memory_utilization
    total = memory.total / 2**30
    assert needed("") == pytest.approx(total / (1 - share), abs=0.06)
    offload = "--offload-model --offload-optimizer --offload-gradients"
    assert needed(f"{offload} --sleep-level 2") == pytest.approx(total, abs=0.06)


@pytest.mark.parametrize(
    "servers",
    [
        "--vllm-mode server",
        "--vllm-mode server --vllm-server-base-url http://a:1 http://b:1",
        "--rollout-engine sglang --sglang-server-base-url http://a:1",
    ],
)
def test_a_run_with_servers_is_estimated_without_gpus_and_shared_directories(servers):
    report = dry_run_report(arguments(f"{QWEN3_0_6B} {servers}", 4), 4)
    assert "engine: servers, not counted here" in report and "servers" in report.split("engine replica")[1]


def test_an_engine_larger_than_the_trainer_names_the_flag_that_divides_it():
    model = f"{LLAMA_8B} --bf16 {TP} 8 --sequence-parallel --use-distributed-optimizer"
    report = dry_run_report(arguments(model, 16), 16)
    weights = (8_030_261_248 + 2 * 768 * 4096) * 2 / GIB  # Llama 3.1 8B, its vocabulary padded for TP 8
    assert f"engine: {weights:.2f} of weights on each rank (--vllm-tensor-parallel-size 1)" in report
    cure = next(line for line in report.splitlines() if "divides them" in line)
    sizes = dict(re.findall(r"(\d+): ([\d.]+)", cure))
    assert list(sizes) == ["2", "4", "8", "16"]  # ranks and heads allow
    assert float(sizes["8"]) == pytest.approx(weights / 8, rel=0.01)
    assert "divides them" not in dry_run_report(arguments(f"{model} --vllm-tensor-parallel-size 8", 16), 16)


@pytest.fixture
def llama_1b(tmp_path):
    """The sizes of Llama 3.2 1B, in a directory that has no weights."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("placed", ["", "--rollout-ranks 2"])
def test_a_draft_model_is_a_part_of_the_engine(llama_1b, placed):
    drafts = json.dumps({"model": str(llama_1b), "num_speculative_tokens": 4}, separators=(",", ":"))
    flags = f"{LLAMA_8B} --bf16 --vllm-speculative-config {drafts} {placed}"
    report = dry_run_report(arguments(flags, 4), 2 if placed else 4)
    draft, policy = 1_235_814_400 * 2 / GIB, 8_030_261_248 * 2 / GIB
    assert re.search(rf"^engine: {policy + draft:.2f} of weights on each", report, re.M)
    # A token's keys and values: 32 layers x 8 heads x 128 channels of the policy, 16 x 8 x 64 of the draft model.
    assert f"\ndrafts (draft_model): {draft:.2f} of the engine's weights, and 20% of its cache\n" in report


def test_a_draft_model_of_an_unknown_family_is_not_counted(llama_1b):
    config = json.loads((llama_1b / "config.json").read_text())
    (llama_1b / "config.json").write_text(json.dumps(config | {"model_type": "other", "architectures": ["Other"]}))
    drafts = json.dumps({"model": str(llama_1b), "num_speculative_tokens": 4}, separators=(",", ":"))
    report = dry_run_report(arguments(f"{LLAMA_8B} --bf16 --vllm-speculative-config {drafts}", 1), 1)
    assert "drafts: not counted: " in report and f"engine: {8_030_261_248 * 2 / GIB:.2f} of weights" in report


def test_offloads_do_not_lower_the_peak_of_training():
    report = dry_run_report(arguments(f"{QWEN3_0_6B} --bf16 --offload-model --offload-optimizer", 1), 1)
    peak = plan(f"{QWEN3_0_6B} --bf16").memory(0).total / GIB
    line = (
        f"--offload-model, --offload-optimizer: only while the engine generates; the peak of training stays {peak:.2f}"
    )
    assert line in report.splitlines()


def test_offloads_move_what_does_not_fit_beside_a_colocated_engine():
    """In bf16 a parameter has 2 bytes of weights, 4 of gradients, 12 of the optimizer; the engine has half a GPU."""
    flags = f"{QWEN3_0_6B} --bf16 --offload-model --offload-optimizer"
    count = plan(f"{QWEN3_0_6B} --bf16").parameters(0).total

    def size(flags: str) -> float | None:
        found = re.search(r"Nothing is copied on a GPU of ([\d.]+) ", dry_run_report(arguments(flags, 1), 1))
        return found and float(found[1])

    for more, kept in (("", 18), (" --offload-gradients", 14)):
        half = f"{flags}{more} --sleep-level 2 --vllm-gpu-memory-utilization 0.5"
        assert size(half) == pytest.approx(kept * count / GIB / (1 - 0.5 - 0.06), abs=0.06)
    assert size(half.replace("--sleep-level 2", "")) is None


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--recompute-granularity full", "recomputes with --recompute-method uniform --recompute-num-layers 1"),
        ("--recompute-activations", "recomputes core_attn alone, and the flash kernels store no scores anyway"),
        (f"{FULL} uniform", None),
        ("--recompute-granularity selective --recompute-modules mlp", None),
    ],
)
def test_defaults_of_recomputation_are_named(flags, line):
    report = dry_run_report(arguments(QWEN3_0_6B + flags, 1), 1)
    assert (line in report) if line else "--recompute-granularity" not in report


def test_shared_prompts_of_a_group():
    """Eight completions of 10 tokens after a prompt of 40: in pairs in packs of 70, its last token twice in each."""
    sizes = "--max-prompt-length 40 --max-completion-length 10 --num-generations 8 --max-tokens-per-microbatch 70"
    sizes = f"{sizes} --model-family llama"
    args = arguments(f"{FLAGS} {sizes} --share-prompts", 1)
    rng = np.random.default_rng(0)
    batch = RolloutBatch.from_completions(
        [rng.integers(3, 1000, 40).tolist()] * 8,
        [rng.permutation(1000)[:10].tolist() for _ in range(8)],
        log_probs=[None] * 8,
        weight_version=0,
        group_ids=[0] * 8,
        row_ids=[0] * 8,
        sample_ids=list(range(8)),
        finish_reasons=[FinishReason.STOP] * 8,
    )
    packs = [pack_completions(batch, [first, first + 1], share_prompts=True) for first in range(0, 8, 2)]
    tokens, tflop = computed(ModelFlops(args), packs)
    assert tokens == 4 * 39 + 8 * 11
    _, whole = computed(ModelFlops(args), [pack_completions(batch, range(8))])
    assert f"computes 244 of 400 tokens and {tflop / whole:.0%} of the FLOPs" in dry_run_report(args, 1)
    assert "shared prompts" not in dry_run_report(arguments(f"{FLAGS} {sizes} --no-share-prompts", 1), 1)
