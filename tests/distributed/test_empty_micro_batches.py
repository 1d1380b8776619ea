"""Completions that share no micro-batch, and whose number is no multiple of the ranks': some micro-batches are empty.

Loss, gradient and weights are those of one rank, where none is empty.
"""

import json

import pytest
from empty_micro_batches_worker import BUDGET
from ranks import run_torchrun
from run_files import json_lines, metrics_of

from tools import check_parallel

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Every loss of the routers, the biases of experts, and multi-token prediction.
MODEL = """--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --normalization RMSNorm --swiglu
 --disable-bias-linear --qk-layernorm --vocab-size 258 --max-position-embeddings 512
 --make-vocab-size-divisible-by 64 --untie-embeddings-and-output-weights --model-family deepseek_v3
 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
 --rotary-scaling-factor 4 --original-max-position-embeddings 128 --num-experts 4 --moe-router-topk 2
 --moe-ffn-hidden-size 32 --moe-router-dtype fp32 --moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid
 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
 --moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1 0.1
 --moe-z-loss-coeff 1e-2"""
SHARED = f"--max-tokens-per-microbatch {BUDGET}"
ALONE = f"{SHARED} --no-share-prompts"
LAYOUTS = {
    1: ["TP1: --micro-batch-size 1"],
    2: [
        f"DP2: {SHARED}",
        f"EP2: {ALONE} --moe-token-dispatcher-type allgather",
        f"PP2 VPP2: {ALONE}",  # 3 completions in 4 micro-batches
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("layouts")
    for ranks, layouts in LAYOUTS.items():
        run_torchrun(ranks, "tests/distributed/empty_micro_batches_worker.py", out, MODEL, *layouts)
    return {row["layout"]: row for row in json_lines(out / "results.jsonl")}


@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_an_update_is_that_of_one_rank(layout, results):
    assert check_parallel.verdict(results[layout], results[LAYOUTS[1][0]], 1e-5) == "same"


RUN = """--transformer-impl local --rollout-engine megatron --num-generations 3 --global-batch-size 3 --lr 1e-3
 --beta 0.1 --train-iters 4 --steps-per-generation 2 --max-prompt-length 8 --max-completion-length 24 --ignore-eos
 --reward-funcs fifths --adam-eps 1e-4 --no-save-hf --max-tokens-per-microbatch 32"""
PLUGIN = """
from megatron_grpo.rewards.registry import Sample, register_reward

@register_reward("fifths")
async def fifths(sample: Sample) -> float:
    return sum(map(ord, sample.completion)) % 5 / 4
"""


def test_a_run_whose_completions_fill_a_micro_batch_each(tiny_models, tmp_path):
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": "2"}) + "\n" for a in "1234"))
    plugin = tmp_path / "own.py"
    plugin.write_text(PLUGIN)
    found = []
    ledger = tmp_path / "ledger"
    for ranks, flag in (1, "--ledger"), (2, "--replay-rollouts"):
        save = tmp_path / str(ranks)
        words = f"""--load-hf {tiny_models["qwen3"]} --train-data-path {rows} --external-plugins {plugin} --save {save}
            {flag} {ledger}"""
        run_torchrun(ranks, "pretrain_grpo.py", *words.split(), *RUN.split())
        found.append(metrics_of(save))
    for row, expected in zip(*found, strict=True):
        assert row["tokens/update"] == expected["tokens/update"]
        for name in ("loss", "grad_norm", "kl", "entropy"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
