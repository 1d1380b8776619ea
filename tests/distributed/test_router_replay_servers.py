"""--router-replay-mode R3 in whole runs with doubles of servers, whose routers choose otherwise than the trainer's."""

import json
import types

import pytest
import torch
from ranks import run_torchrun
from run_files import metrics_of
from server_double import Double
from sharp_model import make_sharp_model
from test_server_runs import COMMON, PLUGIN
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.distributed

SERVERS = {
    "vllm": "--vllm-mode server --vllm-server-timeout 60 --vllm-server-base-url",
    "sglang": "--rollout-engine sglang --sglang-server-timeout 60 --sglang-server-base-url",
}
PLACED = "--rollout-ranks 1 --max-staleness 1 --weight-update drain --rollout-importance-sampling-mode token_truncate"


def contrary(self, hidden_states):
    """Transformers' router, which takes the least likely experts instead of the likeliest."""
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    probs = torch.softmax(logits, -1)
    chosen = torch.topk(-probs, self.top_k).indices
    weights = probs.gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def run(tiny_models, tmp_path, kind, mode, more="", ranks=1):
    """The metrics of two updates with a server that generates with contrary routers."""
    (tmp_path / "own.py").write_text(PLUGIN)
    prompts = [{"prompt": f"{a} and {b}?"} for a in "abc" for b in "xyz"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    directory = make_sharp_model(tiny_models["qwen3_moe"], tmp_path / "model")

    def make_model():
        model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
        for layer in model.model.layers:
            layer.mlp.gate.forward = types.MethodType(contrary, layer.mlp.gate)
        return model

    experts = {"device": "cuda", "routed_experts": True, "scale_out": True}
    double = Double(
        kind, make_model=make_model, **(experts if kind == "vllm" else {"enable_return_routed_experts": True})
    )
    flags = [word for word in COMMON if word not in ("--vllm-mode", "server", "--vllm-server-timeout", "60")]
    words = f"""{SERVERS[kind]} {double.url} --router-replay-mode {mode} --load-hf {directory} --train-iters 2
        --train-data-path {tmp_path}/train.jsonl --external-plugins {tmp_path}/own.py --save {tmp_path}/save {more}"""
    try:
        run_torchrun(ranks, "pretrain_grpo.py", *flags, *words.split())
    finally:
        double.stop()
    return metrics_of(tmp_path / "save")


@pytest.mark.parametrize(("kind", "ranks"), [("vllm", 1), pytest.param("sglang", 2, marks=pytest.mark.slow)])
def test_an_update_replays_the_servers_experts(tiny_models, tmp_path, kind, ranks):
    """Only with exactly these experts are the log-probabilities the server's. Two ranks: both receive completions."""
    found = run(tiny_models, tmp_path, kind, "R3", ranks=ranks)
    assert [row["iteration"] for row in found] == [1, 2]
    assert all(row["mismatch/max_abs"] < 1e-4 and row["grad_norm"] > 0 for row in found)


@pytest.mark.slow
def test_without_replay_the_log_probabilities_differ(tiny_models, tmp_path):
    found = run(tiny_models, tmp_path, "vllm", "R2", "--mismatch-limit 1000")
    assert all(row["mismatch/mean_abs"] > 0.1 for row in found)


@pytest.mark.slow
def test_servers_of_ranks_of_their_own(tiny_models, tmp_path):
    """Their completions are streams. Those of the second update are of the weights before the first."""
    first, second = run(tiny_models, tmp_path, "vllm", "R3", f"{PLACED} --lr 1e-7", ranks=2)
    assert first["mismatch/max_abs"] < 1e-4 and second["staleness/max"] == 1
    assert second["mismatch/mean_abs"] < 1e-3
