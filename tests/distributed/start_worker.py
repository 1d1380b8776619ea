"""pretrain_grpo.py on two hosts as test_start.py makes them up; each rank prints what it reads at the start.

start_worker.py DIRECTORY FLAGS: rank N runs in DIRECTORY/hostN, so that a relative path is another place there.
"""

import os
import sys

os.chdir(f"{sys.argv.pop(1)}/host{os.environ['RANK']}")
os.environ["LOCAL_RANK"] = "0"

import pretrain_grpo
from megatron_grpo.training import setup
from megatron_grpo.training.entry_point import run
from tools.benchmark.scale import reads


def counted(name):
    """Replace a function of the set-up by one that prints what it reads."""
    function = getattr(setup, name)

    def counting(*arguments, **settings):
        with reads() as found:
            result = function(*arguments, **settings)
        print(f"\nrank {os.environ['RANK']} {name}: {found.stats} stats, {found.bytes} bytes", flush=True)
        return result

    setattr(setup, name, counting)


if __name__ == "__main__":
    counted("_read_origin")
    counted("_read_data")
    run(pretrain_grpo.main)
