"""--loss-type dpo in several layouts: its loss and its gradient are those of transformers' model and autograd."""

import json

import dpo_worker
import numpy as np
import pytest
import torch
from dpo_worker import DPO
from ranks import run_torchrun
from slow import slow_except
from transformers import AutoModelForCausalLM

made_up = dpo_worker.made_up
pytestmark = pytest.mark.distributed

LAYOUTS = {
    "alone": (1, ["--micro-batch-size 1", "--max-tokens-per-microbatch 96"]),  # a pair in two packs, or in one
    "DP2": (2, ["--micro-batch-size 1"]),
    "TP2": (2, ["--max-tokens-per-microbatch 96 --tensor-model-parallel-size 2 --sequence-parallel"]),
    "PP2": (2, ["--micro-batch-size 2 --pipeline-model-parallel-size 2"]),
    "CP2": (2, ["--max-tokens-per-microbatch 96 --context-parallel-size 2"]),
}


def of_transformers(path: str) -> list[dict[str, float]]:
    """Return the metrics of both updates: the pairs of each group of four, in a loop, in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.01)
    args = made_up.parse(["--load-hf", path, *DPO.split()], 1)
    batch = dpo_worker.rollout(args)

    def over_reference(i: int) -> torch.Tensor:
        begin, end, prompt = batch.cu_seqlens[i], batch.cu_seqlens[i + 1], batch.prompt_lengths[i]
        ids = torch.tensor(batch.tokens[begin:end].astype(np.int64))
        log_p = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)  # --temperature 0.8
        own = log_p[prompt - 1 : -1].gather(1, ids[prompt:, None]).sum()
        return own - float(batch.ref_log_probs[begin + prompt : end].astype(np.float64).sum())

    rows = []
    for update in range(2):
        losses, margins = [], []
        for first in range(16 * update, 16 * update + 16, 4):
            members = [i for i in range(first, first + 4) if not np.isnan(batch.rewards[i, 0])]
            members.sort(key=lambda i: float(batch.advantages[i]))
            worst, best = members[0], members[-1]
            if batch.advantages[worst] < batch.advantages[best]:
                margins.append(0.05 * (over_reference(best) - over_reference(worst)))
                losses.append(-torch.nn.functional.logsigmoid(margins[-1]))  # TRL's loss_type "sigmoid"
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        margin = torch.stack(margins).detach()
        rows.append({"dpo/loss": loss.item(), "dpo/margin": margin.mean().item(), "dpo/pairs": len(margins)})
        rows[-1] |= {"dpo/accuracy": (margin > 0).double().mean().item(), "grad_norm": norm.item()}
    return rows


@pytest.mark.parametrize("layout", slow_except(["DP2"], LAYOUTS))
def test_loss_and_gradient_are_autograds(layout, tmp_path, tiny_models):
    """The second update begins at the weights of the first one's gradient."""
    ranks, flags = LAYOUTS[layout]
    path, out = tiny_models["qwen3"], tmp_path / "out.json"
    run_torchrun(ranks, "tests/distributed/dpo_worker.py", out, f"--load-hf {path}", *flags)
    expected = of_transformers(path)
    assert [row["dpo/pairs"] for row in expected] == [3, 4] and expected[0]["dpo/loss"] != expected[1]["dpo/loss"]
    for name, rows in json.loads(out.read_text()).items():
        for row, wanted in zip(rows, expected, strict=True):
            assert {key: row[key] for key in wanted} == pytest.approx(wanted, rel=1e-4), name
