"""What test_decode_steps.py runs: one engine, which completes the same requests with and without decode steps.

    torchrun --nproc-per-node 1 tests/distributed/decode_steps_worker.py OUT FLAGS

OUT gets, of both, ids, log-probabilities, reasons and versions of all completions in the order in which they finished,
and the numbers of decode steps and steps.
"""

import json
import sys
from pathlib import Path

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import numpy as np

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.engine import Request
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.vllm.scheduler import scheduler_of
from megatron_grpo.training.entry_point import run
from megatron_grpo.weights import families
from tools import made_up

REQUESTS, TOKENS = 64, 150


def life(engine) -> list:
    """Complete requests that arrive late, are aborted, interrupted and continued, or go on with new weights."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, rng.integers(1, 16)).tolist() for _ in range(REQUESTS // 4)]

    def request(number: int, begun=None) -> Request:
        sampling = Sampling(
            TOKENS if number % 3 else 20, temperature=0.7, log_probs=number % 5 > 0, stop_token_ids=(2, 0)
        )
        return Request(number, prompts[number // 4], sampling, begun)

    done, seed = [], 1
    with engine.rollout(seed):
        engine.submit([request(number) for number in range(REQUESTS // 2)])
        for step in range(40):
            done += engine.poll()
            if step in (5, 20):
                first = (1 + step // 20) * REQUESTS // 4 + REQUESTS // 4
                engine.submit([request(number) for number in range(first, first + REQUESTS // 4)])
            if step == 10:
                engine.abort([min(set(engine._under_way))])
            if step == 25:
                engine._begin_version(7)
        begun = engine.interrupt()
    with engine.rollout(seed + 1):
        engine.submit([request(completion.id, completion) for completion in begun])
        left = {completion.id for completion in begun}
        while left:
            found = engine.poll()
            left -= {completion.id for completion in found}
            done += found
    return [[c.id, c.token_ids, c.log_probs, c.finish_reason, list(c.weight_versions)] for c in done]


def main() -> None:
    out, *flags = sys.argv[1:]
    args = made_up.parse(flags, 1)
    initialize_distributed(args)
    engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
    scheduler = scheduler_of(engine._engine)
    seen = {"decode steps": 0, "steps": 0}
    schedule = scheduler.schedule

    def counted(*args):
        step = schedule(*args)
        seen["steps"] += 1
        seen["decode steps"] += hasattr(step, "requests")
        return step

    scheduler.schedule = counted
    assert scheduler.has_decode_steps
    found = {}
    for name in ("decode steps", "vLLM", "decode steps again"):
        scheduler.has_decode_steps = name != "vLLM"
        engine._begin_version(0)
        found[name] = life(engine)
        found[f"{name}: counts"] = dict(seen)
        seen.update(dict.fromkeys(seen, 0))
    Path(out).write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    run(main)
