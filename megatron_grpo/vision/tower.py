"""The vision tower of the first pipeline stage, and M-RoPE's angles on every stage."""

from argparse import Namespace
from collections.abc import Callable, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.parallel.sequence_parallel import own_tokens
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.kinds import Int64, is_trained, kind_of
from megatron_grpo.vision.pack_images import PackImages

# Pixels [patches, channels of a patch] and grids [images, 3] of the images of these rows, in their order.
Read = Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


class VisionTower(torch.nn.Module):
    """transformers' own tower and projector, whole on each rank of the first stage.

    ``read`` is set when the data is known (`images.attach`).
    """

    read: Read | None = None

    def __init__(self, args: Namespace, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.tower = kind_of(args).tower(args.vision_config["vision_config"])
        for name, parameter in self.tower.named_parameters():
            parameter.requires_grad_(is_trained(args, name))
            # Each tensor-parallel rank has the gradient of its own tokens: megatron-core adds them up.
            parameter.sequence_parallel = config.sequence_parallel
        if config.recompute_granularity == "full":
            self.tower.gradient_checkpointing_enable({"use_reentrant": False})
        # float32 whatever the weights' dtype: transformers casts the weights only.
        self._buffers_in_float32 = {name: buffer.clone() for name, buffer in self.tower.named_buffers()}

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        for name, buffer in self._buffers_in_float32.items():
            owner, _, last = name.rpartition(".")
            moved = function(buffer)
            setattr(self.tower.get_submodule(owner), last, buffer.to(moved.device))
        return self

    def forward(self, hidden_states: torch.Tensor, images: PackImages | None) -> torch.Tensor:
        """Return the embeddings ``[t, 1, h]`` with those of the images in their places."""
        weights = [parameter for parameter in self.tower.parameters() if parameter.requires_grad]
        if images is None or not images.rows:
            # Data-parallel ranks reduce the gradients of all parameters together, so each needs one in every pack.
            if not weights or not torch.is_grad_enabled():
                return hidden_states
            return hidden_states + 0 * torch.stack([weight.flatten()[0] for weight in weights]).sum()
        if self.read is None:
            raise GrpoError("the pack has images, but this model was not given the images of the data")
        pixels, grids = self.read(images.rows)
        dtype, device = next(self.tower.parameters()).dtype, hidden_states.device
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(weights)):
            embedded = self.tower(pixels.to(device, dtype), grid_thw=grids.to(device)).pooler_output
        places, sources = self._own(images, len(hidden_states))
        rows = embedded.index_select(0, torch.from_numpy(sources).to(device)).to(hidden_states.dtype)
        return hidden_states.index_copy(0, torch.from_numpy(places).to(device), rows[:, None])

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

    ``section``: the number of frequencies that turn with time, height and width, one section after the other.
    """

    positions: torch.Tensor | None = None  # [3, t] of all tokens of the pack, on the device

    def __init__(self, whole: RotaryEmbedding, section: Sequence[int]):
        super().__init__()
        self.whole, self.section = whole, list(section)
        self.get_rotary_seq_len = whole.get_rotary_seq_len

    def forward(self, *args, **kwargs) -> torch.Tensor:
        """Return the angles ``[t, 1, 1, d]`` of all tokens of the pack, or of all positions."""
        if self.positions is None:
            return self.whole(*args, **kwargs)
        frequencies = self.whole.inv_freq.to(self.positions.device).split(self.section)
        parts = [self.positions[i % 3, :, None].float() * part for i, part in enumerate(frequencies)]
        angles = torch.cat([*parts, *parts], dim=-1)
        return angles[:, None, None, :]
