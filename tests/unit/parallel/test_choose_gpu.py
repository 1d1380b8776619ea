"""Each process has the GPU with its number; more processes than GPUs end with one line."""

from types import SimpleNamespace

import pytest
import torch

from megatron_grpo.parallel.initialize import _choose_gpu
from megatron_grpo.utils.errors import GrpoError


def chosen(monkeypatch, rank: int, gpus: int, mode: str = "colocate", rollout_ranks: int = 0) -> int:
    """Return the GPU of a process among ``gpus`` + 1 on one host."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": gpus + 1}.items():
        monkeypatch.setenv(name, str(value))
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    _choose_gpu(SimpleNamespace(vllm_mode=mode, rollout_ranks=rollout_ranks))
    return devices[0]


def test_the_gpu_has_the_number_of_the_process(monkeypatch):
    assert [chosen(monkeypatch, rank, 4) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("mode", "rollout_ranks"), [("colocate", 0), ("colocate", 1), ("server", 0)])
def test_a_process_without_a_gpu_is_named(monkeypatch, mode, rollout_ranks):
    with pytest.raises(GrpoError, match=r"process 4 of host .* has no GPU: 4 are visible there\. .*--nproc-per-node 4"):
        chosen(monkeypatch, 4, 4, mode, rollout_ranks)


def test_a_rank_that_drives_servers_needs_none(monkeypatch):
    """docs/asynchronous.md: one process more than there are GPUs for the trainer."""
    assert chosen(monkeypatch, 4, 4, "server", 1) == 0
