"""Saves, evaluations, ledgers, logs, profiles and resumes change no metric, completion or weight of a run by a bit."""

import json
import random

import pytest
from ranks import run_torchrun
from run_files import CLOCKS, json_lines, metrics_of, without
from slow import slow_except
from toy_checkpoints import tensors_of

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

PLUGIN = """
from megatron_grpo.rewards.registry import register_reward

@register_reward("letters")
def letters(sample):
    return float(sum(map(ord, sample.completion)) % 4 == 0)
"""
COMMON = """--transformer-impl local --num-generations 4 --global-batch-size 8 --max-prompt-length 400
    --max-completion-length 8 --lr 2e-3 --lr-decay-style linear --reward-funcs letters --mismatch-limit 10"""
VLLM = '--vllm-engine-kwargs {"kv_cache_memory_bytes":33554432} --check-weight-sync'
MEGATRON = "--rollout-engine megatron"
AVERAGED = "--beta 0.1 --sync-ref-model --ref-model-sync-steps 2 --ref-model-mixup-alpha 0.5"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PARTIAL = "--partial-rollouts --max-staleness 1 --rollout-importance-sampling-mode token_truncate"
ECHOES = "tests/data/echo_environment.py"
ECHO = "--environment echo --max-turns 3 --max-environment-tokens 60 --reward-funcs environment letters"
TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
# One of each row is drawn; all of them go together.
CHOICES = [
    [f"qwen3 {MEGATRON}", f"qwen3_moe {MEGATRON} --moe-aux-loss-coeff 0.01", f"qwen3 {VLLM}"],
    ["", OVERLAP, TP2, f"{OVERLAP} {TP2}", PP2, f"{OVERLAP} {PP2}"],
    ["--micro-batch-size 2", "--micro-batch-size 4", "--max-tokens-per-microbatch 500"],
    ["", "--steps-per-generation 2", "--num-iterations 2"],
    ["", "--bf16", "--fp16 --initial-loss-scale 1024"],
    [
        "",
        "--loss-type dapo",
        "--loss-type gspo",
        "--loss-type cispo --epsilon-high 5",
        "--clip-cov-ratio 0.3 --clip-cov-lb -5",
    ],
    [AVERAGED, AVERAGED, "--beta 0.1", "--beta 0 --lora-rank 4 --lora-dropout 0.2"],
    ["", "--dynamic-sample --max-resample-times 2", "--over-sampling-ratio 1.5", PARTIAL, ECHO, f"{ECHO} {PARTIAL}"],
]
EVALUATED = "--valid-data-path ROWS --eval-interval 2 --eval-num-generations 2 --eval-max-prompts 3"
OPERATIONS = {
    "saves": "--save-interval 2",
    "background": "--save-interval 2 --async-save --max-checkpoints-to-keep 1",
    "evaluations": f"{EVALUATED} --val-before-train",
    "best": f"{EVALUATED} --save-interval 2 --keep-best eval/greedy_reward --max-checkpoints-to-keep 1",
    "ledger": "--ledger SAVE/ledger",
    "logs": "--tensorboard-dir SAVE/tensorboard --log-params-norm --include-performance-metrics",
    "profile": "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2",
}
APART = (*CLOCKS, "eval/", "memory/", "params_norm", "lora/base_sec", "lora/adapter_sec", "lora/check_sec")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a directory with rows, whose prompts begin alike and fill a block of vLLM's cache, and a reward."""
    root = tmp_path_factory.mktemp("inputs")
    texts = [f"{'a long story ' * 12}{a}{b}?" for a in "abcd" for b in "xyz"]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    (root / "rows.jsonl").write_text("\n".join(rows))
    (root / "letters.py").write_text(PLUGIN)
    return root


def run(data, ranks, save, flags, more=""):
    """Run the flags, and return what must not change: rows of metrics, logged completions, and weights."""
    words = f"{COMMON} {flags} --train-data-path ROWS --external-plugins DATA/letters.py {ECHOES} {more}"
    words += f" --stop-token-ids {' '.join(map(str, range(0, 250, 10)))}"  # ends some completions of random weights
    words = words.replace("ROWS", "DATA/rows.jsonl").replace("DATA", str(data)).replace("SAVE", str(save))
    run_torchrun(ranks, "pretrain_grpo.py", *words.split(), "--save", save, "--load", save)
    rows = [row for row in without(metrics_of(save), APART) if row["iteration"] > 0]
    tensors = tensors_of(save / "hf_model") | tensors_of(save / "adapter")
    weights = {name: tensor.tolist() for name, tensor in tensors.items()}
    return {"rows": rows, "completions": json_lines(save / "completions.jsonl"), "weights": weights}


def differences(plain, other):
    """Return a line for each metric that differs, and one for completions and weights."""
    lines = [f"{len(other['rows'])} rows"] * (len(plain["rows"]) != len(other["rows"]))
    for one, two in zip(plain["rows"], other["rows"]):
        names = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
        lines += [f"{one['iteration']} {name}: {one.get(name)} {two.get(name)}" for name in sorted(names)]
    for part in ("completions", "weights"):
        lines += [part] * (plain[part] != other[part])
    return lines


# An average in float32 of a policy in bfloat16 whose gathers overlap; random states that dropout reads.
FIXED = {
    "averaged": (2, f"{CHOICES[0][1]} --bf16 {OVERLAP} {AVERAGED} --micro-batch-size 4 --train-iters 4"),
    "adapter": (1, f"{CHOICES[0][2]} --beta 0.1 --lora-rank 4 --lora-dropout 0.2 --micro-batch-size 4 --train-iters 4"),
}


@pytest.mark.parametrize("name", slow_except(["averaged"], FIXED))
def test_all_together_change_nothing(data, tiny_models, tmp_path, name):
    ranks, flags = FIXED[name]
    flags = with_model(flags, tiny_models)
    plain = run(data, ranks, tmp_path / "plain", flags)
    assert all(row["grad_norm"] > 0 for row in plain["rows"]) and len(plain["rows"]) == 4
    more = " ".join(OPERATIONS.values())
    assert differences(plain, run(data, ranks, tmp_path / "more", flags, more)) == []


def with_model(flags, tiny_models):
    """Return flags whose first word is a family with the directory of its model."""
    family, rest = flags.split(" ", 1)
    return f"--load-hf {tiny_models[family]} {rest}"


def drawn(number):
    """Return the number of ranks and the flags of a draw."""
    draw = random.Random(number)
    flags = " ".join(draw.choice(choices) for choices in CHOICES)
    updates = 6 if "--steps-per-generation" in flags or "--num-iterations" in flags else 4
    alone = "-parallel-size" not in flags and draw.random() < 0.5
    return (1 if alone else 2), f"{flags} --train-iters {updates}", draw


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_single_ones_change_nothing(data, tiny_models, tmp_path, number):
    ranks, flags, draw = drawn(number)
    flags = with_model(flags, tiny_models)
    plain = run(data, ranks, tmp_path / "plain", flags)
    found = {}
    for name in draw.sample(sorted(OPERATIONS), 3):
        found[name] = differences(plain, run(data, ranks, tmp_path / name, flags, OPERATIONS[name]))
    run(data, ranks, tmp_path / "stopped", flags, "--exit-interval 2")
    found["resumed"] = differences(plain, run(data, ranks, tmp_path / "stopped", flags))
    assert not any(found.values()), (ranks, flags, found)
