"""One optimizer update: set-up of optimizer and schedule, the step, and its metrics."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config, unwrap_model

from megatron_grpo.algorithm.loss_metrics import demonstration_metrics, is_extreme, update_metrics
from megatron_grpo.data.pack import Pack
from megatron_grpo.models import balancing
from megatron_grpo.models.config import trains_mtp
from megatron_grpo.models.forward import Model, for_each, run_schedule
from megatron_grpo.training import fused_adam, multi_tensor
from megatron_grpo.training.arguments import ddp_config_from_args, optimizer_config_from_args
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.utils import progress
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.kinds import is_projector
from megatron_grpo.weights.model_weights import canonical


def setup_optimizer(args, model: Model) -> tuple[Model, object, OptimizerParamScheduler]:
    """Wrap the chunks in megatron-core's DDP, and build the optimizer and the learning-rate schedule.

    Load the weights before: the optimizer copies them to its float32 main parameters here.
    """
    ddp_config = ddp_config_from_args(args)
    model = [
        DistributedDataParallel(get_model_config(chunk), ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model)
    ]
    fused_adam.install()
    multi_tensor.install()
    optimizer_config = optimizer_config_from_args(args)
    groups = get_standard_config_overrides(optimizer_config) | _own_rates(args)
    optimizer = get_megatron_optimizer(optimizer_config, model, groups, use_gloo_process_groups=False)
    config = get_model_config(model[0])
    config.finalize_model_grads_func = _finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = for_each(chunk.no_sync for chunk in model)
        if ddp_config.align_param_gather:
            config.grad_sync_func = for_each(chunk.start_grad_sync for chunk in model)
            config.param_sync_func = for_each(chunk.start_param_sync for chunk in model)
    return model, optimizer, _learning_rate_schedule(args, optimizer)


def _own_rates(args) -> dict[ParamKey, dict[str, float]]:
    """Return the learning rates of --vision-tower-lr and --projector-lr."""
    rates = {}
    for projector, rate in (False, args.vision_tower_lr), (True, args.projector_lr):
        if rate is None or rate == args.lr:
            continue

        def matches(parameter: torch.nn.Parameter, name: str, projector: bool = projector) -> bool:
            _, found, own = name.partition("vision.tower.")
            return bool(found) and is_projector(args, own) == projector

        # megatron-core's checkpoints tell groups apart by lr_mult; its schedule reads the other two.
        factor = rate / args.lr
        predicate = ParamWithNamePredicate(name=f"projector {projector}", fn=matches)
        values = {"lr_mult": factor, "max_lr": rate, "min_lr": factor * (args.min_lr or 0.0)}
        rates[ParamKey(with_name_predicate=predicate)] = values
    return rates


def _finalize_model_grads(model: Model, *arguments, **options) -> None:
    progress.step("reduction of the gradients")
    balancing.keep_counts(model)
    for chunk in model:
        _complete_buckets(chunk)
    finalize_model_grads(model, *arguments, **options)


def _complete_buckets(chunk: DistributedDataParallel) -> None:
    """Start the reduction of a bucket that waits for a gradient of the last stage's copy of the embedding.

    Multi-token prediction reads this copy without a gradient. Its gradient of zeros is added to the first stage's.
    """
    model = unwrap_model(chunk)
    if not chunk.ddp_config.overlap_grad_reduce or not model.mtp_process or model.pre_process:
        return
    weight = model.embedding.word_embeddings.weight
    group = chunk.param_to_bucket_group.get(weight)
    # A bucket without any gradient, or one that is reduced in another way, is left to megatron-core.
    if group is not None and group.per_param_grad_ready_counts and weight not in group.per_param_grad_ready_counts:
        group.register_grad_ready(weight)


def _learning_rate_schedule(args, optimizer) -> OptimizerParamScheduler:
    """Return megatron-core's schedule, counted in updates."""
    decay = args.lr_decay_iters or args.train_iters
    warmup = int(args.lr_warmup_fraction * decay) if args.lr_warmup_fraction is not None else args.lr_warmup_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr or 0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay if args.start_weight_decay is None else args.start_weight_decay,
        end_wd=args.weight_decay if args.end_weight_decay is None else args.end_weight_decay,
        wd_incr_steps=args.train_iters,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def train_step(
    forward_step: Callable,
    packs: Sequence[Pack],
    model: Model,
    optimizer,
    scheduler: OptimizerParamScheduler,
    bad_updates: BadUpdates,
) -> dict[str, float]:
    """Run one optimizer update over this rank's ``packs``, through megatron-core's pipeline schedule.

    Returns the metrics of the whole global batch, equal on every rank: metrics of the loss
    (`loss_metrics.update_metrics`), gradient norm, learning rate and, for a mixture of experts, load-balancing loss.
    ``bad_updates`` keeps the optimizer from a bad step.
    """
    balancing.begin_update(packs, model, lambda counted: run_schedule(forward_step, counted, model, forward_only=True))
    chunk: Any  # megatron-core's DistributedDataParallel
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = run_schedule(forward_step, packs, model, forward_only=False)
    metrics = _metrics(packs, reports)
    progress.step("optimizer")
    norm_of_mtp = partial(_norm_of_mtp, optimizer) if trains_mtp(get_model_config(model[0])) else None
    updated, grad_norm = bad_updates.step(optimizer, metrics["loss"], norm_of_mtp)
    bad_updates.look_at(_parameters(model))
    progress.step("metrics")
    learning_rate = max(group["lr"] for group in optimizer.param_groups if group["lr_mult"] == 1.0)
    if updated:
        scheduler.step(increment=1)
        balancing.update_expert_biases(model)
    metrics |= {"grad_norm": grad_norm, "lr": learning_rate, "update/skipped": float(bad_updates.problem is not None)}
    if norm_of_mtp:
        metrics["mtp/grad_norm"] = bad_updates.further_norm
    balance_loss = balancing.mean_loss(model, len(packs))
    return metrics if balance_loss is None else metrics | {"moe/balance_loss": balance_loss}


def _parameters(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the whole model, parameter or one expert's part of it) of this rank."""
    for chunk in map(unwrap_model, model):
        for name, parameter in chunk.named_parameters():
            yield from canonical(chunk, name, parameter.detach())


def _norm_of_mtp(optimizer) -> float:
    """Return the norm of the gradients of multi-token-prediction layers before their clip. Collective.

    megatron-core computes it to clip, which it does before this call.
    """
    return float((optimizer.grad_norms_by_group or optimizer._compute_grad_norms_by_group())["mtp"])


def _metrics(packs: Sequence[Pack], reports: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the metrics of the loss: of the rollout's micro-batches, and of those of demonstrations behind them."""
    count = sum(not pack.demonstrations for pack in packs)
    metrics = update_metrics(_combine_reports(packs[:count], reports[:count]))
    if count == len(packs):
        return metrics
    further = demonstration_metrics(_combine_reports(packs[count:], reports[count:]))
    return metrics | further | {"loss": metrics["loss"] + further["loss"]}


def _combine_reports(packs: Sequence[Pack], reports: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the totals of all micro-batches and data-parallel ranks, by name (`loss_metrics`), equal on every rank.

    Only the last pipeline stage computes the loss; it sends names and totals to the other stages.
    """
    totals: list = [None]
    if parallel_state.is_pipeline_last_stage():
        totals = [_data_parallel_totals(packs, reports)]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast_object_list(
            totals,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
            device=device(),
        )
    if totals[0] is None:
        raise GrpoError(
            "the loss did not report the same metrics for every micro-batch: a loss of --external-plugins must return "
            "the same names each time"
        )
    return totals[0]


def _data_parallel_totals(
    packs: Sequence[Pack], reports: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, float] | None:
    """Return the totals by name; None if the names differ between micro-batches or data-parallel ranks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    names = list(reports[0])
    agreed = all(list(report) == names for report in reports)
    checksum = zlib.crc32("\n".join(names).encode()) if agreed else -1
    # The kernels of the table are launched before the first wait for the device.
    rows = [torch.stack([report[name].double() for name in names]) for report in reports if agreed]
    largest_and_smallest = torch.tensor([checksum, -checksum], device=device())
    dist.all_reduce(largest_and_smallest, dist.ReduceOp.MAX, group=group)
    largest, smallest = largest_and_smallest.tolist()
    if largest != -smallest or largest < 0:
        return None
    table = torch.stack(rows)
    # The context-parallel ranks that share a pack all report the whole of it: the first of them counts.
    counted = [row for row, pack in zip(rows, packs, strict=True) if pack.cp_rank == 0] or [torch.zeros_like(rows[0])]
    values = torch.stack([torch.stack(counted).sum(0), table.amax(0), -table.amin(0)])
    dist.all_reduce(values[0], dist.ReduceOp.SUM, group=group)
    dist.all_reduce(values[1:], dist.ReduceOp.MAX, group=group)
    return {
        name: sum_ if not is_extreme(name) else high if name.endswith("/max") else -low
        for name, sum_, high, low in zip(names, *values.tolist(), strict=True)
    }


def params_norm(model: Model) -> float:
    """Return the L2 norm of all parameters of the whole model, each counted once; equal on every rank."""
    squares = torch.zeros(2, dtype=torch.float64, device=device())
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, *groups):
            of_experts = not getattr(parameter, "allreduce", True)
            squares[int(of_experts)] += parameter.detach().float().square().sum()
    dist.all_reduce(squares[0], group=parallel_state.get_model_parallel_group())
    dist.all_reduce(squares[1], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return squares.sum().sqrt().item()
