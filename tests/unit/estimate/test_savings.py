"""Flags that lower the memory of training, against arithmetic by hand."""

import pytest
from dry_run_worker import arguments
from slow import slow_except
from test_dry_run import GIB, LLAMA_8B, QWEN3_0_6B

from megatron_grpo.estimate.dry_run import fit_line
from megatron_grpo.estimate.memory import Plan, gpu_bytes
from megatron_grpo.estimate.savings import fitting, in_words, savings
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.utils.arguments import replaced

LONG = "--max-prompt-length 1024 --max-completion-length 3072"


def run_of(flags: str, world_size: int):
    """The argument `changed` of `fitting`."""
    given = parse_args(flags.split())
    return lambda changes: resolve_args(
        replaced(given, **changes, explicit=given.explicit | changes.keys()), world_size
    )


def by_flag(flags: str, world_size: int = 1) -> dict[str, float]:
    found = savings(arguments(f"{LLAMA_8B} --bf16 {LONG} {flags}", world_size), 0)
    assert [size for _, size in found] == sorted((size for _, size in found), reverse=True)
    return dict(found)


def test_the_distributed_optimizer_divides_the_state():
    found = by_flag("--micro-batch-size 1", world_size=4)
    # float32 copy and two moments: 12 bytes for each of 8.03e9 parameters, of which a quarter remains
    assert found["--use-distributed-optimizer"] == pytest.approx(8.03e9 * 12 * 3 / 4 / GIB, rel=0.01)


def test_a_smaller_micro_batch_is_offered_down_to_one_completion():
    assert "--max-tokens-per-microbatch 8192" in by_flag("--max-tokens-per-microbatch 16384")
    assert "--max-tokens-per-microbatch 4096" in by_flag("--max-tokens-per-microbatch 6000")
    assert not [flag for flag in by_flag("--max-tokens-per-microbatch 4096") if "max-tokens" in flag]
    assert "--micro-batch-size 2" in by_flag("--micro-batch-size 4")


def test_flags_in_use_are_not_offered():
    used = (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-distributed-optimizer"
    )
    found = by_flag(f"--micro-batch-size 1 {used}", world_size=2)
    assert not [flag for flag in found if flag.startswith(("--recompute", "--use-distributed-optimizer"))]
    assert "--tensor-model-parallel-size 2 --sequence-parallel" in found


MIXTURE = """--model-family qwen3_moe --qk-layernorm --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 1024
    --moe-grouped-gemm --moe-router-dtype fp32 --bf16 --max-tokens-per-microbatch 16384"""
EXPERTS = LLAMA_8B.replace("--model-family llama", MIXTURE)


def test_experts_stay_as_they_are_divided():
    # with TP 4 and ETP 4, experts over 8 ranks would need 32
    found = savings(arguments(f"{EXPERTS} --expert-model-parallel-size 8 {LONG}", 8), 0)
    assert [flags for flags, _ in found if "--tensor-model" in flags] == [
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    ]


def test_a_loss_over_micro_batches_keeps_their_size():
    assert [flag for flag in by_flag("--micro-batch-size 4") if "micro-batch" in flag]
    assert not [flag for flag in by_flag("--micro-batch-size 4 --loss-type bnpo") if "micro-batch" in flag]


FITS = [  # the first three by default
    (f"{LLAMA_8B} --bf16 --micro-batch-size 8 --num-generations 8", 2),
    (f"{EXPERTS} --expert-model-parallel-size 8", 8),
    (f"{QWEN3_0_6B} --bf16 --micro-batch-size 8 --vllm-gpu-memory-utilization 0.6 --sleep-level 1", 1),
    (f"{LLAMA_8B} --bf16 --max-tokens-per-microbatch 16384", 8),
    (f"{LLAMA_8B} --bf16 --micro-batch-size 2 --rollout-engine megatron", 4),
    (f"{LLAMA_8B} --bf16 --max-tokens-per-microbatch 8192 --rollout-ranks 2", 8),
    (f"{LLAMA_8B} --bf16 --micro-batch-size 4 --recompute-granularity selective --recompute-modules mlp", 2),
    (f"{LLAMA_8B} --bf16 --max-tokens-per-microbatch 16384 --cuda-graphs", 2),
    (f"{LLAMA_8B} --bf16 --max-tokens-per-microbatch 16384 --lora-rank 8 --rollout-ranks 2", 8),
    (f"{QWEN3_0_6B} --bf16 --max-tokens-per-microbatch 16384", 1),
]


@pytest.mark.parametrize("gpu", slow_except([80], [20, 40, 60, 80, 141]))  # by default one size
@pytest.mark.parametrize(("flags", "ranks"), slow_except(FITS[:3], FITS))
def test_flags_that_fit(flags, ranks, gpu):
    """The flags are allowed together, and lead to the memory that is said; without any one of them it is more."""
    trainers = ranks - 2 * ("--rollout-ranks" in flags)
    changed = run_of(f"{flags} {LONG} --dry-run", trainers)
    before = changed({})
    found, needed = fitting(changed, gpu * GIB)

    def with_flags(chosen: dict[str, str]) -> float:
        return gpu_bytes(Plan(arguments(f"{flags} {LONG} {in_words(chosen)} --dry-run", trainers)))

    assert with_flags(found) == needed
    if gpu_bytes(Plan(before)) <= gpu * GIB:
        assert found == {}
    else:
        for left_out in [flag for flag in found if flag.startswith(("--sleep", "--max-tokens", "--micro"))]:
            rest = {flag: value for flag, value in found.items() if flag != left_out}
            if left_out != "--sleep-level" or not any("--offload" in flag for flag in rest):
                assert with_flags(rest) > max(needed, gpu * GIB)


def test_the_report_ends_with_them():
    flags = f"{QWEN3_0_6B} --bf16 --max-tokens-per-microbatch 65536 --dry-run"
    last = fit_line(run_of(flags, 1), 24.0)
    assert last.startswith("it does not fit a GPU of 24, where 10 should stay for what is not counted: add --")
    words = last.partition(": add ")[2].rpartition(" (")[0]
    assert fit_line(run_of(f"{flags} {words}", 1), 24.0).startswith("it fits a GPU of 24, with ")
    assert fit_line(run_of(flags, 1), 8.0).startswith("a GPU of 8 has no room for a model: 10 should stay for what")
    assert "--lora-rank" in fit_line(run_of(f"{LLAMA_8B} --bf16 --dry-run", 1), 24.0)


def test_a_gpu_of_an_engine_has_room_for_its_weights():
    # bf16 weights of 8.03e9 parameters at 0.9 of the memory; the trainer of an adapter needs less of a GPU
    changed = run_of(f"{LLAMA_8B} --bf16 --micro-batch-size 1 --lora-rank 8 --rollout-ranks 2 --dry-run {LONG}", 4)
    assert gpu_bytes(Plan(changed({}))) >= 8.03e9 * 2 / 0.9
    assert fit_line(changed, 16.0).startswith("it does not fit")
