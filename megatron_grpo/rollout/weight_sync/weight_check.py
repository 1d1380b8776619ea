"""``--check-weight-sync``: after every sync, compare the engine's weights and log-probabilities with the trainer's.

*Tensors.* The trainer's weights are streamed a second time and compared with the engine's, by Hugging Face name. This
finds lost and changed tensors, and a sync that did not happen. Engines that cannot compare (quantized weights, kernels
that rearrange them) are checked by log-probabilities only.

*Log-probabilities.* Every replica completes a few prompts, and the trainer computes the log-probabilities of the
completions. These also depend on tensors derived from the weights, and on the kernels. A difference does not name its
tensor, and differences below the rounding of two implementations are not found.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.models import forward
from megatron_grpo.parallel.agreement import gathered
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.rollout.engine import LocalEngine
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

PROMPTS_PER_REPLICA, PROBE_TOKENS, PROBE_SEED = 4, 16, 0
ENDING = "The last checkpoint is good; report this with the model's config.json and the versions in the banner"


def largest_mismatch(args: Namespace) -> float:
    """Return the largest mean |log p(policy) - log p(rollout)| that counts as rounding, nats: --mismatch-limit.

    Defaults by precision: 0.001 in float32, 0.2 in 16 bits, 1 with --vllm-quantization or --fp8-format. On equal
    weights the mean is 4e-7 in float32 on a CPU, 0.007 in bf16 on an H200; for toy models with sharp distributions 0.1
    in bf16 and 0.43 with an engine in FP8.
    """
    if args.mismatch_limit is not None:
        return args.mismatch_limit
    if args.vllm_quantization or args.fp8_format:
        return 1.0
    half = args.bf16 or args.fp16 or args.vllm_dtype in ("bfloat16", "float16")
    return 0.2 if half else 1e-3


def compare_tensors(engine: LocalEngine, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
    """Raise GrpoError with the tensors' names on every rank if an engine's weights differ from these. Collective."""
    differences = engine.compare_weights(weights)
    if differences is None:
        return
    wrong = {rank: lines for rank, lines in enumerate(gathered(differences)) if lines}
    if wrong:
        rank, lines = next(iter(wrong.items()))
        more = f" and {len(lines) - 3} more tensors" if len(lines) > 3 else ""
        others = f"; also on ranks {', '.join(map(str, list(wrong)[1:]))}" if len(wrong) > 1 else ""
        raise GrpoError(
            f"the engine does not hold the trainer's weights of update {version}: on rank {rank} "
            f"{'; '.join(lines[:3])}{more}{others}. {ENDING}"
        )


def refuse(lines: list[str], what: str) -> None:
    """Raise GrpoError on every rank of a role if one has lines. Collective."""
    count = torch.tensor(len(lines))
    dist.all_reduce(count, group=host_group())
    if not count:
        return
    rank, first = next((rank, found) for rank, found in enumerate(gathered(lines)) if found)
    raise described(first, what, rank)


def described(lines: Sequence[str], what: str, rank: int) -> GrpoError:
    """Return the error that names the first of a rank's lines."""
    more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
    return GrpoError(f"{what}: on rank {rank} {'; '.join(lines[:3])}{more}. {ENDING}")


def probe_plan(args: Namespace, prompts: list[Prompt], num_replicas: int) -> RolloutPlan:
    """Return a plan of ``prompts``, repeated so that every replica and data-parallel rank gets some."""
    unit = parallel_state.get_data_parallel_world_size() * args.pipeline_model_parallel_size
    count = -(-PROMPTS_PER_REPLICA * num_replicas // unit) * unit
    sampling = Sampling(
        max_tokens=min(PROBE_TOKENS, args.max_completion_length),
        temperature=args.temperature,
        log_probs=True,
        routed_experts=args.router_replay_mode == "R3",
    )
    # Drop the rows' own sampling: log-probabilities of constrained completions are renormalised.
    prompts = [replace(prompts[i % len(prompts)], sampling_fields={}) for i in range(count)]
    return RolloutPlan(prompts, 1, sampling, PROBE_SEED)


def compare_log_probs(
    args: Namespace, model: forward.Model, forward_step: Callable, batch: RolloutBatch, num_replicas: int
) -> None:
    """Raise GrpoError if the model's log-probabilities of a probe differ from the engine's. Collective."""
    # The probe's size is not a multiple of the micro-batch size, and its common prefixes are not known (`Needs`).
    of_probe = replaced(args, micro_batch_size=1, share_prompts=False)
    gap = np.abs(forward.log_probs(of_probe, model, forward_step, batch) - batch.rollout_log_probs)
    replica = np.repeat(batch.sample_ids % num_replicas, batch.lengths)
    means = [float(gap[(replica == r) & (batch.response_mask == 1)].mean()) for r in range(num_replicas)]
    worst, limit = int(np.argmax(means)), largest_mismatch(args)  # nan is the largest
    if not means[worst] <= limit:
        raise GrpoError(
            f"--check-weight-sync: of {PROBE_TOKENS} sampled tokens for each of a few prompts, engine replica {worst} "
            f"has other log-probabilities than the trainer: {means[worst]:.2g} nats on average, the limit is "
            f"{limit:g} (--mismatch-limit). {ENDING}"
        )


def newest_tokens(batch: RolloutBatch, version: int, keeps_cache: bool) -> np.ndarray:
    """Return ``[total]``: 1 on the tokens that were sampled with this version of the weights, else 0.

    ``keeps_cache``: completions that began earlier continue with keys and values of older weights; they are left out.
    """
    sampled = batch.response_mask == 1
    of_version = (batch.weight_version == version) & sampled
    if keeps_cache:
        older = np.bincount(batch.completion_of_tokens, sampled & ~of_version, batch.num_completions) > 0
        of_version &= ~older[batch.completion_of_tokens]
    return of_version.astype(np.float32)
