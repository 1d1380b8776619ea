"""Check on a CPU that kills lose no finished completion and train none twice, and that a replay equals the run.

    python tools/ledger_check.py runs/ledger_check --mode asynchronous --kills 20 --seed 1
    python tools/ledger_check.py runs/ledger_check --mode partial --kills 20 --nproc-per-node 2
    python tools/ledger_check.py runs/ledger_check --mode synchronous -- --dynamic-sample

A tiny model learns one-digit arithmetic in one run, which is started again after each kill: SIGKILL to all its
processes, or SIGTERM to torchrun (--exit-signal-handler), in turn, at random moments of the start and of training.

    asynchronous    one trainer and one engine rank (--rollout-ranks 1), --max-staleness 2
    partial         one rank, --partial-rollouts, --max-staleness 2
    synchronous     one rank, --ledger

With --nproc-per-node N there are N trainers, of which all but those of asynchronous runs hold an engine. Flags after
`--` are added to all runs.

After each kill the ledger is read. A group of completions that was finished then must be there unchanged at every later
kill and at the end; it is trained on once, or waits for its batch at the end. A batch that was recorded is never
recorded with other groups. Then --replay-rollouts repeats the run from its ledger in a process of its own: metrics and
exported weights must be equal, bit for bit. The exit code is 1 for any difference.
"""

import argparse
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration
from megatron_grpo.rollout.ledger import content
from megatron_grpo.rollout.ledger.content import Content, GroupKey
from megatron_grpo.rollout.ledger.ledger import load, recorded_prompt
from megatron_grpo.utils.errors import GrpoError
from tools.resume_check import Run, at_row, count_rows, differences, make_inputs

UPDATES_PER_KILL, SAVE_INTERVAL, START_SECONDS = 3, 3, 20.0
FLAGS = """--transformer-impl local --num-generations 4 --global-batch-size 32 --micro-batch-size 16 --loss-type dapo
    --lr 1e-3 --lr-decay-style constant --max-prompt-length 6 --max-completion-length 16 --vllm-max-num-seqs 24
    --reward-funcs exact_match --vllm-enforce-eager --mismatch-limit 1
    --rollout-importance-sampling-mode token_truncate --num-completions-to-log 0"""
# Flags of the run alone, and of the run and its replay, which has no engine ranks and records nothing.
MODES = {
    "asynchronous": ("--rollout-ranks 1", "--max-staleness 2"),
    "partial": ("", "--partial-rollouts --max-staleness 2"),
    "synchronous": ("--ledger {save}/ledger", ""),
}

Finished = dict[GroupKey, list[list[int]]]  # token ids of each completion of a group


class History:
    """What kills have left in the ledger of a run; ``replaces``: it has --dynamic-sample."""

    def __init__(self, ledger: Path, replaces: bool):
        self._ledger, self._replaces = ledger, replaces
        self.finished: Finished = {}
        self._equal: set[GroupKey] = set()  # finished groups with equal rewards
        self.batches: dict[int, tuple[GroupKey, ...]] = {}

    def read(self) -> Content:
        """Read the ledger; raise GrpoError for a finished group or a batch that has changed or is lost."""
        found = content.read(self._ledger)
        groups = load(found, found.groups, recorded_prompt)
        now = {key: [c.token_ids for c in group.completions if c is not None] for key, group in groups.items()}
        batches = {number: record.groups for number, record in found.batches.items()}
        check_unchanged("group", self.finished, now)
        check_unchanged("batch", self.batches, batches)
        self.finished, self.batches = now, batches
        self._equal = {
            key for key, group in groups.items() if group.rewards is not None and not group.rewards.std(0).any()
        }
        return found

    def check_end(self, num_batches: int) -> str:
        """Raise GrpoError unless every finished group was trained on once or waits; return a line about them.

        Groups with equal rewards may have been replaced by --dynamic-sample.
        """
        found = self.read()
        if sorted(found.batches) != list(range(num_batches)):
            raise GrpoError(f"the ledger has the batches {sorted(found.batches)}, not {num_batches}")
        trained = Counter(key for record in found.batches.values() for key in record.groups)
        twice = [key for key, count in trained.items() if count > 1]
        if twice:
            raise GrpoError(f"groups {twice} were trained on twice")
        last = found.batches[num_batches - 1]
        started = last.started or {}
        waiting = {number for group in started.get("open", ()) if (number := group["number"]) is not None}
        for (batch, _), (_, complete) in found.unfinished.items():
            waiting |= {key.number for key in complete} if batch == num_batches - 1 else set()
        # Groups that started for the batch after the last one belong to no batch.
        lost = [key for key in self.finished if key not in trained and key.number not in waiting]
        lost = [key for key in lost if key.birth < num_batches and not (self._replaces and key in self._equal)]
        if lost:
            raise GrpoError(f"groups {lost} were finished, and never trained on")
        others = "wait or were replaced" if self._replaces else "wait"
        return f"{len(self.finished)} finished groups, {len(trained)} of them trained on once, the others {others}"


def check_unchanged[K](what: str, before: Mapping[K, object], after: Mapping[K, object]) -> None:
    """Raise GrpoError if a value of ``before`` is missing in ``after``, or another one."""
    for name, value in before.items():
        if after.get(name) != value:
            raise GrpoError(f"{what} {name} is {'lost' if name not in after else 'another one'} after a restart")


def kill(run: Run, name: str) -> None:
    """Send SIGKILL to all processes of the run, or SIGTERM to torchrun, and wait for the end."""
    if name == "SIGKILL":
        run.kill()
        return
    run.process.send_signal(signal.SIGTERM)
    run.process.wait()


def check(args: argparse.Namespace) -> None:
    """Kill a run again and again, let it end, replay it; print a line for each kill; GrpoError for any difference."""
    nproc = args.nproc_per_node + (args.mode == "asynchronous")
    updates = UPDATES_PER_KILL * args.kills + 2
    inputs = make_inputs(args.directory)
    place = inputs.index("--valid-data-path")  # a replay evaluates nothing
    del inputs[place : place + 2]
    flags = [*FLAGS.split(), *inputs, "--train-iters", str(updates), "--save-interval", str(SAVE_INTERVAL), *args.flags]
    save, again = (args.directory / f"{args.mode}{name}" for name in ("", "_replayed"))
    for directory in (save, again):
        shutil.rmtree(directory, ignore_errors=True)
    alone, both = (words.format(save=save).split() for words in MODES[args.mode])
    flags += both
    history, rng = History(save / "ledger", "--dynamic-sample" in args.flags), random.Random(args.seed)
    print(f"{'kill':>4}  {'signal':8}  {'moment':28}  checkpoint  rows  batches  finished groups", flush=True)
    for number in range(1, args.kills + 1):
        name = ("SIGKILL", "SIGTERM")[number % 2]
        run = Run(save, [*flags, *alone, "--exit-signal-handler"], nproc)
        if rng.random() < 0.25:
            text, reached, delay = "start", at_row(0), rng.uniform(0, START_SECONDS)
        else:
            row, delay = count_rows(run) + rng.randint(1, 3), rng.uniform(0, 1)
            text, reached = f"row {row}", at_row(row)
        if not run.wait_until(reached):
            print(f"the run has ended before kill {number}", flush=True)
            break
        time.sleep(delay)
        kill(run, name)
        found = history.read()
        cells = latest_iteration(save) or 0, count_rows(run), len(found.batches), len(history.finished)
        moment = f"{text} + {delay:.2f} s"
        print(
            f"{number:>4}  {name:8}  {moment:28}  {cells[0]:>10}  {cells[1]:>4}  {cells[2]:>7}  {cells[3]}", flush=True
        )
    Run(save, [*flags, *alone, "--exit-signal-handler"], nproc).finish()
    print(history.check_end(updates), flush=True)
    Run(again, [*flags, "--replay-rollouts", str(save)], args.nproc_per_node).finish()
    if changed := differences(again, save):
        raise GrpoError("the replay differs: " + "; ".join(changed))
    print(f"the replay of {updates} updates has the same metrics and weights, bit for bit", flush=True)


def main() -> int:
    """Parse the command line, check, and return the exit code."""
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of all runs")
    parser.add_argument("--mode", choices=MODES, default="asynchronous", help="kind of run [asynchronous]")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="number of kills [20]")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the moments [1]")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="trainers [1]")
    options = parser.parse_args(own)
    options.flags, options.directory = flags, options.directory.resolve()
    try:
        check(options)
    except GrpoError as error:
        print(f"ledger_check.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
