"""Weight sync to inference servers: transfer through files, and selection of the method."""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

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


class CheckpointTransfer:
    """Weight transfer through safetensors files in a shared directory (``--weight-sync-method checkpoint``).

    Rank 0 and all servers share the directory. Rank 0 holds at most ``FILE_BYTES`` bytes plus one tensor in memory. The
    files are removed after the servers have read them; the next run on the same host removes files of a killed run.
    """

    def __init__(self, shared: str):
        self._directory = SharedDirectory(shared)

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        try:
            self._write(weights)

            async def load(server: Server) -> None:
                await server.load_weights(str(self._directory.path), servers.timeout)

            servers.update_servers(version, load)
        finally:
            self.close()

    def _write(self, weights: Weights) -> None:
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


def build_transfer(args) -> WeightTransfer:
    """Return the weight transfer of ``--weight-sync-method``."""
    match args.weight_sync_method:
        case "checkpoint":
            return CheckpointTransfer(args.weight_sync_dir)
        case "nccl":
            return NcclTransfer(args)
        case "sparse":
            return SparseTransfer(args)
    raise GrpoError(f"--weight-sync-method {args.weight_sync_method} is not known")
