"""Convert Geometry3K's Parquet files (hiyouga/geometry3k) to prompt files for GRPO with images.

    python tools/data/geometry3k.py --input train.parquet --output geometry_train.parquet

The input has columns "problem" ("<image>Find x."), "images" (objects with bytes) and "answer". Rows of the output have
"prompt" (chat messages), "images", "answer" and "data_source". Train on them with --reward-funcs math. With
--test-output the questions of one figure are in one file.
"""

import argparse
import base64
import hashlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.images import PLACE, as_source, decoded
from tools.data.common import BOXED, chat, convert_files, text


def convert(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Convert a row; raise GrpoError without problem, answer, or for an image that is missing or damaged."""
    problem, answer = text(row, "problem"), text(row, "answer")
    sources = [as_source(value, f"image {number}") for number, value in enumerate(row.get("images") or [], 1)]
    if not sources or problem.count(PLACE) != len(sources):
        raise GrpoError(f"the problem has {problem.count(PLACE)} places {PLACE} for {len(sources)} images")
    images: list[bytes] = []
    for number, image in enumerate(sources, 1):
        if not isinstance(image, bytes):
            raise GrpoError(f"image {number} is the path {image}: expected the bytes of the image")
        decoded(image, number)
        images.append(image)
    in_json = any(path.suffix == ".jsonl" for path in [*args.output, *(args.test_output or [])])
    written = [data_uri(image) if in_json else {"bytes": image} for image in images]
    return {"prompt": chat(problem, BOXED), "images": written, "answer": answer, "data_source": "geometry3k"}


def data_uri(image: bytes) -> str:
    """Return the encoded image as text; readers find its format by its first bytes."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def figure(row: dict[str, Any]) -> str:
    """Return a text that is equal for the questions of one figure."""
    return hashlib.sha256(repr(row["images"]).encode()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    return convert_files(__doc__, convert, argparse.ArgumentParser(), argv, key=figure)


if __name__ == "__main__":
    sys.exit(main())
