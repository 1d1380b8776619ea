"""Forked ranks are as torchrun's: they meet, differ in what real processes differ in, and end together."""

import os
import time

import pytest
import ranks
from ranks import _environment, alive, warm_ranks

pytestmark = pytest.mark.distributed


def launch(tmp_path, program, timeout=300.0):
    script = tmp_path / "script.py"
    script.write_text(program)
    return warm_ranks(2, [str(script), "one", "two"], _environment(), timeout)


MEETING = """
import os, random, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.tensor([dist.get_rank() + 1.0, float(hash("a text")), random.random()], dtype=torch.float64)
everyone = [torch.zeros_like(mine) for _ in range(2)]
dist.all_gather(everyone, mine)
if dist.get_rank() == 0:
    (a, b) = everyone
    print("ranks", a[0].item(), b[0].item(), "differ", bool(a[1] != b[1]), bool(a[2] != b[2]), sys.argv[1:], __name__)
dist.barrier()
"""


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="all processes are told one hash seed")
def test_ranks_meet_and_differ(tmp_path):
    """In their random states, and with --thorough in their hash seeds."""
    for _ in range(2):  # the second time from the same processes
        status, output = launch(tmp_path, MEETING)
        assert status == 0, output
        assert f"ranks 1.0 2.0 differ {ranks.thorough} True ['one', 'two'] __main__\n" in output


@pytest.mark.parametrize(
    ("program", "expected", "said"),
    [
        ("print('end', end='')", 0, "end"),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.5), print('waited for'))).start()",
            0,
            "waited for",
        ),
    ],
)
def test_a_rank_ends_as_python_does(tmp_path, program, expected, said):
    status, output = launch(tmp_path, program)
    assert (status, said in output) == (expected, True), output


SLEEPING = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(__file__).with_name(f"pids.{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
print("said", flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "timeout", "expected"),
    [
        pytest.param("if os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)", 300.0, 3, id="one fails"),
        pytest.param("time.sleep(600)", 10.0, None, id="too long", marks=pytest.mark.slow),
    ],
)
def test_none_is_left(tmp_path, ending, timeout, expected):
    launch(tmp_path, "")  # so that importing is not in the time below
    begin = time.monotonic()
    status, output = launch(tmp_path, SLEEPING + ending, timeout)
    assert (status, time.monotonic() - begin < 200) == (expected, True)
    assert "said" in output
    pids = [int(pid) for path in tmp_path.glob("pids.*") for pid in path.read_text().split()]
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) >= 2 and not any(map(alive, pids))
