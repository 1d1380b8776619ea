"""What test_saves.py runs on two ranks: saves in the background, and saves that fail."""

import errno
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import torch
import torch.distributed as dist
from checkpoint_worker import DISTRIBUTED, POSITION, build, check_equal, say, update

from megatron_grpo.checkpointing import checkpoint, checkpoint_directory, data_files
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError


def ready(root, name, *flags, iteration=1):
    """A model after an update, and what saves it under ``root/name``."""
    args, *parts = build(*DISTRIBUTED, "--save", str(root / name), *flags)
    update(*parts, 1)

    def save(iteration, reference=None):
        checkpoint.save_checkpoint(args, iteration, *parts, POSITION, reference)

    return args, parts, save


def background(root):
    """A save in the background holds what the tensors were when it began, as the one in the foreground does."""
    _, _, save = ready(root, "foreground")
    save(2)
    args, parts, save = ready(root, "background", "--async-save")
    saves = checkpoint.start_background_saves()
    for iteration in (1, 2):
        save(iteration, lambda folder: checkpoint.save_weights(folder, parts[0]))
        assert saves.job is not None
    with torch.no_grad():
        for parameter in parts[0][0].parameters():
            parameter.zero_()
    update(*parts, 2)
    checkpoint.wait_for_background()
    assert saves.job is None
    directory = checkpoint_directory.iteration_directory(args.save, 2)
    assert checkpoint_directory.latest_iteration(args.save) == 2
    assert list(checkpoint_directory.damage(directory, content=True)) == []
    assert not [path.name for path in directory.rglob("*") if path.name.endswith((".written.json", ".partial"))]
    check_equal("background", root / "foreground", root / "background")
    args = replaced(args, load=args.save)
    assert checkpoint.load_checkpoint(args, *parts) == (2, POSITION)
    checkpoint.read_weights(checkpoint.updated_reference(args.load), parts[0])
    say("loaded")
    background_failures(root, saves)


def refused(what, function):
    """Call a function that must raise GrpoError; print the message."""
    try:
        function()
    except GrpoError as error:
        say(f"{what} on rank {dist.get_rank()}: {error}")
    else:
        raise AssertionError(what)


def check_earlier(args, iteration):
    """The earlier checkpoint is the newest, it is whole, and nothing else is left."""
    dist.barrier()
    assert checkpoint_directory.find(args.save)[0] == iteration
    assert sorted(path.name for path in Path(args.save).iterdir()) == [
        f"iter_{iteration:07d}",
        checkpoint_directory.LATEST,
    ]
    checkpoint_directory.verify(checkpoint_directory.iteration_directory(args.save, iteration))
    dist.barrier()


def failures(root):
    """Full disks, in the foreground: an error on all ranks, the earlier checkpoint stays, the next save works."""
    args, _, save = ready(root, "full")
    save(1)
    free = shutil.disk_usage(root)._replace(free=1000)
    with mock.patch.object(shutil, "disk_usage", lambda path: free):
        refused("estimate", lambda: save(2))
    check_earlier(args, 1)
    real = data_files.write_items

    def full(file, items):
        real(file, items)
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return []

    with mock.patch.object(data_files, "write_items", full):
        refused("full", lambda: save(2))
    check_earlier(args, 1)
    with mock.patch.object(torch, "save", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
        refused("common", lambda: save(2))
    check_earlier(args, 1)
    save(1)
    check_earlier(args, 1)
    say("saved after failures")


def background_failures(root, saves):
    """Processes that are killed or cannot write, and a directory that is deleted: an error on all ranks.

    A limit of the size of files takes the place of a full disk: 0 leaves no room for the message. The next save works.
    The processes are those of `background`: to start one takes seconds.
    """
    args, _, save = ready(root, "killed", "--async-save")
    save(1)
    checkpoint.wait_for_background()
    if dist.get_rank() == 1:
        os.kill(saves._process.pid, signal.SIGSTOP)  # so that it cannot be faster
    save(2)
    if dist.get_rank() == 1:
        os.kill(saves._process.pid, signal.SIGKILL)
    refused("killed", checkpoint.wait_for_background)
    check_earlier(args, 1)
    if dist.get_rank() == 0:
        os.kill(saves._process.pid, signal.SIGSTOP)
    save(3)
    if dist.get_rank() == 0:
        shutil.rmtree(checkpoint_directory.iteration_directory(args.save, 3).with_suffix(".tmp"))
        os.kill(saves._process.pid, signal.SIGCONT)
    refused("deleted", checkpoint.wait_for_background)
    check_earlier(args, 1)
    for rank, limit in ((0, 100), (1, 100), (1, 0)):
        if dist.get_rank() == rank:
            resource.prlimit(saves._process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        save(4)
        refused(f"rank {rank} with {limit} bytes", checkpoint.wait_for_background)
        check_earlier(args, 1)
        if dist.get_rank() == rank:
            resource.prlimit(saves._process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    if dist.get_rank() == 0:
        os.kill(saves._process.pid, signal.SIGSTOP)
    save(5)
    if dist.get_rank() == 0:
        os.kill(saves._process.pid, signal.SIGKILL)
    refused("rank 0 killed", checkpoint.wait_for_background)
    check_earlier(args, 1)
    save(6)
    checkpoint.wait_for_background()
    assert checkpoint_directory.latest_iteration(args.save) == 6
    say("saved after failures")


if __name__ == "__main__":
    case, folder = sys.argv[1], Path(sys.argv[2])
    sys.argv[1:] = []
    run(lambda: {"background": background, "failures": failures}[case](folder))
