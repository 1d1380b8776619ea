"""Videos of data rows: lists of frames, which are images, or files, and the rate of the frames."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import require
from megatron_grpo.vision.encoded import as_source

# As in qwen-vl-utils: frames for each second of a list without a rate, and those that are taken of a file.
FPS = 2.0
MIN_FRAMES, MAX_FRAMES = 4, 768  # that are taken of a file

UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Video:
    """The frames that the model sees of a video.

    ``frames``: encoded bytes or files of images; of a video file: none, but its ``path``. ``fps``: how many frames show
    a second, of all ``total`` ones. ``indices``: the frames among them that the model sees.
    """

    frames: tuple[bytes | Path, ...]
    fps: float
    total: int
    indices: tuple[int, ...]
    path: str | Path | None = None

    @property
    def sampled_fps(self) -> float:
        """How many of the frames that the model sees show a second."""
        return len(self.indices) / self.total * self.fps

    def within(self, directory: Path) -> "Video":
        """Return the video with its files relative to ``directory``, and the frames of a video file chosen."""
        if self.path is not None:
            return _chosen(directory / self.path, self.fps)
        return replace(self, frames=tuple(f if isinstance(f, bytes) else directory / f for f in self.frames))

    def metadata(self) -> dict[str, Any]:
        """Return the metadata for the processors of transformers and vLLM, which use all frames they get."""
        return {
            "total_num_frames": self.total,
            "fps": self.fps,
            "duration": self.total / self.fps,
            "frames_indices": list(self.indices),
            "do_sample_frames": False,
        }


def as_video(value: Any, name: str) -> Video:
    """Return a video: of a list of frames, a file, or an object with one of them and ``fps``; GrpoError for others."""
    fps: Any = None
    if isinstance(value, Mapping):
        fps = value.get("fps")
        value = value["frames"] if value.get("frames") is not None else value
    fps = FPS if fps is None else fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise GrpoError(f'"fps" of {name} is {fps!r}: expected the frames for each second, a number above 0')
    if not isinstance(value, list | tuple | np.ndarray):
        path = as_source(value, name)
        if isinstance(path, bytes):
            raise GrpoError(f"{name} is the bytes of a file: give its path, or the list of its frames (images)")
        return Video((), float(fps), 0, (), path)
    if not len(value):
        raise GrpoError(f"{name} has no frames: give at least one image")
    sources = [as_source(frame, f"frame {i} of {name}") for i, frame in enumerate(value, 1)]
    frames = tuple(source if isinstance(source, bytes) else Path(source) for source in sources)
    return Video(frames, float(fps), len(frames), tuple(range(len(frames))))


def video_column(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of the row's column ``videos``, or the one of ``video``; None without a column."""
    if row.get("videos") is None:
        return None if row.get("video") is None else [] if row["video"] == [] else [row["video"]]
    values = row["videos"]
    return list(values) if isinstance(values, list | tuple | np.ndarray) else [values]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Context of OpenCV and its reader of a video file."""
    require(f"({path}), a video file,", "cv2", instead="give the list of its frames (images)")
    import cv2

    if not path.is_file():
        raise GrpoError(f"({path}) cannot be read: there is no such file")
    reader = cv2.VideoCapture(str(path))
    try:
        yield cv2, reader
    finally:
        reader.release()


def _chosen(path: Path, fps: float) -> Video:
    """Return a video file with the frames to take of it: ``fps`` for each second, an even number, equally far apart."""
    with _opened(path) as (cv2, reader):
        total, own = int(reader.get(cv2.CAP_PROP_FRAME_COUNT)), float(reader.get(cv2.CAP_PROP_FPS))
    if total < 1 or not 0 < own < float("inf"):
        raise GrpoError(f"({path}) cannot be read: OpenCV finds no frames; give the list of its frames (images)")
    count = int(min(max(total / own * fps, MIN_FRAMES), MAX_FRAMES, total))
    count -= count % 2 if count > 1 else 0
    indices = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return Video((), own, total, tuple(indices), path)


def read_frames(video: Video, last: int | None = None) -> UInt8:
    """Return the chosen frames ``[frames, height, width, 3]`` of a video file, up to number ``last``, in RGB."""
    path, wanted = Path(str(video.path)), video.indices[:last]
    found = []
    with _opened(path) as (cv2, reader):
        for number in range(wanted[-1] + 1):
            if not reader.grab():
                raise GrpoError(
                    f"({path}) has {number} frames that can be read, and {video.total} by its header: give the list of "
                    "its frames (images)"
                )
            if number in wanted:
                found.append(cv2.cvtColor(reader.retrieve()[1], cv2.COLOR_BGR2RGB))
    return np.stack(found)
