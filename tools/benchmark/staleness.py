"""Compare how a model learns from stale samples: runs over --max-staleness, with and without importance weights.

    python tools/benchmark/staleness.py runs/staleness --staleness 0 1 4 8 --seeds 1 2 3 4 5
    python tools/benchmark/staleness.py runs/staleness --table    # only the table of the runs that have ended

The task is the sum of k numbers, of which k is drawn from a lognormal distribution: `a2b1c2=` -> `a2b3c0`, the sums up
to each number, modulo 5. The answer has 2 k tokens, so the lengths have a long tail. The reward is 1 for the whole
answer, otherwise 0. A tiny model starts with supervised steps up to 20% of right sampled answers, and learns on a CPU
in one process. With --max-staleness above 0 the runs have --partial-rollouts: K + 1 batches are always open, so that
tokens are about K batches old when they are trained on. A run of 0 is synchronous.

*Uncorrected* runs have rollout importance weights of 1 in place of min(p(policy) / p(sampled), 2).

All runs share the data and the initial model; the seed is that of prompts and samples. A run that has ended is not
repeated. Flags after `--` are added to all runs.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MEDIAN, SIGMA, LONGEST = 3, 0.7, 12  # of k
ROWS = {"warmup": 20_000, "train": 20_000, "valid": 300, "test": 500}
SHAPE = """--tokenizer bytes --max-position-embeddings 64 --num-layers 3 --hidden-size 64 --ffn-hidden-size 160
    --num-attention-heads 2 --num-query-groups 2 --lr 3e-3 --stop-accuracy 0.2 --quiet"""
FLAGS = """--transformer-impl local --num-generations 8 --global-batch-size 448 --micro-batch-size 224
    --max-prompt-length 25 --max-completion-length 32 --vllm-max-num-seqs 4096 --reward-funcs exact_match
    --loss-type dapo --lr 2e-3 --lr-decay-style constant --lr-warmup-iters 10 --clip-grad 1.0 --weight-decay 0
    --val-before-train --eval-interval 10 --eval-num-generations 4 --no-save-hf --num-completions-to-log 0
    --mismatch-limit 5"""
CORRECTION = "--rollout-importance-sampling-mode token_truncate"


def problem(rng: random.Random) -> dict[str, str]:
    """Return a row: numbers from 0 to 2 with a letter each, and the sums up to each number, modulo 5."""
    count = min(max(1, round(MEDIAN * math.exp(SIGMA * rng.gauss(0, 1)))), LONGEST)
    numbers = [rng.randrange(3) for _ in range(count)]
    sums = [sum(numbers[: i + 1]) % 5 for i in range(count)]
    asked, answer = ("".join(f"{a}{b}" for a, b in zip(LETTERS, of, strict=False)) for of in (numbers, sums))
    return {"prompt": f"{asked}=", "answer": answer}


def make_inputs(root: Path) -> list[str]:
    """Make the data and the initial model unless they exist; return their flags."""
    data, model = root / "data", root / "model"
    if not data.exists():
        data.mkdir(parents=True)
        rng, seen = random.Random(1), set()
        for name, count in ROWS.items():
            rows = [problem(rng) for _ in range(count)]
            if name == "test":  # held out, but for the short ones, of which there are few
                rows = [row for row in rows if row["prompt"] not in seen or len(row["prompt"]) < 8]
            seen |= {row["prompt"] for row in rows}
            (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not model.exists():
        words: list[str | Path] = ["--save", model, "--train", data / "warmup.jsonl", "--valid", data / "valid.jsonl"]
        subprocess.run([sys.executable, ROOT / "tools" / "make_tiny_model.py", *words, *SHAPE.split()], check=True)
    return f"--load-hf {model} --train-data-path {data}/train.jsonl --valid-data-path {data}/test.jsonl".split()


def run_name(seed: int, staleness: int, corrected: bool) -> str:
    """Return the folder of a run."""
    return f"staleness_{staleness}{'' if corrected else '_uncorrected'}_seed_{seed}"


def train(save: Path, flags: list[str], corrected: bool = True) -> None:
    """Run pretrain_grpo.py, or `train_uncorrected`, in a process of its own, with its output in ``save``."""
    save.mkdir(parents=True, exist_ok=True)
    script = [str(Path(__file__).resolve()), "--uncorrected"] if not corrected else [str(ROOT / "pretrain_grpo.py")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", *script, *flags]
    with open(save / "output", "w") as output:
        subprocess.run(command, stdout=output, stderr=output, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def train_uncorrected() -> None:
    """Run the training program with rollout importance weights of 1."""
    import torch

    import pretrain_grpo
    from megatron_grpo.algorithm import policy_term
    from megatron_grpo.algorithm.importance_sampling import ImportanceWeights
    from megatron_grpo.training.entry_point import run

    def ones(mode, log_probs, *rest) -> ImportanceWeights:
        return ImportanceWeights(torch.ones_like(log_probs), torch.zeros_like(log_probs, dtype=torch.bool))

    with mock.patch.object(policy_term, "importance_weights", ones):
        run(pretrain_grpo.main)


def finished_rows(save: Path, updates: int) -> list[dict[str, float]]:
    """Return the metrics of a run, an object an update; [] if it has not ended."""
    file = save / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return rows if rows and rows[-1]["iteration"] >= updates else []


def result(save: Path, updates: int) -> dict[str, float] | None:
    """Return the numbers of a run; None if it has not ended."""
    rows = finished_rows(save, updates)
    if not rows:
        return None
    sampled = {row["iteration"]: row["eval/sampled_accuracy"] for row in rows if "eval/sampled_accuracy" in row}
    of_updates = [row for row in rows if "tokens/update" in row]
    mean = lambda name: sum(row.get(name, 0.0) for row in of_updates) / len(of_updates)  # noqa: E731
    return {
        "start": sampled[0],
        "half": sampled[updates // 2],
        "final": sampled[updates],
        "reward": sum(row["reward/mean"] for row in of_updates[-20:]) / 20,
        "staleness": mean("staleness/mean"),
        "sample size": mean("mismatch/effective_sample_size"),
        "seconds": sum(row["time/step"] for row in of_updates) - sum(row.get("time/eval", 0.0) for row in of_updates),
    }


def mean_and_error(values: list[float]) -> str:
    """Return "mean ± standard error"."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return f"{mean:.3f} ± {error:.3f}"


def table(root: Path, updates: int) -> str:
    """Return a Markdown table of the runs that have ended."""
    lines = [
        f"| K | importance weights | seeds | sampled accuracy at the start | after {updates // 2} updates "
        f"| after {updates} | mean reward of the last 20 updates | mean staleness | effective sample size | seconds |",
        "|--:|---|--:|--:|---|---|---|--:|--:|--:|",
    ]
    kinds: dict[tuple[int, bool], list[dict[str, float]]] = {}  # by staleness and whether there are importance weights
    for path in root.glob("staleness_*_seed_*"):
        words = path.name.split("_")
        found = result(path, updates)
        if found is not None:
            kinds.setdefault((int(words[1]), words[2] != "uncorrected"), []).append(found)
    for (staleness, corrected), runs in sorted(kinds.items()):
        columns = {name: [run[name] for run in runs] for name in runs[0]}
        means = {name: sum(values) / len(values) for name, values in columns.items()}
        weights = "–" if staleness == 0 else "at most 2" if corrected else "none"
        measured = [f"{means['start']:.3f}", *(mean_and_error(columns[name]) for name in ("half", "final", "reward"))]
        measured += [f"{means['staleness']:.2f}", f"{means['sample size']:.2f}", f"{means['seconds']:.0f}"]
        lines.append(f"| {staleness} | {weights} | {len(runs)} | {' | '.join(measured)} |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line, run what is missing, and print the table."""
    if sys.argv[1:2] == ["--uncorrected"]:
        del sys.argv[1]
        train_uncorrected()
        return 0
    own, more = sys.argv[1:], []
    if "--" in own:
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of all runs")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 8], metavar="K", help="[0 1 4 8]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N", help="[1 2 3 4 5]")
    parser.add_argument("--updates", type=int, default=60, metavar="N", help="of each run, a multiple of 20 [60]")
    parser.add_argument("--table", action="store_true", help="print the table, and run nothing")
    args = parser.parse_args(own)
    root = args.directory.resolve()
    inputs = [] if args.table else make_inputs(root)
    for seed in [] if args.table else args.seeds:
        for staleness in args.staleness:
            for corrected in (True, False) if staleness else (True,):
                save = root / run_name(seed, staleness, corrected)
                if result(save, args.updates) is not None:
                    continue
                flags = [*inputs, *FLAGS.split(), "--train-iters", str(args.updates), "--seed", str(seed)]
                flags += ["--save", str(save), "--load", str(save), *more]
                if staleness:
                    flags += f"--partial-rollouts --max-staleness {staleness} {CORRECTION}".split()
                train(save, flags, corrected)
                print(f"{save.name}: {result(save, args.updates)}", flush=True)
    print(table(root, args.updates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
