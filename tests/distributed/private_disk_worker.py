"""pretrain_grpo.py on two hosts as test_private_disks.py makes them up: each rank is the first of its host.

private_disk_worker.py DIRECTORY FLAGS: rank N runs in DIRECTORY/hostN, so that a relative path is another place there.
"""

import os
import sys

os.chdir(f"{sys.argv.pop(1)}/host{os.environ['RANK']}")
os.environ["LOCAL_RANK"] = "0"

import pretrain_grpo
from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.training.entry_point import run

if __name__ == "__main__":
    checkpoint.TOKEN_SECONDS = 0.5
    run(pretrain_grpo.main)
