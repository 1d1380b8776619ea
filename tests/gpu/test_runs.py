"""pretrain_grpo.py as a user starts it on GPUs: sleeping engine, everything offloaded, resumed, exported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPO, engine_flags, torchrun
from run_files import metrics_of

from tools.cpu_server import cpu_server

pytestmark = pytest.mark.alone  # vLLM's sleep fails when another program takes memory of the GPU meanwhile
GPU = """--bf16 --sleep-level 2 --offload-model --offload-optimizer --offload-gradients --check-weight-sync
    --use-distributed-optimizer --vllm-gpu-memory-utilization 0.1 --vllm-enforce-eager""".split()
UPDATES = """--micro-batch-size 16 --global-batch-size 64 --num-generations 8 --max-prompt-length 8
    --max-completion-length 5 --reward-funcs even_tokens --beta 0.02 --lr 1e-4 --train-iters 4
    --transformer-impl local""".split()
RUN = [*UPDATES, "--exit-interval", "2", "--eval-interval", "2"]


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """Sums as data, and untrained models that know their characters, dense and with experts (heads of 64 channels)."""
    root = tmp_path_factory.mktemp("task")
    sizes = "--hidden-size 128 --ffn-hidden-size 256 --kv-channels 64 --num-layers 4".split()
    for script, *words in (
        ("data/arithmetic.py", "--save", root / "data", "--digits", "2", "--reversed"),
        ("make_tiny_model.py", "--save", root / "qwen3", "--steps", "0", *sizes),
        ("make_tiny_model.py", "--save", root / "qwen3_moe", "--shape", "qwen3_moe", "--steps", "0", *sizes),
    ):
        subprocess.run([sys.executable, REPO / "tools" / script, *map(str, words)], check=True, capture_output=True)
    return root


def check(task: Path, save: Path, nproc: int, *flags: str, model: str = "qwen3") -> None:
    """The same command twice: two updates, then two more that begin where the first end."""
    data = ["--train-data-path", task / "data/train.jsonl", "--valid-data-path", task / "data/test.jsonl"]
    data += ["--external-plugins", REPO / "tools/benchmark/even_tokens.py"]  # an untrained model scores, too
    places = ["--load-hf", task / model, "--save", save, "--load", save]
    for _ in range(2):
        torchrun(nproc, "pretrain_grpo.py", *RUN, *GPU, *engine_flags(64), *data, *places, *flags)
    rows = metrics_of(save)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["mismatch/mean_abs"] < 0.02 and 0 < row["grad_norm"] < 100 and row["reward/failures"] == 0
    export = "adapter/adapter_model.safetensors" if "--lora-rank" in flags else "hf_model/model.safetensors"
    assert (save / export).exists()


def test_one_gpu(task, tmp_path):
    """With checkpoints written in the background; the other runs of this file write theirs in the foreground."""
    check(task, tmp_path / "run", 1, "--async-save")


def test_an_environment(tmp_path):
    """Episodes of several turns; a model of a byte tokenizer, in which every tenth byte ends a turn."""
    data, model, save = tmp_path / "train.jsonl", tmp_path / "model", tmp_path / "run"
    rows = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = "--tokenizer bytes --steps 0 --hidden-size 128 --ffn-hidden-size 256 --kv-channels 64 --num-layers 4"
    command = [sys.executable, REPO / "tools/make_tiny_model.py", "--save", model, *shape.split()]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    flags = """--max-prompt-length 40 --max-completion-length 30 --max-environment-tokens 50 --environment echo
        --max-turns 4 --reward-funcs environment --num-generations 4 --micro-batch-size 8 --global-batch-size 32
        --lr 1e-3 --train-iters 2 --transformer-impl local --no-shuffle""".split()
    flags += ["--external-plugins", REPO / "tests/data/echo_environment.py", "--stop-token-ids", *range(0, 250, 10)]
    places = ["--load-hf", model, "--tokenizer-model", model, "--train-data-path", data, "--save", save]
    output = torchrun(1, "pretrain_grpo.py", *places, *flags, *GPU, *engine_flags(64))
    assert "the environment failed in 4 episodes: raised OSError: no connection" in output
    metrics = metrics_of(save)
    assert len(metrics) == 2 and metrics[0]["environment/failed"] == 4 / 32
    assert metrics[0]["environment/turns"] > 1.5 and metrics[0]["environment/tokens"] > 10
    assert all(row["mismatch/mean_abs"] < 0.02 for row in metrics)


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_an_adapter(task, tmp_path, sync):
    """Level 2 drops the base weights too, so every sync sends them again."""
    check(task, tmp_path / "run", 1, "--lora-rank", "8", "--lora-weight-sync", sync)


def test_experts_of_the_engine(task, tmp_path):
    """The trainer repeats the experts that vLLM chose, which it tells on GPUs only."""
    flags = "--router-replay-mode R3 --steps-per-generation 2 --moe-grouped-gemm"
    check(task, tmp_path / "run", 1, *flags.split(), model="qwen3_moe")


SERVER = """--dtype bfloat16 --max-model-len 64 --logprobs-mode processed_logprobs --gpu-memory-utilization 0.2
    --hf-overrides {"head_dtype":"float32"} --weight-transfer-config {"backend":"nccl"}
    --enable-return-routed-experts"""


@pytest.mark.gpus(2)
def test_experts_of_a_server(task, tmp_path):
    """A server on a GPU of its own tells its experts, before and after it has received weights."""
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    model, data, save = task / "qwen3_moe", task / "data/train.jsonl", tmp_path / "run"
    flags = "--bf16 --use-distributed-optimizer --router-replay-mode R3 --moe-grouped-gemm --vllm-mode server".split()
    flags += ["--load-hf", model, "--train-data-path", data, "--save", save]
    flags += ["--external-plugins", REPO / "tools/benchmark/even_tokens.py"]
    with cpu_server(model, tmp_path / "server.log", SERVER, CUDA_VISIBLE_DEVICES=gpus[1]) as (url, _):
        torchrun(1, "pretrain_grpo.py", *UPDATES, *flags, "--vllm-server-base-url", url)
    rows = metrics_of(save)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert all(row["mismatch/mean_abs"] < 0.02 and 0 < row["grad_norm"] < 100 for row in rows), rows


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --vllm-tensor-parallel-size 2",
        "--pipeline-model-parallel-size 2 --overlap-param-gather --overlap-grad-reduce",
        "--use-distributed-optimizer",
    ],
)
def test_two_gpus(task, tmp_path, layout):
    check(task, tmp_path / "run", 2, *layout.split())


@pytest.mark.gpus(2)
def test_an_engine_on_a_gpu_of_its_own(task, tmp_path):
    """Weights go to it by the plan, over NCCL, with checksums; a probe compares log-probabilities at every version."""
    flags = """--bf16 --use-distributed-optimizer --vllm-enforce-eager --rollout-ranks 1 --max-staleness 1
        --weight-update keep --rollout-importance-sampling-mode token_truncate""".split()
    places = [
        "--load-hf",
        task / "qwen3_moe",
        "--train-data-path",
        task / "data/train.jsonl",
        "--save",
        tmp_path / "run",
    ]
    places += ["--external-plugins", REPO / "tools/benchmark/even_tokens.py"]
    torchrun(2, "pretrain_grpo.py", *UPDATES, *engine_flags(64), *places, *flags)
    rows = metrics_of(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["mismatch/mean_abs"] < 0.02 and all(0 < row["grad_norm"] < 100 for row in rows), rows
