"""Check on a CPU that a killed and resumed run equals an undisturbed run bit by bit.

    python tools/resume_check.py runs/resume_check --kills 10 --seed 1 [-- FLAGS OF pretrain_grpo.py]
    python tools/resume_check.py runs/resume_check --kills 100 --one-run

A tiny model learns one-digit arithmetic: first undisturbed, then once for each kill in a new directory. There all
processes of the run get SIGKILL at a random moment, and the same command is run again. `metrics.jsonl` (without
timings), both files of completions and the exported model must be equal. --seed determines the moments, of four kinds:

    training    at a random number of rows in metrics.jsonl, and up to 0.2 s later
    saving      after the directory of a random checkpoint appears, by up to the duration of the shortest save
    starting    during the start, without a checkpoint to resume from
    resuming    as training, and once more during the following start

With --one-run all kills are of one run, which is resumed again and again, with three updates for each kill. It has two
more kinds:

    launcher    as training, but only torchrun gets SIGKILL; all other processes must end within 5 s
    background  as saving, while the checkpoint is written in the background (--async-save)

Three jobs alternate: one update per rollout; four, with a token budget and the distributed optimizer; and partial
rollouts. Flags after `--` apply to all jobs, such as `--tensor-model-parallel-size 2`. The exit code is 1 for any
difference.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil

from megatron_grpo.checkpointing.checkpoint_directory import iteration_directory, latest_iteration, read_checkpoint_args
from megatron_grpo.utils.errors import GrpoError

UPDATES = 24
COMMON = f"""--transformer-impl local --num-generations 4 --global-batch-size 128 --train-iters {UPDATES}
    --lr 1e-3 --lr-decay-style linear --lr-warmup-iters 4 --beta 0.02 --max-prompt-length 6 --max-completion-length 4
    --reward-funcs exact_match --val-before-train --vllm-enforce-eager --max-checkpoints-to-keep 2"""
JOBS = {
    "one update": """--micro-batch-size 16 --loss-type dapo --save-interval 2 --eval-interval 4
        --rollout-importance-sampling-mode sequence_truncate --mismatch-sample-rate 0 --top-k 8
        --frequency-penalty 0.1""",
    "four updates": """--max-tokens-per-microbatch 80 --steps-per-generation 2 --num-iterations 2 --save-interval 4
        --eval-interval 8 --eval-num-generations 2 --log-interval 3 --mismatch-sample-rate 0.5
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather""",
    "partial rollouts": """--micro-batch-size 16 --loss-type dapo --save-interval 2 --eval-interval 4
        --max-completion-length 16 --partial-rollouts --max-staleness 2 --mismatch-limit 1
        --rollout-importance-sampling-mode token_truncate""",
}
KINDS = ("training", "saving", "training", "saving", "starting", "saving", "training", "training", "saving", "resuming")
KINDS_OF_ONE_RUN = (
    "training", "saving", "training", "background", "starting", "training", "launcher", "saving", "training", "saving"
)  # fmt: skip
SECONDS_TO_END = 5.0  # for all processes, after a kill of torchrun alone
TIME_LIMIT = 600.0  # seconds for one run


@dataclass(frozen=True)
class Moment:
    """The moment to kill a run: `delay` seconds after `reached(run)` becomes true."""

    text: str
    reached: Callable[["Run"], bool]
    delay: float


class Run:
    """A run of pretrain_grpo.py under torchrun, with `save` as its --save and its --load."""

    def __init__(self, save: Path, flags: Sequence[str], nproc: int = 2):
        save.mkdir(parents=True, exist_ok=True)
        self.save, self.started = save, time.monotonic()
        self.log_file = save / f"log.{len(list(save.glob('log.*')))}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command += [str(ROOT / "pretrain_grpo.py"), *flags, "--save", str(save), "--load", str(save)]
        # Temporary files of a killed run are deleted with this object.
        self._temporary = tempfile.TemporaryDirectory(prefix="resume_check_", ignore_cleanup_errors=True)
        own = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TMPDIR": self._temporary.name}
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def log(self) -> str:
        """Return the output so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started

    @property
    def resumed_from(self) -> int:
        """Return the iteration of the checkpoint that was resumed; 0 without one."""
        found = re.search(r"^resumed from .* at iteration ([0-9]+)$", self.log, re.MULTILINE)
        return int(found[1]) if found else 0

    def finish(self, limit: float = TIME_LIMIT) -> "Run":
        """Wait for the end; raise GrpoError with the end of the log for a non-zero exit status."""
        status: int | str
        try:
            status = self.process.wait(max(1.0, limit - self.seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            status = f"killed after {limit:.0f} s"
        if status != 0:
            tail = "\n".join(self.log.splitlines()[-30:])
            raise GrpoError(f"exit status {status} of the run in {self.save}; {self.log_file} ends with\n{tail}")
        return self

    def wait_until(self, reached: Callable[["Run"], bool], limit: float = TIME_LIMIT) -> bool:
        """Wait until `reached(run)` is true; return False if the run ends first.

        Raises GrpoError if it ends with a non-zero exit status.
        """
        while not reached(self):
            if self.process.poll() is not None or self.seconds > limit:
                self.finish(limit)
                return False
            time.sleep(0.001 if limit <= TIME_LIMIT else 0.2)
        return True

    def kill_at(self, moment: Moment) -> bool:
        """Send SIGKILL at ``moment``; return False if the run ends first."""
        if not self.wait_until(moment.reached):
            return False
        time.sleep(moment.delay)
        return self.kill()

    def kill(self, launcher_only: bool = False) -> bool:
        """Send SIGKILL to torchrun and all ranks, or to torchrun alone; return False if the run has already ended.

        torchrun starts each rank in a separate session, so ranks are found as its children. All other processes must
        exit on their own. Raises GrpoError if one is still alive after a minute (torchrun alone: `SECONDS_TO_END`).
        """
        if self.process.poll() is not None:
            return False
        self.process.send_signal(signal.SIGSTOP)  # prevents new processes in the meantime
        torchrun = psutil.Process(self.process.pid)
        ranks, family = torchrun.children(), torchrun.children(recursive=True)
        for process in (torchrun, *([] if launcher_only else ranks)):
            _kill(process)
        self.process.wait()
        deadline = time.monotonic() + (SECONDS_TO_END if launcher_only else 60)
        while left := [process for process in family if _alive(process)]:
            if time.monotonic() > deadline:
                names = ", ".join(f"{process.pid} {process.name()}" for process in left)
                for process in left:
                    _kill(process)
                raise GrpoError(f"these processes outlived the killed run in {self.save}: {names}")
            time.sleep(0.01)
        return True


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()  # psutil first checks that the process id was not reused


@dataclass(frozen=True)
class Reference:
    """A job and its undisturbed run, the reference for the killed runs."""

    flags: list[str]
    save: Path
    start_seconds: float  # until the first row
    nproc: int = 2


def make_inputs(directory: Path) -> list[str]:
    """Make the data and a model that is sometimes correct; return the flags of both."""
    data, model = directory / "data", directory / "model"
    tools: list[list] = [
        ["data/arithmetic.py", "--save", data, "--digits", "1", "--operations", "+", "-"],
        ["make_tiny_model.py", "--save", model, "--train", data / "train.jsonl", "--valid", data / "train.jsonl"]
        + "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --max-position-embeddings 32 --quiet".split(),
    ]
    for tool, *words in tools:
        command = [sys.executable, str(ROOT / "tools" / tool), *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise GrpoError(f"{' '.join(command)} failed:\n{done.stdout}")
    files = ["--train-data-path", data / "train.jsonl", "--valid-data-path", data / "test.jsonl", "--load-hf", model]
    return list(map(str, files))


def make_reference(save: Path, flags: list[str], nproc: int = 2) -> Reference:
    """Run a job undisturbed; raise GrpoError for an update without a gradient, because such a run proves nothing."""
    run = Run(save, flags, nproc)
    run.wait_until(lambda run: count_rows(run) > 0)
    seconds = run.seconds
    run.finish()
    if not all(row["grad_norm"] > 0 for row in read_rows(save / "metrics.jsonl") if "grad_norm" in row):
        raise GrpoError(f"the run in {save} has updates without a gradient: there is nothing to compare")
    return Reference(flags, save, seconds, nproc)


def draw_moment(kind: str, rng: random.Random, reference: Reference) -> Moment:
    """Draw a random moment of a kind, within the whole duration of the run."""
    rows = read_rows(reference.save / "metrics.jsonl")
    if kind == "saving":
        length = min(row["time/save"] for row in rows if "time/save" in row)
        interval = read_checkpoint_args(reference.save)["save_interval"]
        return saving(rng.randrange(interval, rows[-1]["iteration"] + 1, interval), rng.uniform(0, length))
    if kind == "training":
        number, delay = rng.randint(1, len(rows)), rng.uniform(0, 0.2)
        return Moment(f"row {number} + {1000 * delay:.0f} ms", lambda run: count_rows(run) >= number, delay)
    seconds = rng.uniform(0, reference.start_seconds)
    if kind == "resuming":
        return Moment(f"start + {seconds:.1f} s", after(seconds), 0.0)
    # At the first row at the latest, even after a fast start: there is no checkpoint yet.
    return Moment(f"start + {seconds:.1f} s", lambda run: run.seconds >= seconds or count_rows(run) > 0, 0.0)


def after(seconds: float) -> Callable[[Run], bool]:
    """Return the function that tells whether a run has lasted for so many seconds."""
    return lambda run: run.seconds >= seconds


def at_row(iteration: int) -> Callable[[Run], bool]:
    """Return the function that tells whether this process of a run has written the row of an iteration."""
    return lambda run: last_row(run) >= iteration


def saving(iteration: int, delay: float) -> Moment:
    """Return the moment `delay` seconds after the save of an iteration begins."""
    final = iteration_directory("", iteration)
    names = (f"{final}.tmp", final)  # the final name, in case the temporary one existed too briefly

    def begun(run: Run) -> bool:
        return any((run.save / name).exists() for name in names)

    return Moment(f"save {iteration} + {1000 * delay:.0f} ms", begun, delay)


def kill_and_resume(kind: str, rng: random.Random, reference: Reference, save: Path) -> tuple[list[str], list[str]]:
    """Kill a new run in `save` at a random moment, start it again, and compare.

    Returns the cells of the table (moment, checkpoints after the kill, resumed iteration, compared rows) and the
    differences. A moment after the end of the run is drawn again.
    """
    moments, left = [], ""
    for part in ("training", "resuming") if kind == "resuming" else (kind,):
        killed = False
        while not killed:
            if part != "resuming":
                shutil.rmtree(save, ignore_errors=True)
            moment = draw_moment(part, rng, reference)
            killed = Run(save, reference.flags, reference.nproc).kill_at(moment)
        moments.append(moment.text)
    latest = latest_iteration(save)
    leftovers = [path.name for path in sorted(save.glob("iter_*")) if path.suffix]
    left = ", ".join(["nothing" if latest is None else f"iteration {latest}", *leftovers])
    run = Run(save, reference.flags, reference.nproc).finish()
    rows = [row["iteration"] for row in read_rows(save / "metrics.jsonl")]
    new = sum(iteration > run.resumed_from or run.resumed_from == 0 for iteration in rows)
    cells = [", then ".join(moments), left, str(run.resumed_from), f"{new} of {len(rows)}"]
    return cells, differences(save, reference.save)


def kill_one_run(kills: int, rng: random.Random, reference: Reference, save: Path) -> list[str]:
    """Kill and resume one run; print a line for each kill, and return the differences at the end."""
    form = "{:>4}  {:10}  {:34}  {:>12}  {:>8}"
    print(form.format("kill", "kind", "moment", "resumed from", "rows"), flush=True)
    last = read_rows(reference.save / "metrics.jsonl")[-1]["iteration"]
    interval = read_checkpoint_args(reference.save)["save_interval"]
    for number in range(1, kills + 1):
        kind = KINDS_OF_ONE_RUN[(number - 1) % len(KINDS_OF_ONE_RUN)]
        done = latest_iteration(save) or 0 if save.exists() else 0
        if kind == "starting":
            seconds = rng.uniform(0, reference.start_seconds)
            moment = Moment(f"start + {seconds:.1f} s", after(seconds), 0.0)
        elif kind in ("saving", "background"):
            moment = saving(min(done + interval, last), rng.uniform(0, 0.3 if kind == "saving" else 1.0))
        else:
            row, delay = done + rng.randint(1, 2), rng.uniform(0, 0.3)
            moment = Moment(f"row {row} + {1000 * delay:.0f} ms", at_row(row), delay)
        flags = [*reference.flags, *(["--async-save"] if kind == "background" else [])]
        run = Run(save, flags, reference.nproc)
        if run.wait_until(moment.reached):
            time.sleep(moment.delay)
            killed = run.kill(launcher_only=kind == "launcher")
        else:
            killed = False
        if not killed:
            raise GrpoError(f"the run ended before kill {number}: give more updates")
        print(form.format(number, kind, moment.text, run.resumed_from, count_rows(run)), flush=True)
    Run(save, reference.flags, reference.nproc).finish()
    return differences(save, reference.save)


def last_row(run: Run) -> int:
    """Return the iteration of the newest row of metrics.jsonl; 0 until this process of the run has written one."""
    file = run.save / "metrics.jsonl"
    if not re.search(r"^iteration +[0-9]+/", run.log, re.MULTILINE):
        return 0
    newest = file.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2]
    return json.loads(newest)["iteration"] if newest else 0


def differences(save: Path, reference: Path) -> list[str]:
    """Return descriptions of all differences between a finished run and the reference."""
    found = []
    for name in ("metrics.jsonl", "completions.jsonl", "eval_completions.jsonl"):
        if not (reference / name).exists():  # of a run without evaluations
            continue
        missing: dict[str, Any] = {}
        pairs = zip_longest(read_rows(save / name), read_rows(reference / name), fillvalue=missing)
        for number, (row, expected) in enumerate(pairs, start=1):
            keys = [key for key in {**expected, **row} if row.get(key) != expected.get(key) and not _is_timing(key)]
            if keys:
                values = f"{keys[0]} is {row.get(keys[0])!r} instead of {expected.get(keys[0])!r}"
                found.append(f"{name}, row {number}, iteration {expected.get('iteration')}: {values}")
                break  # later rows differ as a consequence
    files, expected_files = (_contents(directory / "hf_model") for directory in (save, reference))
    for name in sorted(files.keys() | expected_files.keys()):
        if files.get(name) != expected_files.get(name):
            found.append(f"hf_model/{name} differs")
    left = [path.name for path in sorted(save.iterdir()) if path.suffix in (".tmp", ".old", ".partial")]
    return found + [f"{name} was not deleted" for name in left]


def count_rows(run: Run) -> int:
    """Return the rows of metrics.jsonl, of this run and of earlier runs in the same directory."""
    file = run.save / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def read_rows(file: Path) -> list[dict]:
    """Return all rows of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _is_timing(key: str) -> bool:
    return key.startswith(("time/", "perf/"))


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.is_dir() else {}


def check(args: argparse.Namespace) -> bool:
    """Run all kills, print a line of the table for each, and return whether all runs were equal."""
    inputs = make_inputs(args.directory)
    if args.one_run:
        return check_one_run(args, inputs)
    references = []
    for job, words in list(JOBS.items())[: args.kills]:
        save = args.directory / f"undisturbed, {job}".replace(", ", "_").replace(" ", "_")
        shutil.rmtree(save, ignore_errors=True)
        reference = make_reference(save, [*COMMON.split(), *words.split(), *inputs, *args.flags], args.nproc_per_node)
        print(f"undisturbed, {job} a rollout: first row after {reference.start_seconds:.0f} s", flush=True)
        references.append((job, reference))

    form = "{:>4}  {:12}  {:8}  {:34}  {:32}  {:>12}  {:>8}  {}"
    print(form.format("kill", "job", "kind", "moment", "left", "resumed from", "rows", "identical"), flush=True)
    rng, equal = random.Random(args.seed), True
    for number in range(1, args.kills + 1):
        kind = KINDS[(number - 1) % len(KINDS)]
        job, reference = references[(number - 1) // 2 % len(references)]
        cells, different = kill_and_resume(kind, rng, reference, args.directory / f"kill_{number}")
        print(form.format(number, job, kind, *cells, "no" if different else "yes"), flush=True)
        for text in different:
            print(f"      {text}", flush=True)
        equal = equal and not different
    return equal


def check_one_run(args: argparse.Namespace, inputs: list[str]) -> bool:
    """Run an undisturbed run and one with all kills; return whether both are equal."""
    words = [*COMMON.split(), *JOBS["one update"].split(), *inputs, *args.flags, "--train-iters", str(3 * args.kills)]
    for name in ("undisturbed_one", "killed_one"):
        shutil.rmtree(args.directory / name, ignore_errors=True)
    reference = make_reference(args.directory / "undisturbed_one", words, args.nproc_per_node)
    print(f"undisturbed: first row after {reference.start_seconds:.0f} s", flush=True)
    found = kill_one_run(args.kills, random.Random(args.seed), reference, args.directory / "killed_one")
    print("\n".join(found) or f"identical after {args.kills} kills", flush=True)
    return not found


def main() -> int:
    """Parse the command line, check, and return the exit code."""
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="folder of all runs")
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="number of kills [10]")
    parser.add_argument("--one-run", action="store_true", help="kill one run again and again")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the moments [1]")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="ranks [2]")
    options = parser.parse_args(own)
    options.flags, options.directory = flags, options.directory.resolve()
    try:
        return 0 if check(options) else 1
    except GrpoError as error:
        print(f"resume_check.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
