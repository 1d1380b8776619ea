"""The vision parts of the model families: where their weights are, how images become tokens, and M-RoPE's positions."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_grpo.utils.errors import GrpoError

if TYPE_CHECKING:
    import torch

Int64 = npt.NDArray[np.int64]
Grid = tuple[int, int, int]  # patches of an image: frames, rows, columns


@dataclass(frozen=True)
class Vision:
    """The vision part of one model family.

    `prefix`: of the weights' Hugging Face names. `projector`: beginnings, behind it, of those that project the tower's
    output to the language model. `tower(config)`: transformers' module for ``vision_config`` of config.json, which
    takes pixels and grids. `grid(processor, height, width)`: the patches into which transformers' image processor cuts
    an image of this size. `interleaved`: M-RoPE's axes alternate from frequency to frequency.
    """

    prefix: str
    projector: tuple[str, ...]
    tower: Callable[[dict[str, Any]], torch.nn.Module]
    grid: Callable[[Any, int, int], Grid]
    interleaved: bool = False

    def tokens(self, args: Namespace, grid: Sequence[int]) -> int:
        """Return the tokens of an image with these patches."""
        return int(np.prod(grid)) // merge_size(args) ** 2


def merge_size(args: Namespace) -> int:
    """Return the patches along each side of the square that becomes one token."""
    return args.vision_config["vision_config"]["spatial_merge_size"]


def image_token_id(args: Namespace) -> int:
    """Return the token that stands for a part of an image."""
    return args.vision_config["image_token_id"]


def _qwen2_5_vl_tower(config: dict[str, Any]) -> torch.nn.Module:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    return Qwen2_5_VisionTransformerPretrainedModel._from_config(Qwen2_5_VLVisionConfig(**config))


def _qwen_grid(processor: Any, height: int, width: int) -> Grid:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    side = processor.patch_size
    try:
        rows, columns = smart_resize(
            height,
            width,
            factor=side * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
    except ValueError as error:
        raise GrpoError(f"of {width} x {height} pixels: {error}") from error
    return 1, rows // side, columns // side


def _qwen3_vl_tower(config: dict[str, Any]) -> torch.nn.Module:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    return Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**config))


def _qwen3_vl_moe_tower(config: dict[str, Any]) -> torch.nn.Module:
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    return Qwen3VLMoeVisionModel._from_config(Qwen3VLMoeVisionConfig(**config))


_MERGERS = ("merger.", "deepstack_merger_list.")
KINDS = {
    "qwen2_5_vl": Vision("visual.", ("merger.",), _qwen2_5_vl_tower, _qwen_grid),
    "qwen3_vl": Vision("model.visual.", _MERGERS, _qwen3_vl_tower, _qwen_grid, interleaved=True),
    "qwen3_vl_moe": Vision("model.visual.", _MERGERS, _qwen3_vl_moe_tower, _qwen_grid, interleaved=True),
}


def kind_of(args: Namespace) -> Vision:
    """Return the vision part of the model that ``args`` describe, which has one."""
    return KINDS[args.model_family]


def is_trained(args: Namespace, name: str) -> bool:
    """Return whether the weight with this name in the tower is trained."""
    frozen = args.freeze_projector if name.startswith(kind_of(args).projector) else args.freeze_vision_tower
    return not frozen


def tower_shapes(args: Namespace) -> dict[str, tuple[int, ...]]:
    """Return {name in the tower: shape} of the weights of the vision tower."""
    return _shapes(args.model_family, json.dumps(args.vision_config["vision_config"], sort_keys=True))


@functools.cache
def _shapes(family: str, config: str) -> dict[str, tuple[int, ...]]:
    import torch

    with torch.device("meta"):
        tower = KINDS[family].tower(json.loads(config))
    return {name: tuple(parameter.shape) for name, parameter in tower.named_parameters()}


def mrope_positions(visual_index: Int64, grids: Sequence[Sequence[int]], merge: int) -> Int64:
    """Return M-RoPE's positions ``[t, 3]`` (time, height, width) of a sequence of text and images.

    Qwen2-VL (arXiv 2409.12191, 2.1): the three are equal on text and count it. An image's tokens have the number that
    the next text token would have, plus their frame, row and column; text goes on behind the largest of these.

    Args:
        visual_index: ``[t]``, which of the sequence's visual tokens a token is, -1 for text; ascending.
        grids: patches of each image, in the order of the sequence: frames, rows, columns.
        merge: patches along each side of a token's square.
    """
    positions = np.zeros((len(visual_index), 3), np.int64)
    starts = np.flatnonzero(visual_index >= 0)
    seen = behind = following = 0  # visual tokens so far, the place behind them, the position of the token there
    for frames, height, width in grids:
        shape = frames, height // merge, width // merge
        start, count = int(starts[seen]), int(np.prod(shape))
        positions[behind:start] = following + np.arange(start - behind)[:, None]
        following += start - behind
        positions[start : start + count] = following + np.indices(shape).reshape(3, -1).T
        following += max(shape[1:])
        seen, behind = seen + count, start + count
    positions[behind:] = following + np.arange(len(positions) - behind)[:, None]
    return positions


def vision_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``args.vision_config`` holds of a config.json: its vision part and the ids of its tokens."""
    keys = "image_token_id video_token_id vision_start_token_id vision_end_token_id".split()
    if not isinstance(config.get("vision_config"), dict) or not isinstance(config.get("image_token_id"), int):
        raise GrpoError("config.json lacks vision_config or image_token_id: it describes no vision-language model")
    return {"vision_config": dict(config["vision_config"])} | {key: config[key] for key in keys if key in config}
