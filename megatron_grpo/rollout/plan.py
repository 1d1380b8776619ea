"""Plans of training rollouts and evaluations: prompts and sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.row_sampling import structured_json
from megatron_grpo.data.sampling_params import Sampling, uses_engine_log_probs
from megatron_grpo.rollout.arguments import replays_top_k
from megatron_grpo.rollout.dynamic_sampling import Selection
from megatron_grpo.rollout.ledger.recording import Recording
from megatron_grpo.rollout.unfinished import PartialRollouts


@dataclass(frozen=True)
class RolloutPlan:
    """Prompts of a rollout and their sampling parameters; equal on all ranks.

    ``selection`` selects the groups if the plan has more prompts than needed; None keeps all groups. With ``partial``
    the prompts are those of new groups, beside the unfinished ones. With ``recording`` the groups are written to the
    run's ledger.
    """

    prompts: Sequence[Prompt]
    num_generations: int
    sampling: Sampling
    seed: int
    selection: Selection | None = None
    partial: PartialRollouts | None = None
    recording: Recording | None = None


def rollout_seed(seed: int, rollout: int) -> int:
    """Return the sampling seed of rollout number ``rollout``: a function of --seed and this number only."""
    return int(np.random.SeedSequence([seed, rollout]).generate_state(1)[0] // 2)


def training_sampling(args, rollout: int) -> Sampling:
    """Return the sampling parameters of training rollout number ``rollout`` (from 1).

    The engine returns log-probabilities in every rollout if a loss or a mask uses them or kept tokens are replayed,
    otherwise in a fraction --mismatch-sample-rate of the rollouts. Evaluations ask for none and for no experts.
    """
    rate = args.mismatch_sample_rate
    compared = int(rollout * rate) > int((rollout - 1) * rate)
    sampling = _sampling(args)
    replayed = replays_top_k(args)
    wanted = (compared or replayed or uses_engine_log_probs(args) is not None) and not sampling.structured_outputs
    experts = args.router_replay_mode == "R3"
    return replace(sampling, log_probs=wanted, kept_token_ids=replayed, routed_experts=experts)


def evaluation_plans(args, prompts: Sequence[Prompt]) -> dict[str, RolloutPlan]:
    """Return the plan of each kind of evaluation: ``greedy``, and ``sampled`` with --eval-num-generations."""
    sampled = _sampling(args)
    # Greedy completions use the model's own logits: no truncation, no penalties.
    greedy = Sampling(
        sampled.max_tokens,
        temperature=0.0,
        stop=sampled.stop,
        stop_token_ids=sampled.stop_token_ids,
        structured_outputs=sampled.structured_outputs,
    )
    plans = {"greedy": RolloutPlan(prompts, 1, greedy, args.seed)}
    if args.eval_num_generations:
        plans["sampled"] = RolloutPlan(prompts, args.eval_num_generations, sampled, args.seed)
    return plans


def _sampling(args) -> Sampling:
    return Sampling(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        stop=tuple(args.stop_words or ()),
        stop_token_ids=args.end_token_ids,
        structured_outputs=structured_json({"regex": args.structured_outputs_regex}),
    )
