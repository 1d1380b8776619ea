"""Our algorithms beside TRL's and verl's own functions, on the same numbers: values, gradients, and who is right.

    pip install --no-deps --target /tmp/trl trl accelerate
    pip install --no-deps --target /tmp/verl verl
    python tools/against_others.py --trl /tmp/trl --verl /tmp/verl

Neither is a dependency, and no line of theirs is here: they are imported from the directories given, which may be
clones (of versions that go with the transformers installed), with empty stand-ins for what they import and the
functions called do not use. TRL's methods are called on a trainer that was never set up and holds only what they read.
Prints a Markdown table: the largest difference of the loss
and of its gradient with respect to the log-probabilities (or of the advantages, or of the factors), relative to the
largest number that is compared. Exit code 1 when what should be the same differs, or the other way round: then the
words here are out of date.
"""

import argparse
from pathlib import Path

import torch
from others import Case, made_up
from others_trl import Trl, of_trl
from others_verl import Verl, of_verl
from torch import Tensor

SAME = 1e-6  # advantages, weights and corrections are float32 with us


def differences(case: Case) -> list[float]:
    """Largest difference of value and, where there is one, gradient, relative to the largest number."""
    ours, theirs = case.ours(case.data, case.flags), case.theirs(case.data)
    if isinstance(ours, Tensor):
        ours, theirs = (ours,), (theirs,)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in zip(ours, theirs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="directory that holds TRL's package, trl/")
    parser.add_argument("--verl", type=Path, required=True, help="directory that holds verl's package, verl/")
    args = parser.parse_args()
    torch.manual_seed(0)
    data, wrong = made_up(), 0
    for library, cases in ((Trl(args.trl), of_trl), (Verl(args.verl), of_verl)):
        print(f"\n| {library.version} | our flags | theirs | value | gradient | |\n|---|---|---|---|---|---|")
        for case in cases(library, data):
            numbers = differences(case)
            unexpected = (max(numbers) > SAME) != bool(case.difference)
            wrong += unexpected
            verdict = "UNEXPECTED " * unexpected + (case.difference or "same")
            shown = " | ".join(f"{number:.0e}" if number else "0" for number in numbers) + " |" * (2 - len(numbers))
            print(f"| {case.thing} | `{case.flags}` | {case.function} | {shown} | {verdict} |")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
