"""The launch of this process: its rank, and what all attempts of one torchrun have in common.

Attempts are those of ``--max-restarts``, and a requeued job.
"""

import json
import os
from pathlib import Path

from megatron_grpo.utils.process_tree import launcher_process

RECORD = "environment.json"  # in --save, with the launch that wrote there


def rank() -> int:
    """Return the rank that torchrun gave this process, 0 without torchrun; needs no process group."""
    return int(os.environ.get("RANK", "0"))


def launch_id() -> str | None:
    """Return the id of this launch; None if its attempts cannot be told from those of other launches.

    It is torchrun's ``--rdzv-id`` (``--standalone`` draws one, a requeued job gives the same one again). Without it a
    torchrun on one host is known by its process.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if os.environ["TORCHELASTIC_RUN_ID"] != "none":  # torchrun's default
        return os.environ["TORCHELASTIC_RUN_ID"]
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    launcher, _ = launcher_process()
    started = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]  # in clock ticks
    return f"torchrun {os.uname().nodename} {launcher} {started}"


def wrote(directory: str | Path) -> bool:
    """Return whether an earlier attempt of this launch has written to ``directory``, a --save."""
    launch, record = launch_id(), Path(directory, RECORD)
    if launch is None or not record.exists():
        return False
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # damaged: the launch is unknown
        return False
    return isinstance(content, dict) and content.get("launch") == launch
