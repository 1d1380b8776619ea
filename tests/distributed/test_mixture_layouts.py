"""Demonstrations beside the rollout in several layouts: loss, gradient norm and metrics are those of one rank."""

import json

import pytest
from good_args import MODEL
from mixture_worker import COUNT, LOSSES
from ranks import run_torchrun
from router_replay_worker import FULL
from slow import slow_except
from test_parallel_layouts import DELTA, MAMBA

pytestmark = pytest.mark.distributed

DENSE = MODEL.replace("--vocab-size 1000", "--vocab-size 128")
MODELS = {
    "DP2": DENSE,
    "dense": DENSE,
    "adapters": f"{DENSE} --lora-rank 4 --lora-alpha 4 --lora-target-modules all-linear",
    "experts": f"{DENSE} --model-family qwen3_moe --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    " --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
}
MODELS |= {"delta nets": DELTA, "Mamba-2": MAMBA}
BUDGET = "--max-tokens-per-microbatch 96"
ALONE = ("--micro-batch-size 2", "--micro-batch-size 4", BUDGET, f"{BUDGET} --no-share-prompts")
EMPTY = "--micro-batch-size 1"  # one of the micro-batches of two ranks has no demonstration
REPLAY = f"--router-replay-mode R2 {FULL}"
LAYOUTS = {
    "DP2": ["--micro-batch-size 2"],
    "dense": [
        BUDGET,
        f"{BUDGET} --tensor-model-parallel-size 2 --sequence-parallel",
        "--micro-batch-size 2 --pipeline-model-parallel-size 2",
        f"{BUDGET} --context-parallel-size 2",
        f"{BUDGET} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
    "adapters": [BUDGET, f"{BUDGET} --tensor-model-parallel-size 2", f"{BUDGET} --context-parallel-size 2"],
    "experts": [
        BUDGET,
        f"{BUDGET} --expert-model-parallel-size 2 {REPLAY}",
        f"{BUDGET} --pipeline-model-parallel-size 2",
        f"{BUDGET} --pipeline-model-parallel-size 2 --moe-token-dispatcher-type allgather {REPLAY}",
    ],
    "delta nets": [EMPTY],
    "Mamba-2": [EMPTY],
}
COMPARED = ("loss", "grad_norm", "sft/loss", "entropy", "clip/high", "ratio/max", "tokens/update", "sft/tokens")


@pytest.mark.parametrize("model", slow_except(["DP2"], LAYOUTS))
def test_a_layout_changes_no_number(model, tmp_path):
    alone = ALONE if model == "dense" else ALONE[2:3]
    for ranks, layouts in (1, alone), (2, LAYOUTS[model]):
        run_torchrun(ranks, "tests/distributed/mixture_worker.py", tmp_path / f"{ranks}.json", MODELS[model], *layouts)
    found = {ranks: json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2)}
    expected = found[1][alone[0]]
    for layout, losses in [*found[1].items(), *found[2].items()]:
        for name in LOSSES:
            for row, wanted in zip(losses[name], expected[name], strict=True):
                values = {key: row[key] for key in COMPARED}
                assert values == pytest.approx({key: wanted[key] for key in COMPARED}, rel=2e-5, abs=1e-7), layout
    assert len({losses["loss"] for losses in (rows[0] for rows in expected.values())}) == 3
    assert [row["sft/mu"] for row in expected["chord"]] == pytest.approx([0.9, 0.5])
    assert COUNT % 2
