"""Train a language model by GRPO on Megatron-Core and vLLM: ``torchrun --nproc-per-node N pretrain_grpo.py FLAGS``.

Read it from the bottom: ``main`` sets up, ``train`` is the algorithm. Per rollout:

    prompts      the next rows of the data, in an order that every rank knows
    sync         the new weights go to the engine
    completions  the engine samples ``--num-generations`` for each; reward functions score them as they finish
    advantages   each completion against the others of its prompt
    updates      ``--num-iterations x --steps-per-generation`` optimizer steps over packed micro-batches

The pieces lie in megatron_grpo/: algorithm/ (the maths), data/, models/, rollout/, rewards/, weights/,
checkpointing/, and training/, whose train_step.py is one update, setup.py and trainer.py what is built once and kept,
validation.py what is refused, and why. docs/arguments.md lists every flag.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from megatron_grpo.utils import cpu_backend

cpu_backend.install()  # before megatron.core is imported; on a GPU it does nothing

from megatron.core import parallel_state

from megatron_grpo.algorithm.advantages import combine_rewards
from megatron_grpo.algorithm.arguments import needs_old_log_probs
from megatron_grpo.algorithm.importance_sampling import importance_weights
from megatron_grpo.algorithm.kl import kl_term
from megatron_grpo.algorithm.loss_metrics import report
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.pass_at_k import pass_at_k, powers_of_two
from megatron_grpo.algorithm.policy_term import drop_overlong, policy_term, update_statistics
from megatron_grpo.algorithm.rollout_advantages import estimate_advantages
from megatron_grpo.algorithm.weighting import token_weights
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.pack import Pack
from megatron_grpo.models import forward, router_replay
from megatron_grpo.models.gpt import model_provider, packed_seq_params
from megatron_grpo.parallel.context_parallel import whole_pack
from megatron_grpo.reference.teacher_server import TeacherServer
from megatron_grpo.rollout.weight_sync import weight_check
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.setup import setup
from megatron_grpo.training.train_step import train_step
from megatron_grpo.training.trainer import Trainer, mean_of_scored
from megatron_grpo.utils.errors import EngineLost
from megatron_grpo.weights.stream import stream_hf


def get_batch(data_iterator) -> tuple[Pack, dict[str, torch.Tensor]]:
    """Return the next micro-batch: the pack itself, on the host, and its arrays as tensors on the device."""
    pack = next(data_iterator)
    arrays = pack.device_arrays()
    return pack, {name: torch.from_numpy(a).to(cpu_backend.device(), non_blocking=True) for name, a in arrays.items()}


def loss_func(args, batch: dict[str, torch.Tensor], num_microbatches: int, output, non_loss_data: bool = False):
    """Return the loss of one micro-batch, and the named scalars that it reports (`loss_metrics`).

    The loss is the sum over the tokens of w (L + beta KL - c H): w averages over the global batch, L is the policy term
    of --loss-type, H the entropy. The schedule divides by the number of micro-batches and DDP by the data-parallel
    size. Both are multiplied back in, so that the gradient is that of the sum over the whole global batch.
    """
    output = whole_pack(output, batch["own_labels"], len(batch["completion"]))
    if non_loss_data:  # a forward-only pass needs only log-probabilities and entropies
        return output
    log_probs, entropy, *mtp_log_probs = output
    old = batch.get("old_log_probs", log_probs.detach())  # absent with one update per rollout: the ratio is 1
    policy = policy_term(args, log_probs, old, batch)
    loss = policy.loss
    if args.beta > 0 and not args.kl_in_reward:
        loss = loss + args.beta * kl_term(args.kl_estimator, log_probs, batch["ref_log_probs"], old)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy
    loss = (batch["weights"] * loss).sum()
    auxiliary = 0.0
    if mtp_log_probs:  # of the multi-token-prediction layers, with the token weights of the policy term
        likelihood = (batch["weights"] * torch.stack(mtp_log_probs).mean(0)).sum()
        auxiliary = -args.mtp_loss_scaling_factor * likelihood

    scale = num_microbatches * parallel_state.get_data_parallel_world_size()
    return scale * (loss + auxiliary), report(loss, policy, log_probs, old, entropy, batch)


def forward_step(data_iterator, model, args, num_microbatches: int):
    """Run one micro-batch through this pipeline stage; megatron-core's schedule calls the loss on the last stage."""
    pack, batch = get_batch(data_iterator)
    router_replay.next_micro_batch(model, pack, batch.get("routed_experts"))
    output = model(
        batch["tokens"][None],
        batch["position_ids"][None],
        attention_mask=None,
        labels=batch["labels"][None],
        padding_mask=batch["padding"][None] if args.num_experts else None,  # routers leave padding out of their counts
        packed_seq_params=packed_seq_params(torch.from_numpy(pack.cu_seqlens), pack.max_seqlen, args.transformer_impl),
    )
    return output, partial(loss_func, args, batch, num_microbatches)


def update(args, trainer: Trainer, batch: RolloutBatch, completions: np.ndarray) -> dict[str, float]:
    """One optimizer step on a global batch: some of the rollout's completions, in packs over data-parallel ranks."""
    weights = np.zeros(batch.num_completions, np.float32)
    lengths, aggregation = batch.response_lengths[completions], LOSSES.get(args.loss_type).aggregation
    weights[completions] = token_weights(aggregation, lengths, args.micro_batch_size, args.max_completion_length)
    batch = replace(batch, weights=weights)
    batch = update_statistics(args, batch, completions, trainer.iteration, partial(scores, args, trainer))
    packs = forward.micro_batches(args, batch, completions)
    step = partial(forward_step, args=args, num_microbatches=len(packs))
    metrics = train_step(step, packs, trainer.model, trainer.optimizer, trainer.scheduler)
    return metrics | {"tokens/update": int(batch.lengths[completions].sum())}


def scores(args, trainer: Trainer, batch: RolloutBatch, completions: np.ndarray) -> np.ndarray:
    """Log-probabilities and entropies of these completions' tokens under the weights that the model holds now,
    ``[2, total]``.
    """
    packs = forward.micro_batches(args, batch, completions, args.logprobs_max_tokens_per_microbatch)
    step = partial(forward_step, args=args, num_microbatches=len(packs))
    return forward.forward_scores(step, packs, trainer.model, len(batch.tokens))


def log_probs(args, trainer: Trainer, batch: RolloutBatch) -> np.ndarray:
    """Log-probabilities of a rollout's tokens under the weights that the model holds now, ``[total]``."""
    return scores(args, trainer, batch, np.arange(batch.num_completions))[0]


def reference_log_probs(frozen, trainer: Trainer, batch: RolloutBatch) -> np.ndarray:
    """Log-probabilities of a rollout's tokens under the reference or a teacher, ``[total]``."""
    if isinstance(frozen, TeacherServer):
        return frozen.log_probs(batch)
    with frozen.ready(trainer.model) as ready:
        return log_probs(ready.args, ready, replace(batch, routed_experts=None))


def correct(args, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
    """Return the batch with rollout importance weights, p(trainer) / p(engine) of its tokens, and their metrics."""
    weights, clipped = importance_weights(
        args.rollout_importance_sampling_mode,
        batch.old_log_probs,
        batch.rollout_log_probs,
        batch.response_mask,
        batch.cu_seqlens,
        args.rollout_importance_sampling_threshold,
        args.rollout_importance_sampling_lower_bound,
    )
    return replace(batch, rollout_importance_weights=weights), {"mismatch/clipped": clipped}


def sync(args, trainer: Trainer) -> None:
    """Give the engine the trainer's weights: what it generates from now on carries this iteration as its version."""
    with trainer.timers("sync"), forward.parameters_complete(args, trainer.model):
        trainer.engine.update_weights(stream_hf(trainer.model, args), trainer.iteration)
        trainer.synced_iteration = trainer.iteration
        if args.check_weight_sync:
            weight_check.compare_tensors(trainer.engine, stream_hf(trainer.model, args), trainer.iteration)


def evaluate(args, trainer: Trainer) -> dict[str, float]:
    """Mean reward and accuracy (the first reward function gives 1) on the held-out prompts: greedy, and sampled if
    asked.
    """
    metrics = {}
    with trainer.timers("eval"), trainer.engine_awake(partial(sync, args, trainer), log_probs):
        for kind, sampling, num_generations in trainer.eval_samplings:
            batch = trainer.collect(trainer.valid_prompts, num_generations, sampling, seed=args.seed)
            rewards = combine_rewards(batch.rewards, args.reward_weights)
            metrics[f"eval/{kind}_reward"] = mean_of_scored(rewards)
            first = batch.rewards[:, 0]  # NaN where it did not score
            metrics[f"eval/{kind}_accuracy"] = mean_of_scored(np.where(np.isnan(first), np.nan, first >= 1.0))
            whole = ~np.isin(batch.group_ids, batch.group_ids[np.isnan(first)])  # prompts whose answers all are scored
            for k in powers_of_two(num_generations) if kind == "sampled" and whole.any() else ():
                metrics[f"eval/pass_at_{k}"] = pass_at_k(first[whole] >= 1.0, batch.group_ids[whole], k)
    return metrics


def train(args, trainer: Trainer) -> None:
    """The algorithm: sync, roll out, score, compare, update, until ``--train-iters`` updates are done."""
    if args.val_before_train and trainer.iteration == 0:
        trainer.log(evaluate(args, trainer))

    while not trainer.finished():
        with trainer.engine_awake(partial(sync, args, trainer), log_probs):
            prompts = trainer.next_prompts()
            selection, seed = trainer.selection(), trainer.rollout_seed()
            batch = trainer.collect(prompts, args.num_generations, trainer.sampling, seed, selection)
        with trainer.timers("logprobs"):
            if needs_old_log_probs(args):
                with router_replay.recording(args, trainer.model, batch):  # R2: the experts that the old policy chose
                    old = log_probs(args, trainer, batch)
                batch = replace(batch, old_log_probs=old)
            if trainer.reference is not None:
                batch = replace(batch, ref_log_probs=reference_log_probs(trainer.reference, trainer, batch))
            if trainer.teacher is not None:
                batch = replace(batch, teacher_log_probs=reference_log_probs(trainer.teacher, trainer, batch))

        rewards = combine_rewards(batch.rewards, args.reward_weights)
        metrics = trainer.rollout_metrics(batch, rewards)
        batch, of_advantages = estimate_advantages(args, batch, rewards)
        metrics |= of_advantages
        if args.overlong_filter:
            batch = drop_overlong(batch)
        if args.rollout_importance_sampling_mode:
            batch, of_weights = correct(args, batch)
            metrics |= of_weights
        trainer.log_completions(batch)
        updates = np.split(np.arange(batch.num_completions), args.steps_per_generation) * args.num_iterations
        for number, completions in enumerate(updates, start=1):
            with trainer.timers("update"):
                row = metrics | update(args, trainer, batch, completions)
            row["flops/update"] = trainer.flops.update(batch.lengths[completions], batch.response_lengths[completions])
            trainer.check_engine(batch, row)
            trainer.advance(row)
            if args.sync_ref_model and trainer.due(args.ref_model_sync_steps):  # after a rollout's last update
                trainer.reference.ema_update(args, trainer.model, args.ref_model_mixup_alpha)
            if number == len(updates) and trainer.due(args.eval_interval):
                try:
                    row |= evaluate(args, trainer)
                except EngineLost:  # the run was saved as of this update, and goes on behind it
                    trainer.log(row)
                    raise
            trainer.log(row)
        if trainer.due(args.save_interval):
            trainer.save()
    trainer.finish()


def main() -> None:
    args = parse_args()
    trainer = setup(args, model_provider)
    if trainer is not None:  # None after --dry-run
        train(args, trainer)


if __name__ == "__main__":
    run(main)
