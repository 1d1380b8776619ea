"""Check that every byte of a checkpoint is as it was written, without loading it.

    python tools/checkpoint/verify.py runs/my_run                   # the newest checkpoint
    python tools/checkpoint/verify.py runs/my_run --iteration 40
    python tools/checkpoint/verify.py runs/my_run --all

Prints a line for each checkpoint, or for each damaged file. The exit code is 1 if any checkpoint is damaged, or has no
checksums (those of Megatron-LM and of earlier versions). It needs neither torch nor a GPU.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_grpo.checkpointing import checkpoint_directory
from megatron_grpo.checkpointing.checkpoint_directory import MANIFEST, damage, has_checksums, iteration_directory
from megatron_grpo.utils.errors import GrpoError


def check(directory: Path) -> bool:
    """Print what is wrong with a checkpoint, or that nothing is; return whether nothing is."""
    start = time.perf_counter()
    if not (directory / MANIFEST).exists():
        print(f"{directory}: no {MANIFEST}; it is damaged, or Megatron-LM wrote it: nothing can be checked")
        return False
    problems = list(damage(directory, content=True))
    for problem in problems:
        print(f"{directory}: damaged: {problem}", flush=True)
    if problems:
        return False
    files = [file for file in directory.rglob("*") if file.is_file()]
    size, seconds = sum(file.stat().st_size for file in files), time.perf_counter() - start
    if not has_checksums(directory):
        print(
            f"{directory}: of an earlier version: the sizes of all files are right, the content of *.distcp unchecked"
        )
        return False
    print(f"{directory}: {len(files)} files, {size / 1e9:.3f} GB, all as they were written ({seconds:.1f} s)")
    return True


def main() -> int:
    """Parse the command line, check, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="SAVE_DIR", help="directory of checkpoints: --save of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--iteration", type=int, metavar="N", help="checkpoint to check [the newest]")
    which.add_argument("--all", action="store_true", help="check all checkpoints")
    args = parser.parse_args()
    try:
        if args.iteration is not None:
            chosen = [iteration_directory(args.directory, args.iteration)]
            if not chosen[0].is_dir():
                raise GrpoError(f"{chosen[0]} does not exist")
        else:
            chosen = [checkpoint_directory.find(args.directory)[1]]
        if args.all:
            chosen = checkpoint_directory.iterations(args.directory)
        whole = [check(directory) for directory in chosen]
        return 0 if all(whole) else 1
    except (GrpoError, OSError) as error:  # OSError: a directory that cannot be looked at
        print(f"verify.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
