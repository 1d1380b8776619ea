"""--rollout-ranks auto: the number of engine ranks, which rank 0 calculates for all.

A resumed run has measured what its engines and its trainers need (`findings.measured_split`). A run that has not starts
with an estimate (estimate/sides.py).
"""

from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable

from megatron_grpo.checkpointing.checkpoint import ARCHITECTURE
from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration, run_directory
from megatron_grpo.estimate.dry_run import ROOM, gpu_memory
from megatron_grpo.estimate.memory import GIB, Plan
from megatron_grpo.estimate.sides import estimated
from megatron_grpo.estimate.split import fastest
from megatron_grpo.observability.findings import Split, measured_split
from megatron_grpo.observability.run_folder import read_lines, read_object
from megatron_grpo.training.resolve import resolve_args, resolve_origin
from megatron_grpo.utils.arguments import args_to_json, replaced
from megatron_grpo.utils.batch_sizes import possible_rollout_ranks
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0

# What a batch consists of, the model, and how each side divides it: times of a run with other values are not used.
OF_TIMES = (
    *("generation_batch_size", "num_generations", "num_iterations", "max_prompt_length", "max_completion_length"),
    *ARCHITECTURE,
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "vllm_tensor_parallel_size"),
)


def resolve_split(args: Namespace, launched: int) -> int:
    """Return --rollout-ranks auto as a number, for parsed arguments with the --load of a resume.

    GrpoError if no split of the ``launched`` ranks is possible.
    """
    if args.vllm_mode == "server":
        raise GrpoError(
            "--rollout-ranks auto with --vllm-mode server: these ranks need no GPU; give a number, such as 1"
        )
    if args.eval_only:
        raise GrpoError("--rollout-ranks auto with --eval-only: the split is that of training; give a number")
    if not args.global_batch_size and not args.generation_batch_size:
        raise GrpoError(
            "--rollout-ranks auto without --global-batch-size: the batch would depend on the number of trainers, and "
            "splits of different batches cannot be compared; give --global-batch-size, or a number of engine ranks"
        )
    possible = possible_rollout_ranks(args, launched)
    resume = bool(args.load) and not args.finetune and latest_iteration(args.load) is not None

    def resolved_for(engines: int) -> Namespace:
        return resolve_args(resolve_origin(replaced(args, rollout_ranks=engines), resume), launched - engines)

    def lacks_memory(engines: int) -> bool:
        return gpu is not None and Plan(resolved_for(engines)).peak() / GIB + ROOM > gpu

    gpu = gpu_memory(args)
    present, measured = _of_resumed_run(args, possible, launched, resolved_for) if resume else (None, None)
    if measured is None and present is not None:
        _print(present, launched, f"as before: {args.load} has too few updates since its last start to measure it")
        return present
    sides = estimated(resolved_for(possible[0])) if measured is None else measured.sides()
    fit = bisect_left(possible, True, key=lacks_memory)  # fewer trainers need more memory
    if present is not None:  # it has run
        fit = max(fit, possible.index(present) + 1)
    best = fastest(possible[:fit] or possible, launched, sides, args.max_staleness, present)
    wanted = fastest(possible, launched, sides, args.max_staleness, present)
    generate, train = sides(best, launched - best)
    how = "estimated (docs/asynchronous.md)" if measured is None else f"by the times that {args.load} has measured"
    if not fit:
        how += f"; by the estimate the trainers of no split fit into the {gpu:.3g} GiB of a GPU (--dry-run)"
    elif best != wanted:
        how += f"; {wanted} would be faster, but its trainers would not fit into the {gpu:.3g} GiB of a GPU"
    _print(best, launched, f"a batch takes the engines {generate:.3g} s and the trainers {train:.3g} s, {how}")
    return best


def _print(engines: int, launched: int, why: str) -> None:
    print_rank_0(f"--rollout-ranks auto: {engines} of {launched}: {why}")


def _of_resumed_run(
    args: Namespace, possible: list[int], launched: int, resolved_for: Callable[[int], Namespace]
) -> tuple[int | None, Split | None]:
    """Return the engine ranks of the run's last start, None with another launch, and what it has measured since then.

    None for both if no update followed, the files are absent or damaged, or the run had another batch, model or
    parallel configuration.
    """
    directory = run_directory(args.load)
    files = [directory / name for name in ("args.json", "environment.json", "metrics.jsonl")]
    if not all(file.exists() for file in files):
        return None, None
    try:
        was, start, rows = read_object(files[0]), read_object(files[1])["start_iteration"], read_lines(files[2])
        placed = was["rollout_ranks"], was["world_size"]
        if not placed[0] or was["vllm_mode"] == "server":
            return None, None
        present = placed[0] if sum(placed) == launched and placed[0] in possible else None
        now = args_to_json(resolved_for(present or possible[0]))
        if any(was[dest] != now[dest] for dest in OF_TIMES):
            return None, None
        since = [row for row in rows if row["iteration"] > start]
        if not since:  # this split may be the reason why
            return None, None
        return present, measured_split(since, placed, was["updates_per_rollout"])
    except (GrpoError, KeyError, TypeError, ArithmeticError):  # damaged files do not refuse a resume
        return None, None
