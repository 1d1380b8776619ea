"""Weight sync to inference servers: transfer through files, and selection of the method."""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_grpo.parallel.roles import Joint
from megatron_grpo.rollout.servers.engine import Weights, WeightTransfer
from megatron_grpo.rollout.servers.pool import ServerPool
from megatron_grpo.rollout.servers.server import Server
from megatron_grpo.rollout.weight_sync.nccl import NcclTransfer, SparseTransfer
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.safetensors_files import save_tensors

Bucket = list[tuple[str, torch.Tensor]]
FILE_BYTES = 2**30


def buckets(weights: Weights, size: int) -> Iterator[Bucket]:
    """Yield ``weights`` in lists of at most ``size`` bytes plus one tensor."""
    bucket: Bucket = []
    held = 0
    for name, tensor in weights:
        bucket.append((name, tensor))
        held += tensor.nbytes
        if held >= size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


class SharedDirectory:
    """A directory of this process below --weight-sync-dir, which rank 0 and all servers share."""

    def __init__(self, shared: str):
        self._shared = Path(shared)
        self.path = self._shared / f"{_PREFIX}{socket.gethostname()}-{os.getpid()}"

    @contextlib.contextmanager
    def written(self, what: str) -> Iterator[None]:
        """Context in which ``what`` is written into the directory, which is created; GrpoError if that fails.

        Directories of killed runs on this host are removed.
        """
        try:
            _remove_stale_directories(self._shared)
            self.path.mkdir(exist_ok=True)
            yield
        except Exception as error:  # safetensors raises its own error for a full disk
            if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
                raise GrpoError(
                    f"--weight-sync-dir {self._shared}: {what} cannot be written: {error}; make room there, or choose "
                    "another directory that the servers see, too"
                ) from error
            raise

    def remove(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path, ignore_errors=True)


class HostCopy:
    """Agreement of the engine ranks of a host on one copy of the weights: the first of them writes it for all.

    The ranks receive the same weights at the same time, and call `written`, then `loaded`, once for each of them.
    ``rank`` is one of ``size`` ranks, whose keys in ``store`` begin with ``prefix``.
    """

    def __init__(self, store: dist.Store | None = None, rank: int = 0, size: int = 1, prefix: str = ""):
        self._store = None if store is None or size == 1 else dist.PrefixStore(prefix, store)
        self._rank, self._size, self._copies = rank, size, 0

    def written(self, write: Callable[[], str], skip: Callable[[], None]) -> str:
        """Return the directory that the first rank returns from ``write``, or raise its GrpoError; others ``skip``."""
        store = self._store
        if store is None:
            return write()
        self._copies += 1
        key = f"{self._copies}/written"
        if self._rank > 0:
            skip()
            _wait_until(lambda: store.check([key]))
            outcome = json.loads(store.get(key))
            if "error" in outcome:
                raise GrpoError(outcome["error"])
            return outcome["directory"]
        outcome = {"error": "the rank that writes the weights for this host has failed: its error is above"}
        try:
            outcome = {"directory": write()}
            return outcome["directory"]
        except GrpoError as error:
            outcome = {"error": str(error)}
            raise
        finally:
            store.set(key, json.dumps(outcome))

    def loaded(self) -> None:
        """Note that the servers of this rank have read the copy; on the first rank, wait for those of all ranks."""
        store = self._store
        if store is None:
            return
        key = f"{self._copies}/loaded"
        store.add(key, 1)
        if self._rank == 0:
            _wait_until(lambda: store.add(key, 0) == self._size)
            for name in (key, f"{self._copies}/written"):
                store.delete_key(name)


def _wait_until(holds: Callable[[], bool]) -> None:
    """Poll, without a time-out: a rank that ends before ends the run."""
    began = time.monotonic()
    while not holds():
        time.sleep(min(0.5, 0.01 + (time.monotonic() - began) / 20))


class CheckpointTransfer:
    """Weight transfer through safetensors files in a shared directory (``--weight-sync-method checkpoint``).

    The rank that writes and all servers share the directory: rank 0, or the first rank of ``copy``. It holds at most
    ``FILE_BYTES`` bytes plus one tensor in memory. The files are removed after the servers have read them, or with
    ``keep`` before the next ones are written, so that a server can read them at any time. The next run on the same host
    removes files of a killed run.
    """

    def __init__(self, shared: str, copy: HostCopy | None = None, keep: bool = False):
        self._directory, self._copy, self._keep = SharedDirectory(shared), copy or HostCopy(), keep

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        def write() -> str:
            self._write(weights)
            return str(self._directory.path)

        def skip() -> None:
            for _ in weights:  # the trainer sends to all engine ranks
                pass

        try:
            directory = self._copy.written(write, skip)

            async def load(server: Server) -> None:
                await server.load_weights(directory, servers.timeout)

            servers.update_servers(version, load)
        finally:
            self._copy.loaded()
            if not self._keep:
                self.close()

    def _write(self, weights: Weights) -> None:
        self._directory.remove()
        with self._directory.written("the weights"):
            on_host = ((name, tensor.cpu().contiguous()) for name, tensor in weights)
            for number, part in enumerate(buckets(on_host, FILE_BYTES)):
                save_tensors(dict(part), self._directory.path / f"model-{number:05d}.safetensors", {"format": "pt"})

    def close(self) -> None:
        self._directory.remove()


_PREFIX = "megatron_grpo-weights-"


def _remove_stale_directories(shared: Path) -> None:
    prefix = f"{_PREFIX}{socket.gethostname()}-"
    for directory in shared.glob(f"{prefix}*"):
        process = directory.name.removeprefix(prefix)
        if process.isdigit() and not Path("/proc", process).exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)


def copy_of_host(joint: Joint, rollout_ranks: int, ranks_per_host: int) -> HostCopy:
    """Return the agreement of the engine ranks that this rank's host has; each of them is a replica over servers."""
    world, host = joint.group.size(), joint.rank // ranks_per_host
    ranks = [rank for rank in range(world - rollout_ranks, world) if rank // ranks_per_host == host]
    return HostCopy(joint.store, ranks.index(joint.rank), len(ranks), f"weights of host {host}")


def build_transfer(args, joint: Joint | None = None) -> WeightTransfer:
    """Return the weight transfer of ``--weight-sync-method``; ``joint``: on an engine rank of --rollout-ranks."""
    match args.weight_sync_method:
        case "checkpoint" if joint is not None:
            ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", joint.group.size()))
            copy = copy_of_host(joint, args.rollout_ranks, ranks_per_host)
            return CheckpointTransfer(args.weight_sync_dir, copy, keep=True)
        case "checkpoint":
            return CheckpointTransfer(args.weight_sync_dir)
        case "nccl":
            return NcclTransfer(args)
        case "sparse":
            return SparseTransfer(args)
    raise GrpoError(f"--weight-sync-method {args.weight_sync_method} is not known")
