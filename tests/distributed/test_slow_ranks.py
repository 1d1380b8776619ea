"""One rank needs longer than --distributed-timeout-minutes for each phase in turn: the run goes on."""

import json
from pathlib import Path

import pytest
from ranks import run_torchrun
from run_files import metrics_of
from test_rollout import KEY, vllm_server

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

PLUGIN = Path(__file__).resolve().parents[1] / "data/slow_phases.py"
MINUTES, SECONDS = 0.1, 7.5  # the time-out, and by how much a rank is late
RUN = f"""--reward-funcs even_length --num-generations 4 --micro-batch-size 4 --global-batch-size 16 --num-iterations 2
    --max-prompt-length 16 --max-completion-length 8 --lr 1e-4 --transformer-impl local --eval-interval 2
    --save-interval 2 --distributed-timeout-minutes {MINUTES}""".split()
PHASES = ("offload", "sync", "rollout", "scoring", "logprobs", "update", "eval", "save", "export")
START = ("model", "checkpoint", "engine", "rewards", "logs")
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
DP2 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PLACED = "--rollout-ranks 1 --max-staleness 1 --rollout-importance-sampling-mode token_truncate"


def run(model, directory: Path, ranks: int, late: int, phases, *flags, updates: int) -> str:
    """Run with a rank that is late; the phases in which it was are those given, but for what a mode does not have."""
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(16)))
    save = directory / "run"
    places = ["--load-hf", model, "--train-data-path", data, "--valid-data-path", data, "--save", save]
    environment = {"SLOW_RANK": str(late), "SLOW_SECONDS": str(SECONDS), "SLOW_PHASES": ",".join(phases)}
    output = run_torchrun(
        ranks, "pretrain_grpo.py", *places, *RUN, "--external-plugins", PLUGIN, "--train-iters", updates, *flags,
        env=environment | {"VLLM_API_KEY": KEY},
    ).stdout  # fmt: skip
    rows = metrics_of(save)
    assert [row["iteration"] for row in rows if "loss" in row] == list(range(1, updates + 1))
    assert (save / "hf_model/model.safetensors").exists()
    return output


@pytest.mark.slow
def test_a_rollout_and_its_rewards(tiny_models, tmp_path):
    output = run(tiny_models["qwen3"], tmp_path, 2, 1, ("rollout", "reward"), updates=2)
    assert "slowed: rollout" in output


@pytest.mark.slow
@pytest.mark.parametrize("flags", [DP2, TP2, "--pipeline-model-parallel-size 2", f"--rollout-engine megatron {TP2}"])
def test_every_phase(tiny_models, tmp_path, flags):
    model = tiny_models["qwen3"]
    output = run(model, tmp_path, 2, 1, (*PHASES, "reward"), *flags.split(), updates=4)
    assert [phase for phase in PHASES if f"slowed: {phase}" not in output] == []
    resumed = run(model, tmp_path, 2, 1, START, *flags.split(), "--load", tmp_path / "run", updates=6)
    assert [phase for phase in START if f"slowed: {phase}" not in resumed] == []


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1, 2], ids=["first trainer", "other trainer", "engine"])
def test_every_phase_beside_engine_ranks(tiny_models, tmp_path, late):
    output = run(tiny_models["qwen3"], tmp_path, 3, late, (*PHASES, "reward"), *PLACED.split(), updates=4)
    if late < 2:  # the trainers score nothing
        assert [phase for phase in PHASES if f"slowed: {phase}" not in output] == ["scoring"]


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_every_phase_with_a_server(tiny_models, tmp_path, late):
    model = tiny_models["qwen3"]
    with vllm_server(model, tmp_path) as url:
        flags = ["--vllm-mode", "server", "--vllm-server-base-url", url, "--vllm-server-timeout", 300]
        output = run(model, tmp_path, 2, late, (*PHASES, "reward"), *flags, updates=4)
    assert [phase for phase in PHASES if f"slowed: {phase}" not in output] == []
