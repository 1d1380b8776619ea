"""Validation of the arguments: calls the rules of all folders in order, and defines the rules of training.

If a checkpoint or ``config.json`` gives the architecture, call ``merge_architecture`` before ``validate_args``.
"""

import importlib.util
import math
from argparse import Namespace

import torch

from megatron_grpo.algorithm.arguments import check_advantages, check_importance_sampling, check_loss
from megatron_grpo.checkpointing.arguments import check_checkpoints
from megatron_grpo.data.arguments import check_data, check_pass_rates
from megatron_grpo.lora.arguments import check_lora
from megatron_grpo.models.arguments import check_model
from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.models.rope import check_rope
from megatron_grpo.observability.arguments import check_logging
from megatron_grpo.parallel.arguments import check_parallelism
from megatron_grpo.reference.arguments import check_reference_models
from megatron_grpo.rewards.arguments import check_rewards
from megatron_grpo.rewards.reward_models.arguments import check_reward_models
from megatron_grpo.rollout.arguments import (
    check_dynamic_sampling,
    check_lengths,
    check_rollout,
    check_structured_outputs,
)
from megatron_grpo.training.arguments import check_values, ddp_config_from_args, optimizer_config_from_args
from megatron_grpo.utils.batch_sizes import batch_arithmetic
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import excludes, flag, needs, required
from megatron_grpo.weights import families
from megatron_grpo.weights.arguments import check_family


def validate_args(args: Namespace, world_size: int) -> None:
    """Raise GrpoError for an invalid configuration, and set the arguments that follow from others.

    ``--dry-run`` needs no data, rewards, learning rate or optional libraries.
    """
    check_values(args)  # again: config.json or a checkpoint may have set the architecture
    sizes = batch_arithmetic(args, world_size)
    args.world_size, args.data_parallel_size = world_size, sizes.dp_size
    args.global_batch_size, args.generation_batch_size = sizes.global_batch_size, sizes.generation_batch_size
    args.steps_per_generation, args.updates_per_rollout = sizes.steps_per_generation, sizes.updates_per_rollout
    check_model(args)
    check_family(args)
    check_parallelism(args)
    families.for_args(args).hf_from_args(args)  # raises for an architecture that the family does not support
    check_lengths(args)
    check_rope(args)
    check_data(args)
    _check_evaluation(args)
    check_rollout(args, world_size)
    check_rewards(args)
    check_reward_models(args)
    check_loss(args)
    check_importance_sampling(args)
    check_advantages(args)
    check_reference_models(args)
    check_lora(args)
    check_dynamic_sampling(args)
    check_pass_rates(args)
    check_structured_outputs(args)
    args.engine_decodes = bool(args.stop_words or args.structured_outputs_regex)
    _check_ends(args)
    _check_weight_decay(args)
    _check_duration(args)
    _check_optimizer(args)
    check_checkpoints(args)
    check_logging(args)
    _check_libraries(args)


def _check_evaluation(args: Namespace) -> None:
    for dest in ("eval_interval", "val_before_train", "eval_num_generations", "eval_max_prompts"):
        needs(args, dest, "valid_data_path", "there are no held-out prompts to evaluate on")
    if args.valid_data_path and not args.eval_interval and not args.val_before_train:
        raise GrpoError("--valid-data-path needs --eval-interval or --val-before-train: without them it is not used")


def _check_ends(args: Namespace) -> None:
    for dest in ("exit_duration_in_mins", "exit_signal_handler"):
        needs(args, dest, "save", "without it the run's updates would be lost")
    if args.on_bad_update == "restore" and not (args.save and args.save_interval):
        raise GrpoError("--on-bad-update restore needs --save and --save-interval: it loads the newest checkpoint")
    if args.on_bad_update == "restore" and args.sync_ref_model:
        raise GrpoError("--on-bad-update restore does not restore the reference model of --sync-ref-model: give skip")
    needs(args, "exit_grace_seconds", "exit_signal_handler", "without it a signal ends the run at once")


def _check_weight_decay(args: Namespace) -> None:
    ends = ("start_weight_decay", "end_weight_decay")
    for dest in ends:
        value = getattr(args, dest)
        if args.weight_decay_incr_style == "constant" and value is not None:
            raise GrpoError(f"{flag(dest)} needs --weight-decay-incr-style linear or cosine: otherwise it is constant")
        if args.weight_decay_incr_style != "constant":
            required(args, dest, f"--weight-decay-incr-style {args.weight_decay_incr_style} needs both ends")
            if "weight_decay" in args.explicit:
                raise GrpoError(f"--weight-decay and {flag(dest)} cannot both be given: each sets the weight decay")


def _check_duration(args: Namespace) -> None:
    excludes(args, "train_iters", "num_epochs", "each sets the length of the run")
    if args.num_epochs is None:
        required(args, "train_iters", "give it, or --num-epochs")
    per_rollout = args.updates_per_rollout
    for dest in ("train_iters", "exit_interval", "eval_interval", "save_interval"):
        value = getattr(args, dest)
        if value is not None and value % per_rollout:
            raise GrpoError(
                f"{flag(dest)} ({value}) must be divisible by the updates per rollout ({per_rollout} = "
                f"--steps-per-generation {args.steps_per_generation} x --num-iterations {args.num_iterations})"
            )


def _check_optimizer(args: Namespace) -> None:
    excludes(args, "bf16", "fp16", "parameters have one dtype")
    required(args, "lr", "give the learning rate, such as 1e-6")
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
    if args.optimizer_cpu_offload and not args.dry_run and not torch.cuda.is_available():
        raise GrpoError("--optimizer-cpu-offload needs a GPU: here the optimizer is on the CPU anyway")
    needs(args, "overlap_param_gather", "use_distributed_optimizer", "only then are parameters gathered")
    needs(args, "overlap_param_gather", "overlap_grad_reduce", "megatron-core overlaps both or neither")


def check_warmup(args: Namespace) -> None:
    """Raise GrpoError for a warm-up longer than the schedule; call again once --num-epochs has set --train-iters."""
    decay = args.lr_decay_iters or args.train_iters or math.inf
    if not 0 <= args.lr_warmup_iters < decay:
        raise GrpoError(
            f"--lr-warmup-iters ({args.lr_warmup_iters}) must be at least 0 and less than the updates in all ({decay})"
        )


def _check_libraries(args: Namespace) -> None:
    """Raise GrpoError for flags that this machine, its libraries or megatron-core do not support."""
    have_te = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    have_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    if args.transformer_impl == "transformer_engine" and not have_te:
        if args.dry_run:
            return
        raise GrpoError(
            "--transformer-impl transformer_engine needs a GPU and Transformer Engine, and one of them is absent: "
            "install it (requirements-gpu.txt), or give --transformer-impl local"
        )
    if args.transformer_impl == "local" and torch.cuda.is_available() and not (args.bf16 or args.fp16):
        raise GrpoError("on a GPU --transformer-impl local needs --bf16 or --fp16: its attention kernel has no float32")
    if args.gradient_accumulation_fusion and not have_apex and not args.dry_run:
        raise GrpoError("--gradient-accumulation-fusion needs apex built with --cuda_ext: install it, or leave it out")
    transformer_config_from_args(args)
    optimizer_config_from_args(args)
    ddp_config_from_args(args)
