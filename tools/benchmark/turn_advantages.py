"""Compare how a model learns a game of many turns: one advantage an episode (grpo), or one a turn.

    python tools/benchmark/turn_advantages.py runs/turns --seeds 1 2 3
    python tools/benchmark/turn_advantages.py runs/turns --table    # only the table of the runs that have ended

The game is the environment `text_game`: a key and a chest in a house of nine rooms, in at most 16 turns. The reward is
0.2 for the key and 0.8 for the chest. A tiny model starts with supervised steps on the games of a player whose commands
are random in every fourth turn; in the others it takes, opens, or goes a random way. The warm-up ends when the model
takes a key and opens a chest that it sees with a probability of 0.5. The house of each game has a seed; those of the
evaluation are held out.

All runs share the data and the initial model; the seed is that of prompts and samples. A run that has ended is not
repeated. Flags after `--` are added to all runs.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_grpo.environments.builtin.text_game import TextGame
from megatron_grpo.environments.registry import Turn
from tools import make_tiny_model
from tools.benchmark.staleness import finished_rows, mean_and_error, train

TURNS = 16
ROWS = {"warmup": 4000, "train": 4000, "test": 96}
TEXTS = [
    "user: ",
    "assistant: ",
    "Play.",
    "You see ",
    "nothing",
    "a key",
    "a chest",
    " and ",
    ".",
    " You have the key.",
]
TEXTS += [" Ways: ", ", ", "north", "south", "west", "east", "take", "open", "\n"]
SHAPE = """--num-layers 3 --hidden-size 96 --ffn-hidden-size 256 --num-attention-heads 4 --lr 2e-3
    --max-position-embeddings 512 --batch-size 32 --stop-accuracy 0.5 --quiet"""
FLAGS = f"""--transformer-impl local --environment text_game --max-turns {TURNS} --max-completion-length 64
    --max-environment-tokens 300 --max-prompt-length 40 --num-generations 8 --global-batch-size 96
    --micro-batch-size 48 --vllm-max-num-seqs 96 --reward-funcs environment --loss-type dapo --lr 1e-3
    --lr-decay-style constant --lr-warmup-iters 5 --clip-grad 1.0 --weight-decay 0 --val-before-train --eval-interval 20
    --eval-num-generations 2 --no-save-hf --num-completions-to-log 0"""
METHODS = ("grpo", "turn_returns", "gigpo")
BEGIN = {"role": "user", "content": "Play."}
WINS = [
    *(BEGIN, {"role": "user", "content": "You see a key. Ways: north, east."}),
    {"role": "assistant", "content": "take"},
    {"role": "user", "content": "You see a chest. You have the key. Ways: south, east."},
    {"role": "assistant", "content": "open"},
]


def game(rng: random.Random, seed: int) -> list[dict[str, str]]:
    """Return the conversation of a game of a player that knows the commands, but in every fourth turn not their use."""
    house = TextGame()
    messages = [BEGIN, *house.reset({"seed": seed})]
    for number in range(1, TURNS + 1):
        seen = messages[-1]["content"]
        ways = seen.partition("Ways: ")[2].rstrip(".").split(", ")
        sensible = "take" if "a key" in seen else "open" if "a chest" in seen and "You have" in seen else ""
        command = rng.choice(["north", "south", "west", "east", "take", "open"])
        if rng.random() < 0.75:
            command = sensible or rng.choice(ways)
        messages.append({"role": "assistant", "content": command})
        reply = house.step(Turn(command, number=number))
        if reply.done:
            break
        messages += reply.messages
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def make_inputs(root: Path) -> list[str]:
    """Make the data and the initial model unless they exist; return their flags."""
    data, model = root / "data", root / "model"
    if not data.exists():
        data.mkdir(parents=True)
        rng = random.Random(1)
        houses = iter(rng.sample(range(10**6), sum(ROWS.values())))
        for name, count in ROWS.items():
            seeds = [next(houses) for _ in range(count)]
            if name == "warmup":
                rows: list[dict[str, Any]] = [{"messages": game(rng, seed)} for seed in seeds]
            else:
                rows = [{"messages": [BEGIN], "seed": seed} for seed in seeds]
            (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (data / "valid.jsonl").write_text(json.dumps({"messages": WINS}) + "\n")
    if not model.exists():
        words = ["--save", model, "--train", data / "warmup.jsonl", "--valid", data / "valid.jsonl", *SHAPE.split()]
        make_tiny_model.TOOL_TEXTS = TEXTS  # one token each
        make_tiny_model.make(make_tiny_model.build_parser().parse_args([*map(str, words), "--tokenizer", "tools"]))
    return f"--load-hf {model} --train-data-path {data}/train.jsonl --valid-data-path {data}/test.jsonl".split()


def result(save: Path, updates: int) -> dict[str, float] | None:
    """Return the numbers of a run; None if it has not ended."""
    rows = finished_rows(save, updates)
    if not rows:
        return None
    sampled = {row["iteration"]: row["eval/sampled_reward"] for row in rows if "eval/sampled_reward" in row}
    greedy = {row["iteration"]: row["eval/greedy_reward"] for row in rows if "eval/greedy_reward" in row}
    of_updates = [row for row in rows if "tokens/update" in row]
    return {
        "start": sampled[0],
        "half": sampled[updates // 2],
        "final": sampled[updates],
        "greedy": greedy[updates],
        "turns": sum(row["environment/turns"] for row in of_updates[-10:]) / 10,
        "seconds": sum(row["time/step"] for row in of_updates) / len(of_updates),
    }


def table(root: Path, updates: int) -> str:
    """Return a Markdown table of the runs that have ended."""
    lines = [
        f"| advantages | seeds | reward at the start | after {updates // 2} updates | after {updates} | greedy, after "
        f"{updates} | turns of the last 10 updates | seconds an update |",
        "|---|--:|---|---|---|---|---|--:|",
    ]
    for method in METHODS:
        found = [result(path, updates) for path in sorted(root.glob(f"{method}_seed_*"))]
        runs = [run for run in found if run is not None]
        if runs:
            columns = [mean_and_error([run[name] for run in runs]) for name in runs[0] if name != "seconds"]
            seconds = sum(run["seconds"] for run in runs) / len(runs)
            lines.append(f"| {method} | {len(runs)} | {' | '.join(columns)} | {seconds:.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line, run what is missing, and print the table."""
    own, more = sys.argv[1:], []
    if "--" in own:
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="[1 2 3]")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="NAME", help="[all]")
    parser.add_argument("--updates", type=int, default=40, metavar="N", help="of each run, a multiple of 40 [40]")
    parser.add_argument("--table", action="store_true", help="print the table, and run nothing")
    args = parser.parse_args(own)
    root = args.directory.resolve()
    inputs = [] if args.table else make_inputs(root)
    for seed in [] if args.table else args.seeds:
        for method in args.methods:
            save = root / f"{method}_seed_{seed}"
            if result(save, args.updates) is not None:
                continue
            flags = [*inputs, *FLAGS.split(), "--advantage-estimator", method, "--train-iters", str(args.updates)]
            train(save, [*flags, "--seed", str(seed), "--save", str(save), "--load", str(save), *more])
            print(f"{save.name}: {result(save, args.updates)}", flush=True)
    print(table(root, args.updates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
