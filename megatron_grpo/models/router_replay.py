"""Routing replay: an update uses the experts that were chosen before it, by the old policy (R2) or the engine (R3).

A router that has moved a little sends tokens that were near a tie to other experts: their probabilities jump by more
than the policy has learnt, and the ratios of the loss with them. Replay repeats the discrete choice alone; how the
chosen experts are weighted is the present router's, and gradients flow into it (arXiv:2507.18071, section 5.3, for the
old policy's; arXiv:2510.11370 for the engine's).

The choices are ``RolloutBatch.routed_experts``. Before each forward of a micro-batch a chunk's routers are told what is
known of its tokens (``next_micro_batch``). A token of which nothing is known takes the router's own choice; in the
layers of multi-token prediction all tokens do.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from megatron_grpo.data.batch import Int64, RolloutBatch
from megatron_grpo.data.pack import Pack
from megatron_grpo.models.config import moe_layers
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.parallel.sequence_parallel import own_tokens


class Replay(RouterReplay):
    """What one router records or repeats; unlike megatron-core's it belongs to its router alone."""

    def __init__(self, config: TransformerConfig):
        # Not super().__init__(): it enters itself in a list of the class, which would outlive the model.
        self.router_replay_action = None
        self.recomputed = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )
        self.clear_indices()

    def clear_indices(self) -> None:
        super().clear_indices()
        self.source: Int64 = np.empty(0, np.int64)  # of the micro-batch that is recorded
        self.recorded: list[tuple[Int64, np.ndarray]] = []  # (source [tokens], experts [tokens, topk]) of each

    def set_target_indices(self, topk_indices: torch.Tensor) -> None:
        """What to repeat, ``[tokens, topk]`` with -1 where unknown, in the next forward and its recomputation."""
        self.target_topk_idx = topk_indices
        if self.recomputed and torch.is_grad_enabled():
            self.replay_backward_list.append(topk_indices)

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """(values, experts), both ``[tokens, topk]``, of scores ``[tokens, experts]``."""
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.router_replay_action is RouterReplayAction.RECORD:
            self.recorded.append((self.source, chosen.to("cpu", torch.int16).numpy()))
        if self.router_replay_action is not RouterReplayAction.REPLAY_FORWARD:
            return values, chosen
        # Inside autograd's backward this is a recomputation. There, in the 1F1B schedule and in the interleaved one, a
        # chunk meets its micro-batches in the order in which it met them forward.
        recomputing = torch._C._current_graph_task_id() != -1
        known = self.replay_backward_list.pop(0) if recomputing else self.target_topk_idx
        experts = torch.where((known < 0).any(1, keepdim=True), chosen, known.long())
        return scores.gather(1, experts), experts


def next_micro_batch(chunk: torch.nn.Module, pack: Pack, routed_experts: torch.Tensor | None) -> None:
    """Before a chunk's forward of ``pack``: its routers shall repeat ``routed_experts``, the pack's on the device."""
    config = unwrap_model(chunk).config
    for layer, replay in _replays(chunk):
        if routed_experts is not None:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            replay.set_target_indices(own_tokens(config, routed_experts)[:, layer])
        elif replay.router_replay_action is RouterReplayAction.RECORD:
            replay.source = own_tokens(config, pack.source)


def end_of_pass(model: Sequence[torch.nn.Module]) -> None:
    """Forget what was to be repeated."""
    for chunk in model:
        for _, replay in _replays(chunk):
            if replay.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
                replay.clear_router_replay_action()
                replay.clear_indices()


@contextlib.contextmanager
def recording(args, model: Sequence[torch.nn.Module], batch: RolloutBatch) -> Iterator[None]:
    """Under R2 the experts chosen within, in one pass over the whole batch, become ``batch.routed_experts``.

    Updates deal completions out to ranks in another way, so every rank gets the choices of all: 2 * layers * topk bytes
    a token in host memory, and about twice as many through its network (768 and 1,536 with 48 layers and top 8).
    """
    if args.router_replay_mode != "R2":
        yield
        return
    replays = [numbered for chunk in model for numbered in _replays(chunk)]
    for _, replay in replays:
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    yield
    experts = np.zeros((len(batch.tokens), sum(moe_layers(args)), args.moe_router_topk), np.int16)
    for layer, replay in replays:
        for source, chosen in replay.recorded:
            real = source >= 0
            experts[source[real], layer] = chosen[real] + 1
        replay.clear_router_replay_action()
        replay.clear_indices()
    # Each token of a layer has one writer and is 0 elsewhere: adding up bytes gathers them, without a carry.
    dist.all_reduce(torch.from_numpy(experts.reshape(-1).view(np.uint8)), group=host_group())
    experts -= 1
    batch.routed_experts = experts


def _replays(chunk: torch.nn.Module) -> Iterator[tuple[int, Replay]]:
    """The routers' records of a chunk's decoder layers, each with its number among the model's MoE layers."""
    model = unwrap_model(chunk)
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer) and layer.mlp.router.router_replay is not None:
            yield sum(moe_layers(model.config)[: layer.layer_number - 1]), layer.mlp.router.router_replay
