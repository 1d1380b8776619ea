"""End of processes with the process that started them: ranks with torchrun, workers and their children with a rank.

Linux only; elsewhere the functions do nothing, or less, as their docstrings say.
"""

import contextlib
import ctypes
import functools
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# From <sys/prctl.h>.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
LAUNCHED = "TORCHELASTIC_RUN_ID"  # torchrun sets it in the environment of ranks
_SECONDS_TO_END = 5.0  # for the descendants of a supervisor


@functools.cache  # once for a process
def end_with_launcher() -> None:
    """End this process at once when torchrun ends, however it ends; do nothing if torchrun did not start it.

    Scripts between torchrun and this process are passed over. No effect outside Linux.
    """
    if LAUNCHED not in os.environ or sys.platform != "linux":
        return
    launcher, watched = launcher_process()
    # The death signal follows the thread that started this process. The main thread ends with its process; another one
    # may end earlier. The signal needs no thread of this process that runs; the watch covers all other cases.
    if launcher == os.getppid() and _started_by_main_thread(launcher):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before the call
            os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_end_after, args=(launcher, watched), name="launcher watch", daemon=True).start()


def launcher_process() -> tuple[int, int | None]:
    """Return the process id of torchrun (the first ancestor without its variable), and a descriptor of the process."""
    process = os.getppid()
    while True:
        descriptor = None
        with contextlib.suppress(OSError):  # an old kernel, or a process that has ended
            descriptor = os.pidfd_open(process)
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes()
            above = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # of another user: no process of ours
            return process, descriptor
        if above == 0 or f"\0{LAUNCHED}=".encode() not in b"\0" + environment:
            return process, descriptor
        if descriptor is not None:
            os.close(descriptor)
        process = above


def _started_by_main_thread(parent: int) -> bool:
    """Return whether the main thread of ``parent`` started this process; False if the kernel does not say."""
    with contextlib.suppress(OSError):
        return str(os.getpid()) in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return False


def _has_ended(process: int, descriptor: int | None, seconds: float = 0.0) -> bool:
    """Return whether another process ends within ``seconds``."""
    if descriptor is None:
        time.sleep(seconds)
        return not Path(f"/proc/{process}").exists()
    poll = select.poll()  # select() takes no descriptor above 1,023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _end_after(process: int, descriptor: int | None) -> None:
    """Wait for the end of another process, then end this one."""
    while not _has_ended(process, descriptor, seconds=1.0):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def fork_rank(
    on_event: Callable[[], None],
    failed: Callable[[int], object],
    report: Callable[[int, signal.Signals | None, bool], None],
) -> None:
    """Return in a child of this process, which is the rank; this process waits for the rank and never returns.

    It passes signals on to the rank and ends as the rank ends; it calls ``on_event`` before both, but not if SIGKILL
    ends this process, which ends the rank. If the rank exits with an error, it calls ``failed(process id of the
    rank)``. If a signal ended the rank, it then calls
    ``report(process id of the rank, signal, whether it passed this signal on)``. When torchrun ends, it ends the rank
    and calls ``report`` with None for the signal. Call it on Linux, under torchrun, while this process has one thread.
    """
    launcher, watched = launcher_process()
    passed_on = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    events = passed_on | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, events)
    parent, rank = os.getpid(), os.fork()
    if rank == 0:
        os.setpgid(0, 0)  # torchrun signals the process group of its child; the rank gets each signal once
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, and within a collective
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # a reason to look at torchrun at once
    sent, ended, status = set(), 0, 0
    while not (ended or _has_ended(launcher, watched)):
        event = signal.sigtimedwait(events, 1.0)
        if event is not None and event.si_signo != signal.SIGCHLD:
            on_event()
            os.kill(rank, event.si_signo)
            sent.add(event.si_signo)
        ended, status = os.waitpid(rank, os.WNOHANG)
    if _has_ended(launcher, watched):
        report(rank, None, False)
        os._exit(1)  # the kernel ends the rank
    on_event()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        if code:
            failed(rank)
        os._exit(code)
    report(rank, signal.Signals(-code), -code in sent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.kill(parent, -code)
    os._exit(1)


def end_with_parent() -> None:
    """End this process at once when the process that started it ends. No effect outside Linux."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(parent)
    if _started_by_main_thread(parent):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_end_after, args=(parent, descriptor), name="parent watch", daemon=True).start()


def supervise() -> None:
    """Return in a child of this process; the process itself stays as the supervisor of the child and never returns.

    The supervisor ends all descendants, also those that have left their process group and session, and then itself:
    when the child ends (with the same status), when its own parent ends, and on SIGTERM. Call it while this process has
    one thread. Standard input and output belong to the child alone. Outside Linux the function only returns.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    events = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, events)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # descendants whose parent has ended become children of this process
    # The death signal comes when the thread that started this process ends: only a reason to look at the parent.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    supervisor, child = os.getpid(), os.fork()
    if child == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if something kills the supervisor
        if os.getppid() != supervisor:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    status = None
    while status is None and os.getppid() == parent:
        event = signal.sigtimedwait(events, 1.0)
        status = _reap(child)
        if event is not None and event.si_signo == signal.SIGTERM:
            break
    _end_descendants()
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:  # the child was killed: end by SIGKILL, so that nothing dumps core twice
        os.kill(supervisor, signal.SIGKILL)
    os._exit(code)


def start_supervised(module: str) -> subprocess.Popen[bytes]:
    """Start ``python -m module``, which calls `supervise`, with pipes for its standard input and output."""
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-u", "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        start_new_session=True,  # Ctrl-C reaches only the trainer
    )


def end_supervised(workers: Sequence[Any], owner: int | None = None) -> None:
    """End the ``process`` (subprocess.Popen) of workers that call `supervise`, with all their descendants.

    A process other than ``owner`` ends nothing: a forked child has a copy of the workers, but not their processes.
    """
    if owner is not None and os.getpid() != owner:
        return
    for worker in workers:
        worker.process.terminate()  # all at once
    for process in [worker.process for worker in workers]:
        try:
            process.wait(2 * _SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # it is stopped, or outside Linux a function hangs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _reap(child: int) -> int | None:
    """Collect all ended children; return the status of ``child`` if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _end_descendants() -> None:
    import psutil  # here: the child does not need it

    deadline = time.monotonic() + _SECONDS_TO_END
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _reap(0)
        time.sleep(0.002)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
