"""Train a language model by GRPO on Megatron-Core and vLLM: ``torchrun --nproc-per-node N pretrain_grpo.py FLAGS``.

As in Megatron-LM's pretrain_gpt.py, `get_batch`, `loss_func` and `forward_step` define one micro-batch, and `main`
passes ``model_provider`` and `forward_step` to ``setup``. `train` is the algorithm. Per rollout:

    completions  the engine receives the newest weights and samples ``--num-generations`` completions of each prompt;
                 reward functions score completions as they finish
    log-probs    forward passes of the old policy, the reference model and the teacher, where the flags need them
    advantages   each completion is compared with the others of its prompt
    updates      ``--num-iterations x --steps-per-generation`` optimizer steps over packed micro-batches

Before the first rollout, ``--sft-iters`` supervised updates learn demonstrations; ``--sft-loss-type`` adds some to the
policy's updates.

The parts are in megatron_grpo/, a folder for each capability. algorithm/ has the mathematics; training/ has the set-up
(setup.py), the parts of a run and its position (trainer.py), one optimizer step (train_step.py), and the rules that
refuse invalid configurations (resolve.py). docs/arguments.md lists every flag.
"""

import gc
import sys
from dataclasses import replace
from functools import partial

from megatron_grpo.utils.packages import check_environment

if __name__ == "__main__":
    check_environment("pretrain_grpo.py")  # before the imports that need packages

from megatron_grpo.training.command_line import check_flags
from megatron_grpo.training.ended_by_signal import report_signals
from megatron_grpo.utils.process_tree import end_with_launcher

if __name__ == "__main__":
    report_signals(sys.argv[1:])  # forks: the child is the rank, its parent reports the signal that ends the rank
    end_with_launcher()
    check_flags(sys.argv[1:])  # a wrong flag ends the run here: the imports below take ten seconds
    gc.disable()  # Python's garbage collector, until run(main): what is imported stays

import numpy as np
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # call before the import of megatron.core; no-op on a GPU

from megatron.core import parallel_state

from megatron_grpo.algorithm.advantages import combine_rewards
from megatron_grpo.algorithm.arguments import learns_log_probs, needs_old_log_probs
from megatron_grpo.algorithm.kl import kl_term
from megatron_grpo.algorithm.loss_metrics import report, report_demonstrations
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.mixing import with_token_weights
from megatron_grpo.algorithm.policy_term import drop_overlong, policy_term, update_statistics
from megatron_grpo.algorithm.rollout_advantages import estimate_advantages, estimate_joint_advantages
from megatron_grpo.algorithm.updates import divide_rollout
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.pack import Pack
from megatron_grpo.models import balancing, forward, router_replay
from megatron_grpo.models.gpt import model_provider, packed_seq_params
from megatron_grpo.parallel.context_parallel import whole_pack
from megatron_grpo.rollout.collect import Needs
from megatron_grpo.rollout.evaluation import evaluation_metrics
from megatron_grpo.rollout.plan import evaluation_plans, rollout_seed
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.eval_only import report_evaluation
from megatron_grpo.training.mixture import demonstration_args, mixture_metrics
from megatron_grpo.training.setup import setup
from megatron_grpo.training.train_step import train_step
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.utils.device import device, to_device


def get_batch(data_iterator) -> tuple[Pack, dict[str, torch.Tensor]]:
    """Return the next micro-batch: the pack itself, on the host, and its arrays as tensors on the device."""
    pack = next(data_iterator)
    arrays, to = pack.device_arrays(), device()
    return pack, {name: to_device(torch.from_numpy(array), to) for name, array in arrays.items()}


def loss_func(args, batch: dict[str, torch.Tensor], num_microbatches: int, cp_size: int, output, non_loss_data=False):
    """Return the loss of one micro-batch, and the named scalars that it reports (`loss_metrics`).

    The loss is the sum over the tokens of w (L + beta KL - c H): w averages over the global batch, L is the policy term
    of --loss-type, H the entropy. The schedule divides by the number of micro-batches and DDP by the data-parallel
    size. This function multiplies by both, so that the gradient is that of the sum over the whole global batch. Each of
    the ``cp_size`` context-parallel ranks that hold the pack computes the same loss.
    """
    output = whole_pack(output, batch["own_labels"], len(batch["completion"]), cp_size, batch.get("first_labels"))
    if non_loss_data:  # log-probabilities and entropies; of a teacher distributions, too large for the device
        return output if len(output) == 2 else output.cpu()
    log_probs, entropy, *mtp_log_probs = output
    if LOSSES.get(args.loss_type).distils:
        batch = batch | {"divergence": mtp_log_probs.pop(0)}
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
        further = torch.stack(mtp_log_probs) * batch["further_in_loss"]
        likelihood = (batch["weights"] * further.mean(0)).sum()
        auxiliary = -args.mtp_loss_scaling_factor * likelihood

    scale = num_microbatches * parallel_state.get_data_parallel_world_size()
    if args.loss_type == args.sft_loss_type:  # demonstrations beside the rollout
        return scale * (loss + auxiliary), report_demonstrations(loss, log_probs)
    return scale * (loss + auxiliary), report(loss, policy, log_probs, old, entropy, batch)


def forward_step(data_iterator, model, args, num_microbatches: int, of_demonstrations=None):
    """Return this pipeline stage's output for one micro-batch, and the loss function for megatron-core's schedule.

    ``of_demonstrations`` are the arguments of micro-batches of demonstrations: another loss and temperature, no KL.
    """
    pack, batch = get_batch(data_iterator)
    args = of_demonstrations if pack.demonstrations else args
    balancing.next_micro_batch(model, pack)
    router_replay.next_micro_batch(model, pack, batch.get("routed_experts"))
    kept = batch.get("kept_token_ids")
    output = model(
        batch["tokens"][None],
        batch["position_ids"][None],
        attention_mask=None,
        labels=batch["labels"][None],
        label_positions=batch["label_positions"],
        padding_mask=batch["padding"][None] if args.num_experts else None,  # excluded from the routers' counts
        packed_seq_params=packed_seq_params(
            torch.from_numpy(pack.cu_seqlens), pack.max_seqlen, args.transformer_impl, pack.shared_prompts
        ),
        kept_token_ids=None if kept is None else kept[batch["own_labels"]],
        rope_positions=batch.get("rope_positions"),  # of vision-language models, as the images
        images=pack.images,
        further_tokens=batch.get("further_tokens"),  # with trained multi-token prediction
        further_labels=batch.get("further_labels"),
        entropy_gradient=args.entropy_coef > 0,  # the head is faster without
        log_probs_gradient=learns_log_probs(args),
        teacher=pack.of_own_labels,
        temperature=args.temperature,
    )
    return output, partial(loss_func, args, batch, num_microbatches, pack.cp_size)


def update(
    args, trainer: Trainer, batch: RolloutBatch, completions: np.ndarray, demonstrations: RolloutBatch | None = None
) -> dict[str, float]:
    """Run one optimizer step on a global batch and return its metrics.

    The global batch is ``completions`` of the rollout, in packs over data-parallel ranks, and perhaps
    ``demonstrations`` in packs of their own.
    """
    batch, demonstrations = with_token_weights(args, batch, completions, demonstrations, trainer.iteration)
    scores = partial(forward.scores, args, trainer.model, forward_step)
    batch, of_update = update_statistics(args, batch, completions, trainer.iteration, scores)
    packs = forward.micro_batches(args, batch, completions)
    of_demonstrations = demonstration_args(args)
    count = len(packs)
    packs += forward.micro_batches_of_demonstrations(of_demonstrations, demonstrations)
    step = partial(forward_step, args=args, num_microbatches=len(packs), of_demonstrations=of_demonstrations)
    metrics = train_step(step, packs, trainer.model, trainer.optimizer, trainer.scheduler, trainer.bad_updates)
    trainer.bad_updates.react(trainer.iteration + 1, batch, completions, metrics)
    metrics |= of_update | trainer.flops.of_update(packs[:count], batch, completions)
    return metrics | mixture_metrics(args, trainer, metrics, packs[count:], demonstrations)


def evaluate(args, trainer: Trainer) -> dict[str, float]:
    """Return the metrics of the held-out prompts, for greedy completions; log some of the completions.

    --eval-num-generations adds the metrics of sampled completions. rollout/evaluation.py says which ones are correct.
    """
    if not trainer.source.generates:  # all rollouts are recorded: there is no engine
        return {}
    metrics: dict[str, float] = {}
    with trainer.timers("eval"), trainer.engine_awake():
        for kind, plan in evaluation_plans(args, trainer.held_out.prompts).items():
            batch = trainer.source.evaluate(plan, Needs(trainer.held_out_to_log))
            metrics |= evaluation_metrics(args, kind, batch, trainer.held_out)
            trainer.log_held_out(kind, batch)
    trainer.saves.evaluation = trainer.iteration, metrics
    return metrics


def train(args, trainer: Trainer) -> None:
    """Repeat rollout, advantages and updates until ``--train-iters`` updates are done, after the supervised warm-up."""
    while trainer.warming_up():
        assert trainer.warm_up is not None
        batch = trainer.demonstrations()  # as completions: the turns of the assistant are in the loss
        with trainer.timers("update"):
            row = update(trainer.warm_up.args, trainer, batch, np.arange(batch.num_completions))
        trainer.finish_warm_up_update(batch, row)

    if args.val_before_train and trainer.iteration == 0:
        trainer.log(evaluate(args, trainer))

    while not trainer.finished():
        shuffle, loss = not args.no_shuffle_completions, LOSSES.get(args.loss_type)
        seed = rollout_seed(args.seed, trainer.source.taken + 1)
        divide = partial(divide_rollout, num_updates=args.steps_per_generation, shuffle=shuffle, loss=loss, seed=seed)
        with trainer.engine_for_rollout():  # awake, with the newest weights
            rollout = trainer.next_rollout(divide)
        batch = rollout.batch  # all completions; tokens of those that this rank computes
        parts = divide(batch.num_completions)  # the completions of each update
        if args.rollout_only:
            trainer.log_rollout(rollout, combine_rewards(batch.rewards, args.reward_weights))
            continue
        with trainer.timers("logprobs"):
            if needs_old_log_probs(args):
                with router_replay.recording(args, trainer.model) as with_experts:  # R2: the old policy's
                    old_log_probs = forward.log_probs(args, trainer.model, forward_step, batch, parts)
                batch = with_experts(replace(batch, old_log_probs=old_log_probs))
            if trainer.reference is not None:
                ref_log_probs = trainer.reference.log_probs(batch, trainer.model, forward_step)
                batch = replace(batch, ref_log_probs=ref_log_probs)
            if trainer.teacher is not None:
                batch = trainer.teacher.add_to(batch, trainer.model, forward_step)

        rewards = combine_rewards(batch.rewards, args.reward_weights)
        metrics = trainer.rollout_metrics(rollout, rewards)
        joined = trainer.joined_demonstrations(batch)
        if joined is None:
            batch, of_advantages = estimate_advantages(args, batch, rewards)
        else:
            batch, joined, of_advantages = estimate_joint_advantages(args, batch, rewards, joined)
        metrics |= of_advantages
        if args.overlong_filter:
            batch = drop_overlong(batch)
        trainer.log_completions(batch)
        updates = args.num_iterations * parts
        for number, completions in enumerate(updates, start=1):
            demonstrations = trainer.mixed_demonstrations(joined, batch, parts, (number - 1) % len(parts))
            with trainer.timers("update"), trainer.teachers_heads():
                row = metrics | update(args, trainer, batch, completions, demonstrations)
            if rollout.sampled:  # now, and not read from a ledger
                trainer.lifecycle.check(batch, row)
            trainer.advance(row)
            if args.sync_ref_model and trainer.due(args.ref_model_sync_steps):  # after a rollout's last update
                trainer.reference.ema_update(args, trainer.model, args.ref_model_mixup_alpha)  # type: ignore[union-attr]
            if number == len(updates) and trainer.due(args.eval_interval):
                with trainer.logged_if_saved(row):
                    row |= evaluate(args, trainer)
            trainer.log(row)
        if trainer.due(args.save_interval):
            trainer.saves.write(trainer.position())
    trainer.finish()


def main() -> None:
    args = parse_args()
    trainer = setup(args, model_provider, forward_step)
    if trainer is None:  # after --dry-run, and on ranks of engines
        return
    if args.eval_only:
        report_evaluation(args.save, trainer, evaluate(trainer.args, trainer))
    else:
        train(trainer.args, trainer)


if __name__ == "__main__":
    run(main)
