"""Flags that tools give pretrain_grpo.py: a new rule that refuses them would end these tools at their start."""

import pytest

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.resolve import resolve_args, resolve_origin
from tools import ledger_check, recipes, resume_check, soak
from tools.benchmark import staleness, turn_advantages

STALE = f"{staleness.FLAGS} --train-iters 60"
RUNS = {
    **{f"resume_check, {job}": f"{resume_check.COMMON} {flags}" for job, flags in resume_check.JOBS.items()},
    **{
        f"ledger_check, {mode}": f"{ledger_check.FLAGS} {' '.join(flags)} --train-iters 8 --save-interval 3"
        for mode, flags in ledger_check.MODES.items()
    },
    "soak": f"{soak.FLAGS.replace(' sometimes', '')} --train-iters 100",
    "staleness 0": STALE,
    "staleness 4": f"{STALE} --partial-rollouts --max-staleness 4 {staleness.CORRECTION}",
    **{
        f"turn_advantages, {method}": f"{turn_advantages.FLAGS} --advantage-estimator {method} --train-iters 40"
        for method in turn_advantages.METHODS
    },
    "recipes": f"{recipes.COMMON.replace('--use-checkpoint-args', '')} --train-iters 240",
}


@pytest.mark.parametrize("name", RUNS)
def test_the_flags_of_a_tool_are_valid(name, tiny_models, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    flags = RUNS[name].format(save=tmp_path).split()
    flags += ["--load-hf", tiny_models["qwen3"], "--train-data-path", str(file), "--save", str(tmp_path)]
    flags += ["--valid-data-path", str(file)] * ("--eval-interval" in flags)
    args = resolve_origin(parse_args(flags), resume=False)
    resolve_args(args, 2 if name == "ledger_check, asynchronous" else 1)
