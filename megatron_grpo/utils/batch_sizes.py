"""How the batch sizes follow from each other. Batches count completions; ``num_*_prompts`` count prompts."""

import math
from argparse import Namespace
from dataclasses import dataclass

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import positive

# The six numbers, as they are documented and printed.
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
    """The sizes of a run, from which the rest follows.

    With a token budget ``micro_batch_size`` and ``gradient_accumulation_steps`` are None: each update is packed into as
    many micro-batches as its tokens need.
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

    @property
    def num_rollout_prompts(self) -> int:
        """Prompts of one rollout."""
        return self.generation_batch_size // self.num_generations

    @property
    def num_train_prompts(self) -> int:
        """Prompts of one update."""
        return self.global_batch_size // self.num_generations

    @property
    def num_prompts_per_dp_group(self) -> float:
        """Prompts of one update for each data-parallel rank, on average."""
        return self.num_train_prompts / self.dp_size

    @property
    def updates_per_rollout(self) -> int:
        """Iterations from one rollout to the next."""
        return self.steps_per_generation * self.num_iterations

    def lines(self) -> list[str]:
        """The arithmetic for people, a number a line: its name, its value, and how it comes about."""
        tp, pp, cp = self.model_parallel_sizes
        micro_batches = f"{self.micro_batch_size} x {self.dp_size} x {self.gradient_accumulation_steps}"
        formulas = dict(FORMULAS)
        if self.max_tokens_per_microbatch:
            micro_batches = f"in micro-batches of up to {self.max_tokens_per_microbatch} tokens, as many as it takes"
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
        return [f"{name:<25} {values[name]:<7} = {how:<18} ({formulas[name]})" for name, how in worked.items()]


def batch_arithmetic(args: Namespace, world_size: int) -> BatchArithmetic:
    """The sizes that ``args`` mean on ``world_size`` ranks; GrpoError with the numbers when they do not fit together.

    Of global batch, steps per generation and generation batch any two give the third. Without a generation batch the
    global batch defaults to one micro-batch on each data-parallel rank.
    """
    positive(args, "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size micro_batch_size")
    positive(args, "global_batch_size generation_batch_size steps_per_generation num_iterations")
    positive(args, "max_tokens_per_microbatch num_generations")
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    tp, pp, cp = sizes
    if world_size % (tp * pp * cp):
        raise GrpoError(
            f"world_size ({world_size}) must be divisible by the product of all model parallel sizes ({tp * pp * cp}): "
            f"TP {tp} x PP {pp} x CP {cp}"
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
            f"= {micro * dp}"
        )
    for name, size in (("global_batch_size", global_batch), ("generation_batch_size", generation)):
        if size % group:
            good = group if budget else math.lcm(group, micro * dp)
            raise GrpoError(
                f"{name} ({size}) must be divisible by num_generations ({group}): it holds whole groups, so take a "
                f"multiple of {good}"
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
    )


def _batch_sizes(args: Namespace, smallest: int) -> tuple[int, int, int]:
    """(global batch, steps per generation, generation batch)."""
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
            f"({steps}) = {global_batch * steps}; any two of them give the third"
        )
    return global_batch, steps, generation
