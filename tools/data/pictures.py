"""Make pictures of a coloured shape, whose colour is to be named, for a supervised warm-up and GRPO.

    python tools/data/pictures.py --save data/pictures

Writes warmup (supervised warm-up), train (GRPO), valid (to stop the warm-up), test (held out from all) and blank (the
questions of test with white pictures), as Parquet with the pictures inside. A row has `prompt` ("<image>colour?"),
`images`, `answer` and `data_source`.

A picture has 84 x 84 pixels. Colour (6), shape (3), size, place and shade are drawn; no two pictures are equal. The
draw depends only on the arguments and --seed. Without seeing a picture, one answer in six is right.
"""

import argparse
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image

from megatron_grpo.utils.errors import GrpoError
from tools.data.common import write_rows

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 40),
    "pink": (250, 120, 200),
    "grey": (130, 130, 130),
}
SHAPES = ("square", "disc", "cross")
SIZES = {"warmup": 3000, "train": 3000, "valid": 200, "test": 400}  # rows of the files
SIDE, SMALLEST, LARGEST = 84, 20, 50  # pixels of a picture, and of a shape


def drawn(colour: str, shape: str, rng: np.random.Generator) -> bytes:
    """Return a PNG file of this shape in this colour, at a random place, in a random size and shade."""
    pixels, size = np.full((SIDE, SIDE, 3), 255), int(rng.integers(SMALLEST, LARGEST))
    top, left = rng.integers(0, SIDE - size, 2)
    rows, columns = np.mgrid[:size, :size] - (size - 1) / 2
    inside = {
        "square": np.ones((size, size), bool),
        "disc": rows**2 + columns**2 <= (size / 2) ** 2,
        "cross": (abs(rows) < size / 6) | (abs(columns) < size / 6),
    }[shape]
    pixels[top : top + size, left : left + size][inside] = COLOURS[colour] + rng.integers(-15, 15, 3)
    return encoded(pixels)


def encoded(pixels: np.ndarray) -> bytes:
    """Return a PNG file of pixels [height, width, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def rows(count: int, name: str, seen: set[bytes], rng: np.random.Generator) -> list[dict]:
    """Return questions about pictures that are not among those `seen`, to which they are added."""
    found: list[dict] = []
    while len(found) < count:
        colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
        picture = drawn(colour, shape, rng)
        if picture not in seen:
            seen.add(picture)
            prompt = {"prompt": "<image>colour?", "images": [{"bytes": picture}]}
            found.append({**prompt, "answer": colour, "data_source": name})
    return found


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--save", type=Path, required=True, metavar="DIR", help="folder of the files")
    for name, count in SIZES.items():
        add(f"--{name}", type=int, default=count, metavar="N", help=f"rows of {name} [{count}]")
    add("--seed", type=int, default=1234, help="seed of all draws [1234]")
    return parser


def main() -> int:
    """Parse the command line, write the files, and return the exit code."""
    args = build_parser().parse_args()
    try:
        if min(getattr(args, name) for name in SIZES) < 1:
            raise GrpoError("every file needs at least one row")
        rng = np.random.default_rng(args.seed)
        seen: set[bytes] = set()
        splits = {name: rows(getattr(args, name), name, seen, rng) for name in SIZES}
        white = encoded(np.full((SIDE, SIDE, 3), 255))
        splits["blank"] = [{**one, "images": [{"bytes": white}], "data_source": "blank"} for one in splits["test"]]
        for name, made in splits.items():
            write_rows(made, args.save / f"{name}.parquet")
            print(f"{args.save / name}.parquet: {len(made)} rows; the first: {made[0]['prompt']} {made[0]['answer']}")
    except GrpoError as error:
        print(f"pictures.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
