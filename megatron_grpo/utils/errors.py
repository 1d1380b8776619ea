"""The exceptions that end a run with one message, and who tells it."""

import os
import time


class GrpoError(Exception):
    """A mistake that the user can mend: the message names the cause and the cure, and the run ends with exit code 1."""


class EngineLost(GrpoError):
    """No engine is left to generate: the run is saved as it was before the rollout, if the device still answers, and
    ends as with any ``GrpoError``. Raised on every rank.
    """

    saved = False  # True if the run's newest checkpoint holds its newest update


def speaks_for_host() -> bool:
    """Whether this process tells a mistake that all processes of its host make: the first does.

    The others wait: torchrun ends all as soon as one leaves, and would cut the first short.
    """
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        return True
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(30)
    return False
