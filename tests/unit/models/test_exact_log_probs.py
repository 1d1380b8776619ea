"""--exact-log-probs on a CPU: its kernels in Triton's interpreter, its layers and gradients, and what it refuses."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from good_args import MODEL, RUN, validated
from interpreted import last_line
from planted import FIRST
from ranks import real_torchrun
from slow import slow_except

from megatron_grpo.algorithm.importance_sampling import mismatch, mismatch_metrics
from megatron_grpo.algorithm.policy_term import drop_overlong, update_statistics
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.sampling_params import constraint_refused
from megatron_grpo.models.exact.layers import rotation_of
from megatron_grpo.rollout.exact_log_probs import SUPPORTED, check_equal, check_exact_log_probs
from megatron_grpo.training.recorded_run import changed_flags, run_flags
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from tools import check_engine

HERE = Path(__file__).parent
ROUNDING = 1e-5  # of float32


@pytest.fixture(scope="module")
def answers() -> dict:
    return json.loads(last_line(HERE / "exact_kernels_worker.py"))


def test_kernels_compute_what_float64_computes(answers):
    gaps = {name: answer for name, answer in answers.items() if not isinstance(answer, bool)}
    assert len(gaps) == 21
    assert all(gap < 1e-4 for gap in gaps.values()), gaps  # `max` passes over NaN


def test_equal_bit_for_bit(answers):
    """Decode steps and parts of prompts are prompts; the norm of a sum in one launch is that of the rounded sum."""
    equal = {name: answer for name, answer in answers.items() if isinstance(answer, bool)}
    assert {"decode steps", "part of a prompt", "norm of a sum"} < equal.keys()
    assert all(equal.values()), equal


SHARED = "--model-family qwen2 --add-qkv-bias --max-tokens-per-microbatch 90 --gradient-accumulation-fusion"
TWO_RANKS = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 1"
LAYERS = {
    "packs": "--model-family qwen3 --qk-layernorm --micro-batch-size 4",
    "shared prompts": SHARED,
    "recomputed": """--model-family llama --micro-batch-size 4 --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1""",
    "untied": "--model-family llama --untie-embeddings-and-output-weights --micro-batch-size 2",
    "two ranks": f"{SHARED} {TWO_RANKS}",
    "sequence parallelism": f"{SHARED} {TWO_RANKS} --sequence-parallel",
    "norms of heads on two ranks": f"--model-family qwen3 --qk-layernorm --micro-batch-size 4 {TWO_RANKS}",
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", slow_except(["two ranks"], LAYERS))
def test_layers_and_gradients_are_those_of_the_local_layers(name):
    """Processes of their own: forked ranks have imported Triton without its interpreter."""
    flags = LAYERS[name]
    command = [str(HERE / "exact_worker.py"), *flags.split()]
    ranks = 2 if TWO_RANKS in flags else 1
    status, output = real_torchrun(ranks, command, os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, 600)
    assert status == 0, output
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(found) == ranks
    first = FIRST if "--qk-layernorm" in flags else FIRST | {"head_norm": None}
    for of_rank in found:
        assert of_rank["log_probs"] < ROUNDING
        assert len(of_rank["gradients"]) > 10
        assert all(gap < ROUNDING for gap in of_rank["gradients"].values()), of_rank
        assert of_rank.get("first", first) == first
    assert ("first" in found[0]) == ("--sequence-parallel" not in flags)


SHAPE = f"{MODEL} {RUN} --bf16 --kv-channels 64 --exact-log-probs --dry-run"


def test_a_supported_run():
    assert validated("", base=SHAPE).exact_log_probs
    assert validated("--attention-backend flash --pipeline-model-parallel-size 2 --beta 0.1", base=SHAPE)
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel --vllm-tensor-parallel-size 2"
    assert validated(f"{tensor} --pipeline-model-parallel-size 2", base=SHAPE)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--tensor-model-parallel-size 2", "give 2 to both"),
        ("--vllm-tensor-parallel-size 2", "give 1 to both"),
        ("--tensor-model-parallel-size 4 --vllm-tensor-parallel-size 4", "give 1 or 2"),
        (
            "--tensor-model-parallel-size 2 --vllm-tensor-parallel-size 2 --num-query-groups 1",
            "share the heads of a key",
        ),
        ("--context-parallel-size 2", "keys of other ranks"),
        ("--kv-channels 16", "64 or 128 channels"),
        ("--lora-rank 4", "adapter"),
        ("--vllm-quantization fp8", "8 bits"),
        ("--vllm-dtype float32", "bfloat16"),
        ("--vllm-mode server --vllm-server-base-url http://host:8000", "a server builds"),
        ("--rollout-engine megatron", "only vLLM's layers"),
        ("--cuda-graphs", "recorded"),
        ("--window-size 8,0", "sliding windows"),
        ("--mismatch-sample-rate 0.5", "compared"),
        ("--loss-type dpo", "compare no log-probabilities"),
        ('--vllm-engine-kwargs {"block_size":48}', "must be 16, 32, 64"),
        ("--num-attention-heads 128 --num-query-groups 1", "takes 64"),
        ("--top-k 5", "truncated"),
        ("--train-only ledger", "not compared"),
        ("--model-family qwen3_moe --num-experts 8", "supported are qwen2, qwen3, llama"),
        ('--vllm-engine-kwargs {"compilation_config":3}', "may choose other kernels"),
    ],
)
def test_what_is_refused(flags, word):
    with pytest.raises(GrpoError, match=f"--exact-log-probs.*{word}"):
        validated(flags, base=SHAPE)


def test_each_row_of_the_rules_refuses_other_values():
    """Every attribute of the table exists, has a supported value in a plain run, and refuses another one."""
    args = validated("", base=SHAPE)
    for dests, values, _ in SUPPORTED:
        for dest in dests.split():
            assert getattr(args, dest) in values, dest
            with pytest.raises(GrpoError, match="--exact-log-probs with"):
                check_exact_log_probs(replaced(args, **{dest: "another value"}))


def test_a_row_may_not_be_constrained():
    """The engine returns no log-probability of such a completion, and nothing would be compared."""
    assert "--exact-log-probs" in constraint_refused(validated("", base=SHAPE))


def test_completions_of_another_tensor_parallel_size_are_not_used():
    """The trainer's log-probabilities of those in a ledger would differ."""
    two = "--tensor-model-parallel-size 2 --vllm-tensor-parallel-size 2"
    one, other = run_flags(validated("", base=SHAPE)), run_flags(validated(two, base=SHAPE))
    assert changed_flags(one, other) == ["--tensor-model-parallel-size was not recorded and is 2"]
    assert changed_flags(other, one) == ["--tensor-model-parallel-size was 2 and is not recorded"]
    assert "tensor_model_parallel_size" not in one  # as in ledgers of earlier versions, which have one rank
    plain = SHAPE.replace("--exact-log-probs", "")
    assert not changed_flags(run_flags(validated("", base=plain)), run_flags(validated(two, base=plain)))


def test_a_cpu_is_refused():
    with pytest.raises(GrpoError, match=r"--exact-log-probs .* needs a GPU"):
        validated("", base=SHAPE.replace("--dry-run", ""))


def test_a_difference_ends_the_run():
    check_equal(3, {"mismatch/max_abs": 0.0, "mismatch/mean_abs": 0.0})
    with pytest.raises(GrpoError, match=r"in update 3 .* up to 0\.25 nats .*GPUs of two kinds"):
        check_equal(3, {"mismatch/max_abs": 0.25, "mismatch/mean_abs": 1e-3})
    with pytest.raises(GrpoError, match="in update 4"):
        check_equal(4, {"mismatch/max_abs": float("nan")})


def test_an_update_without_a_token_in_the_loss_goes_on():
    """--overlong-filter masks all completions of an update if all are cut; a token without a number is refused."""
    args, batch = validated("--overlong-filter", base=SHAPE), cut_completions()
    of_update = np.arange(batch.num_completions)
    with pytest.raises(GrpoError, match=r"--exact-log-probs needs .* but 1 of 3 are missing"):
        update_statistics(args, batch, of_update, 4, scores=None)
    update_statistics(args, drop_overlong(batch), of_update, 4, scores=None)
    none = torch.zeros(0)
    check_equal(5, mismatch_metrics(mismatch(none, none)))


def test_the_tool_compares_the_tokens_that_the_engine_sampled():
    nan, one_bit = np.nan, np.nextafter(np.float32(-2), np.float32(0))
    engine = np.float32([nan, nan, -2, 0])
    same, prompt, other, none = (
        np.float32([nan, *row]) for row in ([1, -2, 0], [3, -2, -0.0], [1, one_bit, 0], [1, -2, nan])
    )
    differ = [bool(check_engine.gaps(row, engine).any()) for row in (same, prompt, other, none)]
    assert differ == [False, False, True, True]


def cut_completions() -> RolloutBatch:
    """Return two completions that were cut at the length limit; the engine returned no number for one token."""
    log_probs = [[-1.0, float("nan")], [-1.0]]
    reasons = [FinishReason.LENGTH] * 2
    return RolloutBatch.from_completions(
        [[5], [6]], [[1, 2], [4]], log_probs, [[4, 4], [4]], [0, 0], [0, 0], [0, 1], reasons
    )


def test_layers_share_the_table_of_their_rotations():
    """Each virtual pipeline stage asks for one; vLLM's, made in inference mode, is of no use to autograd."""
    args, cpu = validated("", base=SHAPE), torch.device("cpu")
    table = rotation_of(args)(cpu)
    assert rotation_of(args)(cpu) is table
    assert rotation_of(replaced(args, rotary_base=500))(cpu) is not table
    with torch.inference_mode():
        assert rotation_of(args)(cpu).is_inference()
    assert not table.is_inference()


def test_another_attention_than_ours_is_refused():
    """The options name the backend that ours replaces: without a name vLLM chooses FlashInfer on Blackwell."""
    from megatron_grpo.rollout.vllm import exact

    assert exact.options()["attention_config"] == {"backend": "FLASH_ATTN"}
    exact.check(engine_with(object.__new__(exact.ExactAttention)))
    other = type("FlashInferImpl", (), {})()
    with pytest.raises(GrpoError, match=r"layers without exact kernels, \['FlashInferImpl'\]: leave the flag out"):
        exact.check(engine_with(other))


def engine_with(attention: object) -> SimpleNamespace:
    """Return an engine whose model has the layers that `exact.check` needs, and this attention."""
    names = "ExactNorm", "ExactSiluAndMul", "ExactLogits", "ExactLinear", "ExactRotation"
    model = SimpleNamespace(modules=lambda: [type(name, (), {})() for name in names])
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))
    core = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    layers = {"model.layers.0.self_attn.attn": SimpleNamespace(impl=attention), "a layer without attention": object()}
    config = SimpleNamespace(static_forward_context=layers)
    return SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core),
        vllm_config=SimpleNamespace(use_v2_model_runner=True, compilation_config=config),
    )
