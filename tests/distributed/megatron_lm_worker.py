"""What test_megatron_lm.py runs under torchrun: a checkpoint of Megatron-LM's training code, loaded in every layout.

    megatron_lm_worker.py ROOT

prints a line for each layout of this number of ranks.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import core_0_16_worker as worker

# core_0_16_worker installs the CPU layer, which comes before megatron.core.
# isort: split
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from toy_checkpoints import packed

from megatron_grpo.checkpointing import checkpoint, checkpoint_directory
from megatron_grpo.models import forward
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced

MODEL = f"--num-layers 2 --untie-embeddings-and-output-weights --train-iters 10 {worker.DENSE} {worker.SHARDED}"
LAYOUTS = {1: ["TP1"], 2: ["TP2 SP", "PP2", "DP2"]}


def tensors(root):
    """All tensors of the only checkpoint under ``root``, whole, as megatron-core itself reads them."""
    stored = dist_checkpointing.load_plain_tensors(str(checkpoint_directory.find(root)[1]))
    return {key: value for key, value in stored.items() if torch.is_tensor(value)}


def logits(model, ids):
    """Logits [tokens, vocabulary] of one sequence."""
    return model(ids[None], torch.arange(len(ids))[None], attention_mask=None, packed_seq_params=packed(ids))[0]


def check_as_written(layout, root, again):
    """Load the checkpoint in a layout and save it from there: both must hold the same."""
    args, trainer = worker.enter(MODEL, layout, root)
    iteration, _ = checkpoint.load_checkpoint(args, *worker.parts_of(trainer))
    assert (iteration, trainer.scheduler.num_steps) == (2, 2)
    assert {group["step"] for group in trainer.optimizer.param_groups} == {2}
    args = replaced(args, save=str(again))
    with forward.parameters_complete(trainer.model):
        checkpoint.save_checkpoint(args, iteration, *worker.parts_of(trainer), {})
    want, got = tensors(root), tensors(again)
    assert want.keys() == got.keys(), want.keys() ^ got.keys()
    assert any("exp_avg_sq" in key for key in want)
    different = [key for key in want if not torch.equal(want[key], got[key])]
    assert not different, different
    return trainer


def check_as_computed(trainer, expected):
    """The loaded model computes Megatron-LM's logits, and its next update on the same tokens."""
    (model,), want = trainer.model, SimpleNamespace(**expected)
    with torch.no_grad():
        got = torch.stack([logits(model, torch.tensor(ids)) for ids in want.tokens])
    assert (got - torch.tensor(want.logits)).abs().max() < 1e-6
    rows = torch.tensor(want.next_tokens)
    model.zero_grad_buffer()
    loss = torch.stack([F.cross_entropy(logits(model, row[:-1]), row[1:]) for row in rows]).mean()
    loss.backward()
    _, grad_norm, _ = trainer.optimizer.step()
    assert (loss.item(), grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=1e-5)


def main(root):
    for layout in LAYOUTS[int(os.environ["WORLD_SIZE"])]:
        trainer = check_as_written(layout, root, root / layout)
        if layout == "TP1":
            check_as_computed(trainer, json.loads((root / "expected.json").read_text()))
        os.write(1, f"rank {dist.get_rank()}: loaded in {layout}\n".encode())


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    sys.argv[1:] = []
    run(lambda: main(directory))
