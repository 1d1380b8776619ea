"""Checkpoints that are written in the background (--async-save).

A save copies this rank's tensors into shared memory, pinned on a GPU's host, and returns. Every rank has a process
(background_writer.py) that writes them and ends with its rank; rank 0's publishes the checkpoint when the files of all
ranks are whole. So a kill at any moment leaves the earlier checkpoint. The memory stays allocated for the next save,
which first waits until this one is published.
"""

import contextlib
import io
import json
import math
import mmap
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_grpo.checkpointing import checkpoint_directory, data_files
from megatron_grpo.checkpointing.background_writer import LENGTH, Item, Job, Part, pauses, report_failure
from megatron_grpo.utils import page_locked, progress
from megatron_grpo.utils.log import log

_LOOK = 5.0  # seconds between two looks at the files that are being written
_SETTLE = 60.0  # seconds that a run which ends with an error waits for its last save


class _Buffer:
    """Shared memory of at least ``size`` bytes, without a name, so that it ends with the processes that use it."""

    def __init__(self, size: int):
        self.size = max(size, mmap.PAGESIZE)
        self.descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size)
        self._memory = mmap.mmap(self.descriptor, self.size)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned = page_locked.register(self.bytes)  # a copy from the device is then several times as fast

    def close(self) -> None:
        if self._pinned:
            page_locked.unregister(self.bytes.data_ptr())
        del self.bytes
        self._memory.close()
        os.close(self.descriptor)


class BackgroundSaves:
    """This rank's process for checkpoints, and the current save: ``job`` is None without one."""

    def __init__(self) -> None:
        self._start()
        self._buffers: list[_Buffer] = []
        self._answer = b""
        self._began = 0.0
        self.job: Job | None = None  # the save that is being staged or written
        self.seconds = 0.0  # of the last save, until `note_published`

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megatron_grpo.checkpointing.background_writer", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches only the trainer
        )
        theirs.close()

    def begin(self, temporary: Path) -> None:
        """Begin to stage a checkpoint in the directory ``temporary``; call `wait` for the save before first."""
        assert self.job is None
        if self._process.poll() is not None:
            self._socket.close()
            self._start()
        self._began = time.monotonic()
        self.job = Job(temporary)

    def stage(self, file: Path, planner: Any, items: Sequence[WriteItem]) -> None:
        """Copy the items of the data file ``file`` into shared memory."""
        assert self.job is not None
        data = [planner.resolve_data(item) for item in items]
        dtypes = [item.tensor_data.properties.dtype if item.tensor_data else torch.uint8 for item in items]
        sizes = [
            len(d.getbuffer()) if isinstance(d, io.BytesIO) else d.numel() * dtype.itemsize
            for d, dtype in zip(data, dtypes, strict=True)
        ]
        starts, end = page_locked.starts(sizes)
        buffer = self._buffer(len(self.job.parts), end)
        part = Part(file, [])
        for item, value, dtype, start, size in zip(items, data, dtypes, starts, sizes, strict=True):
            room = buffer.bytes[start : start + size]
            if isinstance(value, io.BytesIO):
                if size:
                    room.copy_(torch.frombuffer(value.getbuffer(), dtype=torch.uint8))
                part.items.append(Item(item.index, start, size))
            else:
                value = value.detach() if value.dtype == dtype else value.detach().cpu()  # converted on the host
                room.view(dtype).view(value.shape).copy_(value, non_blocking=True)
                part.items.append(Item(item.index, start, size, dtype, tuple(value.shape)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.job.parts.append(part)

    def _buffer(self, number: int, size: int) -> _Buffer:
        if number == len(self._buffers):
            self._buffers.append(_Buffer(size))
        elif self._buffers[number].size < size:
            self._buffers[number].close()
            self._buffers[number] = _Buffer(size)
        return self._buffers[number]

    def submit(self, args: dict[str, Any], keep: int | None, best: dict[str, Any] | None) -> None:
        """Send the staged checkpoint to this rank's process; the arguments are those of rank 0's `publish`."""
        assert self.job is not None
        if dist.get_rank() == 0:
            self.job.args, self.job.keep, self.job.best = args, keep, best
        data = pickle.dumps(self.job)
        descriptors = [buffer.descriptor for buffer in self._buffers[: len(self.job.parts)]]
        try:
            socket.send_fds(self._socket, [LENGTH.pack(len(data))], descriptors)
            self._socket.sendall(data)
        except OSError:  # the process has ended: _answered says so
            pass

    def abandon(self) -> None:
        """Drop a partly staged checkpoint."""
        self.job = None

    def note_published(self) -> None:
        """Set ``seconds``: the current save has just been published, by rank 0's process."""
        self.seconds = time.monotonic() - self._began

    def wait(self, timeout: float = math.inf) -> None:
        """Wait until the current save is published or has failed, without the other ranks, which may be lost.

        A run asks the other ranks instead (`checkpoint.wait_for_background`): here every rank reads the directory.
        """
        job, deadline = self.job, time.monotonic() + timeout
        if job is None:
            return
        if error := self.written(timeout):
            log(f"checkpoint {job.temporary} was not written: {error}")
            return
        if self.job is not None:
            return
        for pause in pauses():
            if time.monotonic() >= deadline or not job.temporary.exists():  # renamed, or deleted
                return
            time.sleep(pause)

    def settle(self) -> None:
        """Wait at most a minute for the current save, and ignore its error: the run ends with another one."""
        self.wait(_SETTLE)

    def written(self, timeout: float = math.inf) -> str | None:
        """Wait until this rank's part is written, and on rank 0 until the save is published; return why it failed.

        Rank 0 discards a failed save. After ``timeout`` seconds return None and keep ``job``.
        """
        job = self.job
        if job is None:
            return None
        deadline, size = time.monotonic() + timeout, -1
        error = None
        try:
            while not self._answer.endswith(b"\n"):
                self._socket.settimeout(max(0.0, min(_LOOK, deadline - time.monotonic())))
                try:
                    data = self._socket.recv(2**16)
                except (BlockingIOError, TimeoutError):
                    if time.monotonic() >= deadline:
                        return None
                    before, size = size, self._bytes_on_disk()
                    if size != before:  # the watchdog sees that the process writes
                        progress.advance()
                    continue
                if not data:
                    raise ConnectionResetError
                self._answer += data
            error = json.loads(self._answer)["error"]
        except ConnectionError:
            error = f"the process that writes it ended (exit status {self._process.wait()})"
            self._tell_rank_0(error)
        finally:
            self._socket.settimeout(None)
        self._answer, self.job = b"", None
        if error and job.args is not None:  # rank 0: the processes of the other ranks wait until it is gone
            checkpoint_directory.discard(job.temporary)
        return error

    def _bytes_on_disk(self) -> int:
        assert self.job is not None
        size = 0
        for part in self.job.parts:
            with contextlib.suppress(OSError):  # not begun yet, or published meanwhile
                size += part.file.stat().st_size
        return size

    def _tell_rank_0(self, error: str) -> None:
        assert self.job is not None
        with contextlib.suppress(OSError):  # the directory is gone
            report_failure(self.job, error)


class StagingWriter(data_files.Writer):
    """Torch's writer of checkpoints, which only copies the tensors: background_writer.py writes the files."""

    def __init__(self, directory: Path, saves: BackgroundSaves):
        super().__init__(directory)
        self.saves = saves

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Copy this rank's items into shared memory."""
        self.saves.stage(Path(self.path, f"{plan.storage_data.prefix}0.distcp"), planner, plan.items)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Pass the metadata to the process of rank 0, which writes it after all data files."""
        assert self.saves.job is not None
        part = self.saves.job.parts[-1]
        part.metadata, part.world_size = metadata, len(results)
