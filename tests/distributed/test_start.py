"""At the start rank 0 alone verifies the checkpoint and reads the data; all ranks end with its one message."""

import json
import re
from pathlib import Path

import pytest
from ranks import run_torchrun
from slow import slow_except

pytestmark = pytest.mark.distributed
WORKER = "tests/distributed/start_worker.py"
FLAGS = """--rollout-engine megatron --transformer-impl local --num-generations 2 --micro-batch-size 2
    --global-batch-size 4 --max-prompt-length 8 --max-completion-length 2 --lr 1e-4 --beta 0 --reward-funcs repetition
    --no-save-hf --save-interval 1 --curriculum --train-data-path train.jsonl""".split()
ROW = {"prompt": "1", "pass_rate": 0.5, "notes": "x" * 1000}


@pytest.fixture
def start(tiny_models, tmp_path):
    """A function that runs two ranks, each on a host with a copy of the data; it returns exit code and output."""
    for host in "host0", "host1":
        (tmp_path / host).mkdir()
        (tmp_path / host / "train.jsonl").write_text((json.dumps(ROW) + "\n") * 1000)

    def run(*words, env=None):
        flags = ["--load-hf", tiny_models["qwen3"], "--save", tmp_path / "run", *FLAGS, *words]
        done = run_torchrun(2, WORKER, tmp_path, *flags, check=False, env=env)
        return done.returncode, done.stdout

    return run


def numbers(output, rank, name):
    """Return (stats, bytes) that a rank has printed."""
    return tuple(map(int, re.search(rf"rank {rank} {name}: (\d+) stats, (\d+) bytes", output).groups()))


def refusal(result):
    """Return the only error of a run, which is its last line."""
    code, output = result
    assert code == 1 and output.count("error: ") == 1, output
    return output.splitlines()[-1]


@pytest.mark.slow
def test_other_ranks_read_no_data_and_verify_no_checkpoint(start, tmp_path):
    code, output = start("--train-iters", "1")
    assert code == 0, output
    checkpoint = tmp_path / "run" / "iter_0000001"
    code, output = start("--train-iters", "2", "--load", str(tmp_path / "run"))
    assert code == 0 and (tmp_path / "run" / "iter_0000002").is_dir(), output
    size = (tmp_path / "host0" / "train.jsonl").stat().st_size
    files = json.loads((checkpoint / "files.json").read_text())["files"]
    stats, _ = numbers(output, 0, "_read_origin")
    assert stats >= len(files)
    stats, _ = numbers(output, 1, "_read_origin")
    assert stats == 3  # whether its host has checkpoint, --load-hf and tokenizer
    assert numbers(output, 0, "_read_data")[1] >= 2 * size  # the lines are found, then the rows are checked
    assert numbers(output, 1, "_read_data")[1] < size / 10

    (data,) = checkpoint.parent.glob("iter_0000002/__0_0.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    line = refusal(start("--train-iters", "3", "--load", str(tmp_path / "run")))
    assert "is damaged: __0_0.distcp has" in line


@pytest.mark.slow
def test_the_others_wait_for_rank_0_as_long_as_it_reads(start):
    """Rank 0 needs longer than the time-out of collectives for the checkpoint, and then for the data."""
    late = {"SLOW_RANK": "0", "SLOW_SECONDS": "5", "SLOW_PHASES": "origin,data"}
    plugin = Path(__file__).resolve().parents[1] / "data/slow_phases.py"
    words = "--train-iters 1 --distributed-timeout-minutes 0.05 --watchdog-timeout 0".split()
    code, output = start(*words, "--external-plugins", str(plugin), env=late)
    assert code == 0 and "slowed: origin" in output and "slowed: data" in output, output


HOSTS = [(999, "bytes on host"), (1000, "has another content on host"), (0, "")]


@pytest.mark.parametrize("rows, message", slow_except(HOSTS[1:2], HOSTS))
def test_a_host_with_other_data_is_named(start, tmp_path, rows, message):
    """The second has other rows of the same length."""
    other = tmp_path / "host1" / "train.jsonl"
    if rows:
        other.write_text((json.dumps(ROW | {"prompt": "2"}) + "\n") * rows)
    else:
        other.unlink()
    line = refusal(start("--train-iters", "1"))
    assert (message or "train.jsonl: no such file") in line and "[rank 1] error" in line


def test_bad_rows_are_told_once(start, tmp_path):
    with (tmp_path / "host0" / "train.jsonl").open("a") as file:
        file.write("{}\n")
    assert "train.jsonl:1001: " in refusal(start("--train-iters", "1"))
