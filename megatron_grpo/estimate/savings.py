"""Flags that lower the memory of training, with the estimated difference."""

from argparse import Namespace

from megatron_grpo.data.arguments import smallest_budget
from megatron_grpo.estimate.memory import GIB, Plan
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

SMALL = 2**28  # bytes; smaller differences are not worth a flag


def savings(args: Namespace, stage: int) -> list[tuple[str, float]]:
    """Return (flags, GiB less on a rank of this pipeline stage) for single changes of ``args``, the largest first."""
    now = Plan(args).memory(stage).total
    found = []
    for flags, changes in _changes(args):
        try:
            less = now - Plan(replaced(args, **changes)).memory(stage).total
        except GrpoError:  # megatron-core refuses the change for this model, such as experts with biases at ETP 2
            continue
        if less >= SMALL:
            found.append((flags, less / GIB))
    return sorted(found, key=lambda row: -row[1])


def _changes(args: Namespace):
    """Yield (flags, changed arguments) that lead to the same result as the present ones."""
    if args.max_tokens_per_microbatch:
        half = max(args.max_tokens_per_microbatch // 2, smallest_budget(args))
        if half < args.max_tokens_per_microbatch:
            yield f"--max-tokens-per-microbatch {half}", {"max_tokens_per_microbatch": half}
    elif args.micro_batch_size > 1:
        yield f"--micro-batch-size {args.micro_batch_size // 2}", {"micro_batch_size": args.micro_batch_size // 2}
    if args.recompute_granularity != "full":
        changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield flags, changes | {"recompute_modules": None}
    ranks = args.data_parallel_size * args.context_parallel_size
    if not args.use_distributed_optimizer and ranks > 1:
        yield "--use-distributed-optimizer", {"use_distributed_optimizer": True}
    if not args.optimizer_cpu_offload and args.optimizer == "adam":
        changes = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
        yield (
            "--optimizer-cpu-offload --use-precision-aware-optimizer",
            changes | {"use_precision_aware_optimizer": True},
        )
    if args.data_parallel_size % 2 == 0:
        half = {"data_parallel_size": args.data_parallel_size // 2}
        heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        width = 2 * args.tensor_model_parallel_size
        if heads % width == 0:
            changes = {"tensor_model_parallel_size": width, "sequence_parallel": True}
            if args.expert_tensor_parallel_size == args.tensor_model_parallel_size:
                changes["expert_tensor_parallel_size"] = width
            yield f"--tensor-model-parallel-size {width} --sequence-parallel", half | changes
