"""On a host whose GPUs torch does not see, a flag that needs one is refused with that cause, not as on a CPU."""

import pytest
import torch
from good_args import validated

from megatron_grpo.utils import device
from megatron_grpo.utils.errors import GrpoError


@pytest.mark.parametrize(
    ("files", "cuda", "message"),
    [
        (1, None, r"--sleep-level needs a GPU, and torch .* is a build for CPUs, .*: install requirements-gpu\.txt"),
        (1, "13.0", r"--sleep-level needs a GPU, and torch .* sees none of this host's .*tools/check_install\.py"),
        (0, None, "--sleep-level needs a GPU, and this machine has none: on a CPU no engine can free its memory"),
    ],
)
def test_the_cause_is_named(tmp_path, monkeypatch, files, cuda, message):
    for number in range(files):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()  # stays where a container has no GPU
    monkeypatch.setattr(device, "GPU_FILES", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(GrpoError, match=message):
        validated("--rollout-engine vllm --sleep-level 2")
