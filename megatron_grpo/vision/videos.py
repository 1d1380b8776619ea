"""Videos of data rows: lists of frames, which are images, and their rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.encoded import as_source

FPS = 2.0  # of frames without a rate, as in qwen-vl-utils


@dataclass(frozen=True)
class Video:
    """The frames of a video, encoded bytes or files, and how many of them show a second."""

    frames: tuple[bytes | str | Path, ...]
    fps: float = FPS

    def within(self, directory: Path) -> "Video":
        """Return the video with its files relative to ``directory``."""
        return Video(tuple(f if isinstance(f, bytes) else directory / f for f in self.frames), self.fps)

    def metadata(self) -> dict[str, Any]:
        """Return what the processors of transformers and vLLM are told of the frames: all of them are used."""
        count = len(self.frames)
        return {
            "total_num_frames": count,
            "fps": self.fps,
            "duration": count / self.fps,
            "frames_indices": list(range(count)),
            "do_sample_frames": False,
        }


def as_video(value: Any, name: str) -> Video:
    """Return a video from a list of frames, or from an object with ``frames`` and ``fps``; GrpoError for neither."""
    fps: Any = None
    if isinstance(value, Mapping) and value.get("frames") is not None:
        value, fps = value["frames"], value.get("fps")
    if not isinstance(value, list | tuple | np.ndarray):
        raise GrpoError(
            f"{name} is {str(value)[:60]!r}: video files are not decoded; give the list of its frames (images), or "
            'an object with "frames" and "fps"'
        )
    if not len(value):
        raise GrpoError(f"{name} has no frames: give at least one image")
    if fps is None:
        fps = FPS
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise GrpoError(f'"fps" of {name} is {fps!r}: expected the frames for each second, a number above 0')
    return Video(tuple(as_source(frame, f"frame {i} of {name}") for i, frame in enumerate(value, 1)), float(fps))


def video_column(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of the row's column ``videos``, or the one of ``video``; None without a column."""
    if row.get("videos") is None:
        return None if row.get("video") is None else [] if row["video"] == [] else [row["video"]]
    values = row["videos"]
    return list(values) if isinstance(values, list | tuple | np.ndarray) else [values]
