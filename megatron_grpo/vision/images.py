"""The images of data rows: where they stand in the messages, their size in tokens, and their pixels."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.encoded import as_source, source_of_part
from megatron_grpo.vision.kinds import Grid, Int64, image_token_id, kind_of, merge_size, mrope_positions

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

PLACE = "<image>"  # in a text: an image of the row stands here
CACHED_BYTES = 512 * 2**20  # of pixels, on a rank that runs the tower

Messages = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of a sequence: encoded bytes or files, patches and tokens of each; none for one of text.

    ``token``: the id that stands for a part of an image. ``merge``: patches along each side of its square. ``mrope``:
    the model has M-RoPE. ``around``: the ids before and behind the parts of an image that the processor adds, if any.
    """

    sources: tuple[bytes | Path, ...]
    grids: tuple[Grid, ...]
    tokens: tuple[int, ...]
    token: int
    merge: int
    mrope: bool = True
    around: tuple[int, ...] = ()
    where: str = ""  # the row: file and line
    prompt: str | Messages = ""  # of the row, with a place for each of its images

    @functools.cached_property
    def names(self) -> list[str]:
        """A name for each image, by its bytes or its file."""
        sources = [source if isinstance(source, bytes) else str(source).encode() for source in self.sources]
        return [hashlib.blake2b(source, digest_size=16).hexdigest() for source in sources]

    def followed_by(self, more: RowImages) -> RowImages:
        """Return these images and those that an environment showed after them."""
        return replace(
            self,
            sources=(*self.sources, *more.sources),
            grids=(*self.grids, *more.grids),
            tokens=(*self.tokens, *more.tokens),
        )

    def open(self) -> list[Image]:
        """Return the decoded images; GrpoError for a damaged one."""
        return list(_opened_of(self))

    def expand(self, ids: Sequence[int]) -> list[int]:
        """Return the tokenizer's ids with each image token replaced by all tokens of its image."""
        places = [place for place, token in enumerate(ids) if token == self.token]
        if len(places) != len(self.sources):
            raise GrpoError(
                f"the prompt or message has {len(self.sources)} images, but its text has {len(places)} of the model's "
                "image tokens: the chat template drops images, or a text contains the token"
            )
        expanded, begin = [], 0
        for place, count in zip(places, self.tokens, strict=True):
            expanded += [*ids[begin:place], *self.around[:1], *[self.token] * count, *self.around[1:]]
            begin = place + 1
        return [*expanded, *ids[begin:]]

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Return a sequence with one token for each image: the inverse of `expand`."""
        array = np.asarray(ids, np.int64)
        keep = np.ones(len(array), bool)
        visual = self._places(ids)
        counts = np.array(self.tokens, np.int64)
        first, last = visual[np.cumsum(counts) - counts], visual[np.cumsum(counts) - 1]
        keep[visual], keep[first] = False, True
        if self.around:
            keep[first - 1] = keep[last + 1] = False
        return array[keep].tolist()

    def _places(self, ids: Sequence[int]) -> Int64:
        """Return where the tokens of the images are; image tokens behind the last image are sampled ones."""
        return np.flatnonzero(np.asarray(ids) == self.token)[: sum(self.tokens)]

    def fits(self, ids: Sequence[int]) -> bool:
        """Return whether all image tokens of a sequence are of its images, so that a further image can follow."""
        return np.count_nonzero(np.asarray(ids) == self.token) == sum(self.tokens)

    def layout(self, ids: Sequence[int]) -> tuple[Int64 | None, Int64]:
        """Return `RolloutBatch.rope_positions`, None without M-RoPE, and `RolloutBatch.visual_index` of a sequence."""
        index, places = np.full(len(ids), -1), self._places(ids)
        index[places] = np.arange(len(places))
        return mrope_positions(index, self.grids, self.merge) if self.mrope else None, index


@functools.lru_cache(maxsize=8)  # the requests for the completions of a prompt come one after another
def _opened_of(images: RowImages) -> tuple[Image, ...]:
    return tuple(decoded(source, number) for number, source in enumerate(images.sources, 1))


class ImageReader:
    """Reads the images of rows; ``processor`` is the transformers processor of the model, with the flags' pixels."""

    def __init__(self, args: Namespace, special_tokens: Mapping[str, int]):
        self.processor = load_processor(args)
        self._args, self._kind, self._token = args, kind_of(args), image_token_id(args)
        names = {token: name for name, token in special_tokens.items()}
        begin, end = (args.vision_config.get(f"vision_{side}_token_id") for side in ("start", "end"))
        if self._token not in names:
            raise GrpoError(
                f"--tokenizer-model {args.tokenizer_model}: config.json's image token {self._token} is no special "
                "token of this tokenizer: give the tokenizer of the model"
            )
        self._text = "".join(names[token] for token in (begin, self._token, end) if token in names)

    def read(self, row: Mapping[str, Any], prompt: str | Messages, directory: Path) -> tuple[str | Messages, RowImages]:
        """Return the prompt with a place for each image, and the images; GrpoError for a row that cannot be read.

        Files are relative to ``directory``. Nothing is decoded but the images' sizes.
        """
        prompt, sources = placed(prompt, column(row), self._text)
        opened = [source if isinstance(source, bytes) else directory / source for source in sources]
        return prompt, replace(self.of(opened), prompt=prompt)

    def of(self, sources: Sequence[bytes | Path]) -> RowImages:
        """Return images from encoded bytes or files; GrpoError for one that cannot be read."""
        grids = tuple(self._grid(source, number) for number, source in enumerate(sources, 1))
        tokens = tuple(self._kind.tokens(self._args, self.processor, grid) for grid in grids)
        kind, merge = self._kind, merge_size(self._args)
        around = kind.around(self.processor)
        return RowImages(tuple(sources), grids, tokens, self._token, merge, kind.mrope, around)

    def _grid(self, source: bytes | Path, number: int) -> Grid:
        with _named(number, source), _opened(source) as image:
            turned = image.getexif().get(0x0112, 1) >= 5  # a photograph on its side, which `decoded` turns
            width, height = image.size[::-1] if turned else image.size
            return self._kind.grid(self._args, self.processor.image_processor, height, width)

    def pixels(self, images: RowImages) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tower's input for the images: pixels ``[patches, channels]`` and grids ``[images, 3]``."""
        pixels, found = self._kind.pixels(self._args, self.processor.image_processor, images.open())
        grids = [tuple(grid) for grid in found.tolist()]
        if grids != list(images.grids):
            raise GrpoError(f"the processor cut images into {grids} patches, expected were {list(images.grids)}")
        return pixels, found


def column(row: Mapping[str, Any]) -> list[Any]:
    """Return the values of the row's column ``images`` or ``image``."""
    values = row.get("images") if row.get("images") is not None else row.get("image")
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple | np.ndarray) else [values]


def without_bytes(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without columns of encoded images: rewards get rows, many times over."""
    encoded = [
        name
        for name in ("images", "image")
        if any(isinstance(as_source(value, name), bytes) for value in column({name: row.get(name)}))
    ]
    return {name: value for name, value in row.items() if name not in encoded}


def placed(prompt: str | Messages, values: Sequence[Any], text: str) -> tuple[str | Messages, list[bytes | str]]:
    """Return the prompt with a place for each image, and the images in the order of their places.

    A place is an image part of a message, or ``<image>`` in a text. A part may hold its image; all others are in
    ``values``. Messages without any place get them all at the start of the first user's message, as TRL does. ``text``
    stands for an image in a prompt without messages.
    """
    given = [as_source(value, f"image {number}") for number, value in enumerate(values, 1)]
    if isinstance(prompt, str):
        _check_count(prompt.count(PLACE), given, "no chat messages")
        return prompt.replace(PLACE, text), given
    messages, own = copy.deepcopy(prompt), []
    for message in messages:
        content, parts = message["content"], []
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if part["type"] != "text":
                source = source_of_part(part)
                own.append(None if source is None else as_source(source, "an image of a message"))
                parts.append({"type": "image"})
                continue
            before, *others = part["text"].split(PLACE)
            parts += [{"type": "text", "text": before}] if before else []
            for other in others:
                own.append(None)
                parts += [{"type": "image"}] + ([{"type": "text", "text": other}] if other else [])
        if isinstance(content, list) or any(part["type"] == "image" for part in parts):
            message["content"] = parts
    if given and not own:
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is None:
            raise GrpoError(f"the row has {len(given)} images and no user message in which they could stand")
        content = first["content"]
        text_parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        first["content"] = [*({"type": "image"} for _ in given), *text_parts]
        return messages, given
    _check_count(sum(source is None for source in own), given, "messages")
    rest = iter(given)
    return messages, [next(rest) if source is None else source for source in own]


def _check_count(places: int, given: Sequence[Any], where: str) -> None:
    if places != len(given):
        raise GrpoError(
            f'the row has {len(given)} images in its column "images", and its prompt ({where}) has {places} places for '
            f"them: write {PLACE} where each belongs"
        )


def decoded(source: bytes | Path, number: int) -> Image:
    """Return an image in RGB, upright as its EXIF data says."""
    from PIL import ImageOps

    with _named(number, source), _opened(source) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def _opened(source: bytes | Path) -> Image:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


@contextlib.contextmanager
def _named(number: int, source: bytes | Path) -> Iterator[None]:
    """Context that turns any error of an image into a GrpoError with its number and file."""
    name = f"image {number}" + ("" if isinstance(source, bytes) else f" ({source})")
    try:
        yield
    except GrpoError as error:
        raise GrpoError(f"{name} {error}") from error
    except Exception as error:  # PIL's readers raise errors of many types for damaged files
        raise GrpoError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


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

    The newest pixels are kept in memory.
    """

    def __init__(self, reader: ImageReader, of_row: Callable[[int], RowImages]):
        self.reader, self._of_row = reader, of_row
        self._episodes: dict[int, RowImages] = {}
        self._kept: OrderedDict[int, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def of(self, key: int) -> RowImages:
        """Return the images with this key."""
        return self._of_row(key) if key >= 0 else self._episodes[key]

    def take_episodes(self, shown: Mapping[int, tuple[int, Sequence[bytes]]]) -> None:
        """Take, by key, the row and the encoded images of each episode of a new rollout, in place of the last one's."""
        self._episodes = {
            key: self._of_row(row).followed_by(self.reader.of(images)) for key, (row, images) in shown.items()
        }
        for key in [key for key in self._kept if key < 0]:
            del self._kept[key]

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


def attach(model: Sequence[torch.nn.Module], reader: ImageReader, images_of: Callable[[int], RowImages]) -> ImageStore:
    """Give the vision tower, if this rank has one, the pixels of images; ``images_of`` returns those of a row."""
    store = ImageStore(reader, images_of)
    for wrapped in model:
        chunk: Any = wrapped
        while hasattr(chunk, "module"):
            chunk = chunk.module
        if chunk.vision is not None:
            chunk.vision.read = store.read
    return store
