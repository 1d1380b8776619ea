"""Checkpoints of real models on several ranks, moved between layouts; checkpoint_worker.py has the checks."""

import re

import pytest

WORKER = "tests/distributed/checkpoint_worker.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_resume_restores_position_and_random_states(tmp_path, torchrun):
    out = torchrun(2, WORKER, "reshard", tmp_path).stdout
    for layout in ("TP2 again", "TP2 SP", "DP2"):
        assert out.count(f"{layout}: all tensors equal\n") == 2, out  # one line from each rank
    assert out.count("random states are seeded again") == 1
    out = torchrun(1, WORKER, "one_rank", tmp_path).stdout
    assert out.count("one rank: all tensors equal") == 1


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "cases", "done"),
    [
        (2, "few_chains", {"all tensors equal": 2}),
        pytest.param(2, "few_lora_chains", {"all tensors equal": 2}, marks=pytest.mark.slow),
        pytest.param(2, "resumed", {"resumed in": 1}, marks=pytest.mark.slow),
        pytest.param(4, "random_states", {"random states restored": 2}, marks=pytest.mark.slow),
        pytest.param(
            2, "hybrid_chains,resumed_hybrid", {"all tensors equal": 25, "resumed in": 1}, marks=pytest.mark.slow
        ),
        pytest.param(
            2, "all_chains,resumed_latent", {"all tensors equal": 38, "resumed in": 1}, marks=pytest.mark.slow
        ),
        pytest.param(
            4,
            "all_chains,random_states_of_experts",
            {"all tensors equal": 9, "random states restored": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_checkpoints_move_between_all_layouts(tmp_path, torchrun, ranks, cases, done):
    """Weights, float32 copies and moments stay the same bit for bit and are those of plain torch; runs go on alike."""
    out = torchrun(ranks, WORKER, cases, tmp_path).stdout
    for line, count in done.items():
        assert out.count(line) == count * ranks, out


@pytest.mark.distributed
def test_ranks_save_their_own_optimizer_state_without_a_copy(tmp_path, torchrun):
    assert torchrun(2, WORKER, "own_shards", tmp_path).stdout.count("own shards, each position once") == 2


@pytest.mark.slow
@pytest.mark.distributed
def test_bad_checkpoints_are_refused_on_all_ranks_alike(tmp_path, torchrun):
    out = torchrun(2, WORKER, "refuse", tmp_path).stdout
    for message in (
        r"is of another architecture: num_layers is 2 in the checkpoint and 1 in this run; "
        + r"hidden_size is 32 in the checkpoint and 64 in this run",
        r"vocab_size is 100 in the checkpoint and 99 in this run",
        r"is damaged: __1_0.distcp has 100 bytes instead of \d+",
        r"cannot be loaded: rank 1: the content of __1_0.distcp has changed since it was written",
        r"is damaged: __1_0.distcp is missing",
        r"holds weights only, no optimizer state to resume from: give the directory as --pretrained-checkpoint",
        r"was written with DistributedOptimizer, this run has FP32Optimizer: give the same --optimizer, --use-dist",
        r"does not hold decoder\.\S*[kq]_layernorm\S* \(and 1 more that this model has\)",
        r"checkpoint \S+ cannot be loaded: .*shape mismatch.*linear_fc1.weight",
        r"Not a directory",
        r"has the distributed optimizer's state as dp_reshardable, .* or reset Adam with --no-load-optim",
        r"--save shared is no longer this run's: the run of process 7 has taken it over",
        r"does not hold optimizer\.\S*mtp\S* \(and \d+ more of the optimizer's\): the run that wrote it did not train",
    ):
        lines = re.findall(rf"^refused on rank (\d): .*{message}", out, re.MULTILINE)
        assert sorted(lines) == ["0", "1"], f"{message}\n{out}"
