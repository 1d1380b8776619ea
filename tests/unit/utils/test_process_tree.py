"""Processes that end with the process that started them; every test kills one and waits for the others."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from ranks import REPO, alive, gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux's")

RANK = """
    import os, sys, time
    sys.path.insert(0, {root!r})
    from megatron_grpo.utils.process_tree import end_with_launcher
    end_with_launcher()
    os.write(1, b"%d\\n" % os.getpid())
    {then}
"""
LAUNCHER = """
    import os, subprocess, sys, threading, time
    def start():
        subprocess.Popen({command!r}, env=os.environ | {{"TORCHELASTIC_RUN_ID": "x"}}, start_new_session=True)
    {start}
    time.sleep(1000)
"""


def write(file, text, **values):
    file.write_text(textwrap.dedent(text).format(root=str(REPO), **values))
    return [sys.executable, str(file)]


def launch(tmp_path, start, then="time.sleep(1000)", wrapper=()):
    """Start a launcher in place of torchrun; return it and the process id of its rank."""
    rank = write(tmp_path / "rank.py", RANK, then=then)
    command = write(tmp_path / "launcher.py", LAUNCHER, command=[*wrapper, *rank], start=start)
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return launcher, int(launcher.stdout.readline())


THREAD = "thread = threading.Thread(target=start); thread.start(); thread.join()"


@pytest.mark.parametrize("start", ["start()", THREAD], ids=["main thread", "thread that has ended"])
@pytest.mark.parametrize("wrapper", [(), ("/bin/sh", "-c", '"$0" "$@"; true')], ids=["", "script between"])
def test_a_rank_ends_with_its_launcher(tmp_path, start, wrapper):
    """Also a launcher that has started it in a thread: the death signal would come with the end of that thread."""
    launcher, rank = launch(tmp_path, start, wrapper=wrapper)
    assert alive(rank)
    launcher.kill()
    launcher.wait()
    assert gone([rank])


def test_the_death_signal_needs_no_thread_of_the_rank(tmp_path):
    """A rank in native code that holds the GIL, such as a call that hangs, runs no thread of Python."""
    holds_gil = "import ctypes; ctypes.PyDLL(None).sleep(1000)"
    launcher, rank = launch(tmp_path, "start()", then=holds_gil)
    launcher.kill()
    launcher.wait()
    assert gone([rank])


def test_without_torchrun_a_rank_outlives_its_shell(tmp_path):
    then = """
    while os.getppid() == int(os.environ["SHELL_PID"]):
        time.sleep(0.01)
    time.sleep(0.3)
    os.write(1, b"lives\\n")
    """
    rank = write(tmp_path / "rank.py", textwrap.dedent(RANK), then=textwrap.dedent(then))
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    command = ["/bin/sh", "-c", 'SHELL_PID=$$ "$0" "$@" & wait', *rank]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert int(shell.stdout.readline()) > 0
    shell.kill()
    assert shell.stdout.readline() == "lives\n"
    shell.wait()


# A child forks a daemon, as `os.fork(); os.setsid(); os.fork()` does it, and tells its process id.
DAEMON = """
    import os, sys, time
    sys.path.insert(0, {root!r})
    from megatron_grpo.utils.process_tree import supervise
    supervise()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(1, b"%d\\n" % os.getpid())
            time.sleep(1000)
        os._exit(0)
    os.wait()
    os.write(1, b"%d\\n" % os.getpid())
    {then}
"""
STARTER = """
    import os, subprocess, time
    worker = subprocess.Popen({command!r})
    os.write(1, b"%d\\n" % worker.pid)
    time.sleep(1000)
"""


@pytest.mark.parametrize("way", ["parent killed", "worker killed", "SIGTERM", "exit"])
def test_a_daemon_ends_with_the_worker_that_started_it(tmp_path, way):
    command = write(tmp_path / "worker.py", DAEMON, then="sys.stdin.read(); raise SystemExit(3)")
    command = write(tmp_path / "starter.py", STARTER, command=command)
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(parent.stdout.readline()) for _ in range(3)]
        assert all(map(alive, pids))
        worker = next(pid for pid in pids[1:] if children(pids[0]) >= {pid} and not is_session_of_its_own(pid))
        match way:
            case "parent killed":
                parent.kill()
            case "worker killed":
                os.kill(worker, signal.SIGKILL)
            case "SIGTERM":
                os.kill(pids[0], signal.SIGTERM)
            case "exit":
                parent.stdin.close()
        assert gone(pids)
    finally:
        parent.kill()
        parent.wait()


def test_a_supervised_worker_ends_with_its_supervisor(tmp_path):
    command = write(tmp_path / "worker.py", DAEMON, then="time.sleep(1000)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        pids = [int(supervisor.stdout.readline()) for _ in range(2)]
        supervisor.kill()
        ended = [pid for pid in pids if not is_session_of_its_own(pid)]
        assert gone(ended)
        for daemon in set(pids) - set(ended):
            os.kill(daemon, signal.SIGKILL)


def children(pid):
    return {process.pid for process in psutil.Process(pid).children()}


def is_session_of_its_own(pid):
    return os.getsid(pid) != os.getsid(0)
