"""Compare losses, advantages and KL with the functions of TRL and verl on the same numbers: values and gradients.

    pip install --no-deps --target /tmp/trl trl accelerate
    pip install --no-deps --target /tmp/verl verl
    python tools/against_others.py --trl /tmp/trl --verl /tmp/verl

Neither library is a dependency, and no code of theirs is copied. They are imported from the given directories, which
may be clones (of versions that are compatible with the installed transformers). Packages that they import but that the
called functions do not use are replaced by empty modules. TRL's methods are called on a trainer without set-up, which
has only the attributes that they read.

Prints a Markdown table with the largest difference of the loss and of its gradient with respect to the
log-probabilities (or of the advantages, or of the weights), relative to the largest compared number, and the reason for
a known difference. The exit code is 1 for an unexpected difference, or if a known difference no longer exists.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from tools.others import Case, made_up
from tools.others_trl import Trl, of_trl
from tools.others_verl import Verl, of_verl

SAME = 1e-6  # this project computes advantages, token weights and rollout importance weights in float32


def differences(case: Case) -> list[float]:
    """Return the largest difference of the value and of the gradient, if any, relative to the largest number."""
    ours, theirs = case.ours(case.data, case.flags), case.theirs(case.data)
    if isinstance(ours, Tensor):
        ours, theirs = (ours,), (theirs,)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in zip(ours, theirs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, metavar="DIR", help="directory with TRL's package, trl/")
    parser.add_argument("--verl", type=Path, required=True, metavar="DIR", help="directory with verl's package, verl/")
    args = parser.parse_args()
    torch.manual_seed(0)
    data, wrong = made_up(), 0
    trl, verl = Trl(args.trl), Verl(args.verl)
    for version, cases in (trl.version, of_trl(trl, data)), (verl.version, of_verl(verl, data)):
        print(f"\n| {version} | our flags | theirs | value | gradient | |\n|---|---|---|---|---|---|")
        for case in cases:
            numbers = differences(case)
            unexpected = (max(numbers) > SAME) != bool(case.difference)
            wrong += unexpected
            verdict = "UNEXPECTED " * unexpected + (case.difference or "same")
            shown = " | ".join(f"{number:.0e}" if number else "0" for number in numbers) + " |" * (2 - len(numbers))
            print(f"| {case.thing} | `{case.flags}` | {case.function} | {shown} | {verdict} |")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
