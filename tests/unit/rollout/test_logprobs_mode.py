"""A vLLM server must return the log-probabilities that the trainer computes, whenever something uses them."""

import pytest

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.rollout.vllm.server import VllmServer
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.http_client import Fault

CORRECTED = "--mismatch-sample-rate 0 --rollout-importance-sampling-mode icepop"


def check(mode: str, flags: str) -> None:
    args = parse_args(["--vllm-mode", "server", "--weight-sync-method", "checkpoint", *flags.split()])
    model = {"dtype": "torch.float32", "logprobs_mode": mode, "max_logprobs": 20, "quantization": None}
    config = {"model_config": model, "device_config": {"device": "cuda"}}
    VllmServer("http://localhost:1", args)._check_config(config, {})


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("raw_logprobs", ""),
        ("raw_logprobs", "--top-p 0.9 --presence-penalty 1"),
        ("processed_logprobs", ""),
        ("processed_logprobs", "--temperature 0.7"),
        ("processed_logprobs", "--top-k 20 --top-p 0.9"),
        ("raw_logprobs", "--top-k 5 --no-top-k-replay"),
        ("raw_logits", "--temperature 0.7 --mismatch-sample-rate 0"),
    ],
)
def test_accepted(mode, flags):
    check(mode, flags)


@pytest.mark.parametrize(
    ("mode", "flags", "cure"),
    [
        ("raw_logprobs", "--temperature 0.7", "processed_logprobs"),
        ("raw_logprobs", f"--temperature 0.7 {CORRECTED}", "processed_logprobs"),
        ("processed_logprobs", "--top-k 5 --no-top-k-replay", "raw_logprobs"),
        ("raw_logprobs", "--top-k 5 --mismatch-sample-rate 0", "processed_logprobs"),
        ("raw_logprobs", "--temperature 0.7 --mismatch-sample-rate 0 --m2po-threshold 0.04", "processed_logprobs"),
        ("processed_logprobs", f"--repetition-penalty 1.1 {CORRECTED}", "raw_logprobs"),
        ("raw_logits", "", "raw_logprobs"),
    ],
)
def test_refused(mode, flags, cure):
    with pytest.raises(Fault, match=f"it returns {mode}, .*: start it with --logprobs-mode {cure}$"):
        check(mode, flags)


def test_a_server_that_returns_too_few_is_refused():
    with pytest.raises(
        Fault, match=r"its --max-logprobs is 20, but --top-k is 21 .*: start it with --max-logprobs 21, or"
    ):
        check("processed_logprobs", "--top-k 21")
