"""An Offloader whose background copies are as late as they may be."""

import threading

import torch

import pretrain_grpo  # noqa: F401  # first: it prepares for machines without a GPU
from megatron_grpo.training.offload import Offloader


class LateOffloader(Offloader):
    """Copies in the background only once something waits for them; until then the memory holds other bytes.

    Its context ends the thread, also after an error.
    """

    due = threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.due.set()

    def to_device(self, background: bool = False):
        if not (self.is_out and background):
            return super().to_device(background)
        assert self.due.is_set() or self._copies is None, "earlier copies have not ended"
        self.due = threading.Event()
        self._thread.submit(self.due.wait)
        back = super().to_device(background)
        for storage, _ in self._copied:
            storage.fill_(255)  # NaN as floating-point numbers
        torch.cuda.synchronize()
        return back

    def complete(self) -> None:
        self.due.set()
        super().complete()
