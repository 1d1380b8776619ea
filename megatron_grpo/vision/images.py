"""The images and videos of data rows: where they stand in the messages, their size in tokens, and their pixels."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import re
import threading
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cachetools
import numpy as np

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.encoded import as_rgb, as_source, frames_of, named, source_of_part
from megatron_grpo.vision.kinds import (
    Grid,
    Int64,
    image_token_id,
    kind_of,
    merge_size,
    mrope_positions,
    video_step,
    video_token_id,
)
from megatron_grpo.vision.videos import Video, as_video, read_frames, video_column

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from PIL.Image import Image

PLACE = "<image>"  # in a text: an image of the row stands here
VIDEO_PLACE = "<video>"  # in a text of a row with a column of videos: one of them stands here
CACHED_BYTES = 512 * 2**20  # on each rank: of decoded images, of the tower's input, and of what servers get

Messages = list[dict[str, Any]]
Source = bytes | Path | Video


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images and videos of a sequence, in their order: encoded bytes or files, and patches; none for one of text.

    ``expansions``: the ids that stand for each in the model's input, in place of one. ``token``, ``video_token``: the
    ids that stand for a part of an image and of a video. ``merge``: patches along each side of its square. ``steps``:
    see `mrope_positions`. ``timestamps``: each frame of a video has positions of its own. ``mrope``: the model has
    M-RoPE. ``samples``: which of them each sample of a completion has; empty if each sample has them all.
    """

    sources: tuple[Source, ...]
    grids: tuple[Grid, ...]
    expansions: tuple[tuple[int, ...], ...]
    token: int
    merge: int
    video_token: int
    steps: tuple[float, ...] = ()
    timestamps: bool = False
    mrope: bool = True
    samples: tuple[tuple[int, ...], ...] = ()
    where: str = ""  # the row: file and line
    prompt: str | Messages = ""  # of the row, with a place for each of its images and videos

    @functools.cached_property
    def names(self) -> list[str]:
        """A name for each image or video, by its bytes or its file."""
        return [_name_of(source) for source in self.sources]

    @property
    def has_videos(self) -> bool:
        """Whether any of them is a video."""
        return any(isinstance(source, Video) for source in self.sources)

    @functools.cached_property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of each image or video that stand for a part of it."""
        return tuple(int(self._is_visual(expansion).sum()) for expansion in self.expansions)

    def followed_by(self, more: RowImages) -> RowImages:
        """Return these images and those that an environment showed after them."""
        return replace(
            self,
            sources=(*self.sources, *more.sources),
            grids=(*self.grids, *more.grids),
            expansions=(*self.expansions, *more.expansions),
            steps=(*self.steps, *more.steps),
        )

    def open(self, most: int | None = None) -> list[Image | npt.NDArray[np.uint8]]:
        """Return the decoded images, and videos [frames, height, width, 3]; GrpoError for a damaged one.

        ``most``: only so many, the first ones.

        The newest are kept: each turn of a conversation has the images of all earlier ones.
        """
        return [opened(source, number) for source, number in list(_numbered(self.sources))[:most]]

    def check(self) -> None:
        """Decode all images and videos, and keep none; GrpoError for a damaged one."""
        for source, number in _numbered(self.sources):
            opened.__wrapped__(source, number)

    def for_vllm(self) -> dict[str, list[Any]]:
        """Return vLLM's multi_modal_data."""
        return self.by_modality(
            [
                (found, source.metadata()) if isinstance(source, Video) else found
                for source, found in zip(self.sources, self.open(), strict=True)
            ]
        )

    def by_modality(self, values: Sequence[Any]) -> dict[str, list[Any]]:
        """Return a value for each image or video as lists by vLLM's names of modalities."""
        found: dict[str, list[Any]] = {}
        for source, value in zip(self.sources, values, strict=True):
            found.setdefault("video" if isinstance(source, Video) else "image", []).append(value)
        return found

    def expand(self, ids: Sequence[int]) -> list[int]:
        """Return the tokenizer's ids with each image's and video's token replaced by all tokens of it."""
        places = np.flatnonzero(self._is_visual(ids)).tolist()
        expected = [self.video_token if isinstance(source, Video) else self.token for source in self.sources]
        if [ids[place] for place in places] != expected:
            videos = expected.count(self.video_token)
            what = f"{len(expected) - videos} images" + (f" and {videos} videos" if videos else "")
            raise GrpoError(
                f"the prompt or message has {what}, but its text has {len(places)} of the model's "
                f"{'image and video' if videos else 'image'} tokens, or has them in another order: the chat template "
                "drops images or videos, or a text contains the token"
            )
        expanded, begin = [], 0
        for place, expansion in zip(places, self.expansions, strict=True):
            expanded += [*ids[begin:place], *expansion]
            begin = place + 1
        return [*expanded, *ids[begin:]]

    def expanded_lengths(self, ids: Sequence[int]) -> Int64:
        """Return the number of tokens that `expand` makes of each id, ``[len(ids)]``."""
        lengths = np.ones(len(ids), np.int64)
        lengths[self._is_visual(ids)] = [len(expansion) for expansion in self.expansions]
        return lengths

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Return a sequence with one token for each image and video: the inverse of `expand`."""
        visual, found, begin, seen = self._places(ids), list[int](), 0, 0
        for expansion, count in zip(self.expansions, self.tokens, strict=True):
            lead = int(self._is_visual(expansion).argmax())  # tokens of the expansion before the first visual one
            start = int(visual[seen]) - lead
            found += [*ids[begin:start], expansion[lead]]
            begin, seen = start + len(expansion), seen + count
        return [*found, *ids[begin:]]

    def _is_visual(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        array = np.asarray(ids, np.int64)
        return (array == self.token) | (array == self.video_token)

    def _places(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> Int64:
        """Return where the images' and videos' tokens are; such tokens behind the last of them are sampled ones."""
        return np.flatnonzero(self._is_visual(ids))[: sum(self.tokens)]

    def fits(self, ids: Sequence[int]) -> bool:
        """Return whether all image tokens of a sequence are of its images, so that a further image can follow."""
        return np.count_nonzero(self._is_visual(ids)) == sum(self.tokens)

    def layout(
        self, ids: Sequence[int] | npt.NDArray[np.int32], starts: Sequence[int] = ()
    ) -> tuple[Int64 | None, Int64]:
        """Return `RolloutBatch.rope_positions`, None without M-RoPE, and `RolloutBatch.visual_index` of a completion.

        ``starts``: where its further samples begin. Each sample has positions of its own.
        """
        first = np.cumsum([0, *self.tokens])
        index, positions = np.full(len(ids), -1), [np.zeros((0, 3), np.int64)]
        for number, (begin, end) in enumerate(pairwise([0, *starts, len(ids)])):
            chosen = self.samples[number] if self.samples else range(len(self.sources))
            part = self.only(chosen) if self.samples else self
            places = part._places(ids[begin:end])
            within = np.full(end - begin, -1)
            within[places] = np.arange(len(places))
            tokens = np.concatenate([np.zeros(0, np.int64), *(np.arange(first[i], first[i + 1]) for i in chosen)])
            index[begin + places] = tokens[: len(places)]
            if self.mrope:
                positions.append(part._rope_positions(within))
        return np.concatenate(positions) if self.mrope else None, index

    def only(self, chosen: Sequence[int]) -> RowImages:
        """Return the images and videos with these numbers, in this order."""
        names = ("sources", "grids", "expansions", "steps")
        changed: dict[str, Any] = {name: tuple(getattr(self, name)[i] for i in chosen) for name in names}
        return replace(self, samples=(), **changed)

    def _rope_positions(self, index: Int64) -> Int64:
        if self.timestamps:
            return mrope_positions(index, [(1, *grid[1:]) for grid in self.grids for _ in range(grid[0])], self.merge)
        return mrope_positions(index, self.grids, self.merge, self.steps)


def _name_of(source: Source) -> str:
    parts = source.frames if isinstance(source, Video) else (source,)
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        hashed.update(f"{len(data)} ".encode() * isinstance(source, Video) + data)
    if isinstance(source, Video):
        hashed.update(f"{source.path} {source.fps} {source.indices}".encode())
    return hashed.hexdigest()


def _bytes_of(found: Image | npt.NDArray[np.uint8]) -> int:
    return found.nbytes if isinstance(found, np.ndarray) else 3 * found.width * found.height


@cachetools.cached(
    cachetools.LRUCache(CACHED_BYTES, _bytes_of),
    key=lambda source, number: source,
    lock=threading.Lock(),
)
def opened(source: Source, number: int) -> Image | npt.NDArray[np.uint8]:
    """Return a decoded image or video, kept by its bytes or its file; ``number`` names it in errors."""
    return _frames_of(source, number) if isinstance(source, Video) else decoded(source, number)


def _within(directory: Path, source: bytes | str | Video, number: int) -> Source:
    """Return an image or video with its files relative to ``directory``."""
    if isinstance(source, Video):
        with named(f"video {number}", b""):
            return source.within(directory)
    return source if isinstance(source, bytes) else directory / source


def _numbered(sources: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return images and videos with their numbers among those of their kind."""
    counts = {True: 0, False: 0}
    found = []
    for source in sources:
        counts[isinstance(source, Video)] += 1
        found.append((source, counts[isinstance(source, Video)]))
    return found


class ImageReader:
    """Reads the images and videos of rows; ``processor`` is the transformers processor of the model, with the flags'
    pixels.
    """

    media = ("image", "video")  # what rows can have beside text

    def __init__(self, args: Namespace, special_tokens: Mapping[str, int]):
        self.processor = load_processor(args)
        self._args, self._kind, self._token = args, kind_of(args), image_token_id(args)
        self._video_token = video_token_id(args, self.processor)
        self.tokens = self._token, self._video_token  # that stand for parts of images and videos
        names = {token: name for name, token in special_tokens.items()}
        begin, end = (args.vision_config.get(f"vision_{side}_token_id") for side in ("start", "end"))
        for what, token in ("image", self._token), ("video", self._video_token):
            if token not in names:
                raise GrpoError(
                    f"--tokenizer-model {args.tokenizer_model}: the model's {what} token {token} is no special "
                    "token of this tokenizer: give the tokenizer of the model"
                )
        self._texts = {
            medium: "".join(names[token] for token in (begin, own, end) if token in names)
            for medium, own in (("image", self._token), ("video", self._video_token))
        }

    def read(self, row: Mapping[str, Any], prompt: str | Messages, directory: Path) -> tuple[str | Messages, RowImages]:
        """Return the prompt with a place for each image and video, and these; GrpoError for a row that cannot be read.

        Files are relative to ``directory``. Nothing is decoded but the images' sizes.
        """
        given: dict[str, list[Any]] = {"image": [as_source(v, f"image {i}") for i, v in enumerate(column(row), 1)]}
        videos = video_column(row)
        if videos is not None:
            given["video"] = [as_video(value, f"video {i}") for i, value in enumerate(videos, 1)]
        prompt, sources = placed(prompt, given, self._texts)
        if self._args.vllm_mode == "server" and any(isinstance(v, Video) and v.path is not None for v in sources):
            raise GrpoError(
                "the row has a video file, and a server takes the frames of all videos at one rate: give the list of "
                "its frames (images) and their fps, or --vllm-mode colocate"
            )
        opened = [_within(directory, source, number) for source, number in _numbered(sources)]
        return prompt, replace(self.of(opened), prompt=prompt)

    def _as_shown(self, source: Source) -> Source:
        """Return the video that an environment showed for its bytes, and anything else as it is."""
        with named("a video", b""):
            video = frames_of(source) if isinstance(source, bytes) else None
        if video is None:
            return source
        return as_video({"frames": video[0], "fps": video[1]}, "a video")

    def of(self, sources: Sequence[Source]) -> RowImages:
        """Return images and videos from encoded bytes or files; GrpoError for one that cannot be read."""
        sources = [self._as_shown(source) for source in sources]
        numbered, kind = _numbered(sources), self._kind
        grids = tuple(
            self._video_grid(source, number) if isinstance(source, Video) else self._grid(source, number)
            for source, number in numbered
        )
        expansions = tuple(map(self._expansion, sources, grids))
        processor, timed = self.processor.video_processor, kind.mrope and kind.around_frames is None
        steps = tuple(
            video_step(self._args, processor, source.sampled_fps) if timed and isinstance(source, Video) else 1.0
            for source in sources
        )
        return RowImages(
            tuple(sources),
            grids,
            expansions,
            self._token,
            merge_size(self._args),
            self._video_token,
            steps,
            kind.around_frames is not None,
            kind.mrope,
        )

    def _expansion(self, source: Source, grid: Grid) -> tuple[int, ...]:
        """Return the ids that stand for an image or a video with these patches."""
        count = self._kind.tokens(self._args, self.processor, grid)
        if not isinstance(source, Video):
            around = self._kind.around(self.processor)
            return (*around[:1], *[self._token] * count, *around[1:])
        if self._kind.around_frames is None:
            return (self._video_token,) * count
        encode, found = self.processor.tokenizer.encode, list[int]()
        for before, behind in self._kind.around_frames(self.processor, source):
            found += encode(before, add_special_tokens=False)
            found += [self._video_token] * (count // grid[0])
            found += encode(behind, add_special_tokens=False)
        return tuple(found)

    def _grid(self, source: bytes | Path, number: int) -> Grid:
        with named(f"image {number}", source):
            return self._kind.grid(self._args, self.processor.image_processor, *_size_of(source))

    def _video_grid(self, video: Video, number: int) -> Grid:
        if self._video_token >= self._args.padded_vocab_size:
            raise GrpoError(
                f"video {number} needs token {self._video_token}, and the embedding has {self._args.padded_vocab_size} "
                f"rows: raise --make-vocab-size-divisible-by ({self._args.make_vocab_size_divisible_by})"
            )
        sizes, count = list[tuple[int, int]](), len(video.indices)
        if video.path is not None:
            with named(f"video {number}", b""):
                sizes.append(read_frames(video, 1).shape[1:3])
        for i, frame in enumerate(video.frames, 1):
            with named(f"video {number}, frame {i}", frame):
                sizes.append(_size_of(frame))
        for i, size in enumerate(sizes, 1):
            if size != sizes[0]:
                raise GrpoError(
                    f"video {number}, frame {i} has {size[1]} x {size[0]} pixels, and frame 1 has {sizes[0][1]} x "
                    f"{sizes[0][0]}: give frames of one size"
                )
        height, width = sizes[0]
        with named(f"video {number}", b""):
            if height in (1, 3):
                raise GrpoError(
                    f"has frames of {width} x {height} pixels, and the processor would read rows as colours: give "
                    "frames of another height"
                )
            return self._kind.video(self._args, self.processor.video_processor, count, height, width)

    def pixels(self, images: RowImages) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tower's input for images and videos: pixels ``[patches, channels]`` and grids ``[sources, 3]``."""
        import torch

        found = [
            self._video_pixels(source, opened)
            if isinstance(source, Video) and isinstance(opened, np.ndarray)
            else self._kind.pixels(self._args, self.processor.image_processor, [opened])
            for source, opened in zip(images.sources, images.open(), strict=True)
        ]
        pixels, patches = torch.cat([one for one, _ in found]), torch.cat([grid for _, grid in found])
        grids = [tuple(grid) for grid in patches.tolist()]
        if grids != list(images.grids):
            raise GrpoError(f"the processor cut images into {grids} patches, expected were {list(images.grids)}")
        return pixels, patches

    def _video_pixels(self, video: Video, frames: npt.NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        found = self.processor.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        pixels = found["pixel_values_videos"]
        if not self._kind.tiles:
            return pixels, found["video_grid_thw"]
        grid = self._kind.video(self._args, self.processor.video_processor, len(pixels[0]), *frames.shape[1:3])
        return pixels[0], torch.tensor([grid])


def column(row: Mapping[str, Any]) -> list[Any]:
    """Return the values of the row's column ``images`` or ``image``."""
    values = row.get("images") if row.get("images") is not None else row.get("image")
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple | np.ndarray) else [values]


def without_bytes(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without columns of encoded images and frames: rewards get rows, many times over."""
    sources: dict[str, list[Any]] = {
        name: [as_source(value, name) for value in column({name: row.get(name)})] for name in ("images", "image")
    }
    for name in "videos", "video":
        videos = [as_video(value, name) for value in video_column({name: row.get(name)}) or []]
        sources[name] = [frame for video in videos for frame in video.frames]
    encoded = [name for name, values in sources.items() if any(isinstance(value, bytes) for value in values)]
    return {name: value for name, value in row.items() if name not in encoded}


def placed(
    prompt: str | Messages, given: Mapping[str, list[Any]], texts: Mapping[str, str]
) -> tuple[str | Messages, list[Any]]:
    """Return the prompt with a place for each image and video, and these in the order of their places.

    A place is an image or video part of a message, or ``<image>`` or ``<video>`` in a text. A part may hold its image
    or frames; all others are in ``given``, by "image" and "video"; without "video", ``<video>`` is text. Messages
    without any place get them all at the start of the first user's message, as TRL does. ``texts`` stand for an image
    and a video in a prompt without messages.
    """
    places = re.compile("(" + "|".join(_PLACES[medium] for medium in given) + ")")
    own: list[tuple[str, Any]] = []  # medium, and what a part holds
    if isinstance(prompt, str):
        own = [(_MEDIA[place], None) for place in places.findall(prompt)]
        _check_counts(own, given, "no chat messages")
        prompt = places.sub(lambda found: texts[_MEDIA[found[0]]], prompt)
        return prompt, _in_order(own, given)
    messages = copy.deepcopy(prompt)
    for message in messages:
        content, parts = message["content"], []
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if part["type"] != "text":
                own.append(_held(part))
                parts.append({"type": own[-1][0]})
                continue
            for text in filter(None, places.split(part["text"])):
                if text in _MEDIA and _MEDIA[text] in given:
                    own.append((_MEDIA[text], None))
                    parts.append({"type": _MEDIA[text]})
                else:
                    parts.append({"type": "text", "text": text})
        if isinstance(content, list) or any(part["type"] != "text" for part in parts):
            message["content"] = parts
    if not own and any(given.values()):
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is None:
            counts = " and ".join(f"{len(values)} {medium}s" for medium, values in given.items() if values)
            raise GrpoError(f"the row has {counts} and no user message in which they could stand")
        content = first["content"]
        text_parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        own = [(medium, None) for medium, values in given.items() for _ in values]
        first["content"] = [*({"type": medium} for medium, _ in own), *text_parts]
    _check_counts(own, given, "messages")
    return messages, _in_order(own, given)


_PLACES = {"image": PLACE, "video": VIDEO_PLACE}
_MEDIA = {place: medium for medium, place in _PLACES.items()}


def _held(part: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the medium of a message's part, and the image or video that it holds; None if it holds none."""
    if part["type"] == "video":
        value = next((part[key] for key in ("video", "frames", "path", "url") if part.get(key) is not None), None)
        if part.get("fps") is not None and not isinstance(value, Mapping):
            value = {"frames" if isinstance(value, list) else "path": value, "fps": part["fps"]}
        return "video", None if value is None else as_video(value, "a video of a message")
    source = source_of_part(part)
    return "image", None if source is None else as_source(source, "an image of a message")


def _in_order(own: Sequence[tuple[str, Any]], given: Mapping[str, list[Any]]) -> list[Any]:
    rest = {medium: iter(values) for medium, values in given.items()}
    return [next(rest[medium]) if held is None else held for medium, held in own]


def _check_counts(own: Sequence[tuple[str, Any]], given: Mapping[str, list[Any]], where: str) -> None:
    for medium, place in _PLACES.items():
        places, values = own.count((medium, None)), given.get(medium, [])
        if places != len(values):
            raise GrpoError(
                f'the row has {len(values)} {medium}s in its column "{medium}s", and its prompt ({where}) has {places} '
                f"places for them: write {place} where each belongs"
            )


def decoded(source: bytes | Path, number: int) -> Image:
    """Return an image in RGB, upright as its EXIF data says."""
    return _decoded(source, f"image {number}")


def _decoded(source: bytes | Path, name: str) -> Image:
    with named(name, source), _opened(source) as image:
        return as_rgb(image)


def _frames_of(video: Video, number: int) -> npt.NDArray[np.uint8]:
    if video.path is not None:
        with named(f"video {number}", b""):
            return read_frames(video)
    frames = [_decoded(frame, f"video {number}, frame {i}") for i, frame in enumerate(video.frames, 1)]
    return np.stack([np.asarray(frame) for frame in frames])


def _opened(source: bytes | Path) -> Image:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def _size_of(source: bytes | Path) -> tuple[int, int]:
    """Return the height and width of an image without decoding it."""
    with _opened(source) as image:
        turned = image.getexif().get(0x0112, 1) >= 5  # a photograph on its side, which `decoded` turns
        width, height = image.size[::-1] if turned else image.size
        return height, width


def load_processor(args: Namespace) -> Any:
    """Return the processor of the model, from --tokenizer-model, with --min-image-pixels and --max-image-pixels."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(args.tokenizer_model, local_files_only=True)
        image_processor = processor.image_processor
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        raise GrpoError(
            f"--tokenizer-model {args.tokenizer_model}: transformers cannot read the processor of images "
            f"(preprocessor_config.json): {str(error).strip().splitlines()[0]}"
        ) from error
    if kind_of(args).tiles:
        return processor
    # Both sides see the frames of the row, and each has the pixels of the processor's bounds.
    processor.video_processor.do_sample_frames = processor.video_processor.cap_pixels_per_frame = False
    size = dict(image_processor.size)
    for flag, key in (("min_image_pixels", "shortest_edge"), ("max_image_pixels", "longest_edge")):
        if getattr(args, flag) is not None:
            size[key] = getattr(args, flag)
    if size["shortest_edge"] > size["longest_edge"]:
        raise GrpoError(
            f"images would have at least {size['shortest_edge']} and at most {size['longest_edge']} pixels: give both "
            "--min-image-pixels and --max-image-pixels"
        )
    image_processor.size = type(image_processor.size)(**size) if not isinstance(image_processor.size, dict) else size
    return processor


class ImageStore:
    """The images of the completions that a rank computes, by `RolloutBatch.image_keys`: of rows, and of episodes.

    The newest pixels are kept in memory. ``with_rows``: episodes begin with the images of their rows; those of agents
    do not.
    """

    def __init__(self, reader: ImageReader, of_row: Callable[[int], RowImages], with_rows: bool = True):
        self.reader, self._of_row = reader, of_row
        none = reader.of(())
        self._begins: Callable[[int], RowImages] = of_row if with_rows else lambda row: none
        self._episodes: dict[int, RowImages] = {}
        self._kept: OrderedDict[int, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def of(self, key: int) -> RowImages:
        """Return the images with this key."""
        return self._of_row(key) if key >= 0 else self._episodes[key]

    def of_episode(self, key: int) -> RowImages:
        """Return the images of an episode with this key."""
        return self._begins(key) if key >= 0 else self._episodes[key]

    def take_episodes(self, shown: Mapping[int, tuple[int, Sequence[Sequence[bytes]]]]) -> None:
        """Take, by key, the row of each episode of a new rollout and the encoded images that each of its samples has
        behind those of the row, in place of the last rollout's.
        """
        self._episodes = {key: self.of_shown(row, samples) for key, (row, samples) in shown.items()}
        for key in [key for key in self._kept if key < 0]:
            del self._kept[key]

    def of_shown(self, row: int, samples: Sequence[Sequence[bytes]]) -> RowImages:
        """Return the images of a row and, each once, those that the samples of an episode have behind them."""
        own = self._begins(row)
        count = len(own.sources)
        numbers = {image: count + i for i, image in enumerate(dict.fromkeys(chain.from_iterable(samples)))}
        chosen = tuple((*range(count), *(numbers[image] for image in images)) for images in samples)
        return replace(own.followed_by(self.reader.of(list(numbers))), samples=chosen)

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tower's input for the images with these keys: `ImageReader.pixels`, one after the other."""
        import torch

        found = [self._pixels(key) for key in keys]
        return torch.cat([pixels for pixels, _ in found]), torch.cat([grids for _, grids in found])

    def _pixels(self, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        if key not in self._kept:
            self._kept[key] = self.reader.pixels(self.of(key))
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(pixels.nbytes for pixels, _ in self._kept.values()) > CACHED_BYTES:
            self._kept.popitem(last=False)
        return self._kept[key]


def attach(
    model: Sequence[torch.nn.Module],
    reader: ImageReader,
    images_of: Callable[[int], RowImages],
    with_rows: bool = True,
) -> ImageStore:
    """Give the vision tower, if this rank has one, the pixels of images; ``images_of`` returns those of a row.

    ``with_rows``: see `ImageStore`.
    """
    from megatron.core.utils import unwrap_model

    store = ImageStore(reader, images_of, with_rows)
    for chunk in map(unwrap_model, model):
        if chunk.vision is not None:
            chunk.vision.read = store.read
    return store
