"""What test_lost_engine.py runs under torchrun: pretrain_grpo.py, whose engine fails in one step on one rank.

torchrun --nproc-per-node W tests/distributed/lost_engine_worker.py RANK STEP FLAGS
"""

import itertools
import os
import sys

import pretrain_grpo
from megatron_grpo.training.entry_point import run

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20 MiB.\nGPU 0 has a total capacity of 1 GiB."


def main() -> None:
    rank, failing_step = sys.argv.pop(1), int(sys.argv.pop(1))
    if rank == os.environ["RANK"]:
        if "megatron" in sys.argv:
            from megatron_grpo.rollout.megatron.engine import MegatronEngine as Engine

            name = "_poll"
        else:
            from vllm.v1.engine.llm_engine import LLMEngine as Engine

            from megatron_grpo.rollout.vllm import colocate  # noqa: F401  sets what vLLM reads at import

            name = "step"
        whole, calls = getattr(Engine, name), itertools.count(1)

        def step(self):
            if next(calls) == failing_step:
                raise RuntimeError(OUT_OF_MEMORY)
            return whole(self)

        setattr(Engine, name, step)
    pretrain_grpo.main()


if __name__ == "__main__":
    run(main)
