"""Measure the time to the first prompts of a large Parquet file, and the host memory.

    python tools/benchmark/large_data.py --path /tmp/large.parquet --gigabytes 5 --prompts 1024 --rounds 20

Writes the file if it does not exist (chat prompts of random characters, about half of each row incompressible), opens
it as training does, and draws prompts with a byte tokenizer. Memory is the growth of this process after all imports.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.prompts import PromptDataset, draw
from megatron_grpo.training.arguments import parse_args
from tools.data.common import Bytes


def write(path: Path, gigabytes: float, rows_in_group: int) -> None:
    """Write a file of ``gigabytes`` GiB, one row group at a time."""
    rng, number = np.random.default_rng(0), 0
    with pyarrow.parquet.ParquetWriter(path, schema(), compression="snappy") as writer:
        while path.stat().st_size < gigabytes * 2**30:
            noise = rng.integers(0x20, 0x7E, (rows_in_group, 700), np.uint8)
            prompts, answers = [], []
            for row in noise:
                prompts.append([{"role": "user", "content": row.tobytes().decode()}])
                answers.append(str(number))
                number += 1
            columns = {"prompt": prompts, "answer": answers, "data_source": ["made up"] * rows_in_group}
            writer.write_table(pyarrow.table(columns, schema()), row_group_size=rows_in_group)


def schema() -> pyarrow.Schema:
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    columns = {"prompt": pyarrow.list_(message), "answer": pyarrow.string(), "data_source": pyarrow.string()}
    return pyarrow.schema(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--path", type=Path, required=True, metavar="FILE", help="Parquet file; written if it does not exist"
    )
    parser.add_argument("--gigabytes", type=float, default=5.0, metavar="X", help="size of the file to write, GiB [5]")
    parser.add_argument("--rows-in-group", type=int, default=100_000, metavar="N", help="rows per row group [100000]")
    parser.add_argument("--prompts", type=int, default=1024, metavar="N", help="prompts in a rollout [1024]")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="number of rollouts [20]")
    options = parser.parse_args()
    if not options.path.exists():
        write(options.path, options.gigabytes, options.rows_in_group)
    print(f"{options.path.stat().st_size / 2**30:.2f} GiB, {pyarrow.parquet.read_metadata(options.path)}")
    process, args = psutil.Process(), parse_args(["--max-prompt-length", "2048"])
    before, start = process.memory_info().rss, time.monotonic()
    dataset = PromptDataset([options.path], Bytes(), args)
    sampler = dataset.sampler()
    print(f"opened {len(dataset):,} rows after {time.monotonic() - start:.2f} s")
    largest, slowest = 0, 0.0
    for number in range(options.rounds):
        began = time.monotonic()
        draw(dataset, sampler, options.prompts)
        slowest = max(slowest, time.monotonic() - began)
        largest = max(largest, process.memory_info().rss)
        if number == 0:
            print(f"first {options.prompts} prompts after {time.monotonic() - start:.2f} s")
    seconds = (time.monotonic() - start) / options.rounds
    print(f"{options.rounds} rollouts: {seconds:.2f} s each, the slowest {slowest:.2f} s")
    print(f"memory: {(largest - before) / 2**30:.3f} GiB more at most")


if __name__ == "__main__":
    main()
