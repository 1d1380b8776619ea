"""The run that disturbed_worker.py disturbs: four updates of a tiny model with a reward from a plug-in."""

from pathlib import Path

WORKER = "tests/distributed/disturbed_worker.py"
PLUGIN = """
from megatron_grpo.rewards.registry import Sample, register_reward

@register_reward("digits")
def digits(sample: Sample) -> float:
    return float(sum(c.isdigit() for c in sample.completion))
"""
# Six steps of the engine a rollout, one micro-batch an update, a checkpoint of each second update.
FLAGS = """--transformer-impl local --rollout-engine megatron --num-generations 4 --lr 2e-3 --max-prompt-length 16
    --max-completion-length 6 --ignore-eos --train-iters 4 --save-interval 2 --micro-batch-size 4 --beta 0.1
    --reward-funcs digits --no-save-hf""".split()


def disturbed_flags(model: str, directory: Path) -> list[str]:
    """Write rows and the reward to ``directory``; return the run's flags without --save."""
    (directory / "digits.py").write_text(PLUGIN)
    (directory / "train.jsonl").write_text("".join(f'{{"prompt": "{a} and {b}?"}}\n' for a in "abc" for b in "xyz"))
    words = f"--load-hf {model} --train-data-path {directory}/train.jsonl --external-plugins {directory}/digits.py"
    return [*FLAGS, *words.split()]
