"""Measure wrong starts of pretrain_grpo.py: seconds to the message, and the place of the message on the terminal.

    python tools/benchmark/wrong_starts.py [--only TEXT] [--launcher python]

Makes a small random model and its data in a temporary directory, and starts one run for each mistake in a terminal of
24 lines and 80 columns, by python and by torchrun with two processes. Prints a Markdown table: seconds from the command
to the message, seconds of CPU time until the end, lines on the screen below the message, and the message; above it what
any start takes. The CPU time is that of all processes, and hardly depends on what else the machine does. The exit code
is 1 if a start succeeds, prints a traceback of this program, or has no message on its last screen. Needs pyte
(requirements-test.txt).
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[2]
LINES, COLUMNS = 24, 80
LIMIT_S = 300
MESSAGE = re.compile(r"pretrain_grpo\.py: (?:\[rank \d+\] )?error: (.+)")
OUR_FRAME = re.compile(r'File "[^"]*(/megatron_grpo/|pretrain_grpo\.py)')

GOOD = """--transformer-impl local --micro-batch-size 8 --num-generations 4 --train-iters 2 --lr 1e-3 --beta 0
 --max-prompt-length 8 --max-completion-length 4 --reward-funcs exact_match"""

RIGHT = '{"prompt": "1", "answer": "1"}'  # a row


@dataclass
class Inputs:
    """Directory with the inputs of a valid run."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    def good(self) -> list[str]:
        """Return the flags of a valid run."""
        flags = {"--load-hf": self.model, "--train-data-path": self.root / "train.jsonl", "--save": self.root / "save"}
        return [*GOOD.split(), *(str(word) for pair in flags.items() for word in pair)]

    def rows(self, *lines: str) -> list[str]:
        """Return the flags of a data file with these lines."""
        return ["--train-data-path", str(self.write("bad.jsonl", "\n".join(lines) + "\n"))]

    def write(self, name: str, text: str) -> Path:
        """Write a file and return its path."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def copy(self, *leave_out: str, **files: str) -> list[str]:
        """Return the flags of a copy of the model without some files, and with the texts of others."""
        directory = self.root / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self.model, directory, ignore=shutil.ignore_patterns(*leave_out))
        for name, text in files.items():
            (directory / name).write_text(text)
        return ["--load-hf", str(directory)]

    def config(self, **changes: object) -> list[str]:
        """Return the flags of a copy of the model with changes of config.json."""
        config = json.loads((self.model / "config.json").read_text()) | changes
        return self.copy(**{"config.json": json.dumps(config)})

    def plugin(self, text: str) -> list[str]:
        """Return the flags of a plug-in with this text."""
        path = self.write("plugin.py", f"from megatron_grpo.rewards.registry import register_reward\n{text}\n")
        return ["--external-plugins", str(path), "--reward-funcs", "mine"]

    def truncated(self) -> list[str]:
        """Return the flags of a copy of the model whose weights end too early."""
        flags = self.copy()
        weights = Path(flags[1], "model.safetensors")
        os.truncate(weights, weights.stat().st_size - 100)
        return flags

    def damaged_run(self) -> list[str]:
        """Return the flags that resume a run without its newest checkpoint."""
        run = self.write("run/latest_checkpointed_iteration.txt", "40").parent
        return ["--load", str(run), "--save", str(run)]


Make = Callable[[Inputs], list[str]]


def flags(words: str) -> Make:
    return lambda inputs: words.split()


def without(flag: str, *instead: str) -> Make:
    """Return a function for the words that remove a flag, by a marker that `command` reads, and add others."""
    return lambda inputs: [f"-{flag}", *instead]


def rows(*lines: str) -> Make:
    return lambda inputs: inputs.rows(*lines)


# What is wrong, and the words that make a valid start wrong.
CASES: dict[str, Make] = {
    # flags by themselves
    "a misspelt flag": flags("--num-generation 4"),
    "a flag of TRL": flags("--learning-rate 1e-6"),
    "a setting of verl": flags("data.train_batch_size=64"),
    "a flag of slime": flags("--rollout-max-response-len 64"),
    "a flag of ms-swift that needs no counterpart": flags("--use-vllm true"),
    "a flag that nobody has": flags("--xyzzy 1"),
    "a setting of megatron-core without support": flags("--mamba-num-heads 8"),
    "a word for a number": flags("--lr fast"),
    "a choice that does not exist": flags("--loss-type ppo"),
    "a flag without its value": flags("--temperature"),
    "a value too many": flags("--seed 1 2"),
    "a number out of range": flags("--num-generations 0"),
    "an empty value": lambda inputs: ["--save", ""],
    # flags together
    "no learning rate": without("--lr"),
    "no data": without("--train-data-path"),
    "no reward": without("--reward-funcs"),
    "no model": without("--load-hf"),
    "no length of the run": without("--train-iters"),
    "two lengths of the run": flags("--num-epochs 1"),
    "a batch that groups do not divide": flags("--num-generations 3"),
    "a batch that ranks do not divide": flags("--global-batch-size 20"),
    "more model parallel ranks than processes": flags("--tensor-model-parallel-size 8"),
    "lengths beyond the model's positions": flags("--max-completion-length 4096"),
    "experts in a dense model": flags("--num-experts 8"),
    "Transformer Engine on a CPU": flags("--transformer-impl transformer_engine"),
    "a tracker that is not installed": flags("--wandb-project p"),
    "a flag that this run does not read": flags("--valid-data-path valid.jsonl"),
    # the model's files
    "a name of the Hugging Face hub": flags("--load-hf Qwen/Qwen3-0.6B"),
    "a directory without a model": lambda inputs: ["--load-hf", str(inputs.root)],
    "a model that is not supported": lambda inputs: inputs.config(architectures=["LlavaForConditionalGeneration"]),
    "weights in pickles only": lambda inputs: inputs.copy("*.safetensors", **{"pytorch_model.bin": ""}),
    "weights of an interrupted download": lambda inputs: inputs.truncated(),
    "no tokenizer": lambda inputs: inputs.copy("tokenizer*"),
    # data
    "a data file that does not exist": flags("--train-data-path gone.jsonl"),
    "a line that is not JSON": rows(RIGHT, '{"prompt": "1'),
    "a row without a prompt": rows(RIGHT, '{"text": "2", "answer": "2"}'),
    "a row with images": rows('{"prompt": "1", "answer": "1", "images": ["a.png"]}'),
    "a prompt that is too long": rows(RIGHT, '{"prompt": "1 + 1 + 1 + 1 =", "answer": "4"}'),
    "rows without answers": rows(*['{"prompt": "1+1="}'] * 8),
    # rewards and plug-ins
    "a misspelt reward": flags("--reward-funcs exact_macth"),
    "a plug-in that does not exist": flags("--external-plugins gone.py"),
    "a plug-in with a syntax error": lambda inputs: inputs.plugin("def mine(sample:"),
    "a plug-in that registers nothing": lambda inputs: inputs.plugin("def mine(sample):\n    return 1.0"),
    "a reward that always fails": lambda inputs: inputs.plugin(
        "@register_reward('mine')\ndef mine(sample):\n    return 1 / 0"
    ),
    # directories and servers
    "a directory that cannot be written": flags("--save /proc/run"),
    "a run in its directory": lambda inputs: [
        "--save",
        str(inputs.write("other/latest_checkpointed_iteration.txt", "40").parent),
    ],
    "a checkpoint that is not there": lambda inputs: inputs.damaged_run(),
    "a server that does not answer": flags(
        "--vllm-mode server --vllm-server-base-url http://127.0.0.1:9 --vllm-server-timeout 5"
    ),
}


def command(launcher: str, words: list[str]) -> list[str]:
    """Return the command of a start; a word "---flag" removes the flag with its value from those before."""
    kept: list[str] = []
    for word in words:
        if word.startswith("---"):
            at = kept.index(word[1:])
            del kept[at : at + 2]
        else:
            kept.append(word)
    start = [sys.executable]
    if launcher == "torchrun":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*start, str(ROOT / "pretrain_grpo.py"), *kept]


@dataclass
class Start:
    """What a start showed."""

    code: int | None  # None: it ran into the limit
    text: str
    seconds: float  # until the message, else until the end
    cpu_seconds: float  # of all its processes
    message: str | None
    below: int | None  # lines of the last screen below the message; None if it is not on the last screen


def start(words: list[str], directory: Path) -> Start:
    """Run a command in a terminal of its own, and return what it showed."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    began, cpu_before, seconds, output = time.monotonic(), cpu_time(), None, b""
    process = subprocess.Popen(
        words,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    while time.monotonic() - began < LIMIT_S:
        if not select.select([ours], [], [], 1.0)[0]:
            continue
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal has no writer left
            break
        output += part
        stream.feed(part)
        if seconds is None and message_in(output.decode(errors="replace")):
            seconds = time.monotonic() - began
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    os.close(ours)
    code = process.wait()
    text = output.decode(errors="replace").replace("\r\n", "\n")
    message = message_in(text)
    spent = time.monotonic() - began
    seconds = spent if seconds is None else seconds
    return Start(code, text, seconds, cpu_time() - cpu_before, message, lines_below(screen, message))


def cpu_time() -> float:
    """Return the seconds of CPU time of the processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def message_in(text: str) -> str | None:
    """Return the message of a run: the text behind the first "error: " of our program."""
    for line in text.splitlines():
        found = MESSAGE.match(line)
        if found:
            return found[1].rstrip("\r")
    return None


def lines_below(screen: pyte.Screen, message: str | None) -> int | None:
    """Return how many used lines of the screen are below the last line with the beginning of the message."""
    if message is None:
        return None
    shown = [line.rstrip() for line in screen.display]
    used = max((number for number, line in enumerate(shown) if line), default=0)
    places = [(number, line.index(message[:30])) for number, line in enumerate(shown) if message[:30] in line]
    if not places:
        return None
    line, column = places[-1]
    return max(0, used - line - (column + len(message) - 1) // COLUMNS)  # the message may take several lines


def make_inputs(root: Path) -> Inputs:
    """Write a small random model and eight rows; return them."""
    sizes = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32 --max-position-embeddings 512"
    words = f"--save {root / 'model'} --tokenizer bytes --steps 0 --threads 1 --quiet {sizes}".split()
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_tiny_model.py"), *words], check=True)
    lines = [json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) for a in range(1, 9)]
    inputs = Inputs(root)
    inputs.write("train.jsonl", "\n".join(lines) + "\n")
    return inputs


def seconds_of(words: list[str]) -> str:
    """Return the seconds that a command takes, and those of CPU time, as text."""
    began, cpu_before = time.monotonic(), cpu_time()
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return f"{time.monotonic() - began:.1f} s, {cpu_time() - cpu_before:.1f} s of CPU time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="only the mistakes with this text in their title")
    parser.add_argument("--launcher", choices=("python", "torchrun"), help="start by this one only")
    args = parser.parse_args()
    launchers = [args.launcher] if args.launcher else ["python", "torchrun"]
    chosen = {title: make for title, make in CASES.items() if (args.only or "") in title}
    wrong = 0
    print(f"imports of pretrain_grpo.py: {seconds_of([sys.executable, '-c', 'import pretrain_grpo'])}")
    with tempfile.TemporaryDirectory() as directory:
        if "torchrun" in launchers:
            empty = Path(directory, "empty.py")
            empty.touch()
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(empty)]
            print(f"torchrun of two empty programs: {seconds_of(words)}")
        inputs = make_inputs(Path(directory))
        print("\n| mistake | " + " | ".join(f"{name}: s | CPU s | below" for name in launchers) + " | message |")
        print("|---|" + "--:|--:|--:|" * len(launchers) + "---|")
        for title, make in chosen.items():
            cells, message = [], None
            for launcher in launchers:
                run = start(command(launcher, inputs.good() + make(inputs)), inputs.root)
                fine = run.code and run.message and run.below is not None and not OUR_FRAME.search(run.text)
                if not fine:
                    wrong += 1
                    print(f"{title} ({launcher}): code {run.code}\n{run.text[-3000:]}", file=sys.stderr)
                below = "-" if run.below is None else run.below
                cells.append(f"{run.seconds:.1f} | {run.cpu_seconds:.1f} | {below}")
                message = message or run.message
            shown = (message or "none").replace(str(inputs.root), "DIR").replace("|", "\\|")
            print(f"| {title} | " + " | ".join(cells) + f" | {shown} |", flush=True)
    if wrong:
        sys.exit(f"{wrong} starts did not end as they should: standard error has their output")


if __name__ == "__main__":
    main()
