"""A signal to this process that the run has noted when the call returns."""

import signal
import threading
from unittest import mock

from megatron_grpo.training.early_exit import EarlyExit


def raise_noted_signal(number: signal.Signals) -> None:
    """Send the signal and wait for the thread of `EarlyExit` that reads it: on a busy machine it comes late."""
    noted, note = threading.Event(), EarlyExit._note

    def tell(self, number):
        note(self, number)
        noted.set()

    with mock.patch.object(EarlyExit, "_note", tell):
        signal.raise_signal(number)
        noted.wait()
