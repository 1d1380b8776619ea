"""Flags that lower the memory of a GPU: one by one with their effect, and as many as a given GPU needs."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from megatron_grpo.data.arguments import smallest_budget
from megatron_grpo.estimate.memory import GIB, Plan, gpu_bytes
from megatron_grpo.rollout.arguments import has_colocated_vllm
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

SMALL = 2**28  # bytes; smaller differences are not worth a flag

Flags = dict[str, str]  # words of a command line: flags and their values
# Flags, the arguments that they set, and those that follow from them.
Change = tuple[Flags, dict[str, Any], dict[str, Any]]


def savings(args: Namespace, stage: int) -> list[tuple[str, float]]:
    """Return (flags, GiB less on a rank of this pipeline stage) for single changes of ``args``, the largest first."""
    now = Plan(args).memory(stage).total
    found = []
    for flags, changes, follows in _of_training(args):
        try:
            less = now - Plan(replaced(args, **changes, **follows)).memory(stage).total
        except GrpoError:  # megatron-core refuses the change for this model, such as experts with biases at ETP 2
            continue
        if less >= SMALL:
            found.append((in_words(flags), less / GIB))
    return sorted(found, key=lambda row: -row[1])


def fitting(changed: Callable[[dict[str, Any]], Namespace], most: float) -> tuple[Flags, float]:
    """Return flags with which a GPU needs at most ``most`` bytes, and the bytes that it then needs.

    ``changed`` returns the resolved arguments of the run after changes, and raises GrpoError for those that the run
    would refuse. Each flag is the cheapest, in speed, that lowers what is left. If all together do not suffice, the
    bytes are more than ``most``.
    """
    steps: list[Change] = []

    def with_steps(chosen: list[Change]) -> tuple[Namespace, float]:
        args = changed({dest: value for _, changes, _ in chosen for dest, value in changes.items()})
        return args, gpu_bytes(Plan(args))

    args, now = with_steps(steps)
    while now > most:
        for step in _all(args):
            try:
                next_args, less = with_steps([*steps, step])
            except GrpoError:
                continue
            if now - less >= SMALL:
                steps.append(step)
                args, now = next_args, less
                break
        else:
            break
    for step in list(steps):  # leave out flags that a later one made needless
        rest = [other for other in steps if other is not step]
        try:
            _, less = with_steps(rest)
        except GrpoError:  # a later flag needs this one
            continue
        if less <= max(most, now):
            steps, now = rest, less
    return {flag: value for flags, *_ in steps for flag, value in flags.items()}, now


def in_words(flags: Flags) -> str:
    """Return flags as a command line has them."""
    return " ".join(f"{flag} {value}".rstrip() for flag, value in flags.items())


def _all(args: Namespace) -> Iterator[Change]:
    """Yield the changes that lower the memory of a GPU, the cheapest in speed first."""
    if has_colocated_vllm(args) and not args.rollout_ranks:
        if not args.sleep_level:
            yield {"--sleep-level": "2"}, {"sleep_level": 2}, {}
        else:
            for name in ("gradients", "optimizer", "model"):
                if not getattr(args, f"offload_{name}"):
                    yield {f"--offload-{name}": ""}, {f"offload_{name}": True}, {}
    yield from _of_training(args)
    width = 2 * args.vllm_tensor_parallel_size
    if has_colocated_vllm(args) and args.num_attention_heads % width == 0:
        yield {"--vllm-tensor-parallel-size": str(width)}, {"vllm_tensor_parallel_size": width}, {}


def _of_training(args: Namespace) -> Iterator[Change]:
    """Yield changes of the trainer that lead to the same result as the present flags, the cheapest in speed first."""
    ranks = args.data_parallel_size * args.context_parallel_size
    if not args.use_distributed_optimizer and ranks > 1:
        yield {"--use-distributed-optimizer": ""}, {"use_distributed_optimizer": True}, {}
    if args.max_tokens_per_microbatch:
        half = max(args.max_tokens_per_microbatch // 2, smallest_budget(args))
        if half < args.max_tokens_per_microbatch:
            yield {"--max-tokens-per-microbatch": str(half)}, {"max_tokens_per_microbatch": half}, {}
    elif args.micro_batch_size > 1 and args.loss_type != "bnpo":  # bnpo averages over micro-batches
        half = args.micro_batch_size // 2
        yield {"--micro-batch-size": str(half)}, {"micro_batch_size": half}, {}
    if args.recompute_granularity != "full" and not args.recompute_modules:  # full recomputation refuses modules
        flags = {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}
        changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield flags, changes, {}
    if args.data_parallel_size % 2 == 0:
        heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        width = 2 * args.tensor_model_parallel_size
        if heads % width == 0:
            follows = {"data_parallel_size": args.data_parallel_size // 2}
            flags = {"--tensor-model-parallel-size": str(width), "--sequence-parallel": ""}
            changes = {"tensor_model_parallel_size": width, "sequence_parallel": True}
            if args.num_experts:  # by default their tensor parallelism would grow, too
                size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
                flags["--expert-tensor-parallel-size"], changes["expert_tensor_parallel_size"] = str(size), size
            yield flags, changes, follows
    if not args.optimizer_cpu_offload and args.optimizer == "adam":
        flags, changes = {"--optimizer-cpu-offload": ""}, {"optimizer_cpu_offload": True}
        if args.transformer_impl == "transformer_engine":  # without its Adam a copy stays on the GPU
            for name in "use-precision-aware-optimizer", "use-distributed-optimizer":  # the first needs the second
                flags[f"--{name}"], changes[name.replace("-", "_")] = "", True
        yield flags, changes, {"optimizer_offload_fraction": 1.0}
