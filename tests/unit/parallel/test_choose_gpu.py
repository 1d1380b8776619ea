"""Each process has the GPU with its number; more processes than GPUs end with one line."""

from types import SimpleNamespace

import pytest
import torch

from megatron_grpo.parallel.initialize import _choose_gpu
from megatron_grpo.utils.errors import GrpoError


def chosen(monkeypatch, rank: int, gpus: int, here: int | None, mode: str = "colocate", rollout_ranks: int = 0) -> int:
    """Return the GPU of a rank of the second of two hosts, each with ``gpus`` GPUs and ``here`` processes.

    None: of a single host with five processes whose launcher does not set LOCAL_WORLD_SIZE.
    """
    values = {"RANK": (here or 0) + rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2 * here if here else 5}
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here:
        values["LOCAL_WORLD_SIZE"] = here
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    _choose_gpu(SimpleNamespace(vllm_mode=mode, rollout_ranks=rollout_ranks))
    return devices[0]


def test_the_gpu_has_the_number_of_the_process(monkeypatch):
    assert [chosen(monkeypatch, rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [0, 4])  # torchrun shows the message of a host's first process alone
@pytest.mark.parametrize(("mode", "rollout_ranks"), [("colocate", 0), ("colocate", 1), ("server", 0)])
def test_processes_without_a_gpu_are_named(monkeypatch, mode, rollout_ranks, rank):
    with pytest.raises(GrpoError, match=r"5 processes of host .* 4 are visible there: .*--nproc-per-node 4 "):
        chosen(monkeypatch, rank, 4, 5, mode, rollout_ranks)


def test_a_launcher_that_does_not_tell_the_number_of_processes(monkeypatch):
    """As srun with variables of the user's own: all GPUs are visible to each process, or one to each."""
    assert [chosen(monkeypatch, rank, 4, None) for rank in (0, 3)] == [0, 3]
    assert [chosen(monkeypatch, rank, 1, None) for rank in (0, 3)] == [0, 0]
    with pytest.raises(GrpoError, match=r"5 processes of host .* 4 are visible there"):
        chosen(monkeypatch, 4, 4, None)
    assert chosen(monkeypatch, 4, 4, None, "server", 1) == 0  # the last rank of one host with five


@pytest.mark.parametrize("drivers", [1, 2, 5, 7])
def test_ranks_that_drive_servers_need_none(monkeypatch, drivers):
    """docs/asynchronous.md: one process more than there are GPUs for the trainer. More of them are of both hosts."""
    assert [chosen(monkeypatch, rank, 4, 5, "server", drivers) for rank in (0, 4)] == [0, 0]
    with pytest.raises(GrpoError, match=r"6 processes of host .* --nproc-per-node 5 "):
        chosen(monkeypatch, 0, 4, 7, "server", 1)
