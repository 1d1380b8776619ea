"""A vLLM server must return the log-probabilities that the trainer computes, whenever something uses them."""

import pytest

from megatron_grpo.utils import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.rollout.vllm.server import VllmServer
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.http_client import Fault

CORRECTED = "--mismatch-sample-rate 0 --rollout-importance-sampling-mode icepop"


def check(mode: str, flags: str) -> None:
    args = parse_args(["--weight-sync-method", "checkpoint", *flags.split()])
    model = {"dtype": "torch.float32", "logprobs_mode": mode}
    config = {"model_config": model, "device_config": {"device": "cuda"}}
    VllmServer("http://localhost:1", args)._check_config(config, {})


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("raw_logprobs", ""),
        ("raw_logprobs", "--top-p 0.9 --presence-penalty 1"),
        ("processed_logprobs", ""),
        ("processed_logprobs", "--temperature 0.7"),
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
        ("processed_logprobs", "--top-k 5", "raw_logprobs"),
        ("processed_logprobs", f"--repetition-penalty 1.1 {CORRECTED}", "raw_logprobs"),
        ("raw_logits", "", "raw_logprobs"),
    ],
)
def test_refused(mode, flags, cure):
    with pytest.raises(Fault, match=f"it returns {mode}, .*: start it with --logprobs-mode {cure}$"):
        check(mode, flags)
