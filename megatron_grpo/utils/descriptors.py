"""Open files and sockets of a run's processes: raised to the hard limit, refused where that is too low.

`ulimit -n` is 1,024 in many shells and services. A rank has one or two sockets to each other rank (the gloo groups of
all ranks), and torchrun's store has two to each rank.
"""

import contextlib
import os
import resource

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.process_tree import LAUNCHED, launcher_process

OF_A_PROCESS = 512  # files, pipes, devices and libraries of a rank with vLLM
CURE = (
    "raise it (containers: --ulimit nofile=1048576; hosts: nofile in /etc/security/limits.conf; services: LimitNOFILE)"
)
ENOUGH = 2**20  # where the hard limit is higher: some programs walk over all numbers


def needed(ranks: int, streams: int = 0, workers: int = 0) -> int:
    """Return the descriptors of the fullest process of a run: two for each rank and each of its ``workers`` processes.

    ``streams``: to servers.
    """
    return OF_A_PROCESS + 2 * ranks + streams + 2 * workers


def launcher() -> list[int]:
    """Return the process id of torchrun, if it started this process."""
    if LAUNCHED not in os.environ:
        return []
    process, descriptor = launcher_process()
    if descriptor is not None:
        os.close(descriptor)
    return [process]


def raise_limit(ranks: int, streams: int = 0, workers: int = 0) -> None:
    """Raise the soft limit of this process and of torchrun, which keeps the store; GrpoError if the hard one is low.

    Processes that this one starts later inherit the limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = needed(ranks, streams, workers)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise GrpoError(
            f"a process of this run needs {need} open files ({OF_A_PROCESS}, 2 for each of {ranks} ranks and {workers} "
            f"worker processes, {streams} streams from servers), and the hard limit is {hard} (ulimit -Hn): {CURE}"
        )
    for process in (0, *launcher()):
        with contextlib.suppress(OSError):  # of another user, or ended
            soft, highest = resource.prlimit(process, resource.RLIMIT_NOFILE)
            limit = ENOUGH if highest == resource.RLIM_INFINITY else min(highest, ENOUGH)
            if soft != resource.RLIM_INFINITY and soft < limit:
                resource.prlimit(process, resource.RLIMIT_NOFILE, (limit, highest))
