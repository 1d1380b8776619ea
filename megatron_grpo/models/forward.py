"""The model as chunks of pipeline stages: construction, micro-batches, and passes in megatron-core's schedule."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.pack import Layout, Pack, lay_out, pack_completions
from megatron_grpo.data.prefix_tree import (
    Prefixes,
    hashed_prefixes,
    is_worth_sharing,
    spared_by_samples,
    spared_tokens,
    with_prefixes,
)
from megatron_grpo.data.schedule import Schedule, attention_coefficient, degrees_of, hybrid_schedule, schedule
from megatron_grpo.data.share import spread
from megatron_grpo.models import balancing, router_replay
from megatron_grpo.models.config import attention_layers, trains_mtp
from megatron_grpo.models.fp8_training import check_fp8_device, token_multiple
from megatron_grpo.models.gemma4 import with_layer
from megatron_grpo.parallel.arguments import query_groups
from megatron_grpo.parallel.initialize import await_ranks, host_group
from megatron_grpo.parallel.zigzag import padded_lengths, sequence_multiple
from megatron_grpo.utils import progress
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.device import device

Model = list[torch.nn.Module]
NOT_FINITE = float("inf")  # what a pass returns for nan, which stands for tokens that no pass has computed


def build_model(args, model_provider: Callable) -> Model:
    """Build this rank's pipeline stage: one chunk for each virtual stage, on its device, in its dtype.

    The chunks are not wrapped for data-parallel training.
    """
    check_fp8_device(args)
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
            # megatron-core would sum the gradients of the experts' unsharded biases over tensor-parallel ranks, which
            # hold other experts or tokens.
            for name, parameter in chunk.named_parameters():
                if ".mlp.experts." in name:
                    parameter.sequence_parallel = False
        chunk.to(device())
        model.append(_in_16_bits(chunk) if args.bf16 or args.fp16 else chunk)
    return model


def _in_16_bits(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return a chunk with 16-bit weights and the experts' biases in float32.

    megatron-core casts the biases back before its first forward pass, when references have copied them.
    """
    rounded = Float16Module(chunk.config, chunk)
    for name, buffer in rounded.named_buffers():
        if name.endswith("router.expert_bias"):
            buffer.data = buffer.data.float()
    return rounded


def for_each[T](chunks: Iterable[T]) -> list[T] | T:
    """Return a list, one of each model chunk, or the item itself if there is only one, as megatron-core expects."""
    items = list(chunks)
    return items if len(items) > 1 else items[0]


def assignment(
    args, batch: RolloutBatch, completions: np.ndarray, max_tokens: int | None = None
) -> tuple[list[int], list[list[np.ndarray]]]:
    """Return (degree of each micro-batch, completions of each micro-batch of every rank: [rank][micro-batch]).

    Equal on all ranks. Rank is data-parallel rank x CP + context-parallel rank; as many neighbours as the degree share
    a pack. ``completions`` are the numbers of those to divide. ``max_tokens`` is a token budget that overrides the
    flags.
    """
    max_tokens = max_tokens or args.max_tokens_per_microbatch
    return _assignment(args, batch, completions, max_tokens, _shared(args, batch, completions, max_tokens))


def _assignment(
    args, batch: RolloutBatch, completions: np.ndarray, max_tokens: int | None, prefixes: Prefixes | None
) -> tuple[list[int], list[list[np.ndarray]]]:
    """Return `assignment` for packs that have ``prefixes`` once."""
    lengths = batch.lengths[completions]
    samples = _samples(batch, completions)
    together = batch.image_keys[completions] if args.vision_config else None
    dp_size = parallel_state.get_data_parallel_world_size()
    cp_size = parallel_state.get_context_parallel_world_size()
    how: dict[str, Any] = {
        "max_tokens": max_tokens,
        "microbatch_multiple": args.pipeline_model_parallel_size if args.num_virtual_stages_per_pipeline_rank else 1,
        "attention_coefficient": _attention_coefficient(args),
        "together": together,
    }
    ranks: Schedule
    if args.hybrid_context_parallel and max_tokens:
        repeated = None
        if prefixes is not None:
            how["prefixes"] = prefixes
            repeated = {degree: _repeated(args, batch, completions, degree) for degree in degrees_of(cp_size)}
        degrees, ranks = hybrid_schedule(lengths, dp_size, cp_size, samples=samples, repeated=repeated, **how)
    else:
        # Without a budget use unpadded lengths: the packs, and the routers' auxiliary losses of a pack, are then equal
        # in every parallel configuration.
        padded = padded_lengths(lengths, cp_size, samples) if max_tokens else lengths
        if prefixes is not None:
            padded = padded - _repeated(args, batch, completions, cp_size)
            how |= {"prefixes": prefixes, "cp_size": cp_size}
        groups = schedule(padded, dp_size, None if max_tokens else args.micro_batch_size, **how)
        degrees, ranks = [cp_size] * len(groups[0]), [group for group in groups for _ in range(cp_size)]
    return degrees, [[completions[pack] for pack in rank] for rank in ranks]


def _shared(args, batch: RolloutBatch, completions: np.ndarray, max_tokens: int | None) -> Prefixes | None:
    """Return the prefixes that packs of these completions have once; None: packs have whole sequences.

    Completions that begin alike are in one pack with a token budget only.
    """
    if not args.share_prompts or not max_tokens:
        return None
    found = _prefixes(args, batch, completions)
    if args.vision_config and batch.samples is not None:
        return found  # what samples of an episode repeat is not known
    spared = spared_tokens(found.common).sum() + _repeated(args, batch, completions, 1).sum()
    return found if is_worth_sharing(int(spared), int(batch.lengths[completions].sum())) else None


def _samples(batch: RolloutBatch, completions: np.ndarray) -> np.ndarray | None:
    return None if batch.samples is None else batch.samples[completions]


def own_completions(args, batch: RolloutBatch, completions: np.ndarray, max_tokens: int | None = None) -> np.ndarray:
    """Return the completions in this rank's micro-batches; the arguments are those of `assignment`.

    With --router-replay-mode R2 they are those of all context-parallel ranks, which exchange their experts.
    """
    _, ranks = assignment(args, batch, completions, max_tokens)
    if args.router_replay_mode == "R2":
        cp_size = parallel_state.get_context_parallel_world_size()
        first = parallel_state.get_data_parallel_rank() * cp_size
        return np.unique(np.concatenate([pack for rank in ranks[first : first + cp_size] for pack in rank]))
    return np.concatenate(ranks[_own_place()])


def _own_place() -> int:
    """Return this rank's index in `assignment`."""
    cp_size, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return parallel_state.get_data_parallel_rank() * cp_size + cp_rank


class MicroBatches(Sequence[Pack]):
    """Packs, each made when it is first read: a GPU computes one while the host makes the next.

    ``length``: the tokens to which each is padded on a rank, the argument of the ``makers``; None: as many as it has.
    """

    def __init__(self, makers: Sequence[Callable[[int | None], Pack]], length: int | None = None):
        self._makers, self._packs, self.length = makers, dict[int, Pack](), length

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        number = range(len(self))[number]
        if number not in self._packs:
            self._packs[number] = self._makers[number](self.length)
        return self._packs[number]

    def __add__(self, others: "MicroBatches") -> "MicroBatches":
        """Return the packs of both, not made yet: pipeline stages exchange packs of one length."""
        return MicroBatches([*self._makers, *others._makers], max(self.length or 0, others.length or 0) or None)

    def make_next(self) -> None:
        """Make the first pack that nothing has read yet."""
        if len(self._packs) < len(self):
            self[next(number for number in range(len(self)) if number not in self._packs)]


def micro_batches(
    args, batch: RolloutBatch, completions: np.ndarray, max_tokens: int | None = None, end: int | None = None
) -> MicroBatches:
    """Return this rank's micro-batches (packs) of ``completions``, indices in the batch; each rank has equally many.

    Context parallelism splits the tokens of a pack over ranks, and sequence parallelism splits them again over
    tensor-parallel ranks. ``max_tokens`` is a token budget that overrides the flags. With ``end`` the completions are
    demonstrations; those from this number on have a place in the schedule, and are not computed: a micro-batch can be
    empty.
    """
    max_tokens = max_tokens or args.max_tokens_per_microbatch
    prefixes = _shared(args, batch, completions, max_tokens)
    degrees, ranks = _assignment(args, batch, completions, max_tokens, prefixes)
    own, share_prompts = ranks[_own_place()], prefixes is not None
    if end is not None:
        own = [indices[indices < end] for indices in own]
    further = _further_tokens(args)
    pad_multiple = token_multiple(args) * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    cp_rank = parallel_state.get_context_parallel_rank()
    layouts: list[Layout | None] = [None] * len(own)
    of_rank = None  # tokens of a pack on a rank; None: as many as it has, padded
    if args.num_experts and args.moe_token_dispatcher_type == "allgather":  # needs equally many tokens on each rank
        cp_size = parallel_state.get_context_parallel_world_size()
        unit = pad_multiple * sequence_multiple(cp_size) // cp_size  # of every degree
        found = [lay_out(batch, *item, share_prompts, further) for item in zip(own, degrees, strict=True)]
        needed = [-(-layout.padded(degree) // (degree * unit)) for layout, degree in zip(found, degrees, strict=True)]
        units = torch.tensor(max(needed))
        torch.distributed.all_reduce(units, torch.distributed.ReduceOp.MAX, group=host_group())
        layouts, of_rank = [*found], unit * int(units)

    def pack(indices: np.ndarray, degree: int, layout: Layout | None, of_rank: int | None) -> Pack:
        total = of_rank and of_rank * degree
        if not of_rank and not len(indices):  # attention and products in FP8 have no kernel of no tokens
            total = pad_multiple * sequence_multiple(degree)
        place = cp_rank % degree
        made = pack_completions(batch, indices, pad_multiple, total, degree, place, share_prompts, further, layout)
        return replace(made, demonstrations=end is not None)

    return MicroBatches([partial(pack, *item) for item in zip(own, degrees, layouts, strict=True)], of_rank)


def micro_batches_of_demonstrations(args, batch: RolloutBatch | None) -> MicroBatches:
    """Return this rank's micro-batches of demonstrations beside a rollout, ``batch``, which every rank holds.

    Each rank has equally many; where the demonstrations are too few, some are empty. A micro-batch without a token
    budget has at most --micro-batch-size of them.
    """
    if batch is None:
        return MicroBatches([])
    unit = parallel_state.get_data_parallel_world_size()
    unit *= args.pipeline_model_parallel_size if args.num_virtual_stages_per_pipeline_rank else 1
    count = -(-batch.num_completions // unit)
    if not args.max_tokens_per_microbatch:
        size = min(args.micro_batch_size, count)
        args, count = replaced(args, micro_batch_size=size), -(-count // size) * size
    end, shortest = batch.num_completions, int(np.argmin(batch.lengths))
    batch = batch.select([*range(end), *[shortest] * (count * unit - end)])
    return micro_batches(args, batch, np.arange(batch.num_completions), end=end)


def _prefixes(args, batch: RolloutBatch, completions: np.ndarray) -> Prefixes:
    """Return the prefixes that these completions have in common, as every rank knows them: at least those.

    Images are not in the hashes: completions with other `RolloutBatch.image_keys` count as having nothing in common.
    """
    assert batch.prefix_hashes is not None or batch.holds_all
    hashes = with_prefixes(batch).prefix_hashes
    assert hashes is not None
    apart = batch.image_keys[completions] if args.vision_config else None
    found = hashed_prefixes(hashes[completions], batch.prompt_lengths[completions], apart)
    return found._replace(common=np.maximum(found.common - _further_tokens(args), 0))


def _further_tokens(args) -> int:
    """Return the number of multi-token-prediction layers that are trained, which read and predict further tokens."""
    return args.mtp_num_layers if trains_mtp(args) else 0


def _repeated(args, batch: RolloutBatch, completions: np.ndarray, degree: int) -> np.ndarray:
    """Return the tokens that the samples of each completion share at least, [m]."""
    if batch.samples is None or args.vision_config:
        return np.zeros(len(completions), np.int64)
    repeated = with_prefixes(batch).repeated_tokens
    assert repeated is not None
    samples = batch.samples[completions]
    least = np.maximum(repeated[completions] - (samples - 1) * _further_tokens(args), 0)
    return spared_by_samples(least, samples, degree)


def _attention_coefficient(args) -> float:
    """Return `schedule.attention_coefficient` of the model: attention work relative to the linear layers."""
    if args.gemma4_config:  # the mean of its layers
        beside = args.ffn_hidden_size if args.num_experts else None  # the MLP beside the experts
        more = {"gemma4_config": None, "moe_shared_expert_intermediate_size": beside}
        alike = [replaced(with_layer(args, layer), **more) for layer in range(args.num_layers)]
        return float(np.mean([_attention_coefficient(one) for one in alike]))
    ffn = args.ffn_hidden_size
    if args.num_experts:
        ffn = args.moe_router_topk * args.moe_ffn_hidden_size + (args.moe_shared_expert_intermediate_size or 0)
    key_value_heads = args.num_attention_heads if args.multi_latent_attention else query_groups(args)
    head = args.qk_head_dim + args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels
    coefficient = attention_coefficient(args.hidden_size, args.num_attention_heads * head, key_value_heads * head, ffn)
    return coefficient * sum(attention_layers(args)) / args.num_layers


def scores(args, model: Model, forward_step: Callable, batch: RolloutBatch, completions: np.ndarray) -> np.ndarray:
    """Return log-probability and entropy of these completions' tokens under the model's present weights, ``[2,
    total]``; nan elsewhere. Collective.
    """
    return not_finite_as_nan(_scores(args, model, forward_step, batch, completions))


def _scores(args, model: Model, forward_step: Callable, batch: RolloutBatch, completions: np.ndarray) -> np.ndarray:
    """Return `scores` with NOT_FINITE."""
    packs = micro_batches(args, batch, completions, budget_of_scores(args))
    step = partial(forward_step, args=args, num_microbatches=len(packs))
    return forward_scores(step, packs, model, batch)


def log_probs(
    args, model: Model, forward_step: Callable, batch: RolloutBatch, updates: Sequence[np.ndarray] = ()
) -> np.ndarray:
    """Return the log-probabilities of a rollout's tokens under the model's present weights, ``[total]``. Collective.

    ``updates`` are the completions of each update that follows, for `parts_of_old_policy`. The value of a token in the
    loss is nan if the model gives nan: the update with the token judges it (`training.bad_updates`).
    """
    found = np.full(len(batch.tokens), np.nan, np.float32)
    for completions in parts_of_old_policy(args, batch.num_completions, updates):
        values = _scores(args, model, forward_step, batch, completions)[0]
        found = np.where(np.isnan(values), found, values)
    check_computed(batch, found)
    return not_finite_as_nan(found)


def check_computed(batch: RolloutBatch, values: np.ndarray) -> None:
    """Raise ValueError if no pass has computed the ``values`` [total] of some tokens in the loss: they are nan."""
    missed = np.isnan(values) & (batch.response_mask == 1)
    if missed.any():
        samples = np.unique(batch.sample_ids[batch.completion_of_tokens[missed]]).tolist()
        raise ValueError(f"the pass has missed {missed.sum()} tokens in the loss, of samples {samples}")


def not_finite_as_nan(values: np.ndarray) -> np.ndarray:
    """Return ``values`` with nan for NOT_FINITE."""
    return np.where(values == NOT_FINITE, np.float32(np.nan), values)


def budget_of_scores(args) -> int | None:
    """Return the token budget of a model's passes without gradients; None: that of updates."""
    return None if _replays_shared_tokens(args) else args.logprobs_max_tokens_per_microbatch


def parts_of_old_policy(args, num_completions: int, updates: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return the completions of each forward pass for the old policy's log-probabilities: one pass, or one an update.

    The experts that such a pass records are those of an update. In the same packs, tokens that the pass computes once
    have one choice of experts, so that the update computes them once, too.
    """
    return updates if len(updates) and _replays_shared_tokens(args) else [np.arange(num_completions)]


def _replays_shared_tokens(args) -> bool:
    return args.router_replay_mode == "R2" and args.share_prompts


def forward_scores(forward_step: Callable, packs: Sequence[Pack], model: Model, batch: RolloutBatch) -> np.ndarray:
    """Compute log-probability and entropy of every label token of all ranks' ``packs``, which are of ``batch``.

    Returns float32 ``[2, total]`` on every rank that holds the tokens: nan for tokens that are not labels, NOT_FINITE
    for labels of which the model gives nan.
    """
    nothing = np.full((len(batch.tokens), 2), np.nan, np.float32)
    return np.ascontiguousarray(forward_rows(forward_step, packs, model, batch, nothing).T)


@torch.no_grad()
def forward_rows(
    forward_step: Callable, packs: Sequence[Pack], model: Model, batch: RolloutBatch, nothing: np.ndarray
) -> np.ndarray:
    """Compute the model's output for every label token of all ranks' ``packs``, which are of ``batch``.

    Returns ``[total, columns]`` on every rank that holds the tokens, and ``nothing``, of this shape and type, for
    tokens that are not labels. Of int16 the values are the bits of the model's dtype; of float32, NOT_FINITE stands for
    nan.
    """
    dtype = unwrap_model(model[-1]).config.params_dtype  # megatron-core gives 16-bit outputs as float32
    results = run_schedule(forward_step, packs, model, forward_only=True)
    flat, computed = nothing.copy(), np.zeros(batch.num_completions, bool)
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        for pack, rows in zip(packs, results, strict=True):
            if pack.cp_rank == 0:
                values = rows.T.contiguous().cpu()
                if flat.dtype == np.int16:
                    values = values.to(dtype).view(torch.int16)
                else:
                    values = values.float().masked_fill(values.isnan(), NOT_FINITE)
                flat[pack.token_index] = values.numpy()
                computed[pack.indices] = True
    return spread(batch, [flat], computed)[0]


def run_schedule(forward_step: Callable, packs: Sequence[Pack], model: Model, forward_only: bool) -> list:
    """Run megatron-core's pipeline schedule; return the results of ``loss_func`` for each micro-batch.

    The list is empty on all but the last pipeline stage.
    """
    await_ranks()
    for chunk in model:
        _set_dropout(chunk, on=not forward_only)

    def step(*arguments):
        progress.step("forward")
        output = forward_step(*arguments)
        if isinstance(packs, MicroBatches):  # while the device computes
            packs.make_next()
        if not forward_only:
            progress.step("backward")  # or communication with other stages
        return output

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=for_each(iter(packs) for _ in model),
        model=for_each(model),
        num_microbatches=len(packs),
        # Used only if all packs are padded to one length; otherwise stages communicate the shapes.
        seq_length=len(packs[0].tokens) * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    router_replay.end_of_pass(model)
    balancing.end_of_pass(model)
    return results


def _set_dropout(chunk: torch.nn.Module, on: bool) -> None:
    """Switch the dropout of adapters (lora/), the only dropout of the model: log-probabilities are without it."""
    model = unwrap_model(chunk)
    if hasattr(model, "lora"):
        model.lora.train(on)


@contextlib.contextmanager
def parameters_complete(model: Model) -> Iterator[None]:
    """Gather all parameters for this context; ``--overlap-param-gather`` would do so only in the next forward pass.

    The model says whether it does so: a reference that borrows the policy's modules has arguments of its own.
    """
    chunks: list[Any] = [chunk for chunk in model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    if chunks:
        await_ranks()  # the gather has a time-out
    for chunk in chunks:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.enable_forward_pre_hook()


def weight_tensors(chunk: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers; the expert bias of a router is a buffer."""
    yield from chunk.parameters()
    yield from torch.nn.Module.buffers(chunk)  # megatron-core's DDP uses the name for its gradient buffers
