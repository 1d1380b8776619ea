"""The arithmetic of batch sizes. Batches count completions; ``num_*_prompts`` count prompts."""

import math
import os
from argparse import Namespace
from dataclasses import dataclass

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import positive

# The formulas of the documentation and of the printed table.
FORMULAS = {
    "dp_size": "world_size / (TP x PP x CP)",
    "global_batch_size": "micro_batch_size x dp_size x gradient_accumulation_steps",
    "generation_batch_size": "global_batch_size x steps_per_generation",
    "num_rollout_prompts": "generation_batch_size / num_generations",
    "num_train_prompts": "global_batch_size / num_generations",
    "num_prompts_per_dp_group": "num_train_prompts / dp_size",
}


@dataclass(frozen=True)
class BatchArithmetic:
    """Batch sizes of a run, and the sizes derived from them.

    ``micro_batch_size`` and ``gradient_accumulation_steps`` are None with a token budget: the number of micro-batches
    of an update then depends on its tokens.
    """

    world_size: int
    model_parallel_sizes: tuple[int, int, int]
    dp_size: int
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    max_tokens_per_microbatch: int | None
    global_batch_size: int
    steps_per_generation: int
    generation_batch_size: int
    num_generations: int
    num_iterations: int
    budget_of_rank: bool  # the budget is of one context-parallel rank, not of a whole micro-batch

    @property
    def num_rollout_prompts(self) -> int:
        """Return the number of prompts of one rollout."""
        return self.generation_batch_size // self.num_generations

    @property
    def num_train_prompts(self) -> int:
        """Return the number of prompts of one update."""
        return self.global_batch_size // self.num_generations

    @property
    def num_prompts_per_dp_group(self) -> float:
        """Return the mean number of prompts of one update on a data-parallel rank."""
        return self.num_train_prompts / self.dp_size

    @property
    def updates_per_rollout(self) -> int:
        """Return the number of updates between two rollouts."""
        return self.steps_per_generation * self.num_iterations

    def lines(self, width: int | None = None) -> list[str]:
        """Return the arithmetic as text, one line for each size: its name, its value, its numbers and its formula.

        The formulas are left out if a line is longer than ``width`` characters [no limit].
        """
        tp, pp, cp = self.model_parallel_sizes
        micro_batches = f"{self.micro_batch_size} x {self.dp_size} x {self.gradient_accumulation_steps}"
        formulas = dict(FORMULAS)
        if self.max_tokens_per_microbatch:
            share = " a rank" if self.budget_of_rank else ""
            micro_batches = f"micro-batches of up to {self.max_tokens_per_microbatch} tokens{share}, as many as needed"
            formulas["global_batch_size"] = "gradient accumulation is not fixed"
        worked = {
            "dp_size": f"{self.world_size} / ({tp} x {pp} x {cp})",
            "global_batch_size": micro_batches,
            "generation_batch_size": f"{self.global_batch_size} x {self.steps_per_generation}",
            "num_rollout_prompts": f"{self.generation_batch_size} / {self.num_generations}",
            "num_train_prompts": f"{self.global_batch_size} / {self.num_generations}",
            "num_prompts_per_dp_group": f"{self.num_train_prompts} / {self.dp_size}",
            "updates_per_rollout": f"{self.steps_per_generation} x {self.num_iterations}",
        }
        formulas["updates_per_rollout"] = "steps_per_generation x num_iterations"
        values = {name: round(getattr(self, name), 4) for name in worked}
        short = [f"{name:<25} {values[name]:<7} = {how}" for name, how in worked.items()]
        long = [f"{line:<54} ({formulas[name]})" for name, line in zip(worked, short, strict=True)]
        return short if width and max(map(len, long)) > width else long


def batch_arithmetic(args: Namespace, world_size: int) -> BatchArithmetic:
    """Return the batch sizes of ``args`` on ``world_size`` ranks.

    Any two of global batch size, steps per generation and generation batch size determine the third. Without a
    generation batch size the global batch size defaults to one micro-batch on each data-parallel rank. Raises GrpoError
    with the numbers for sizes that contradict each other.
    """
    positive(args, "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size micro_batch_size")
    positive(args, "global_batch_size generation_batch_size steps_per_generation num_iterations")
    positive(args, "max_tokens_per_microbatch num_generations")
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    tp, pp, cp = sizes
    if world_size % (tp * pp * cp):
        raise GrpoError(
            f"world_size ({world_size}) must be divisible by the product of all model parallel sizes ({tp * pp * cp}): "
            f"TP {tp} x PP {pp} x CP {cp}; start more processes (torchrun --nproc-per-node), or lower one of the sizes"
        )
    dp = world_size // (tp * pp * cp)
    micro, budget, group = args.micro_batch_size, args.max_tokens_per_microbatch, args.num_generations
    global_batch, steps, generation = _batch_sizes(args, micro * dp)
    if budget:
        if global_batch < dp:
            raise GrpoError(f"global_batch_size ({global_batch}) must be at least dp_size ({dp}): one completion each")
    elif global_batch % (micro * dp):
        raise GrpoError(
            f"global_batch_size ({global_batch}) must be divisible by micro_batch_size ({micro}) x dp_size ({dp}) "
            f"= {micro * dp}: give a multiple, or another --micro-batch-size"
        )
    for name, size in (("global_batch_size", global_batch), ("generation_batch_size", generation)):
        if size % group:
            good = group if budget else math.lcm(group, micro * dp)
            raise GrpoError(
                f"{name} ({size}) must be divisible by num_generations ({group}), because it holds whole groups: give "
                f"a multiple of {good}"
            )
    return BatchArithmetic(
        world_size=world_size,
        model_parallel_sizes=sizes,
        dp_size=dp,
        micro_batch_size=None if budget else micro,
        gradient_accumulation_steps=None if budget else global_batch // (micro * dp),
        max_tokens_per_microbatch=budget,
        global_batch_size=global_batch,
        steps_per_generation=steps,
        generation_batch_size=generation,
        num_generations=group,
        num_iterations=args.num_iterations,
        budget_of_rank=args.hybrid_context_parallel,
    )


def trainer_ranks(args: Namespace, launched: int) -> int:
    """Return how many of the ``launched`` ranks train; the last --rollout-ranks are engines.

    Before --rollout-ranks auto is resolved, it is the number in the first possible split.
    """
    if args.rollout_ranks == "auto":
        return launched - possible_rollout_ranks(args, launched)[0]
    if args.rollout_ranks >= launched:
        raise GrpoError(
            f"--rollout-ranks ({args.rollout_ranks}) must be less than the number of processes ({launched}), because "
            "the others train: start more processes (torchrun --nproc-per-node)"
        )
    return launched - args.rollout_ranks


def _batch_sizes(args: Namespace, smallest: int) -> tuple[int, int, int]:
    """Return (global batch size, steps per generation, generation batch size)."""
    global_batch, steps, generation = args.global_batch_size, args.steps_per_generation, args.generation_batch_size
    if generation is None:
        global_batch = global_batch or smallest
        generation = global_batch * steps
    elif global_batch is None:
        if generation % steps:
            raise GrpoError(f"generation_batch_size ({generation}) must be divisible by steps_per_generation ({steps})")
        global_batch = generation // steps
    elif "steps_per_generation" not in args.explicit:
        if generation % global_batch:
            raise GrpoError(
                f"generation_batch_size ({generation}) must be divisible by global_batch_size ({global_batch})"
            )
        steps = generation // global_batch
    elif generation != global_batch * steps:
        raise GrpoError(
            f"generation_batch_size ({generation}) must be global_batch_size ({global_batch}) x steps_per_generation "
            f"({steps}) = {global_batch * steps}: leave one of the three out; the other two determine it"
        )
    return global_batch, steps, generation


def longest_sequence(args: Namespace) -> int:
    """Return the tokens of the longest sequence: the prompt, what the policy samples, and what an environment says."""
    said = args.max_environment_tokens if args.environment else 0
    return args.max_prompt_length + args.max_completion_length + said


def longest_in_words(args: Namespace) -> str:
    """Return the sum of `longest_sequence` in words, for messages."""
    said = f" + --max-environment-tokens ({args.max_environment_tokens})" if args.environment else ""
    return (
        f"--max-prompt-length ({args.max_prompt_length}) + --max-completion-length ({args.max_completion_length}){said}"
    )


def check_hosts(trainers: int, rollout_ranks: int, width: int, ranks_per_host: int) -> None:
    """Raise GrpoError if an engine replica would have ranks on two hosts."""
    for first in range(trainers, trainers + rollout_ranks, width):
        if first // ranks_per_host != (first + width - 1) // ranks_per_host:
            raise GrpoError(
                f"--rollout-ranks {rollout_ranks}: the engine replica of ranks {first} to {first + width - 1} would be "
                f"on two hosts of {ranks_per_host} ranks: give a multiple of --vllm-tensor-parallel-size {width} that "
                "begins or ends with a host"
            )


def possible_rollout_ranks(args: Namespace, launched: int) -> list[int]:
    """Return the numbers of engine ranks with whole engine replicas, whole model replicas and a batch that divides.

    Under torchrun, which tells the ranks of a host, no engine replica is on two hosts. Raises GrpoError if ``launched``
    ranks have no such split.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tp)
    model, width = pp * math.lcm(tp * args.context_parallel_size, experts), args.vllm_tensor_parallel_size
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", launched))
    found = []
    refused = (
        f"engines have multiples of {width} ranks (--vllm-tensor-parallel-size) and trainers multiples of {model} "
        "(TP x PP x CP, EP x ETP x PP): start more processes (torchrun --nproc-per-node), or lower one of these sizes"
    )
    for engines in range(width, launched, width):
        trainers = launched - engines
        if trainers % model:
            continue
        try:
            batch_arithmetic(args, trainers)
            check_hosts(trainers, engines, width, ranks_per_host)
        except GrpoError as error:
            refused = str(error)
        else:
            found.append(engines)
    if not found:
        raise GrpoError(
            f"--rollout-ranks auto: {launched} processes cannot be split into engines and trainers: {refused}"
        )
    return found
