"""Two ranks that end as the first argument says; errors pass through the entry point of a run, signals do not."""

import os
import signal
import sys
from pathlib import Path

from megatron_grpo.training.ended_by_signal import report_signals

if __name__ == "__main__":
    report_signals(sys.argv[1:])

import torch.distributed as dist

from megatron_grpo.observability.run_status import StatusFile
from megatron_grpo.utils.errors import GrpoError


def main() -> None:
    kind = sys.argv[1]
    if kind == "before":
        raise GrpoError("--lr is wrong: the cure")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and "--save" in sys.argv:
        StatusFile(Path(sys.argv[-1]), dict)
    dist.barrier()  # the file is there
    if kind == "everywhere":
        raise GrpoError("--lr is wrong: the cure")
    if kind == "waits":
        dist.barrier()
        os.write(2, f"rank {os.getpid()} waits\n".encode())
        signal.pause()
    if dist.get_rank() == 1:
        if kind == "parent":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        if kind.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[kind])
        raise GrpoError("--lr is wrong: the cure") if kind == "rank 1" else ZeroDivisionError("a defect")
    dist.barrier()


if __name__ == "__main__":
    if sys.argv[1].startswith("SIG"):
        main()  # without the imports of the entry point, which take seconds
    else:
        from megatron_grpo.training.entry_point import run

        run(main)
