"""The best checkpoint by a metric of evaluations (--keep-best)."""

import json
import math
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.algorithm.pass_at_k import powers_of_two
from megatron_grpo.checkpointing.checkpoint_directory import BEST, iteration_directory, read_best, write_best
from megatron_grpo.data.held_out_files import valid_files
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import excludes, needs


def metrics_to_keep(args: Namespace) -> list[str]:
    """Return the metrics of the run's evaluations of which more is better."""
    files = valid_files(args.valid_data_path)
    names = ["greedy_accuracy", "greedy_reward"]
    if args.eval_num_generations:
        names += ["sampled_accuracy", "sampled_reward"]
        names += [f"pass_at_{k}" for k in powers_of_two(args.eval_num_generations)]
    prefixes = ["", *(f"{file}/" for file in files)] if len(files) > 1 else [""]
    return [f"eval/{prefix}{name}" for prefix in prefixes for name in names]


def check_keep_best(args: Namespace) -> None:
    """Raise GrpoError for a metric that the run does not have, and for evaluations without a checkpoint."""
    if not args.keep_best:
        return
    needs(args, "keep_best", "save_interval", "the best checkpoint is one of those that are saved")
    needs(args, "keep_best", "eval_interval", "evaluations say which checkpoint is the best")
    for dest in ("replay_rollouts", "train_only"):
        excludes(args, "keep_best", dest, "without an engine there are no evaluations")
    names = metrics_to_keep(args)
    if args.keep_best not in names:
        raise GrpoError(f"--keep-best {args.keep_best}: the evaluations of this run have {', '.join(names)}")
    if args.eval_interval % args.save_interval:
        raise GrpoError(
            f"--keep-best needs a checkpoint at each evaluation: --eval-interval ({args.eval_interval}) must be "
            f"divisible by --save-interval ({args.save_interval}); --max-checkpoints-to-keep limits the disk"
        )


def new_best(args: Namespace, iteration: int, metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the content of best.json if the evaluation ``metrics`` at ``iteration`` is the best so far, else None."""
    value = metrics.get(args.keep_best, math.nan)
    if math.isnan(value):
        return None
    best = read_best(args.save)
    if best is not None and best["metric"] == args.keep_best and best["value"] >= value:
        return None
    return {"iteration": iteration, "metric": args.keep_best, "value": value}


def choose_again(args: Namespace, after: int) -> None:
    """Correct best.json for a run that goes on after update ``after``, when metrics.jsonl ends there; on one rank.

    If it names a later checkpoint, or a deleted one, the best one is that of the best evaluation in metrics.jsonl whose
    checkpoint exists. There is none with a --log-interval whose rows average evaluations, and without --keep-best.
    """
    best = read_best(args.save)
    if best is not None and best["iteration"] <= after:
        return
    write_best(args.save, None)
    if not args.keep_best or args.eval_interval % args.log_interval:
        return
    with open(Path(args.save, "metrics.jsonl"), encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            value = row.get(args.keep_best)
            if value is None or not iteration_directory(args.save, row["iteration"]).is_dir():
                continue
            if better := new_best(args, row["iteration"], {args.keep_best: value}):
                write_best(args.save, better)


def best_in_words(args: Namespace) -> str:
    """Return a line about the best checkpoint under --save, for the end of a run."""
    best = read_best(args.save)
    if best is None:
        return f"--keep-best: no evaluation of this run had {args.keep_best} and a checkpoint"
    directory = iteration_directory(args.save, best["iteration"])
    return f"best checkpoint ({best['metric']} {best['value']:.4f}, {Path(args.save, BEST)}): {directory}"
