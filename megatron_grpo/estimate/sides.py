"""Estimated seconds of a batch on engines and on trainers, for --rollout-ranks before anything is measured.

Every completion is as long as it may become, and engines always run as many as they may: an answer that ends early
saves both sides about as much. Long tails, tools, rewards, pictures, weight sync and parallel ranks that wait for each
other are not counted.

A decode step of n sequences reads the weights once, and the keys and values of each sequence so far:

    seconds(n) = STEP_SECONDS + n SEQUENCE_SECONDS + (weights + n x mean length x cache a token) / BYTES

The update has the FLOPs of `ModelFlops`, those of the passes for log-probabilities before it too.
"""

from argparse import Namespace
from functools import cached_property
from math import ceil

import numpy as np

from megatron_grpo.algorithm.arguments import needs_old_log_probs
from megatron_grpo.estimate.memory import Plan
from megatron_grpo.estimate.split import Sides
from megatron_grpo.estimate.throughput import ModelFlops
from megatron_grpo.models.config import params_dtype
from megatron_grpo.rollout.arguments import has_servers, keeps_prefixes, max_num_seqs_of

# Of an H200 (989 dense 16-bit TFLOP/s, 4.8 TB/s); the ratio of other GPUs is similar.
FLOPS = 0.4 * 989e12  # a second, of an update
BYTES = 0.8 * 4.8e12  # a second, in a decode step
STEP_SECONDS, SEQUENCE_SECONDS = 1.2e-3, 4.2e-6  # of a decode step besides reading: fixed, and for each sequence


def train_flops(args: Namespace) -> float:
    """Return the FLOPs of all passes over a batch; the prompt of a group counts once with --share-prompts."""
    flops, prompt, completion = ModelFlops(args), args.max_prompt_length, args.max_completion_length

    def passes(lengths: int, labels: int) -> float:
        tokens = np.array([lengths]), np.array([labels])
        extra = needs_old_log_probs(args) + args.with_reference
        return args.num_iterations * flops.update(*tokens) * 1e12 + extra * flops.forward(*tokens)

    groups = args.generation_batch_size // args.num_generations
    shared = groups * (args.num_generations - 1) if args.share_prompts else 0
    return args.generation_batch_size * passes(prompt + completion, completion) - shared * passes(prompt, 0)


def decode_seconds(plan: Plan, sequences: float, length: float | None = None) -> float:
    """Return the seconds of a decode step of an engine replica with this number of sequences, and their mean length."""
    args, size = plan.args, params_dtype(plan.args).itemsize
    if length is None:
        length = args.max_prompt_length + args.max_completion_length / 2
    cache = sequences * length * plan.cache_of_token()
    return STEP_SECONDS + sequences * SEQUENCE_SECONDS + size * (plan.engine() + cache) / BYTES


def prompt_seconds(flops: ModelFlops, tokens: int) -> float:
    """Return the seconds that one GPU takes to compute a prompt of so many tokens."""
    length = np.array([tokens])
    return flops.forward(length, 0 * length) / FLOPS


class TurnSeconds:
    """The costs of turns for a `WorkingSet`, of an engine replica of resolved arguments; the first one takes longer."""

    def __init__(self, args: Namespace):
        self._args = args

    def turn(self, tokens: float, history: float, running: float) -> float:
        """See `Costs.turn`."""
        return tokens * decode_seconds(self._plan, running, history + tokens / 2) / running

    def history(self, tokens: float) -> float:
        """See `Costs.history`."""
        return prompt_seconds(self._flops, round(tokens)) / self._args.vllm_tensor_parallel_size

    @cached_property
    def _plan(self) -> Plan:
        return Plan(self._args)

    @cached_property
    def _flops(self) -> ModelFlops:
        return ModelFlops(self._args)


def concurrent(args: Namespace, engines: int) -> int:
    """Return the sequences that an engine replica runs at a time, of ``engines`` ranks in all."""
    started = args.generation_batch_size * (1 + args.max_staleness)
    return min(max_num_seqs_of(args, engines), ceil(started * args.vllm_tensor_parallel_size / engines))


def estimated(args: Namespace) -> Sides:
    """Return the estimated seconds of a batch on engines and on trainers, for resolved arguments."""
    plan, train = Plan(args), train_flops(args) / FLOPS
    computed = args.generation_batch_size
    if has_servers(args) or keeps_prefixes(args):  # servers do by default
        computed //= args.num_generations
    prompts = computed * prompt_seconds(ModelFlops(args), args.max_prompt_length)

    def sides(engines: int, trainers: int) -> tuple[float, float]:
        sequences = concurrent(args, engines)
        waves = args.generation_batch_size * args.vllm_tensor_parallel_size / (engines * sequences)
        # Below 1 if the next batches are generated at the same time. Without staleness a step waits for the last wave.
        steps = args.max_completion_length * (waves if args.max_staleness else ceil(waves))
        return prompts / engines + steps * decode_seconds(plan, sequences), train / trainers

    return sides
