"""Checkpoints with stand-ins for megatron-core's files. It imports no torch: a process of its own starts at once."""

import json

from megatron_grpo.checkpointing import checkpoint_directory as cd
from megatron_grpo.checkpointing.checksums import CHECKSUMS, Checksum


def save(root, iteration, keep=None, payload="weights", best=None):
    """Write and publish a checkpoint."""
    temporary = cd.start(root, iteration)
    for name in cd.CORE_FILES:
        (temporary / name).write_text(f"{name} {iteration}")
    (temporary / "__0_0.distcp").write_text(payload * 100)
    items = [[100 * len(payload), Checksum(100 * payload.encode()).text()]]
    (temporary / CHECKSUMS).write_text(json.dumps({"__0_0.distcp": items}))
    cd.publish(temporary, {"num_layers": 4}, keep, best)
