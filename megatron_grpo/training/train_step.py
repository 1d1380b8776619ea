"""Model, optimizer and schedule set-up, and the two things done with them: one update, and a pass for
log-probabilities.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import Float16Module, param_is_not_shared
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.utils import get_model_config

from megatron_grpo.algorithm.corrections import mismatch_metrics
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.pack import Pack, pack_completions
from megatron_grpo.data.schedule import attention_coefficient, schedule
from megatron_grpo.models import router_replay
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.parallel.zigzag import padded_lengths, sequence_multiple
from megatron_grpo.training import fused_adam
from megatron_grpo.training.arguments import ddp_config_from_args, optimizer_config_from_args
from megatron_grpo.utils.cpu_backend import device
from megatron_grpo.weights.families.common import query_groups
from megatron_grpo.weights.families.moe import moe_layers

Model = list[torch.nn.Module]


def build_model(args, model_provider: Callable) -> Model:
    """This rank's pipeline stage, one chunk for each of its virtual stages, on its device, in its dtype, not yet
    wrapped for training.
    """
    stages = args.num_virtual_stages_per_pipeline_rank or 1
    model = []
    for stage in range(stages):
        vp_stage = stage if stages > 1 else None
        chunk = model_provider(
            args,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunk.vp_stage = vp_stage
        if args.num_experts and args.expert_tensor_parallel_size != args.tensor_model_parallel_size:
            # megatron-core reduces experts' gradients over their own data-parallel ranks when this mark says so, and
            # sets it only for EP > 1; but with another tensor-parallel size those ranks are others than the rest's too.
            for name, parameter in chunk.named_parameters():
                if ".mlp.experts." in name:
                    parameter.allreduce = False
                    # Their biases, which are whole, it would add up over tensor-parallel ranks, and count the first
                    # rank's only in the gradient norm, though these ranks hold other experts or see other tokens.
                    parameter.sequence_parallel, parameter.tensor_model_parallel = False, True
        chunk.to(device())
        model.append(Float16Module(chunk.config, chunk) if args.bf16 or args.fp16 else chunk)
    return model


def setup_optimizer(args, model: Model) -> tuple[Model, object, OptimizerParamScheduler]:
    """Wrap the chunks in megatron-core's DDP, and build the optimizer and the learning-rate schedule.

    The weights must be in place already: the optimizer's float32 copies are taken from them here.
    """
    ddp_config = ddp_config_from_args(args)
    model = [
        DistributedDataParallel(get_model_config(chunk), ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model)
    ]
    fused_adam.install()
    optimizer = get_megatron_optimizer(optimizer_config_from_args(args), model)
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = _for_each(chunk.no_sync for chunk in model)
        if ddp_config.align_param_gather:
            config.grad_sync_func = _for_each(chunk.start_grad_sync for chunk in model)
            config.param_sync_func = _for_each(chunk.start_param_sync for chunk in model)
    return model, optimizer, _learning_rate_schedule(args, optimizer)


def _for_each(functions: Iterable[Callable]) -> list[Callable] | Callable:
    """What megatron-core wants of several chunks, a list, and of a single one, the function itself."""
    functions = list(functions)
    return functions if len(functions) > 1 else functions[0]


def _learning_rate_schedule(args, optimizer) -> OptimizerParamScheduler:
    """megatron-core's schedule, counted in updates."""
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


@dataclass
class UpdateReport:
    """What one optimizer update did: sums and extremes over the whole global batch, the gradient norm, the learning
    rate.
    """

    sums: dict[str, float]
    extremes: dict[str, float]
    grad_norm: float
    learning_rate: float
    balance_loss: float | None = None  # of a mixture of experts' routers

    def metrics(self) -> dict[str, float]:
        """The report under the names of ``metric_guide.METRICS``: sums over tokens become means."""
        tokens = max(self.sums["tokens"], 1)  # --overlong-filter can leave an update without any
        row = {
            "loss": self.sums["loss"],
            "entropy": self.sums["entropy"] / tokens,
            "kl": self.sums["kl"] / tokens,
            "clip/low": self.sums["clip_low"] / tokens,
            "clip/high": self.sums["clip_high"] / tokens,
            "clip/masked": self.sums["masked"] / tokens,
            "ratio/min": self.extremes["ratio/min"],
            "ratio/max": self.extremes["ratio/max"],
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
        }
        row |= mismatch_metrics(self.sums | self.extremes)
        if self.balance_loss is not None:
            row["moe/balance_loss"] = self.balance_loss
        return row


def micro_batches(args, batch: RolloutBatch, completions: np.ndarray, max_tokens: int | None = None) -> list[Pack]:
    """This rank's micro-batches of the given completions (numbers in the batch): as many packs on every rank.

    A pack's tokens are shared out over context-parallel ranks, and under sequence parallelism once more over
    tensor-parallel ones. ``max_tokens`` is a token budget in place of the flags'.
    """
    max_tokens = max_tokens or args.max_tokens_per_microbatch
    cp_size = parallel_state.get_context_parallel_world_size()
    cp_rank = parallel_state.get_context_parallel_rank()
    lengths = padded_lengths(batch.lengths[completions], cp_size)
    ranks = schedule(
        # Without a budget packs are the same in every layout, as the routers' auxiliary losses of a pack then are.
        lengths if max_tokens else batch.lengths[completions],
        parallel_state.get_data_parallel_world_size(),
        micro_batch_size=None if max_tokens else args.micro_batch_size,
        max_tokens=max_tokens,
        microbatch_multiple=args.pipeline_model_parallel_size if args.num_virtual_stages_per_pipeline_rank else 1,
        attention_coefficient=_attention_coefficient(args),
    )
    pad_multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    total_length = None
    if args.num_experts and args.moe_token_dispatcher_type == "allgather":  # it gathers as many tokens from each rank
        multiple = pad_multiple * sequence_multiple(cp_size)
        total_length = -(-max(int(lengths[pack].sum()) for rank in ranks for pack in rank) // multiple) * multiple
    return [
        pack_completions(batch, completions[pack], pad_multiple, total_length, cp_size, cp_rank)
        for pack in ranks[parallel_state.get_data_parallel_rank()]
    ]


def _attention_coefficient(args) -> float:
    """How attention, whose work grows with the square of a length, compares with the linear layers."""
    ffn = args.ffn_hidden_size
    if args.num_experts:
        ffn = args.moe_router_topk * args.moe_ffn_hidden_size + (args.moe_shared_expert_intermediate_size or 0)
    key_value_heads = args.num_attention_heads if args.multi_latent_attention else query_groups(args)
    head = args.qk_head_dim + args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels
    return attention_coefficient(args.hidden_size, args.num_attention_heads * head, key_value_heads * head, ffn)


def train_step(
    forward_step: Callable,
    packs: Sequence[Pack],
    model: Model,
    optimizer,
    scheduler: OptimizerParamScheduler,
    report_names: Sequence[str],
) -> UpdateReport:
    """One optimizer update over this rank's ``packs``, through megatron-core's pipeline schedule.

    ``report_names`` are the keys of what ``loss_func`` reports, known to the stages that do not run it as well.
    """
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = _run_schedule(forward_step, packs, model, forward_only=False)
    updated, grad_norm, _ = optimizer.step()
    learning_rate = max(group["lr"] for group in optimizer.param_groups)
    if updated:
        scheduler.step(increment=1)
    sums, extremes = _reduce_reports(reports, report_names)
    balance_loss = _balance_loss(get_model_config(model[0]), len(packs))
    return UpdateReport(sums, extremes, float(grad_norm or 0.0), learning_rate, balance_loss)


def _balance_loss(config, num_microbatches: int) -> float | None:
    """The routers' load-balancing loss, mean over layers and micro-batches; None where it is switched off."""
    coefficients = config.moe_aux_loss_coeff
    if config.num_moe_experts is None or not np.any(coefficients):
        return None
    dp = parallel_state.get_data_parallel_world_size()
    total = torch.zeros((), device=device())
    for name, tracked in get_moe_layer_wise_logging_tracker().items():
        if name.endswith("load_balancing_loss"):  # each rank has its share, of all ranks or of its data-parallel rank
            total += tracked["values"].sum() * (dp if tracked["reduce_group_has_dp"] else 1)
    clear_aux_losses_tracker()
    dist.all_reduce(total)
    return total.item() / dp / sum(moe_layers(config)) / num_microbatches


@torch.no_grad()
def forward_scores(forward_step: Callable, packs: Sequence[Pack], model: Model, total: int) -> np.ndarray:
    """Log-probability and entropy of every label token of all ranks' ``packs``: float32 ``[2, total]``, on every rank,
    nan elsewhere.
    """
    results = _run_schedule(forward_step, packs, model, forward_only=True)
    # The last row says where there is a value. Each position has one writer, so a sum over ranks gathers.
    flat = np.zeros((3, total), dtype=np.float32)
    ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    if parallel_state.is_pipeline_last_stage() and ranks == (0, 0):
        for pack, scores in zip(packs, results, strict=True):
            flat[:2, pack.token_index] = scores.float().cpu().numpy()
            flat[2, pack.token_index] = 1.0
    dist.all_reduce(torch.from_numpy(flat), group=host_group())
    return np.where(flat[2] == 1.0, flat[:2], np.float32(np.nan))


def _run_schedule(forward_step: Callable, packs: Sequence[Pack], model: Model, forward_only: bool) -> list:
    """What ``loss_func`` returned for each micro-batch (on the last pipeline stage; an empty list elsewhere)."""
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_for_each(iter(packs) for _ in model),
        model=_for_each(model),
        num_microbatches=len(packs),
        # Packs differ in length, and stages tell each other the shapes, unless all were padded to one length.
        seq_length=int(packs[0].cu_seqlens[-1]),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    router_replay.end_of_pass(model)
    return results


def _reduce_reports(
    reports: list[dict[str, torch.Tensor]], names: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Add up the micro-batches' reports over data-parallel ranks; names that end in ``/max`` or ``/min`` take the
    extreme instead.

    Every rank returns the same numbers: the last pipeline stage has them and sends them to the others.
    """
    values = torch.zeros(3, len(names), dtype=torch.float64, device=device())
    if parallel_state.is_pipeline_last_stage():
        table = torch.stack([torch.stack([report[name].double() for name in names]) for report in reports])
        values = torch.stack([table.sum(0), table.amax(0), -table.amin(0)])
        data_parallel = parallel_state.get_data_parallel_group()  # context ranks all report the whole pack
        dist.all_reduce(values[0], dist.ReduceOp.SUM, group=data_parallel)
        dist.all_reduce(values[1:], dist.ReduceOp.MAX, group=data_parallel)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            values,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    total, largest, smallest = (dict(zip(names, row, strict=True)) for row in values.tolist())
    extremes = {name: value for name, value in largest.items() if name.endswith("/max")}
    extremes |= {name: -value for name, value in smallest.items() if name.endswith("/min")}
    return {name: value for name, value in total.items() if name not in extremes}, extremes


def params_norm(model: Model) -> float:
    """L2 norm of all parameters of the whole model, each counted once; the same on every rank."""
    squares = torch.zeros(2, dtype=torch.float64, device=device())
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
        of_experts = not getattr(parameter, "allreduce", True)
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, groups[of_experts]):
            squares[int(of_experts)] += parameter.detach().float().square().sum()
    dist.all_reduce(squares[0], group=parallel_state.get_model_parallel_group())
    dist.all_reduce(squares[1], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return squares.sum().sqrt().item()


@contextlib.contextmanager
def parameters_complete(args, model: Model) -> Iterator[None]:
    """Inside, every parameter holds its newest value, though ``--overlap-param-gather`` would fetch it in the next
    forward.
    """
    if args.overlap_param_gather:
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=True)
    yield
    if args.overlap_param_gather:
        for chunk in model:
            chunk.enable_forward_pre_hook()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, which a GPU can read while it computes."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy.pin_memory() if torch.cuda.is_available() else copy


def weight_tensors(chunk: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers: a router's expert bias is a buffer."""
    yield from chunk.parameters()
    yield from torch.nn.Module.buffers(chunk)  # megatron-core's DDP has another attribute of this name


class ReferencePolicy:
    """Frozen weights, the reference of the KL term: they lie in host memory and take the model's place for one pass."""

    def __init__(self, model: Model):
        """Copy the model's present weights."""
        self.weights = [[to_host(tensor) for tensor in weight_tensors(chunk)] for chunk in model]

    @torch.no_grad()
    def copy_to(self, model: Model) -> None:
        """Overwrite the model's weights."""
        for chunk, weights in zip(model, self.weights, strict=True):
            for tensor, weight in zip(weight_tensors(chunk), weights, strict=True):
                tensor.copy_(weight, non_blocking=True)

    @contextlib.contextmanager
    def in_place_of(self, model: Model) -> Iterator[None]:
        """Within, the model is the reference; afterwards it is the policy again, bit for bit."""
        policy = ReferencePolicy(model)
        self.copy_to(model)
        try:
            yield
        finally:
            policy.copy_to(model)
