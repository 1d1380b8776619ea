"""What test_working_set.py runs: episodes of one engine whose cache is too small for all, with and without a set.

    torchrun --nproc-per-node 1 tests/distributed/working_set_worker.py OUT FLAGS

OUT gets, of both, the tokens and log-probabilities of each episode, and the tokens that the engine computed.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import numpy as np

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.engine import Request
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.vllm.scheduler import scheduler_of
from megatron_grpo.rollout.working_set import WorkingSet
from megatron_grpo.training.entry_point import run
from megatron_grpo.weights import families
from tools import made_up

EPISODES, TURNS, TOKENS, ANSWER = 12, 5, 40, 140
COSTS = SimpleNamespace(turn=lambda tokens, history, running: 1 / running, history=lambda tokens: 1e9)


def converse(engine) -> list:
    """Complete all turns, each after an answer of other tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, 100).tolist() for _ in range(EPISODES)]
    answers = rng.integers(3, 250, (EPISODES, TURNS, ANSWER)).tolist()

    def request(number: int, turn: int, begun=None) -> Request:
        sampling = Sampling(TOKENS * (turn + 1), temperature=1.0, log_probs=True, stop_token_ids=())
        return Request(number, prompts[number], sampling, begun, seed=100 * number + turn)

    turns, done = dict.fromkeys(range(EPISODES), 0), {}
    with engine.rollout(1):
        engine.submit([request(number, 0) for number in turns])
        while turns:
            for completion in engine.poll():
                number = completion.id
                turns[number] += 1
                if turns[number] == TURNS:
                    done[number] = completion
                    del turns[number]
                    engine.end(number)
                else:
                    begun = completion.with_environment_tokens(answers[number][turns[number]])
                    engine.submit([request(number, turns[number], begun)])
    return [[done[n].token_ids, np.nan_to_num(done[n].log_probs, nan=9).tolist()] for n in range(EPISODES)]


def main() -> None:
    out, *flags = sys.argv[1:]
    args = made_up.parse(flags, 1)
    initialize_distributed(args)
    engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
    scheduler, computed = scheduler_of(engine._engine), 0
    schedule = scheduler.schedule

    def counted(*args):
        nonlocal computed
        step = schedule(*args)
        computed += step.total_num_scheduled_tokens
        return step

    scheduler.schedule = counted
    found = {"cache": engine.cache_tokens}
    for name, costs in (("all pass", None), ("set", COSTS)):
        computed = 0
        found[name] = converse(WorkingSet(engine, costs))
        found[f"{name}: computed"] = computed
    Path(out).write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    run(main)
