"""What test_kept_rollouts.py runs: partial rollouts of one engine, which goes on with its requests or begins again.

    torchrun --nproc-per-node 1 tests/distributed/kept_rollouts_worker.py OUT FLAGS

OUT gets, of each way, the completions of all batches by row and sample: tokens, log-probabilities and versions; and how
many requests the engine got.
"""

import json
import sys
from pathlib import Path

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import numpy as np

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.partial import collect_partial_rollout
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.unfinished import PartialRollouts
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.training.entry_point import run
from megatron_grpo.weights import families
from tools import made_up

GROUPS, GENERATIONS, STALENESS, ROLLOUTS = 4, 2, 2, 5
PROMPTS = GROUPS * (ROLLOUTS + STALENESS)
SAMPLING = Sampling(120, temperature=0.0, log_probs=True)  # a continued completion has the tokens of an undisturbed one


def completions(batch) -> dict[str, list]:
    found = {}
    for i, (row, sample) in enumerate(zip(batch.row_ids.tolist(), batch.sample_ids.tolist(), strict=True)):
        own = slice(batch.cu_seqlens[i] + batch.prompt_lengths[i], batch.cu_seqlens[i + 1])
        parts = batch.tokens, batch.rollout_log_probs, batch.weight_version
        found[f"{row} {sample % GENERATIONS}"] = [part[own].tolist() for part in parts]
    return found


def partial(engine, prompts: list[Prompt], keeps: bool, works_between: bool) -> dict:
    """Return the completions of partial rollouts; between them the engine gets new weights, and other work."""
    groups, drawn, found, submitted = PartialRollouts(engine, GROUPS, GENERATIONS, STALENESS, keeps), 0, {}, []
    submit = engine.submit

    def noting(requests):
        requests = list(requests)
        submitted.extend(request.id for request in requests)
        submit(requests)

    for rollout in range(ROLLOUTS):
        if engine._under_way:
            engine._finish_step()
        engine._begin_version(rollout)
        if works_between and rollout in (2, 3):
            groups.pause(engine)
            plan = RolloutPlan(prompts[:1], 1, SAMPLING, 99)
            collect_rollout(engine, plan, None, None, Timers())
        engine.submit = noting
        new = prompts[drawn : drawn + groups.prompts_to_draw()]
        drawn += len(new)
        plan = RolloutPlan(new, GENERATIONS, SAMPLING, rollout, partial=groups)
        batch, _ = collect_partial_rollout(engine, plan, None, None, Timers())
        found |= completions(batch)
        engine.submit = submit
    with engine.rollout(0):
        engine.interrupt()
    return {"found": found, "submitted": len(submitted), "requests": len(set(submitted))}


def main() -> None:
    out, *flags = sys.argv[1:]
    args = made_up.parse(flags, 1)
    initialize_distributed(args)
    engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 250, rng.integers(1, 16)).tolist() for _ in range(PROMPTS)]
    lengths = [1 + 37 * n % 120 for n in range(PROMPTS)]
    prompts = [Prompt(n, ids[n], {}, "made up", sampling_fields={"max_tokens": lengths[n]}) for n in range(PROMPTS)]
    engine._begin_version(0)
    whole, _ = collect_rollout(engine, RolloutPlan(prompts, GENERATIONS, SAMPLING, 0), None, None, Timers())
    facts = {"whole": {"found": completions(whole)}}
    for name, *how in ("again", False, False), ("kept", True, False), ("kept, other work", True, True):
        facts[name] = partial(engine, prompts, *how)
    Path(out).write_text(json.dumps(facts))
    engine.close()


if __name__ == "__main__":
    run(main)
