"""Supervised updates in several layouts: loss, gradient norm and learning rate are those of one rank."""

import json

import pytest
from ranks import run_torchrun
from run_files import metrics_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FLAGS = """--transformer-impl local --rollout-engine megatron --num-generations 4 --lr 1e-3 --beta 0 --train-iters 1
 --max-prompt-length 60 --max-completion-length 24 --reward-funcs exact_match --no-save-hf --global-batch-size 8
 --sft-iters 3 --sft-lr 1e-3 --max-tokens-per-microbatch 96""".split()
LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "CP2": "--context-parallel-size 2",
    "DP2": "--share-prompts",
}


@pytest.fixture(scope="module")
def run(tiny_models, tmp_path_factory):
    """``run(ranks, flags)``: the rows of the supervised updates."""
    root = tmp_path_factory.mktemp("inputs")
    (root / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": "2"}) + "\n" for a in "1234"))
    says = [[("hi", "yo"), ("2?", "4")], [("say a", "aa" * 9), ("b", "bcd")], [("x" * 20, "y"), ("z", "zz")]]
    with open(root / "sft.jsonl", "w") as file:
        for turns in says:
            pairs = [pair for user, own in turns for pair in (("user", user), ("assistant", own))]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in pairs]}) + "\n")

    def of(ranks, flags=""):
        save = tmp_path_factory.mktemp("save")
        words = ["--load-hf", tiny_models["qwen3"], "--chat-template", TEMPLATE, "--save", str(save)]
        words += ["--train-data-path", str(root / "train.jsonl"), "--sft-data-path", str(root / "sft.jsonl")]
        run_torchrun(ranks, "pretrain_grpo.py", *words, *FLAGS, *flags.split())
        return [row for row in metrics_of(save) if row["iteration"] < 0]

    return of


@pytest.fixture(scope="module")
def alone(run):
    return run(1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_number(layout, run, alone):
    rows = run(2, LAYOUTS[layout])
    assert [row["iteration"] for row in rows] == [-3, -2, -1]
    for row, expected in zip(rows, alone, strict=True):
        assert row["sft/tokens"] == expected["sft/tokens"] and row["lr"] == expected["lr"]
        assert row["sft/loss"] == pytest.approx(expected["sft/loss"], rel=2e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
