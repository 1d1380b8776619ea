"""pretrain_grpo.py with an engine that is behind on purpose: how far do the corrections for such samples carry?

    torchrun --nproc-per-node N tools/stale_engine.py UPDATES FLAGS

FLAGS are pretrain_grpo.py's, with one update a rollout. The engine samples with the weights that the trainer had
UPDATES updates ago (the first ones until there are as many), and is evaluated with the newest. A correction sees the
difference as it sees that of any other engine. Old weights are kept in host memory: this is for small models.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pretrain_grpo  # first: it prepares for machines without a GPU
from megatron_grpo.models import forward
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.weights.stream import stream_hf


def main() -> None:
    """Replace what gives the engine its weights, and the check that would end such a run; then train."""
    lag, history = int(sys.argv.pop(1)), {}
    evaluate = pretrain_grpo.evaluate

    def sync(trainer: Trainer) -> None:
        args = trainer.args
        with trainer.timers("sync"), forward.parameters_complete(args, trainer.model):
            history[trainer.iteration] = [
                (name, weight.cpu().clone()) for name, weight in stream_hf(trainer.model, args)
            ]
        rollouts = sorted(history)[-lag - 1 :]
        trainer.engine.update_weights(iter(history[rollouts[0]]), trainer.iteration)
        trainer.synced_iteration = trainer.iteration
        for iteration in history.keys() - rollouts:
            del history[iteration]

    def evaluate_the_newest(args, trainer: Trainer) -> dict[str, float]:
        trainer.synced_iteration, Trainer.sync = -1, in_time
        metrics = evaluate(args, trainer)
        trainer.synced_iteration, Trainer.sync = -1, sync
        return metrics

    in_time, Trainer.sync, pretrain_grpo.evaluate = Trainer.sync, sync, evaluate_the_newest
    Trainer.check_engine = lambda self, batch, row: None
    pretrain_grpo.main()


if __name__ == "__main__":
    run(main)
