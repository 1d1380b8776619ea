"""Lock of a run on its --save directory, so that two runs never write there at the same time.

``{save}/run.lock`` names the run that has the directory: a lease, which its rank 0 renews every `BEAT` seconds.

Process ids repeat, in containers and after a reboot, and clocks of hosts differ, so neither is compared. On the kernel
that wrote the lease, a file lock (fcntl) says whether its holder still runs. Anywhere else the lease itself is watched:
it is taken over if nothing renews it for `LEASE` seconds.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path

from megatron_grpo.utils.errors import GrpoError

NAME = "run.lock"
BEAT = 5.0  # seconds between renewals
LEASE = 60.0  # seconds: longer than any call that stops all threads of a process
PATIENCE = 10.0  # seconds: a killed run may still be ending


class RunLock:
    """Lock on the directory ``root``, which is created if needed; renewed by a thread until `release`.

    ``taken_over``: a line about the ended run whose lock was taken over, or "". ``patience``: seconds to wait for a run
    that is ending. Raises GrpoError if another run holds the lock.
    """

    def __init__(self, root: str | Path, patience: float = PATIENCE, lease: float = LEASE, beat: float = BEAT):
        self.root, self.file = Path(root), Path(root, NAME)
        self._beat = beat
        self._run = {
            "run": uuid.uuid4().hex,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "kernel": _kernel(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._beats = 0
        self.taken_over = ""
        self._mutex = threading.Lock()  # of the descriptor and the file
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open(time.monotonic() + patience)
            self._end_earlier_lease(lease)
            self._renew()
        except OSError as error:
            raise GrpoError(f"--save {root} cannot be locked: {error}; choose another directory") from error
        self._released = threading.Event()
        threading.Thread(target=self._keep, name="lease of --save", daemon=True).start()

    def _open(self, deadline: float) -> int:
        """Return a descriptor of the file with a lock on it, where the file system has locks."""
        while True:
            # Closing any other descriptor of the file would release the lock: this process opens it only here.
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = _read(descriptor)
                os.close(descriptor)
                if time.monotonic() > deadline:
                    raise GrpoError(self._refusal(holder)) from None
                time.sleep(0.1)
                continue
            except OSError:  # no locks on this file system: the lease alone decides
                return descriptor
            if _same(self.file, descriptor):
                return descriptor
            os.close(descriptor)  # its holder has just released and deleted it

    def _end_earlier_lease(self, lease: float) -> None:
        holder = first = _read(self._descriptor)
        if not first:
            return
        deadline = time.monotonic() + lease
        # The file lock has answered for this kernel. Elsewhere the lease may be alive on a file system without locks.
        while holder.get("kernel") != self._run["kernel"] and time.monotonic() < deadline:
            time.sleep(min(0.5, lease / 10))
            holder = _read(self._descriptor)
            if holder != first:
                os.close(self._descriptor)
                raise GrpoError(self._refusal(holder))
        self.taken_over = f"--save {self.root}: taken over from {_describe(first)}, which has ended"

    def _refusal(self, holder: dict) -> str:
        return (
            f"--save {self.root} is in use by {_describe(holder)}: wait for its end or end it, "
            "or choose another directory"
        )

    def _renew(self) -> None:
        self._beats += 1
        text = json.dumps(self._run | {"beats": self._beats}).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))

    def _keep(self) -> None:
        while not self._released.wait(self._beat):
            try:
                with self._mutex:
                    if not (self._released.is_set() or self.taken_by() or self.deleted()):
                        self._renew()
            except OSError:  # a full or absent file system: saves report it
                continue

    def taken_by(self) -> str | None:
        """Return a sentence about the run that has taken the lock over, or None."""
        holder = _read(self._descriptor)
        if holder.get("run", self._run["run"]) == self._run["run"]:
            return None
        return f"{_describe(holder)} has taken it over, because this run did not renew its lock for {LEASE:.0f} s"

    def deleted(self) -> bool:
        """Return whether the file was deleted, probably with its directory."""
        return not _same(self.file, self._descriptor)

    def take_again(self) -> None:
        """Lock the directory once more after it was deleted; GrpoError if another run was faster."""
        with self._mutex:
            os.close(self._descriptor)
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                self._descriptor = self._open(time.monotonic())
                self._renew()
            except OSError as error:
                raise GrpoError(f"--save {self.root} was deleted, and cannot be made again: {error}") from error

    def release(self) -> None:
        """Delete the file; further calls do nothing."""
        if self._released.is_set():
            return
        with self._mutex, contextlib.suppress(OSError):  # its file system is gone, perhaps
            self._released.set()
            if not (self.taken_by() or self.deleted()):
                self.file.unlink(missing_ok=True)
            os.close(self._descriptor)


def _read(descriptor: int) -> dict:
    """Return what the lock's file holds; {} for an empty file, and {"text": ...} for one that is being written."""
    text = os.pread(descriptor, 4096, 0).decode(errors="replace")
    try:
        holder = json.loads(text) if text.strip() else {}
        return holder if isinstance(holder, dict) else {"text": text}
    except ValueError:
        return {"text": text}


def _describe(holder: dict) -> str:
    if "process" not in holder:
        return "another run"
    return f"the run of process {holder['process']} on {holder.get('host')}, started {holder.get('since')}"


def _same(file: Path, descriptor: int) -> bool:
    """Return whether a path still names an open file."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _kernel() -> str:
    """Return an id of the running kernel: of this boot of this host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {uuid.uuid4().hex}"  # unknown: equal to no other
