"""What test_overlap.py runs under torchrun: everyone who reads the weights after an update reads the newest.

torchrun --nproc-per-node 2 tests/distributed/overlap_worker.py DIRECTORY
"""

import contextlib
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import checkpoint_worker
import numpy as np
import torch
from checkpoint_worker import BUCKETS, DENSE, PARTS, SHARDED, enter, fill, say

import pretrain_grpo
from megatron_grpo.models import forward
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.reference.model_args import reference_args
from megatron_grpo.reference.reference_model import SwappedReference
from megatron_grpo.rollout.source import RolloutSource
from megatron_grpo.training import train_step
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.saves import Saves
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.training.update_flops import UpdateFlops
from megatron_grpo.utils.arguments import replaced
from tools import made_up


class Engine:
    """Keeps what it is sent."""

    has_weights = False

    def update_weights(self, stream, version):
        self.weights = {name: tensor.clone() for name, tensor in stream}


class Parts(SimpleNamespace, Trainer):
    """A trainer that has the given parts alone."""


def readers(flags: str, layout: str, save: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What an engine, a checkpoint and the reference pass find after an update, through the program's own calls; then
    the policy's log-probabilities, which the pass must leave alone, and the weights after one more update.
    """
    args, model = enter(flags, layout)
    args = replaced(args, save=str(save))
    fill(model, args, "weight")
    reference = SwappedReference(reference_args(args), model)
    logger = SimpleNamespace(flush=lambda: None)
    trainer = Parts(
        **dict(zip(PARTS, train_step.setup_optimizer(args, model), strict=True)),
        **{"args": args, "timers": Timers(), "logger": logger, "iteration": 1, "tokens": 0, "reference": None},
        source=RolloutSource(args=args, dataset=None, sampler=SimpleNamespace(state_dict=dict), timers=None),
        early_exit=None,
        bad_updates=BadUpdates("stop", None, None),
        flops=UpdateFlops(args, None),
    )
    offloader = SimpleNamespace(complete=lambda: None)
    trainer.lifecycle = EngineLifecycle(args, trainer.model, None, Engine(), offloader, None, trainer.timers, None)
    saves = Saves(**{field.name: vars(trainer)[field.name] for field in fields(Saves) if field.name in vars(trainer)})
    found = {}

    def sync(name):
        trainer.lifecycle.sync(trainer.iteration)
        found[name] = trainer.lifecycle.engine.weights

    def log_probs(batch):
        return forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, batch)

    batch = made_up.rollout(args)
    batch.old_log_probs = batch.ref_log_probs = log_probs(batch)
    first, second = np.split(np.arange(batch.num_completions), 2)
    pretrain_grpo.update(args, trainer, batch, first)
    sync("engine")
    saves.write(trainer.position())
    found["checkpoint"] = checkpoint_worker.tensors(save)
    of_reference = partial(reference.log_probs, batch, trainer.model, pretrain_grpo.forward_step)
    ref_log_probs = of_reference()
    assert np.array_equal(ref_log_probs, batch.old_log_probs, equal_nan=True)  # the reference is where it began
    found["after the reference"] = {"log_probs": torch.from_numpy(log_probs(batch))}
    sync("engine after the reference")
    pretrain_grpo.update(args, trainer, batch, second)
    of_reference()  # as in a replay, which has no engine to send weights to
    found["after the reference of a replay"] = {"log_probs": torch.from_numpy(log_probs(batch))}
    sync("engine after the next update")
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Equal to rounding: buckets may be summed in another order."""
    assert one.keys() == other.keys()
    return all(
        torch.allclose(one[name].float(), other[name].float(), rtol=1e-5, atol=1e-6, equal_nan=True) for name in one
    )


def main(root: Path) -> None:
    plain = readers(f"{DENSE} {SHARDED}", "DP2", root / "plain")
    for layout in ("DP2", "PP2 VPP2", "DP2: --bf16"):
        want = plain if layout == "DP2" else readers(f"{DENSE} {SHARDED}", layout, root / layout)
        overlapped = readers(f"{DENSE} {BUCKETS}", layout, root / f"{layout} overlapped")
        for name in want:
            assert equal(overlapped[name], want[name]), (layout, name)
    say("nobody reads a stale weight")

    complete = forward.parameters_complete
    forward.parameters_complete = lambda model: contextlib.nullcontext()
    careless = readers(f"{DENSE} {BUCKETS}", "DP2", root / "careless")
    forward.parameters_complete = complete
    say(f"stale without care: {', '.join(name for name in plain if not equal(careless[name], plain[name]))}")


if __name__ == "__main__":
    directory = Path(sys.argv.pop())
    run(lambda: main(directory))
