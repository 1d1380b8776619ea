"""The vision tower of the first pipeline stage, and M-RoPE's angles on every stage."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.parallel.param_gather import wait_for_weights
from megatron_grpo.parallel.sequence_parallel import own_tokens
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.kinds import Int64, is_trained, kind_of
from megatron_grpo.vision.pack_images import PackImages

# Pixels [patches, channels of a patch] and grids [images, 3] of the images with these keys, in their order.
Read = Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class Features:
    """Inner features of the tower for one micro-batch, DeepStack's (arXiv 2406.04334): decoder layer i adds values[i].

    ``values``: [visual tokens, h] each, without a gradient; ``gradients``: what the layers' backward passes leave.
    ``places``, ``sources`` [v]: as in `PackImages`, of this rank's tokens.
    """

    values: list[torch.Tensor]
    places: torch.Tensor
    sources: torch.Tensor
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


class _AddFeatures(torch.autograd.Function):
    """Adds the features of a layer. Their gradient waits in `Features` for `_Collect`.

    The graph has no edge from a layer to the tower: the backward pass of a recomputed layer is one of its own, and
    would run the tower's in each of them.
    """

    @staticmethod
    def forward(ctx, hidden_states, features: Features, number: int):
        ctx.features, ctx.number = features, number
        rows = features.values[number].index_select(0, features.sources).to(hidden_states.dtype)
        return hidden_states.index_add(0, features.places, rows[:, None])

    @staticmethod
    def backward(ctx, gradient):
        features, number = ctx.features, ctx.number
        rows = gradient[:, 0].index_select(0, features.places).float()
        zeros = torch.zeros_like(features.values[number], dtype=torch.float32)
        features.gradients[number] = zeros.index_add_(0, features.sources, rows)
        return gradient, None, None


class _Collect(torch.autograd.Function):
    """Returns the input of the first layer; its backward pass, after those of all layers, gives the tower the gradients
    of its features, and ends the micro-batch.
    """

    @staticmethod
    def forward(ctx, hidden_states, features: Features, end: Callable[[Features], None], *values):
        ctx.features, ctx.end = features, end
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx, gradient):
        ctx.end(ctx.features)
        found = ctx.features.gradients
        return gradient, None, None, *(found[i].to(v.dtype) for i, v in enumerate(ctx.features.values))


class VisionTower(torch.nn.Module):
    """transformers' own tower and projector, whole on each rank of the first stage.

    ``read`` is set when the data is known (`images.attach`).
    """

    read: Read | None = None

    def __init__(self, args: Namespace, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.tower = kind_of(args).tower(args.vision_config, config.hidden_size)
        self._see: Callable = kind_of(args).see
        self._blank: Callable = kind_of(args).blank
        parameter: Any  # megatron-core adds attributes
        for name, parameter in self.tower.named_parameters():
            parameter.requires_grad_(is_trained(args, name))
            # Each tensor-parallel rank has the gradient of its own tokens: megatron-core adds them up.
            parameter.sequence_parallel = config.sequence_parallel
        if config.recompute_granularity == "full":
            self.tower.gradient_checkpointing_enable({"use_reentrant": False})
        # float32 whatever the weights' dtype: transformers casts the weights only.
        self._buffers_in_float32 = {name: buffer.clone() for name, buffer in self.tower.named_buffers()}
        self._newest: Features | None = None  # of the last forward pass
        self._pending: list[Features] = []  # of the micro-batches whose backward pass has not ended, in their order

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        for name, buffer in self._buffers_in_float32.items():
            owner, _, last = name.rpartition(".")
            module = self.tower.get_submodule(owner)
            setattr(module, last, buffer.to(getattr(module, last).device))
        return self

    def enter(self, layers: torch.nn.ModuleList) -> None:
        """Let the first decoder layers add the tower's inner features; GrpoError if the stage has too few layers."""
        count = len(getattr(self.tower, "deepstack_visual_indexes", ()))
        if len(layers) < count:
            raise GrpoError(
                f"features of the vision tower enter the first {count} layers, and the first pipeline stage has "
                f"{len(layers)}: give it more (--decoder-first-pipeline-num-layers), or fewer stages"
            )
        for number in range(count):
            layers[number].register_forward_hook(partial(self._add_features, number))

    def _add_features(self, number: int, layer: torch.nn.Module, inputs: tuple, outputs: tuple) -> tuple:
        """Hook of a decoder layer: return its outputs with the features that it adds."""
        # A layer that runs in a backward pass is recomputed; backward passes have the order of the forward passes.
        recomputed = torch._C._current_graph_task_id() != -1
        features = self._pending[0] if recomputed else self._newest
        if features is None or not features.values:
            return outputs
        hidden_states, *others = outputs
        return _AddFeatures.apply(hidden_states, features, number), *others

    def forward(self, hidden_states: torch.Tensor, images: PackImages | None) -> torch.Tensor:
        """Return the embeddings ``[t, 1, h]`` with those of the images in their places."""
        training, device = torch.is_grad_enabled(), hidden_states.device
        trained = any(parameter.requires_grad for parameter in self.tower.parameters())
        # Whatever this pack has: data-parallel ranks gather weights, and below reduce gradients, in one order.
        wait_for_weights(*self.tower.modules())
        inner: Sequence[torch.Tensor] = ()
        places = sources = torch.empty(0, dtype=torch.long, device=device)
        shown = images if images is not None and images.keys else None
        if shown is not None or (trained and training):
            if shown is None:
                pixels, grids = self._blank(self.tower)
            elif self.read is None:
                raise GrpoError("the pack has images, but this model was not given the images of the data")
            else:
                pixels, grids = self.read(shown.keys)
            dtype = next(self.tower.parameters()).dtype
            with torch.set_grad_enabled(training and trained):
                seen = self._see(self.tower, pixels.to(device, dtype), grids.to(device))
            inner = getattr(seen, "deepstack_features", None) or ()
            if shown is not None:  # else no token has a feature, and all gradients are zeros
                own = self._own(shown, len(hidden_states))
                places, sources = (torch.from_numpy(array).to(device) for array in own)
            rows = seen.pooler_output.index_select(0, sources).to(hidden_states.dtype)
            hidden_states = hidden_states.index_copy(0, places, rows[:, None])
        self._newest = features = Features([value.detach() for value in inner], places, sources)
        if not (training and hidden_states.requires_grad):
            return hidden_states
        self._pending.append(features)
        return _Collect.apply(hidden_states, features, self._pending.remove, *inner)

    def _own(self, images: PackImages, count: int) -> tuple[Int64, Int64]:
        """Return (place among this rank's ``count`` tokens, source) of the visual tokens of its slice of the pack."""
        if not self.config.sequence_parallel:
            return images.places, images.sources
        whole = np.full(count * parallel_state.get_tensor_model_parallel_world_size(), -1)
        whole[images.places] = images.sources
        own = own_tokens(self.config, whole)
        places = np.flatnonzero(own >= 0)
        return places, own[places]


class MRope(torch.nn.Module):
    """Rotary embedding by three positions of each token (`kinds.mrope_positions`), or by one if a pack has no images.

    --mrope-section: the number of frequencies that turn with time, height and width, one section after the other; or
    interleaved (Qwen3-VL, Qwen3.5): time, height, width in turn, then time for the rest.
    """

    positions: torch.Tensor | None = None  # [3, t] of all tokens of the pack, on the device

    def __init__(self, whole: RotaryEmbedding, args: Namespace):
        super().__init__()
        self.whole, self.get_rotary_seq_len = whole, whole.get_rotary_seq_len
        _, height, width = args.mrope_section
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(args.mrope_section))  # of each frequency
        if kind_of(args).interleaved:
            axis = torch.zeros_like(axis)
            axis[1 : 3 * height : 3], axis[2 : 3 * width : 3] = 1, 2
        self.axis = axis

    def forward(self, *args, **kwargs) -> torch.Tensor:
        """Return the angles ``[t, 1, 1, d]`` of all tokens of the pack, or of all positions."""
        if self.positions is None:
            return self.whole(*args, **kwargs)
        device = self.positions.device
        angles = self.positions[self.axis.to(device)].T.float() * self.whole.inv_freq.to(device)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]
