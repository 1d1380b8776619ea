"""A run whose adapter a real vLLM server loads from files, on CPUs."""

import json

import pytest
from ranks import run_torchrun
from run_files import metrics_of
from sharp_model import make_sharp_model
from test_adapter_sync import SIZES
from test_server_runs import COMMON, PLUGIN

from tools.cpu_server import cpu_server
from tools.make_tiny_model import build_parser, make

pytestmark = [pytest.mark.vllm, pytest.mark.distributed, pytest.mark.slow]


def test_the_servers_log_probabilities_are_the_trainers(tmp_path):
    """Of every version of the adapter, on a base that the server has read itself, on two ranks."""
    make(build_parser().parse_args(["--save", str(tmp_path / "random"), *SIZES]))
    model = make_sharp_model(tmp_path / "random", tmp_path / "model")
    (tmp_path / "own.py").write_text(PLUGIN)
    rows = [{"prompt": f"{a} and {b}?"} for a in "abc" for b in "xyz"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"""--load-hf {model} --train-data-path {tmp_path}/train.jsonl --external-plugins {tmp_path}/own.py
        --save {tmp_path}/run --lora-rank 6 --lora-alpha 48 --lr 0.03 --lora-weight-sync adapter --train-iters 4
        --temperature 1 --check-weight-sync --vllm-server-timeout 300"""
    options = "--logprobs-mode raw_logprobs --enable-lora --max-lora-rank 8"
    # The level is given, because an earlier test of this process can have changed it.
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with cpu_server(tmp_path / "model", tmp_path / "log", options, **variables) as (url, _):
        done = run_torchrun(2, "pretrain_grpo.py", *COMMON, *flags.split(), "--vllm-server-base-url", url)
    assert "LoRA: the servers load the adapter from files" in done.stdout
    metrics = metrics_of(tmp_path / "run")
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4]
    assert all(0 < row["mismatch/mean_abs"] < 1e-5 for row in metrics)
    assert all(row["grad_norm"] > 1 for row in metrics[:3])  # so that every sync brings another adapter
    # Four versions; seven probes of one kind of layers, one without any, after which the first came again.
    assert (tmp_path / "log").read_text().count("Loaded new LoRA adapter") == 4 + 8 + 1
