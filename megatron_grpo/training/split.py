"""--rollout-ranks auto: the number of engine ranks, which every rank calculates before the ranks meet.

A resumed run has measured what its engines and its trainers need (`findings.measured_split`). A run that has not starts
with an estimate (estimate/sides.py). Ranks that come to different numbers, because a file server shows them different
files, end the run when they meet (`initialize.join`).
"""

from argparse import Namespace
from bisect import bisect_left
from typing import Any

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration, run_directory
from megatron_grpo.estimate.dry_run import ROOM, gpu_memory
from megatron_grpo.estimate.memory import GIB, Plan
from megatron_grpo.estimate.sides import estimated
from megatron_grpo.estimate.split import fastest
from megatron_grpo.observability.findings import Split, measured_split
from megatron_grpo.observability.run_folder import read_lines, read_object
from megatron_grpo.training.resolve import resolve_args, resolve_origin
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.batch_sizes import batch_arithmetic, possible_rollout_ranks
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0

# What a batch consists of: times of a run with other values are not used.
OF_BATCH = ("generation_batch_size", "num_generations", "num_iterations", "max_prompt_length", "max_completion_length")


def resolve_split(args: Namespace, launched: int) -> dict[str, Any]:
    """Return --rollout-ranks auto as a number, for parsed arguments with the --load of a resume; {} without auto.

    GrpoError if no split of the ``launched`` ranks is possible.
    """
    if args.rollout_ranks != "auto":
        return {}
    if args.vllm_mode == "server":
        raise GrpoError(
            "--rollout-ranks auto with --vllm-mode server: these ranks need no GPU; give a number, such as 1"
        )
    if args.eval_only:
        raise GrpoError("--rollout-ranks auto with --eval-only: the split is that of training; give a number")
    possible = possible_rollout_ranks(args, launched)
    resume = bool(args.load) and not args.finetune and latest_iteration(args.load) is not None

    def resolved_for(engines: int) -> Namespace:
        return resolve_args(resolve_origin(replaced(args, rollout_ranks=engines), resume), launched - engines)

    def lacks_memory(engines: int) -> bool:
        return gpu is not None and Plan(resolved_for(engines)).peak() / GIB + ROOM > gpu

    gpu = gpu_memory(args)
    before, measured = _of_resumed_run(args, possible[0], launched) if resume else (None, None)
    present = before if before in possible else None
    if measured is None and present is not None:
        _print(present, launched, f"as before: {args.load} has too few updates since its last start to measure it")
        return {"rollout_ranks": present}
    sides = estimated(resolved_for(possible[0])) if measured is None else measured.sides()
    if gpu is not None:  # fewer trainers need more memory
        possible = possible[: bisect_left(possible, True, key=lacks_memory)] or possible[:1]
    best = fastest(possible, launched, sides, args.max_staleness, present)
    generate, train = sides(best, launched - best)
    how = "estimated (docs/asynchronous.md)" if measured is None else f"by the times that {args.load} has measured"
    _print(best, launched, f"a batch takes the engines {generate:.3g} s and the trainers {train:.3g} s, {how}")
    return {"rollout_ranks": best}


def _print(engines: int, launched: int, why: str) -> None:
    print_rank_0(f"--rollout-ranks auto: {engines} of {launched}: {why}")


def _of_resumed_run(args: Namespace, engines: int, launched: int) -> tuple[int | None, Split | None]:
    """Return the engine ranks of the run's last start, None with another launch, and what it has measured since then.

    ``engines``: of any possible split of this launch.
    """
    directory = run_directory(args.load)
    files = [directory / name for name in ("args.json", "environment.json", "metrics.jsonl")]
    if not all(file.exists() for file in files):
        return None, None
    was, start, rows = read_object(files[0]), read_object(files[1])["start_iteration"], read_lines(files[2])
    if not was.get("rollout_ranks") or was["vllm_mode"] == "server":
        return None, None
    placed = was["rollout_ranks"], was["world_size"]
    sizes = vars(args) | {"generation_batch_size": batch_arithmetic(args, launched - engines).generation_batch_size}
    if any(was[dest] != sizes[dest] for dest in OF_BATCH):
        return None, None
    since = [row for row in rows if row["iteration"] > start]
    return placed[0] if sum(placed) == launched else None, measured_split(since, placed, was["updates_per_rollout"])
