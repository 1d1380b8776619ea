"""Whole runs on two ranks against doubles of vLLM's servers: all are lost in the middle, and the run goes on later."""

import json
import threading
from pathlib import Path

import pytest
from ranks import run_torchrun
from run_files import metrics_of, without
from server_double import Double
from sharp_model import make_sharp_model
from test_rollout import KEY, vllm_server
from transformers import AutoModelForCausalLM

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration
from megatron_grpo.rollout.ledger import content
from tools.make_tiny_model import build_parser, make

pytestmark = pytest.mark.distributed

PLUGIN = """
from megatron_grpo.rewards.registry import Sample, register_reward

@register_reward("few_digits")
async def few_digits(sample: Sample) -> float:
    return -float(sum(c.isdigit() for c in sample.completion))
"""
COMMON = """--transformer-impl local --num-generations 4 --lr 2e-4 --max-prompt-length 16 --max-completion-length 6
    --train-iters 3 --global-batch-size 8 --micro-batch-size 4 --beta 0 --reward-funcs few_digits --no-save-hf
    --vllm-mode server --vllm-server-timeout 60""".split()
# What is a matter of time alone.


def rows(save: Path) -> list[dict]:
    """The metrics of the updates, without clocks."""
    return without(metrics_of(save))


@pytest.fixture(scope="module")
def flags(tiny_models, tmp_path_factory) -> list[str]:
    directory = tmp_path_factory.mktemp("server_runs")
    (directory / "own.py").write_text(PLUGIN)
    prompts = [{"prompt": f"{a} and {b}?"} for a in "abc" for b in "xyz"]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    model = make_sharp_model(tiny_models["qwen3"], directory / "model")
    words = f"--load-hf {model} --train-data-path {directory}/train.jsonl --external-plugins {directory}/own.py"
    return [*COMMON, *words.split()]


@pytest.fixture(scope="module")
def double(flags):
    model = flags[flags.index("--load-hf") + 1]
    double = Double(make_model=lambda: AutoModelForCausalLM.from_pretrained(model).float().eval())
    yield double
    double.stop()


def run(flags: list[str], double: Double, save: Path, check: bool = True):
    words = ["--vllm-server-base-url", double.url, "--save", save, "--load", save]
    return run_torchrun(2, "pretrain_grpo.py", *flags, *words, check=check)


@pytest.mark.slow
def test_a_run_that_lost_all_servers_goes_on_as_if_it_had_not(flags, double, tmp_path):
    run(flags, double, tmp_path / "whole")
    expected = rows(tmp_path / "whole")
    assert [row["iteration"] for row in expected] == [1, 2, 3]
    assert all(row["mismatch/mean_abs"] < 1e-5 and row["grad_norm"] > 0 for row in expected)

    double.fail_after = double.generated + 3  # of two in each rollout: in the middle of the second
    save = tmp_path / "lost"
    done = run(flags, double, save, check=False)
    assert done.returncode == 1
    message = f"error: no server is left to generate ({double.url}: "
    assert done.stdout.count(message) == 1, done.stdout
    assert f"The run is saved at iteration 1: --load {save} resumes from it" in done.stdout
    assert 'pretrain_grpo.py", line' not in done.stdout  # the only traceback is torchrun's own
    assert "Unclosed" not in done.stdout  # aiohttp's complaint of a connection that nobody closed
    assert latest_iteration(save) == 1

    double.fail_after, double.fault = None, ""
    double.restart()
    assert f"resumed from {save} at iteration 1" in run(flags, double, save).stdout
    assert rows(save) == expected


@pytest.mark.slow
def test_servers_generate_while_the_trainer_updates(flags, double, tmp_path):
    """A rank of --rollout-ranks drives them; one is killed in the middle and comes back with the weights."""
    other, save = Double(make_model=double.make_model), tmp_path / "save"
    other.fail_after = 12
    back = threading.Event()

    def restart():
        while other.fault != "die":
            if back.wait(0.01):
                return
        other.fail_after = None
        other.restart()
        other.fault = ""

    thread = threading.Thread(target=restart)
    thread.start()
    words = ["--rollout-ranks", 1, "--max-staleness", 2, "--rollout-importance-sampling-mode", "token_truncate"]
    words += ["--vllm-server-base-url", double.url, other.url, "--save", save, "--train-iters", 6]
    try:
        done = run_torchrun(2, "pretrain_grpo.py", *flags, *words)
    finally:
        back.set()
        thread.join()
        other.stop()
    found = rows(save)
    assert [row["iteration"] for row in found] == list(range(1, 7)) and other.generated > 12
    # Whether it is excluded before depends on whether it is back when it is next asked.
    assert f"server {other.url} answers again or has restarted" in done.stdout
    assert max(row["staleness/max"] for row in found) in (1, 2)
    ledger = content.read(save / "ledger")
    trained = [key for record in ledger.batches.values() for key in record.groups]
    assert len(set(trained)) == len(trained) == 12


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("how", ["interrupt", "drain", "keep"])
def test_a_real_server_generates_while_the_trainer_updates(flags, tmp_path, how):
    """After each publication its log-probabilities must be the trainer's, or the run ends (the probe).

    The server generates two completions at a time, so that the trainer waits for it and weights change under some.
    """
    model, save = flags[flags.index("--load-hf") + 1], tmp_path / "save"
    words = ["--rollout-ranks", 1, "--max-staleness", 2, "--rollout-importance-sampling-mode", "token_truncate"]
    words += ["--weight-update", how, "--max-completion-length", 96, "--save", save, "--train-iters", 6, "--ignore-eos"]
    words += ["--vllm-max-num-seqs", 2]
    with vllm_server(model, tmp_path) as url:
        environment = {"VLLM_API_KEY": KEY}
        words += ["--vllm-server-base-url", url, "--vllm-server-timeout", 300]
        run_torchrun(2, "pretrain_grpo.py", *flags, *words, env=environment)
    found = rows(save)
    assert [row["iteration"] for row in found] == list(range(1, 7))
    assert max(row["staleness/max"] for row in found) in (1, 2)
    interrupted = max(row["staleness/interrupted"] for row in found)
    assert (interrupted > 0) == (how != "drain")  # completions of several versions


@pytest.mark.slow
def test_check_engine_with_several_ranks(flags, double):
    """Only rank 0 has the completions of servers; all ranks compute their log-probabilities."""
    words = ["--load-hf", flags[flags.index("--load-hf") + 1], "--transformer-impl", "local"]
    words += ["--tensor-model-parallel-size", "2", "--vllm-mode", "server", "--vllm-server-base-url", double.url]
    done = run_torchrun(2, "tools/check_engine.py", *words)
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    mean, largest = map(float, table[-1].split("|")[2:4])
    assert 0 < mean < 1e-5 and largest < 1e-4


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_server_of_a_model_with_delta_nets(flags, tmp_path):
    """In bfloat16, all that vLLM has of delta nets on a CPU, on both sides; the server begins with other weights."""
    model, save = tmp_path / "model", tmp_path / "save"
    sizes = f"--save {model} --shape qwen3_5_text --steps 0 --quiet --hidden-size 64 --num-layers 4"
    make(build_parser().parse_args(sizes.split()))
    prompts = [{"prompt": f"{a}+{b}="} for a in range(3) for b in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    words = [*flags, "--load-hf", model, "--train-data-path", tmp_path / "sums.jsonl", "--save", save, "--lr", "1e-3"]
    words += ["--bf16", "--use-distributed-optimizer"]
    # The toy has 128 positions; vLLM caches states of prefixes only if it may split prompts: cpu_server.py forbids it.
    options = "--dtype bfloat16 --mamba-ssm-cache-dtype float32 --max-model-len 128 --no-enable-prefix-caching"
    with vllm_server(str(model), tmp_path, options) as url:
        words += ["--vllm-server-base-url", url, "--vllm-server-timeout", 300]
        run_torchrun(2, "pretrain_grpo.py", *words, env={"VLLM_API_KEY": KEY})
    found = rows(save)
    assert [row["iteration"] for row in found] == [1, 2, 3]
    assert all(0 < row["mismatch/mean_abs"] < 2e-2 and row["grad_norm"] > 0 for row in found), found
