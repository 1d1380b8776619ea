"""An engine in the training processes fails on one of two ranks: the run is saved as of before, and goes on from there.

Servers that are lost are in test_server_runs.py.
"""

import json
from pathlib import Path

import pytest
from ranks import run_torchrun
from run_files import metrics_of, without

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration

pytestmark = pytest.mark.distributed

PLUGIN = """
from megatron_grpo.rewards.registry import Sample, register_reward

@register_reward("few_digits")
async def few_digits(sample: Sample) -> float:
    return -float(sum(c.isdigit() for c in sample.completion))
"""
# Completions of six tokens, so a rollout has six steps: the eighth is in the second rollout.
COMMON = """--transformer-impl local --num-generations 4 --lr 2e-4 --max-prompt-length 16 --max-completion-length 6
    --train-iters 3 --global-batch-size 8 --micro-batch-size 4 --beta 0 --reward-funcs few_digits --no-save-hf
    --ignore-eos""".split()
WORKER = "tests/distributed/lost_engine_worker.py"
NOWHERE = ["-1", "0"]


def rows(save: Path) -> list[dict]:
    """The metrics of the updates, without clocks."""
    return without(metrics_of(save))


@pytest.fixture(scope="module")
def flags(tiny_models, tmp_path_factory) -> list[str]:
    directory = tmp_path_factory.mktemp("lost_engine")
    (directory / "own.py").write_text(PLUGIN)
    prompts = [{"prompt": f"{a} and {b}?"} for a in "abc" for b in "xyz"]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    words = f"--load-hf {tiny_models['qwen3']} --train-data-path {directory}/train.jsonl"
    return [*COMMON, *words.split(), "--external-plugins", f"{directory}/own.py"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("engine", "what"), [("vllm", "vLLM's step"), ("megatron", "the Megatron engine's step")], ids=["vllm", "megatron"]
)
def test_a_run_that_lost_the_engine_of_one_rank_goes_on_as_if_it_had_not(flags, engine, what, tmp_path):
    def run(failing: list[str], save: Path, check: bool = True):
        words = ["--rollout-engine", engine, "--save", save, "--load", save]
        return run_torchrun(2, WORKER, *failing, *flags, *words, check=check)

    run(NOWHERE, tmp_path / "whole")
    expected = rows(tmp_path / "whole")
    assert [row["iteration"] for row in expected] == [1, 2, 3]

    save = tmp_path / "lost"
    done = run(["1", "8"], save, check=False)
    assert done.returncode == 1
    message = f"error: {what} failed on rank 1: RuntimeError: CUDA out of memory. Tried to allocate 20 MiB. The run is "
    message += f"saved at iteration 1: --load {save} resumes from it"
    assert done.stdout.count("error: ") == 1, done.stdout
    assert done.stdout.splitlines()[-1].endswith(message), done.stdout
    assert "GPU 0 has a total capacity" in done.stdout  # the traceback of the rank that failed
    assert latest_iteration(save) == 1

    assert f"resumed from {save} at iteration 1" in run(NOWHERE, save).stdout
    assert rows(save) == expected
