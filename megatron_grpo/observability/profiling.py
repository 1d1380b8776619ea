"""Profiles of some updates (``--profile``), with PyTorch's profiler or Nsight Systems; the flags are Megatron-LM's."""

from argparse import Namespace
from pathlib import Path

import torch

PHASE = "phase/"  # prefix of the profiler range that Timers opens for each phase
OPERATORS = 30  # rows of the table


class Profiler:
    """Profiler of the updates between --profile-step-start and --profile-step-end, on --profile-ranks.

    PyTorch's profiler writes ``rank<R>.trace.json.gz`` (for Perfetto or chrome://tracing) and ``rank<R>.txt``, a table
    of phases and operators. Without --use-pytorch-profiler, CUDA's profiler range is started and stopped, for
    ``nsys profile --capture-range cudaProfilerApi``.
    """

    def __init__(self, args: Namespace, rank: int, iteration: int):
        self.args, self.rank = args, rank
        self.wanted = args.profile and rank in (args.profile_ranks or [0])
        self.recording: torch.profiler.profile | bool = False
        self.after(iteration)

    def after(self, iteration: int) -> None:
        """Start or end the recording after update ``iteration``."""
        if self.wanted and not self.recording and iteration == self.args.profile_step_start:
            self._begin()
        elif self.recording and iteration >= self.args.profile_step_end:
            self.close()

    def close(self) -> None:
        """End the current recording, if any, and write it."""
        if isinstance(self.recording, torch.profiler.profile):
            self.recording.stop()
            self._write(self.recording)
        elif self.recording:
            torch.cuda.profiler.stop()
        self.recording = False

    def _begin(self) -> None:
        if self.args.use_pytorch_profiler:
            self.recording = torch.profiler.profile()  # records all activities that this machine supports
            self.recording.start()
        else:
            torch.cuda.profiler.start()
            self.recording = True

    def _write(self, recorded: torch.profiler.profile) -> None:
        directory = Path(self.args.save, "profile")
        directory.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(directory / f"rank{self.rank}.trace.json.gz"))
        averages = recorded.key_averages()
        lines = [f"updates {self.args.profile_step_start + 1} to {self.args.profile_step_end}", ""]
        phases = [event for event in averages if event.key.startswith(PHASE)]
        for event in sorted(phases, key=lambda event: -event.cpu_time_total):
            seconds = event.cpu_time_total / 1e6
            lines.append(f"{event.key.removeprefix(PHASE):12s} {seconds:10.3f} s in {event.count} calls")
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        lines += ["", averages.table(sort_by=order, row_limit=OPERATORS)]
        (directory / f"rank{self.rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
