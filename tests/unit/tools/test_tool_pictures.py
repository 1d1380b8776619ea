"""tools/data/pictures.py and geometry3k.py: what they write trains, and their files share nothing."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
from vision_models import picture

from megatron_grpo.vision.images import as_source, decoded
from tools.data.common import write_rows

TOOLS = Path(__file__).resolve().parents[3] / "tools" / "data"


def tool(name, *arguments):
    return subprocess.run([sys.executable, TOOLS / name, *map(str, arguments)], capture_output=True, text=True)


def rows_of(file) -> list[dict]:
    return pyarrow.parquet.read_table(file).to_pylist()


def test_pictures_show_their_answers(tmp_path):
    sizes = "--warmup 20 --train 30 --valid 10 --test 12".split()
    for name in ("a", "b"):
        assert tool("pictures.py", "--save", tmp_path / name, *sizes).returncode == 0
    counts = {"warmup": 20, "train": 30, "valid": 10, "test": 12, "blank": 12}
    files = {name: rows_of(tmp_path / "a" / f"{name}.parquet") for name in counts}
    assert {name: len(rows) for name, rows in files.items()} == counts
    assert files["train"] == rows_of(tmp_path / "b" / "train.parquet")  # the draw depends on the seed alone
    shown = [row["images"][0]["bytes"] for name, rows in files.items() if name != "blank" for row in rows]
    assert len(set(shown)) == len(shown) == 72
    means = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}
    for row in files["train"]:
        image = decoded(row["images"][0]["bytes"], 1)
        colours = sorted(image.getcolors(), reverse=True)
        (_, colour) = next(item for item in colours if item[1] != (255, 255, 255))
        if row["answer"] in means:
            assert tuple(int(channel > 110) for channel in colour) == means[row["answer"]]
    assert [row["answer"] for row in files["blank"]] == [row["answer"] for row in files["test"]]
    assert all(decoded(row["images"][0]["bytes"], 1).getextrema() == ((255, 255),) * 3 for row in files["blank"])
    refused = tool("pictures.py", "--save", tmp_path / "c", "--test", "0")
    assert refused.returncode == 1 and refused.stderr == "pictures.py: every file needs at least one row\n"


def test_geometry3k(tmp_path):
    rows = [
        {
            "problem": f"<image>Find x{k}.",
            "answer": str(k),
            "images": [{"bytes": picture(60, 60, k % 10), "path": None}],
        }
        for k in range(40)
    ]
    write_rows(rows, tmp_path / "in.parquet")
    outputs = ["--output", tmp_path / "train.parquet", "--test-output", tmp_path / "test.parquet", "--test-share", 0.4]
    run = tool("geometry3k.py", "--input", tmp_path / "in.parquet", *outputs)
    assert run.returncode == 0, run.stderr
    train, test = (rows_of(tmp_path / f"{name}.parquet") for name in ("train", "test"))
    figures = [{row["images"][0]["bytes"] for row in part} for part in (train, test)]
    assert len(train) + len(test) == 40 and not figures[0] & figures[1]
    assert train[0]["prompt"][0]["content"].startswith("<image>Find x") and train[0]["data_source"] == "geometry3k"
    assert tool("geometry3k.py", "--input", tmp_path / "in.parquet", "--output", tmp_path / "a.jsonl").returncode == 0
    write_rows([{**rows[0], "images": [{"bytes": b"no"}]}, {**rows[0], "problem": "none"}], tmp_path / "bad.parquet")
    run = tool("geometry3k.py", "--input", tmp_path / "bad.parquet", "--output", tmp_path / "b.parquet")
    assert run.returncode == 1 and "image 1 cannot be read" in run.stderr and "0 places <image>" in run.stderr
    assert isinstance(as_source(rows[0]["images"][0], ""), bytes)
