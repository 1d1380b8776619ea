"""Encoded images that environments and agents show: forms that are read, and how they are sent and stored.

This module imports no torch: processes of environments start fast.
"""

import base64
import binascii
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_grpo.utils.errors import GrpoError

if TYPE_CHECKING:
    import PIL.Image

UInt8 = npt.NDArray[np.uint8]
_SIZE = np.dtype("<i8")
_VIDEO = b"\0video"  # no image begins so


def as_source(value: Any, name: str) -> bytes | str:
    """Return the encoded image or the path of its file; GrpoError for what is neither."""
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if not isinstance(value, str) or not value:
        raise GrpoError(f"{name} is {str(value)[:60]!r}: expected a path, bytes, or an object with one of them")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition("base64,")[2], validate=True)
        except binascii.Error as error:
            raise GrpoError(f"{name} is a data URI that is not valid base64: {error}") from error
    scheme, found, _ = value.partition("://")
    if found and scheme != "file":
        raise GrpoError(f"{name} is at {value[:80]}: images are read from local files only; download it first")
    return value.removeprefix("file://")


def source_of_part(part: Mapping[str, Any]) -> Any:
    """Return what a message's image part holds as its image; None if it holds none."""
    for key in ("image", "url", "path", "image_url"):
        if part.get(key) is not None:
            value = part[key]
            return value["url"] if key == "image_url" and isinstance(value, Mapping) else value
    return None


def as_data_uri(value: Any) -> str:
    """Return an image as a data URI: a PIL image as PNG, else the bytes of the file; GrpoError if it is none.

    ``value`` may also be a path, bytes, a data URI or an object with bytes or path. These are decoded once, so that a
    damaged image is found here.
    """
    import PIL.Image

    name = "an image of the environment"
    if isinstance(value, PIL.Image.Image):
        file = io.BytesIO()
        with named(name, b""):
            as_rgb(value).save(file, "PNG")
        return data_uri("image/png", file.getvalue())
    found = as_source(value, name)
    source = found if isinstance(found, bytes) else Path(found)
    with named(name, source):
        data = source if isinstance(source, bytes) else source.read_bytes()
        with PIL.Image.open(io.BytesIO(data)) as image:
            as_rgb(image)
            return data_uri(PIL.Image.MIME.get(image.format or "", "image"), data)


@contextlib.contextmanager
def named(name: str, source: bytes | Path) -> Iterator[None]:
    """Context that turns any error of an image into a GrpoError with its name and file."""
    from PIL import UnidentifiedImageError

    name += "" if isinstance(source, bytes) else f" ({source})"
    try:
        yield
    except GrpoError as error:
        raise GrpoError(f"{name} {error}") from error
    except UnidentifiedImageError as error:
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        raise GrpoError(f"{name} cannot be read: {size} bytes in no format of images that Pillow reads") from error
    except Exception as error:  # PIL's readers raise errors of many types for damaged files
        raise GrpoError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def as_rgb(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """Return an image in RGB, upright as its EXIF data says; GrpoError if its pixels have no range."""
    import PIL.Image
    import PIL.ImageOps

    image = PIL.ImageOps.exif_transpose(image)
    if image.mode in ("I", "F"):
        raise GrpoError(f"has pixels of 32 bits (mode {image.mode}), whose range is not known: convert it to 8 bits")
    if image.mode.startswith("I;16"):  # Pillow would clip them to 255
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def data_uri(kind: str, data: bytes) -> str:
    """Return encoded bytes as a data URI; ``kind``: image/png."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def joined(samples: Sequence[Sequence[bytes]]) -> UInt8:
    """Return the encoded images of each sample of a completion as one flat array.

    An image is its size, 8 bytes, and its bytes; when it occurs again, a number of 8 bytes: -2 for the first image, -3
    for the second. -1 stands between two samples.
    """
    parts, numbers = list[bytes](), dict[bytes, int]()
    for place, images in enumerate(samples):
        parts += [_number(-1)] * (place > 0)
        for image in images:
            if image in numbers:
                parts.append(_number(-2 - numbers[image]))
                continue
            numbers[image] = len(numbers)
            parts += [_number(len(image)), image]
    return np.frombuffer(b"".join(parts), np.uint8)


def as_one(frames: Sequence[bytes], fps: float) -> bytes:
    """Return the encoded frames of a video, and their rate, as bytes that stand among those of images."""
    return _VIDEO + np.array(fps, "<f8").tobytes() + joined([frames]).tobytes()


def frames_of(data: bytes) -> tuple[list[bytes], float] | None:
    """Undo `as_one`; None for an image."""
    if not data.startswith(_VIDEO):
        return None
    begin = len(_VIDEO)
    (frames,) = divided(np.frombuffer(data[begin + 8 :], np.uint8))
    return frames, float(np.frombuffer(data[begin : begin + 8], "<f8")[0])


def _number(value: int) -> bytes:
    return np.array(value, _SIZE).tobytes()


def divided(data: UInt8) -> list[list[bytes]]:
    """Undo `joined`."""
    samples, different, begin = [list[bytes]()], list[bytes](), 0
    while begin < len(data):
        size = int(data[begin : begin + _SIZE.itemsize].view(_SIZE)[0])
        begin += _SIZE.itemsize
        if size == -1:
            samples.append([])
        elif size < 0:
            samples[-1].append(different[-2 - size])
        else:
            different.append(data[begin : begin + size].tobytes())
            samples[-1].append(different[-1])
            begin += size
    return samples
