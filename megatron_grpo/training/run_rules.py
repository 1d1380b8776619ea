"""Rules of a run's length, evaluation, batch sizes and optimizer; and the first rules about flags alone.

This module does not import torch.
"""

import math
from argparse import Namespace

from megatron_grpo.checkpointing.arguments import check_checkpoints
from megatron_grpo.environments.arguments import check_agent, check_environments, resolve_environment
from megatron_grpo.estimate.arguments import check_dry_run
from megatron_grpo.rewards.arguments import check_rewards, resolve_rewards
from megatron_grpo.rewards.reward_models.arguments import check_reward_models
from megatron_grpo.utils.arguments import Step, replaced, resolved
from megatron_grpo.utils.batch_sizes import batch_arithmetic
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import excludes, flag, needs, required


def check_required(args: Namespace) -> None:
    """Refuse the absence of what every run needs; a dry run needs none of it, --eval-only nothing of training."""
    if args.dry_run:
        return
    if not args.eval_only:
        required(args, "train_data_path", "name the files of training prompts")
    required(args, "reward_funcs", "name at least one reward function")
    if args.eval_only:
        return
    required(args, "lr", "give the learning rate, such as 1e-6")
    if args.num_epochs is None:
        required(args, "train_iters", "give it, or --num-epochs")


def resolve_batch_sizes(args: Namespace) -> dict[str, int]:
    """Return the batch sizes that follow from others; GrpoError for sizes that contradict each other.

    --eval-only has those of one group a rank: it has no batches, and runs on other numbers of ranks than the run. It
    keeps the updates per rollout, which rules of the loss read.
    """
    if args.eval_only:
        steps, sizes_of_run = args.steps_per_generation, (args.generation_batch_size, args.global_batch_size)
        if all(sizes_of_run):
            steps = max(1, args.generation_batch_size // args.global_batch_size)
        none = dict.fromkeys(("global_batch_size", "generation_batch_size", "max_tokens_per_microbatch"))
        args = replaced(args, **none, micro_batch_size=args.num_generations, steps_per_generation=steps)
    sizes = batch_arithmetic(args, args.world_size)
    return {"data_parallel_size": sizes.dp_size} | {
        dest: getattr(sizes, dest)
        for dest in ("global_batch_size", "generation_batch_size", "steps_per_generation", "updates_per_rollout")
    }


def check_evaluation(args: Namespace) -> None:
    """Refuse flags of evaluation without held-out prompts, and held-out prompts without evaluation."""
    dests = "eval_interval val_before_train eval_num_generations eval_max_prompts eval_correct_reward"
    for dest in (*dests.split(), "eval_completions_to_log", "eval_only"):
        needs(args, dest, "valid_data_path", "there are no held-out prompts to evaluate on")
    if not args.log_completions:
        needs(args, "eval_completions_to_log", "save", "there is no directory to write to")
    if args.valid_data_path and not (args.eval_interval or args.val_before_train or args.eval_only):
        raise GrpoError("--valid-data-path needs --eval-interval or --val-before-train: without them it is not used")
    if not args.eval_only:
        return
    excludes(args, "eval_only", "dry_run", "the estimates are those of training")
    if not (args.load or args.load_hf or args.pretrained_checkpoint):
        raise GrpoError("--eval-only needs --load, --load-hf or --pretrained-checkpoint: there are no weights")


def check_ends(args: Namespace) -> None:
    """Refuse ends of a run that would lose its updates."""
    for dest in ("exit_duration_in_mins", "exit_signal_handler"):
        needs(args, dest, "save", "without it the run's updates would be lost")
    if args.on_bad_update == "restore" and not ((args.save and args.save_interval) or args.eval_only):
        raise GrpoError("--on-bad-update restore needs --save and --save-interval: it loads the newest checkpoint")
    if args.on_bad_update == "restore" and args.sync_ref_model:
        raise GrpoError("--on-bad-update restore does not restore the reference model of --sync-ref-model: give skip")
    needs(args, "exit_grace_seconds", "exit_signal_handler", "without it a signal ends the run at once")


def check_weight_decay(args: Namespace) -> None:
    """Refuse a schedule of the weight decay that is incomplete or has no effect."""
    ends = ("start_weight_decay", "end_weight_decay")
    for dest in ends:
        value = getattr(args, dest)
        if args.weight_decay_incr_style == "constant" and value is not None:
            raise GrpoError(f"{flag(dest)} needs --weight-decay-incr-style linear or cosine: otherwise it is constant")
        if args.weight_decay_incr_style != "constant":
            required(args, dest, f"--weight-decay-incr-style {args.weight_decay_incr_style} needs both ends")
            if "weight_decay" in args.explicit:
                raise GrpoError(f"--weight-decay and {flag(dest)} cannot both be given: each sets the weight decay")


def check_duration(args: Namespace) -> None:
    """Refuse two lengths of a run, and intervals that are no multiples of a rollout's updates."""
    excludes(args, "train_iters", "num_epochs", "each sets the length of the run")
    per_rollout = args.updates_per_rollout
    for dest in ("train_iters", "exit_interval", "eval_interval", "save_interval"):
        value = getattr(args, dest)
        if value is not None and value % per_rollout:
            raise GrpoError(
                f"{flag(dest)} ({value}) must be divisible by the updates per rollout ({per_rollout} = "
                f"--steps-per-generation {args.steps_per_generation} x --num-iterations {args.num_iterations})"
            )


def check_optimizer(args: Namespace) -> None:
    """Refuse contradictory or impossible settings of the optimizer."""
    excludes(args, "bf16", "fp16", "parameters have one dtype")
    if args.lr is not None and not 0 <= args.min_lr <= args.lr:
        raise GrpoError(f"--min-lr ({args.min_lr}) must lie between 0 and --lr ({args.lr})")
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction < 1:
        raise GrpoError(f"--lr-warmup-fraction ({args.lr_warmup_fraction}) must be at least 0 and less than 1")
    excludes(args, "lr_warmup_iters", "lr_warmup_fraction", "each sets the length of the warm-up")
    check_warmup(args)
    for dest in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        if not 0 <= getattr(args, dest) < 1:
            raise GrpoError(f"{flag(dest)} ({getattr(args, dest)}) must be at least 0 and less than 1")
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise GrpoError("--use-distributed-optimizer needs --optimizer adam")
    for dest in ("offload_model", "offload_gradients"):
        excludes(args, dest, "use_nccl_ub", "the network card has registered the addresses of the buffers")
    needs(args, "overlap_param_gather", "use_distributed_optimizer", "only then are parameters gathered")
    needs(args, "overlap_param_gather", "overlap_grad_reduce", "megatron-core overlaps both or neither")


def check_warmup(args: Namespace) -> None:
    """Raise GrpoError for a warm-up longer than the schedule; call again once --num-epochs has set --train-iters."""
    decay = args.lr_decay_iters or args.train_iters or math.inf
    if not 0 <= args.lr_warmup_iters < decay:
        raise GrpoError(
            f"--lr-warmup-iters ({args.lr_warmup_iters}) must be at least 0 and less than the updates in all ({decay})"
            ": a shorter run needs a smaller one, or 0"
        )


# The rules of the flags of a run, in order.
RUN: tuple[Step, ...] = (
    check_required,
    resolve_batch_sizes,
    check_evaluation,
    resolve_rewards,
    check_rewards,
    check_agent,
    resolve_environment,
    check_environments,
    check_reward_models,
    check_ends,
    check_weight_decay,
    check_duration,
    check_optimizer,
    check_checkpoints,
    check_dry_run,
)


def resolve_run[A: Namespace](args: A, world_size: int) -> A:
    """Return parsed arguments with what follows from `RUN` on ``world_size`` training ranks."""
    return resolved(replaced(args, world_size=world_size), *RUN)
