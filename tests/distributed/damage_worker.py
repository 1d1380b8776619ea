"""What test_damage.py runs: a checkpoint of a real model with every kind of damage, loaded and verified.

    torchrun --nproc-per-node 1 tests/distributed/damage_worker.py DIRECTORY 1

prints a line for each kind (with N in place of 1: for one in N): the message of the load, or LOADED. Two checkpoints of
one run lie beside each other (iterations 2 and 4); damage is done to the newer one.
"""

import os
import random
import shutil
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]
from checkpoint_worker import DISTRIBUTED, POSITION, build, update

from megatron_grpo.checkpointing import checkpoint, checkpoint_directory
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

OWN = ("files.json", "args.json", "checksums.json")
FILES = ("__0_0.distcp", ".metadata", "metadata.json", *OWN)
REFERENCE = tuple(f"reference/{name}" for name in FILES if name not in ("files.json", "args.json"))
LATEST = checkpoint_directory.LATEST


def flip(file, place, bit=1):
    """Change one bit at a relative place of a file."""
    with open(file, "r+b") as opened:
        position = min(int(place * file.stat().st_size), file.stat().st_size - 1)
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ bit]))


def zero_page(file):
    """Zero the page in the middle of a file, as a file system does with a block that it lost."""
    size = file.stat().st_size
    with open(file, "r+b") as opened:
        opened.seek(size // 2)
        opened.write(bytes(min(4096, size - size // 2)))


def append(file):
    """Add a byte."""
    with open(file, "ab") as opened:
        opened.write(b"\0")


def replace_by_directory(file):
    """Put a directory in the place of a file."""
    file.unlink()
    file.mkdir()


def exchange(file, other):
    """Give a file the content of the same file of the other iteration; if they are equal, that of another file."""
    theirs = other.read_bytes()
    file.write_bytes(theirs if theirs != file.read_bytes() else theirs[::-1])


BY_FILE = {
    "a bit at its start": lambda file, other: flip(file, 0.0),
    "a bit in its middle": lambda file, other: flip(file, 0.5),
    "a bit at its end": lambda file, other: flip(file, 1.0),
    "a page of zeros": lambda file, other: zero_page(file),
    "cut in half": lambda file, other: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file, other: os.truncate(file, 0),
    "a byte more": lambda file, other: append(file),
    "removed": lambda file, other: file.unlink(),
    "of the other iteration": exchange,
    "a directory in its place": lambda file, other: replace_by_directory(file),
}


def rename_over(root):
    """Give the directory of iteration 2 the name of iteration 4."""
    shutil.rmtree(root / "iter_0000004")
    (root / "iter_0000002").rename(root / "iter_0000004")


def all_files_of_the_other(root):
    """Replace every file by that of the other iteration."""
    shutil.rmtree(root / "iter_0000004")
    shutil.copytree(root / "iter_0000002", root / "iter_0000004")


def forget(root):
    """Remove the files that only this program writes: what is left looks like Megatron-LM's."""
    for name in OWN:
        (root / "iter_0000004" / name).unlink()


def no_latest_nor_whole(root):
    """Remove the pointer and damage both checkpoints."""
    (root / LATEST).unlink()
    for directory in root.glob("iter_*"):
        (directory / "metadata.json").unlink()


def exchange_within(root):
    """Exchange two data files of one size within a checkpoint: the policy's and the reference's."""
    one, other = root / "iter_0000004" / "__0_0.distcp", root / "iter_0000004" / "reference" / "__0_0.distcp"
    data = one.read_bytes()
    one.write_bytes(other.read_bytes().ljust(len(data), b"\0")[: len(data)])


# kind -> (damage to the folder of the run, what its message names)
OF_THE_RUN = {
    "iteration 2 renamed to iteration 4": (rename_over, "files.json is that of iteration 2"),
    "iteration 2 copied over iteration 4": (all_files_of_the_other, "files.json is that of iteration 2"),
    "own files removed": (forget, "files.json is missing"),
    "content of the reference's data file": (exchange_within, "__0_0.distcp"),
    "the directory removed": (lambda root: shutil.rmtree(root / "iter_0000004"), "iter_0000004 does not exist"),
    "a file in place of the directory": (
        lambda root: (shutil.rmtree(root / "iter_0000004"), (root / "iter_0000004").touch()),
        "iter_0000004 does not exist",
    ),
    f"{LATEST} emptied": (lambda root: os.truncate(root / LATEST, 0), LATEST),
    f"{LATEST} of zeros": (lambda root: (root / LATEST).write_bytes(bytes(8)), LATEST),
    f"{LATEST} names another": (lambda root: (root / LATEST).write_text("40"), "iter_0000040 does not exist"),
    f"a bit of {LATEST}": (lambda root: flip(root / LATEST, 0.0, 64), LATEST),
    f"a directory in place of {LATEST}": (lambda root: replace_by_directory(root / LATEST), LATEST),
    f"no {LATEST}, nothing whole": (no_latest_nor_whole, LATEST),
}


def kinds():
    """Yield (kind, damage, what the message must name)."""
    for name in (*FILES, *REFERENCE):
        for kind, change in BY_FILE.items():
            yield (
                f"{name}: {kind}",
                lambda root, name=name, change=change: change(
                    root / "iter_0000004" / name, root / "iter_0000002" / name
                ),
                Path(name).name,
            )
    for kind, (damage, names) in OF_THE_RUN.items():
        yield kind, damage, names


def random_bits(number, seed=0):
    """Yield kinds of one flipped bit anywhere in the files that a resume reads."""
    draw = random.Random(seed)
    for _ in range(number):
        name = draw.choice((*FILES, *REFERENCE))
        place, bit = draw.random(), 1 << draw.randrange(8)
        yield (
            f"{name}: bit {bit} at {place:.4f}",
            lambda root, name=name, place=place, bit=bit: flip(root / "iter_0000004" / name, place, bit),
            Path(name).name,
        )


def main(root, share):
    """Save two checkpoints; damage, verify and load copies of them."""
    source = root / "source"
    args, model, optimizer, scheduler = build(*DISTRIBUTED, "--save", str(source))
    parts = model, optimizer, scheduler
    for iteration in (2, 4):
        update(*parts, iteration)
        checkpoint.save_checkpoint(
            args, iteration, *parts, POSITION, lambda folder: checkpoint.save_weights(folder, model)
        )
    args = replaced(args, load=str(root / "damaged"), save=None)

    def load():
        assert checkpoint.latest_iteration(args.load)
        checkpoint.read_checkpoint_args(args.load)
        checkpoint.load_checkpoint(args, *parts)
        checkpoint.read_weights(checkpoint.updated_reference(args.load), model)

    damages = [*kinds(), *random_bits(40)]
    for kind, damage, names in [("nothing", lambda root: None, None), *damages[::share]]:
        shutil.copytree(source, root / "damaged", copy_function=os.link if kind == "nothing" else shutil.copy)
        damage(root / "damaged")
        try:
            load()
            found = "LOADED"
        except GrpoError as error:
            found = str(error)
        wrong = (found != "LOADED") if names is None else (names not in found)
        directory = root / "damaged" / "iter_0000004"
        problems = list(checkpoint_directory.damage(directory, content=True)) if directory.is_dir() else ["absent"]
        if names is not None and LATEST not in kind and not any(names in problem for problem in [*problems, found]):
            wrong = True
        if names is not None and LATEST not in kind and not problems:
            wrong, found = True, f"verify finds nothing; {found}"
        print(f"{'NOT FOUND' if wrong else 'found'} | {kind} | {found}", flush=True)
        shutil.rmtree(root / "damaged")


if __name__ == "__main__":
    folder, one_in = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv[1:] = []
    run(lambda: main(folder, one_in))
