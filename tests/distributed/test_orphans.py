"""kill -9 of torchrun alone: ranks, reward workers and what reward functions have started end within seconds."""

import os
import subprocess
import sys
import time

import pytest
from ranks import REPO, alive

PLUGIN = """
import os, time
from megatron_grpo.rewards.registry import register_reward
@register_reward("daemon")
def daemon(sample):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(2, b"pid %d\\n" % os.getpid())
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return 1.0
"""
RANK = """
import os, sys, time
from megatron_grpo.utils.process_tree import end_with_launcher
end_with_launcher()
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import Sample
pool = RewardPool(["daemon"], [sys.argv[1]])
pool.score([Sample("", "", {})])
for pid in (os.getpid(), *(worker.process.pid for worker in pool._workers)):
    os.write(2, b"pid %d\\n" % pid)
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux's")
def test_nothing_outlives_a_killed_torchrun(tmp_path):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [str(tmp_path / "rank.py"), str(tmp_path / "plugin.py")],
        env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = []
    while len(pids) < 6:  # a rank, a supervisor and a daemon, twice
        line = torchrun.stderr.readline()
        assert line, pids
        pids += [int(line.split()[1])] if line.startswith("pid ") else []
    assert all(map(alive, pids))
    torchrun.kill()
    torchrun.wait()
    killed = time.monotonic()
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() - killed < 60, left
        time.sleep(0.01)
    print(f"all ended after {time.monotonic() - killed:.2f} s")
