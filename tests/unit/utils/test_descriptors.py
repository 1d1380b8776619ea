import resource
import subprocess
import sys
import textwrap

import pytest
from open_links import open_links

from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.utils import descriptors


def program(soft: int, hard: int, ranks: int, streams: int = 0, workers: int = 0) -> subprocess.CompletedProcess:
    """Call raise_limit in a process with these limits, whose parent is its launcher; print both soft limits."""
    code = f"""
        import os, resource, subprocess, sys
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun
            resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
            command = [sys.executable, "-c", sys.argv[1], sys.argv[1]]
            code = subprocess.run(command, env=os.environ | {{"TORCHELASTIC_RUN_ID": "1"}}).returncode
            print("launcher", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            sys.exit(code)
        from megatron_grpo.utils.descriptors import raise_limit
        raise_limit({ranks}, {streams}, {workers})
        print("rank", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    """
    text = textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", text, text], capture_output=True, text=True)


def test_a_rank_raises_its_soft_limit_and_that_of_torchrun():
    done = program(1024, 4096, 1024)
    assert done.stdout.split() == ["rank", "4096", "launcher", "4096"], done.stderr


@pytest.mark.parametrize(("ranks", "streams", "workers"), [(2048, 0, 0), (8, 8 * 512, 0), (8, 0, 2048)])
def test_a_hard_limit_that_is_too_low_is_refused_with_the_number(ranks, streams, workers):
    done = program(1024, 4096, ranks, streams, workers)
    need = descriptors.OF_A_PROCESS + 2 * ranks + streams + 2 * workers
    assert done.returncode == 1 and f"needs {need} open files" in done.stderr
    assert "the hard limit is 4096" in done.stderr and "LimitNOFILE" in done.stderr


def test_a_process_that_torchrun_did_not_start_has_no_launcher(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert descriptors.launcher() == []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors.raise_limit(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_worker_process_takes_two_descriptors():
    """As `needed` counts them, of rewards and of environments."""

    kinds = "pipe", "socket"
    before = open_links(*kinds)
    rewards = RewardPool(["exact_match"], [], 3)
    assert len(open_links(*kinds) - before) == 2 * 3
    rewards.close()
    before = open_links(*kinds)
    environments = EnvironmentPool(["calculator"], [], 3, 10.0, 1)
    assert len(open_links(*kinds) - before) == 2 * 3
    environments.close()
