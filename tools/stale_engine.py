"""Run pretrain_grpo.py with an artificial staleness of the engine, to measure the effect of rollout importance weights.

    torchrun --nproc-per-node N tools/stale_engine.py UPDATES FLAGS

FLAGS are those of pretrain_grpo.py, with one update for each rollout. The engine samples with the trainer's weights of
UPDATES updates ago (with the initial weights at the start); evaluations use the newest weights. Rollout importance
weights correct the difference like that of any other engine. Old weights are stored in host memory, so the tool is for
small models.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import pretrain_grpo  # first: it prepares for machines without a GPU
from megatron_grpo.models import forward
from megatron_grpo.rollout.source import Synced
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.weights.stream import stream_hf


def main() -> None:
    """Replace the weight sync, disable the check that would end such a run, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("updates", metavar="UPDATES", type=int, help="age of the engine's weights")
    options, sys.argv[1:] = parser.parse_known_args()
    lag, evaluate, sync_newest = options.updates, pretrain_grpo.evaluate, EngineLifecycle.sync
    history: dict[int, list[tuple[str, torch.Tensor]]] = {}  # weights by version

    def sync(lifecycle: EngineLifecycle, version: int) -> None:
        args, model, engine = lifecycle.args, lifecycle.model, lifecycle.engine
        assert engine is not None
        with lifecycle.timers("sync"), forward.parameters_complete(model):
            history[version] = [(name, weight.cpu().clone()) for name, weight in stream_hf(model, args)]
        rollouts = sorted(history)[-lag - 1 :]
        engine.update_weights(iter(history[rollouts[0]]), version)
        lifecycle.synced = Synced(version)
        for iteration in history.keys() - rollouts:
            del history[iteration]

    def evaluate_newest(args, trainer: Trainer) -> dict[str, float]:
        trainer.lifecycle.synced = Synced(-1)
        with mock.patch.object(EngineLifecycle, "sync", sync_newest):
            metrics = evaluate(args, trainer)
        trainer.lifecycle.synced = Synced(-1)
        return metrics

    with (
        mock.patch.object(EngineLifecycle, "sync", sync),
        mock.patch.object(EngineLifecycle, "check"),
        mock.patch.object(pretrain_grpo, "evaluate", evaluate_newest),
    ):
        pretrain_grpo.main()


if __name__ == "__main__":
    run(main)
