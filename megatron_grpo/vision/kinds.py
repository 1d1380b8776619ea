"""The vision parts of the model families: where their weights are, how images become tokens, and M-RoPE's positions."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.videos import Video

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Int64 = npt.NDArray[np.int64]
# Patches of an image or video: frames or tiles, rows, columns; LLaVA-OneVision: and the height and width of an image in
# pixels, 0 and 0 of a video.
Grid = tuple[int, ...]


def _qwen_pixels(args: Namespace, processor: Any, images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    found = processor(images=images, return_tensors="pt")
    return found["pixel_values"], found["image_grid_thw"]


def _qwen_blank(tower: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    keys = tower.config
    side, of_patch = keys.spatial_merge_size, keys.in_channels * keys.temporal_patch_size * keys.patch_size**2
    return torch.zeros(side**2, of_patch), torch.tensor([[1, side, side]])


@dataclass(frozen=True)
class Vision:
    """The vision part of one model family.

    `prefix`: of the weights' Hugging Face names. `projector`: beginnings, behind it, of those that project the tower's
    output to the language model. `tower(config, hidden_size)`: transformers' module for ``args.vision_config`` and the
    language model's size. `see(tower, pixels, grids)`: its output. `grid(args, processor, height, width)`: the patches
    into which transformers' image processor cuts an image of this size. `video(args, processor, frames, height,
    width)`: those into which its video processor cuts frames of this size. `tokens(args, processor, grid)`: the tokens
    of an image or video with these patches. `pixels(args, processor, images)`: the tower's input for images, and the
    grids. `blank(tower)`: the same for the smallest image, of zeros. `around(processor)`: tokens that the processor
    puts before and behind each image. `around_frames(processor, video)`: texts before and behind each frame of patches
    of a video, each of which has M-RoPE's positions of an image; None: a video has no texts, and its positions tell the
    time. `unused`: beginnings of the weights that files hold and the features do not depend on. `nested`: a beginning
    of names in the tower, and the same in files. `tiles`: the processor cuts images into tiles of one size, to which it
    scales frames, and has no bounds of pixels. `class_token`: a tile has one. `mrope`: text and images have M-RoPE's
    positions. `interleaved`: its axes alternate from frequency to frequency. `text`: the family as which --model-family
    reads the language model of a directory alone. `defaults`: transformers' values of keys that vision_config leaves
    out.
    """

    prefix: str
    projector: tuple[str, ...]
    tower: Callable[[dict[str, Any], int], PreTrainedModel]
    grid: Callable[[Namespace, Any, int, int], Grid]
    video: Callable[[Namespace, Any, int, int, int], Grid]
    see: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], Any] = lambda tower, pixels, grids: tower(
        pixels, grid_thw=grids
    )
    tokens: Callable[[Namespace, Any, Grid], int] = lambda args, processor, grid: merged(args, grid)
    pixels: Callable[[Namespace, Any, Sequence[Any]], tuple[torch.Tensor, torch.Tensor]] = _qwen_pixels
    blank: Callable[[torch.nn.Module], tuple[torch.Tensor, torch.Tensor]] = _qwen_blank
    around: Callable[[Any], tuple[int, ...]] = lambda processor: ()
    around_frames: Callable[[Any, Video], list[tuple[str, str]]] | None = None
    unused: tuple[str, ...] = ()
    nested: tuple[str, str] = ("", "")
    tiles: bool = False
    class_token: bool = False
    mrope: bool = True
    interleaved: bool = False
    text: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def file_name(self, name: str) -> str:
        """Return the Hugging Face name of the weight with this name in the tower."""
        inner, outer = self.nested
        return self.prefix + (outer + name.removeprefix(inner) if name.startswith(inner) else name)


def merged(args: Namespace, grid: Sequence[int]) -> int:
    """Return the rows that the projector computes for an image with these patches."""
    return prod(grid[:3]) // merge_size(args) ** 2


def merge_size(args: Namespace) -> int:
    """Return the patches along each side of the square that becomes one token."""
    keys = args.vision_config
    if "downsample_ratio" in keys:
        return round(1 / keys["downsample_ratio"])
    return keys["vision_config"].get("spatial_merge_size", 1)  # LLaVA-OneVision has none


def patches_per_token(args: Namespace) -> float:
    """Return the patches that the tower computes for each token of the largest image, which fills its tiles."""
    keys = args.vision_config
    if "image_grid_pinpoints" not in keys:
        return merge_size(args) ** 2
    side = keys["vision_config"]["image_size"]
    tiles = max(height * width for height, width in keys["image_grid_pinpoints"]) // side**2
    return (1 + tiles) / (1 + min(tiles, LLAVA_TILES))  # more tiles are scaled down to the size of so many


def image_token_id(args: Namespace) -> int:
    """Return the token that stands for a part of an image."""
    return next(args.vision_config[key] for key in IMAGE_TOKEN if key in args.vision_config)


def video_token_id(args: Namespace, processor: Any) -> int:
    """Return the token that stands for a part of a video in vLLM: of config.json, or of InternVL's processor."""
    of_config = (args.vision_config[key] for key in VIDEO_TOKEN if key in args.vision_config)
    return next(of_config, processor.tokenizer.convert_tokens_to_ids(processor.video_token))


def _qwen2_5_vl_tower(config: dict[str, Any], hidden_size: int) -> torch.nn.Module:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    from megatron_grpo.vision.attention import use_offsets

    vision = Qwen2_5_VLVisionConfig(**config["vision_config"])
    return use_offsets(Qwen2_5_VisionTransformerPretrainedModel._from_config(vision))


def _patches(resize: Callable[..., tuple[int, int]], processor: Any, what: str, *sizes: int, **more: int) -> list[int]:
    """Return the rows and columns of patches after transformers' ``resize``; ``what``: in front of an error's sizes."""
    side = processor.patch_size
    try:
        scaled = resize(
            *sizes,
            factor=side * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
            **more,
        )
    except ValueError as error:
        raise GrpoError(f"{what}of {sizes[-1]} x {sizes[-2]} pixels: {error}") from error
    return [pixels // side for pixels in scaled]


def _qwen_grid(args: Namespace, processor: Any, height: int, width: int) -> Grid:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    rows, columns = _patches(smart_resize, processor, "", height, width)
    return 1, rows, columns


def _qwen2_5_vl_video(args: Namespace, processor: Any, frames: int, height: int, width: int) -> Grid:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize

    rows, columns = _patches(smart_resize, processor, "has frames ", height, width)
    return -(-frames // processor.temporal_patch_size), rows, columns


def video_step(args: Namespace, processor: Any, fps: float) -> float:
    """Return the step of M-RoPE's time from one frame of patches to the next (`mrope_positions`)."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    # transformers' processor gives the seconds in float32.
    seconds = float(np.float32(processor.temporal_patch_size / fps))
    return seconds * Qwen2_5_VLVisionConfig(**args.vision_config["vision_config"]).tokens_per_second


def _qwen3_vl_video(args: Namespace, processor: Any, frames: int, height: int, width: int) -> Grid:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    sizes, thickness = (frames, height, width), processor.temporal_patch_size
    rows, columns = _patches(smart_resize, processor, f"has {frames} frames ", *sizes, temporal_factor=thickness)
    return -(-frames // thickness), rows, columns


def _qwen3_vl_around_frames(processor: Any, video: Video) -> list[tuple[str, str]]:
    indices, thickness = list(video.indices), processor.video_processor.temporal_patch_size
    begin, end = processor.vision_start_token, processor.vision_end_token
    times = processor._calculate_timestamps(indices, video.fps, thickness)
    return [(f"<{time:.1f} seconds>{begin}", end) for time in times]


def _qwen3_tower(name: str) -> Callable[[dict[str, Any], int], torch.nn.Module]:
    """Return what builds the tower of a family whose classes in transformers begin with this name."""

    def tower(config: dict[str, Any], hidden_size: int) -> torch.nn.Module:
        import transformers

        from megatron_grpo.vision.attention import use_offsets

        vision = getattr(transformers, f"{name}VisionConfig")(**config["vision_config"])
        return use_offsets(getattr(transformers, f"{name}VisionModel")._from_config(vision))

    return tower


def _without_decoder(model: type, of_model: type, config: dict[str, Any], hidden_size: int) -> torch.nn.Module:
    """Return tower and projector of a class of transformers, which has no module of these alone."""
    decoder = {"model_type": "qwen2", "num_hidden_layers": 0, "vocab_size": 1, "hidden_size": hidden_size}
    whole = model._from_config(of_model(text_config=decoder, **config))  # type: ignore[attr-defined]
    del whole.language_model
    return whole


def _internvl_tower(config: dict[str, Any], hidden_size: int) -> torch.nn.Module:
    from transformers.models.internvl.configuration_internvl import InternVLConfig
    from transformers.models.internvl.modeling_internvl import InternVLModel

    return _without_decoder(InternVLModel, InternVLConfig, config, hidden_size)


def _internvl_see(tower: Any, pixels: torch.Tensor, grids: torch.Tensor) -> Any:
    seen = tower.get_image_features(pixels)
    seen.pooler_output = seen.pooler_output.flatten(0, 1)  # [tiles, tokens of a tile, h]
    return seen


def _tile(args: Namespace) -> tuple[int, int]:
    """Return the rows and columns of patches of a tile."""
    vision = args.vision_config["vision_config"]
    return vision["image_size"][0] // vision["patch_size"][0], vision["image_size"][1] // vision["patch_size"][1]


def _internvl_grid(args: Namespace, processor: Any, height: int, width: int) -> Grid:
    expected = tuple(args.vision_config["vision_config"]["image_size"])
    if (processor.size["height"], processor.size["width"]) != expected:
        raise GrpoError(
            f"is cut into tiles of {dict(processor.size)} by the processor, and config.json has "
            f"vision_config.image_size {list(expected)}: give the processor's files of the model"
        )
    return processor.get_number_of_image_patches(height, width, {"crop_to_patches": True}), *_tile(args)


def _check_frames(processor: Any, height: int, width: int) -> None:
    """Raise GrpoError if the video processor would leave frames out, or scale them to another size than tiles have."""
    if dict(processor.size) != {"height": height, "width": width}:
        raise GrpoError(
            f"has frames that the processor scales to {dict(processor.size)}, and config.json has tiles of {height} x "
            f"{width} pixels: correct size in video_preprocessor_config.json or processor_config.json"
        )
    if processor.do_sample_frames:
        raise GrpoError(
            "has frames of which the processor would leave some out: set do_sample_frames to false in "
            "video_preprocessor_config.json or processor_config.json, and give the frames that the model is to see"
        )


def _internvl_video(args: Namespace, processor: Any, frames: int, height: int, width: int) -> Grid:
    _check_frames(processor, *args.vision_config["vision_config"]["image_size"])
    return frames, *_tile(args)


def _internvl_around_frames(processor: Any, video: Video) -> list[tuple[str, str]]:
    begin, end = processor.start_image_token, processor.end_image_token
    return [("\n" * (i > 1) + f"Frame{i}: {begin}", end) for i in range(1, len(video.indices) + 1)]


def _internvl_pixels(args: Namespace, processor: Any, images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    found = processor(images=images, crop_to_patches=True, return_tensors="pt")  # as InternVLProcessor calls it
    return found["pixel_values"], torch.tensor([[int(count), *_tile(args)] for count in found["num_patches"]])


def _internvl_blank(tower: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    height, width = tower.config.vision_config.image_size
    return torch.zeros(1, tower.config.vision_config.num_channels, height, width), torch.tensor([[1, 0, 0]])


LLAVA_TILES = 9  # of LLaVA-OneVision: vLLM knows anyres_max_9 only


def _llava_onevision_tower(config: dict[str, Any], hidden_size: int) -> torch.nn.Module:
    from transformers.models.llava_onevision.configuration_llava_onevision import LlavaOnevisionConfig
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    return _without_decoder(LlavaOnevisionModel, LlavaOnevisionConfig, config, hidden_size)


def _llava_onevision_see(tower: Any, pixels: torch.Tensor, grids: torch.Tensor) -> Any:
    import torch

    # As get_image_features and get_video_features, in one pass of the tower.
    seen = tower.vision_tower(pixels, output_hidden_states=True)
    tiles, sizes, rows = tower.multi_modal_projector(seen.hidden_states[-1]), grids.tolist(), list[torch.Tensor]()
    for part, (*_, height, width) in zip(tiles.split([size[0] for size in sizes]), sizes, strict=True):
        if height:
            (image,), _ = tower.pack_image_features([part], [[height, width]], tower.image_newline)
            rows.append(image)  # unpadded and with its newlines
        else:
            rows += [tower.apply_pooling(part).flatten(0, 1), tower.image_newline[None]]
    seen.pooler_output = torch.cat(rows)
    return seen


def _llava_onevision_grid(args: Namespace, processor: Any, height: int, width: int) -> Grid:
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    keys = args.vision_config
    side, points = keys["vision_config"]["image_size"], keys["image_grid_pinpoints"]
    if [list(point) for point in processor.image_grid_pinpoints] != points or dict(processor.size) != {
        "height": side,
        "width": side,
    }:
        raise GrpoError(
            f"is cut into tiles of {dict(processor.size)} for the sizes {processor.image_grid_pinpoints} by the "
            f"processor, and config.json has tiles of {side} pixels and image_grid_pinpoints {points}: give the "
            "processor's files of the model"
        )
    patches = side // keys["vision_config"]["patch_size"]
    return image_size_to_num_patches((height, width), points, side), patches, patches, height, width


def _llava_onevision_video(args: Namespace, processor: Any, frames: int, height: int, width: int) -> Grid:
    if args.vllm_mode == "server":
        raise GrpoError(
            "cannot go to a server: vLLM 0.32 ends when it encodes videos of different lengths of this family "
            "together; give --vllm-mode colocate"
        )
    keys = args.vision_config["vision_config"]
    _check_frames(processor, keys["image_size"], keys["image_size"])
    patches = keys["image_size"] // keys["patch_size"]
    return frames, patches, patches, 0, 0


def _llava_onevision_tokens(args: Namespace, processor: Any, grid: Grid) -> int:
    frames, _, _, height, width = grid
    if height:
        return processor._get_num_multimodal_tokens([(height, width)])["num_image_tokens"][0]
    return processor._get_num_multimodal_tokens(video_sizes=[(frames, 0, 0)])["num_video_tokens"][0]


def _llava_onevision_pixels(
    args: Namespace, processor: Any, images: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    # As vLLM calls it: each image is cut into tiles, also one of several in a prompt.
    found = processor(images=images, do_pad=False)
    grids = [_llava_onevision_grid(args, processor, *map(int, size)) for size in found["image_sizes"]]
    return torch.cat(found["pixel_values"]), torch.tensor(grids)


def _llava_onevision_blank(tower: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A video of one frame."""
    import torch

    side = tower.config.vision_config.image_size
    return torch.zeros(1, tower.config.vision_config.num_channels, side, side), torch.tensor([[1, 0, 0, 0, 0]])


def _qwen3_kind(name: str, text: str | None = None) -> Vision:
    """Return the vision part of Qwen3-VL and of Qwen3.5, whose tower has no inner features."""
    return Vision(
        "model.visual.",
        ("merger.", "deepstack_merger_list."),
        _qwen3_tower(name),
        _qwen_grid,
        _qwen3_vl_video,
        interleaved=True,
        around_frames=_qwen3_vl_around_frames,
        text=text,
        defaults={"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "spatial_merge_size": 2},
    )


KINDS = {
    "qwen2_5_vl": Vision(
        "visual.",
        ("merger.",),
        _qwen2_5_vl_tower,
        _qwen_grid,
        _qwen2_5_vl_video,
        defaults={
            "depth": 32,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "window_size": 112,
        },
    ),
    "qwen3_vl": _qwen3_kind("Qwen3VL"),
    "qwen3_vl_moe": _qwen3_kind("Qwen3VLMoe"),
    "qwen3_5": _qwen3_kind("Qwen3_5", "qwen3_5_text"),
    "qwen3_5_moe": _qwen3_kind("Qwen3_5Moe", "qwen3_5_moe_text"),
    "internvl": Vision(
        prefix="",
        projector=("multi_modal_projector.",),
        tower=_internvl_tower,
        grid=_internvl_grid,
        video=_internvl_video,
        see=_internvl_see,
        pixels=_internvl_pixels,
        blank=_internvl_blank,
        around=lambda processor: (processor.start_image_token_id, processor.end_image_token_id),
        around_frames=_internvl_around_frames,
        tiles=True,
        class_token=True,
        mrope=False,
        defaults={
            "hidden_size": 1024,
            "image_size": [448, 448],
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "patch_size": [14, 14],
        },
    ),
    "llava_onevision": Vision(
        prefix="",
        projector=("multi_modal_projector.", "image_newline"),
        tower=_llava_onevision_tower,
        grid=_llava_onevision_grid,
        video=_llava_onevision_video,
        see=_llava_onevision_see,
        tokens=_llava_onevision_tokens,
        pixels=_llava_onevision_pixels,
        blank=_llava_onevision_blank,
        unused=("vision_tower.post_layernorm.",),  # features are those before it
        nested=("vision_tower.", "vision_tower.vision_model."),
        tiles=True,
        mrope=False,
        defaults={
            "hidden_size": 768,
            "image_size": 224,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "patch_size": 16,
        },
    ),
}


def kind_of(args: Namespace) -> Vision:
    """Return the vision part of the model that ``args`` describe, which has one."""
    return KINDS[args.model_family]


def is_projector(args: Namespace, name: str) -> bool:
    """Return whether the weight with this name in the tower belongs to the projector."""
    return name.startswith(kind_of(args).projector)


def is_trained(args: Namespace, name: str) -> bool:
    """Return whether the weight with this name in the tower is trained."""
    if name.startswith(kind_of(args).unused):
        return False
    return not (args.freeze_projector if is_projector(args, name) else args.freeze_vision_tower)


def tower_shapes(args: Namespace) -> dict[str, tuple[int, ...]]:
    """Return {name in the tower: shape} of the weights of the vision tower."""
    return _shapes(args.model_family, json.dumps(args.vision_config, sort_keys=True), args.hidden_size)


@functools.cache
def _shapes(family: str, config: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
    import torch

    with torch.device("meta"):
        tower = KINDS[family].tower(json.loads(config), hidden_size)
    return {name: tuple(parameter.shape) for name, parameter in tower.named_parameters()}


def mrope_positions(
    visual_index: Int64, grids: Sequence[Sequence[int]], merge: int, steps: Sequence[float] | None = None
) -> Int64:
    """Return M-RoPE's positions ``[t, 3]`` (time, height, width) of a sequence of text, images and videos.

    Qwen2-VL (arXiv 2409.12191, 2.1): the three are equal on text and count it. An image's tokens have the number that
    the next text token would have, plus their frame, row and column; text goes on behind the largest of these. A frame
    of a video counts as its time (Qwen2.5-VL, arXiv 2502.13923, 2.1.2). transformers 5 lets text go on behind the
    largest row or column instead, and so repeats positions behind a long video; vLLM does as the papers say.

    Args:
        visual_index: ``[t]``, which of the sequence's visual tokens a token is, -1 for text; ascending.
        grids: patches of each image or video, in the order of the sequence: frames, rows, columns.
        merge: patches along each side of a token's square.
        steps: of each image or video, of time from frame to frame; times are rounded down. [1 each]
    """
    positions = np.zeros((len(visual_index), 3), np.int64)
    starts = np.flatnonzero(visual_index >= 0)
    seen = behind = following = 0  # visual tokens so far, the place behind them, the position of the token there
    for (frames, height, width), step in zip(grids, steps or [1.0] * len(grids), strict=True):
        shape = frames, height // merge, width // merge
        start, count = int(starts[seen]), int(np.prod(shape))
        positions[behind:start] = following + np.arange(start - behind)[:, None]
        following += start - behind
        own = np.indices(shape).reshape(3, -1).T
        own[:, 0] = (own[:, 0] * step).astype(np.int64)
        positions[start : start + count] = following + own
        following += int(own.max()) + 1
        seen, behind = seen + count, start + count
    positions[behind:] = following + np.arange(len(positions) - behind)[:, None]
    return positions


IMAGE_TOKEN = ("image_token_id", "image_token_index")
VIDEO_TOKEN = ("video_token_id", "video_token_index")
# Keys of config.json beside vision_config: the ids of its tokens; the step from the tower to the projector of InternVL
# and LLaVA-OneVision.
VISION_KEYS = """image_token_id image_token_index video_token_id video_token_index vision_start_token_id
    vision_end_token_id image_seq_length downsample_ratio projector_hidden_act multimodal_projector_bias
    vision_feature_layer vision_feature_select_strategy image_grid_pinpoints vision_aspect_ratio""".split()


def vision_keys(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``args.vision_config`` holds of a family's config.json: its vision part and `VISION_KEYS`."""
    token = next((config[key] for key in IMAGE_TOKEN if key in config), None)
    if not isinstance(config.get("vision_config"), dict) or not isinstance(token, int):
        raise GrpoError("config.json lacks vision_config or image_token_id: it describes no vision-language model")
    vision = {**KINDS[family].defaults, **config["vision_config"]}
    return {"vision_config": vision} | {key: config[key] for key in VISION_KEYS if key in config}
