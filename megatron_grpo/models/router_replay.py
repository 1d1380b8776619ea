"""Routing replay: an update uses the experts that the old policy (R2) or the engine (R3) chose before the update.

After a small change a router sends tokens near a tie to other experts. The probabilities of these tokens, and the
ratios in the loss, then change by more than the policy has learnt. Replay repeats only the discrete choice. The current
router computes the weights of the chosen experts, and gradients flow into it (arXiv:2507.18071, section 5.3, for the
old policy; arXiv:2510.11370 for the engine).

``RolloutBatch.routed_experts`` holds the choices. ``next_micro_batch`` sets the choices of a micro-batch before each
forward pass. Tokens without a recorded choice, and all tokens in multi-token-prediction layers, use the router's own.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from megatron_grpo.data.batch import Int64, RolloutBatch
from megatron_grpo.data.pack import Pack
from megatron_grpo.data.share import spread
from megatron_grpo.models.config import moe_layers
from megatron_grpo.parallel.initialize import model_group
from megatron_grpo.parallel.sequence_parallel import own_tokens
from megatron_grpo.utils.device import device


class Replay(RouterReplay):
    """Record of the experts that one router chooses or replays; megatron-core's class keeps a global list instead."""

    def __init__(self, config: TransformerConfig):
        # Not super().__init__(): it appends self to a list of the class, which would keep it alive after the model.
        self.router_replay_action = None
        self.recomputed = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )
        self.clear_indices()

    def clear_indices(self) -> None:
        super().clear_indices()
        # Of the recorded micro-batch: tokens of completions, where in the pack, and where in the batch.
        self.rows = self.source = np.empty(0, np.int64)
        self.recorded: list[tuple[Int64, np.ndarray]] = []  # (source [tokens], experts [tokens, topk]) per micro-batch

    def set_target_indices(self, topk_indices: torch.Tensor) -> None:
        """Set the experts ``[tokens or 1, topk]`` (-1: unknown) of the next forward pass and of its recomputation."""
        self.target_topk_idx = topk_indices
        if self.recomputed and torch.is_grad_enabled():
            self.replay_backward_list.append(topk_indices)

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Return (values, experts), both ``[tokens, topk]``, for scores ``[tokens, experts]``."""
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.router_replay_action is RouterReplayAction.RECORD:
            self.recorded.append((self.source, chosen.to("cpu", torch.int16).numpy()[self.rows]))
        if self.router_replay_action is not RouterReplayAction.REPLAY_FORWARD:
            return values, chosen
        known = self.replay_backward_list.pop(0) if recomputing() else self.target_topk_idx
        experts = torch.where((known < 0).any(1, keepdim=True), chosen, known.long())
        return scores.gather(1, experts), experts


def recomputing() -> bool:
    """Return whether a forward pass within autograd's backward pass, a recomputation, calls this function.

    In the 1F1B and the interleaved schedule a chunk recomputes its micro-batches in the order of their forward passes.
    """
    return torch._C._current_graph_task_id() != -1


def next_micro_batch(chunk: torch.nn.Module, pack: Pack, routed_experts: torch.Tensor | None) -> None:
    """Prepare the routers of ``chunk`` for the forward pass of ``pack``: replay ``routed_experts``, or record.

    ``routed_experts`` are the pack's experts on the device, or None: behind packs with experts (those of the rollout,
    before demonstrations) the routers choose by themselves.
    """
    config = unwrap_model(chunk).config
    for layer, replay in _router_records(chunk):
        if routed_experts is not None:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            replay.set_target_indices(own_tokens(config, routed_experts)[:, layer])
        elif replay.router_replay_action is RouterReplayAction.RECORD:
            replay.rows, replay.source = _own_computed(config, pack)
        elif replay.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            # One row for all tokens.
            replay.set_target_indices(torch.full((1, config.moe_router_topk), -1, device=device()))


def _own_computed(config: TransformerConfig, pack: Pack) -> tuple[Int64, Int64]:
    """Return `Pack.computed` of this rank's slice of the tokens under sequence parallelism."""
    place = np.full(len(pack.tokens), -1)
    own = own_tokens(config, np.arange(len(pack.tokens)))
    place[own] = np.arange(len(own))
    rows, flat = pack.computed()
    mine = place[rows] >= 0
    return place[rows][mine], flat[mine]


def end_of_pass(model: Sequence[torch.nn.Module]) -> None:
    """Clear the replayed experts of all routers."""
    for chunk in model:
        for _, replay in _router_records(chunk):
            if replay.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
                replay.clear_router_replay_action()
                replay.clear_indices()


@contextlib.contextmanager
def recording(args, model: Sequence[torch.nn.Module]) -> Iterator[Callable[[RolloutBatch], RolloutBatch]]:
    """Record the experts of one pass over a whole batch, with R2 only; afterwards call what the context gives.

    That function takes the batch and returns it with ``routed_experts``. The ranks of a pipeline stage or a part of the
    tokens record these alone; all ranks that hold a token get its whole row: 2 * layers * topk bytes for each token
    (768 with 48 layers and top 8).
    """
    if args.router_replay_mode != "R2":
        yield lambda batch: batch
        return
    replays = [numbered for chunk in model for numbered in _router_records(chunk)]
    recorded: list[tuple[int, list[tuple[Int64, np.ndarray]]]] = []
    for _, replay in replays:
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    try:
        yield lambda batch: _with_experts(args, recorded, batch)
    finally:
        for layer, replay in replays:
            recorded.append((layer, replay.recorded))
            replay.clear_router_replay_action()
            replay.clear_indices()


def _with_experts(
    args, recorded: Sequence[tuple[int, list[tuple[Int64, np.ndarray]]]], batch: RolloutBatch
) -> RolloutBatch:
    """Return the batch with the experts that the routers of all ranks have recorded. Collective."""
    experts = np.zeros((len(batch.tokens), sum(moe_layers(args)), args.moe_router_topk), np.int16)
    is_recorded = np.zeros(len(batch.tokens), bool)
    for layer, of_layer in recorded:
        for source, chosen in of_layer:
            experts[source, layer] = chosen + 1
            is_recorded[source] = True
    # Which completions this data-parallel rank has computed: its ranks together, of which each one has recorded some.
    computed = np.zeros(batch.num_completions, np.uint8)
    computed[batch.completion_of_tokens[is_recorded]] = 1
    dist.all_reduce(torch.from_numpy(computed), dist.ReduceOp.MAX, group=model_group())
    # One rank writes each token of a layer and all others hold 0, so a sum of bytes gathers them without a carry.
    tokens = batch.token_positions(np.flatnonzero(computed))
    rows = experts[tokens]
    dist.all_reduce(torch.from_numpy(rows.reshape(-1).view(np.uint8)), group=model_group())
    experts[tokens] = rows
    (routed_experts,) = spread(batch, [experts - np.int16(1)], computed == 1)
    return replace(batch, routed_experts=routed_experts)


def _router_records(chunk: torch.nn.Module) -> Iterator[tuple[int, Replay]]:
    """Yield (number among the model's MoE layers, record of its router) for the decoder layers of a chunk."""
    model = unwrap_model(chunk)
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer) and layer.mlp.router.router_replay is not None:
            yield sum(moe_layers(model.config)[: layer.layer_number - 1]), layer.mlp.router.router_replay
