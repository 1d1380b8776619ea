"""Packages that only some flags need: without one the run ends at its start, with the package and the command."""

import re
import sys

import good_args
import pytest
import torch
from ranks import REPO

from megatron_grpo.environments.builtin.mcp_server import mcp_tools
from megatron_grpo.environments.builtin.openenv_server import OpenEnv, openenv_tools
from megatron_grpo.environments.builtin.search import search_tool
from megatron_grpo.environments.tool_calls import ToolCallParser
from megatron_grpo.rewards.registry import get_rewards
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.early_checks import check_early
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import missing, require
from tools import check_export

# The command of the file that a user installs from.
INSTALL = re.search(r"^# +(pip install --no-build-isolation .*)$", (REPO / "requirements-gpu.txt").read_text(), re.M)[1]
TRANSFORMER_ENGINE = f"transformer-engine, which is not installed: {INSTALL}"


def hide(monkeypatch, *modules: str) -> None:
    """Make modules look as if they were not installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_a_missing_package(monkeypatch):
    hide(monkeypatch, "cutlass", "quack", "wandb")
    assert missing("json", "wandb", "no_such_module") == ["wandb", "no_such_module"]
    require("--flag", "json")
    with pytest.raises(GrpoError, match=r"^--f 1 needs the package wandb, which is not installed: pip install wandb$"):
        require("--f 1", "wandb", "json")
    text = (
        "--f needs the packages nvidia-cutlass-dsl and quack-kernels, which are not installed: "
        "pip install -r requirements-gpu.txt, or give --g"
    )
    with pytest.raises(GrpoError, match=f"^{re.escape(text)}$"):
        require("--f", "cutlass", "quack", instead="give --g")


RUN = "--lr 1e-6 --train-iters 8 --train-data-path prompts.jsonl --micro-batch-size 8 --load run"


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        ("vllm", "--reward-funcs exact_match", "--rollout-engine vllm needs the package vllm, .*: pip install -r req"),
        ("math_verify", "--reward-funcs accuracy", "--reward-funcs accuracy needs .* pip install math-verify, or give"),
        ("math_verify", "--reward-funcs exact_match cosine", "--reward-funcs cosine needs .* pip install math-verify"),
    ],
)
def test_before_the_imports(module, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    hide(monkeypatch, module)
    with pytest.raises(GrpoError, match=message):
        check_early(parse_args(f"{RUN} {flags}".split()), 1)
    for other in ("--dry-run", "--rollout-engine megatron --reward-funcs exact_match"):
        check_early(parse_args(f"{RUN} {flags} {other}".split()), 1)


@pytest.mark.parametrize(
    ("modules", "flags", "message"),
    [
        (
            ["cutlass", "quack"],
            "--attention-backend flash --bf16",
            "--attention-backend flash needs the packages nvidia-cutlass-dsl and quack-kernels, which are not "
            "installed: pip install -r requirements-gpu.txt, or give --attention-backend local",
        ),
        (["transformer_engine"], "--transformer-impl transformer_engine --bf16", TRANSFORMER_ENGINE),
        (
            ["transformer_engine"],
            "--transformer-impl transformer_engine --bf16 --fp8-format e4m3 --kv-channels 32",
            TRANSFORMER_ENGINE,
        ),
        (
            ["transformer_engine"],
            "--use-precision-aware-optimizer --use-distributed-optimizer --bf16",
            TRANSFORMER_ENGINE,
        ),
        (
            ["vllm"],
            "--vllm-mode server --vllm-server-base-url http://127.0.0.1:8000 --bf16",
            "--weight-sync-method nccl, whose sender is vLLM's, needs the package vllm",
        ),
        (["tensorboard"], "--tensorboard-dir logs --bf16", "--tensorboard-dir needs the package tensorboard"),
        (["wandb"], "--wandb-project p --bf16", "--wandb-project p needs the package wandb"),
        (
            ["arctic_inference"],
            '--vllm-speculative-config {"method":"suffix"}',
            "--vllm-speculative-config with method suffix needs the package arctic-inference, which is not installed: "
            "pip install arctic-inference==0.3.0, or give ngram",
        ),
        (["swanlab"], "--swanlab-project p --bf16", "--swanlab-project p needs the package swanlab"),
    ],
)
def test_on_a_gpu(modules, flags, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    hide(monkeypatch, *modules)
    with pytest.raises(GrpoError, match=re.escape(message)):
        good_args.validated(flags)


def test_tools_and_rewards(monkeypatch, tmp_path):
    hide(monkeypatch, "bm25s", "math_verify", "mcp", "peft", "vllm", "websockets")
    arguments = check_export.argparse.Namespace(hf=tmp_path, adapter=tmp_path)
    for refused, package in (
        (lambda: search_tool("corpus.jsonl"), "bm25s"),
        (lambda: mcp_tools("server"), "mcp"),
        (lambda: type("Mine", (OpenEnv,), {}), "websockets"),
        (lambda: openenv_tools("http://127.0.0.1:1"), "websockets"),
        (lambda: ToolCallParser("hermes", None), "vllm"),
        (lambda: check_export.check(arguments), "vllm"),
    ):
        with pytest.raises(GrpoError, match=rf"needs the package {package}, .*: pip install "):
            refused()
    monkeypatch.setitem(sys.modules, "vllm", sys)  # found
    with pytest.raises(GrpoError, match=r"--adapter .* needs the package peft, .*: pip install peft"):
        check_export.check(arguments)
    monkeypatch.delitem(sys.modules, "megatron_grpo.rewards.builtin.math_answer", raising=False)
    monkeypatch.setattr("megatron_grpo.rewards.registry._registry", {})
    with pytest.raises(GrpoError, match="--reward-funcs accuracy needs the package math-verify"):
        get_rewards(["accuracy"])
