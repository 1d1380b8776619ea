"""A --save that the hosts of a run do not share is refused at the start, before a checkpoint is lost."""

import json

import pytest
from ranks import run_torchrun
from slow import slow_except

pytestmark = pytest.mark.distributed
WORKER = "tests/distributed/private_disk_worker.py"


FLAGS = """--rollout-engine megatron --transformer-impl local --num-generations 2 --micro-batch-size 2
    --global-batch-size 4 --max-prompt-length 8 --max-completion-length 2 --lr 1e-4 --beta 0 --reward-funcs repetition
    --no-save-hf --save-interval 1 --train-data-path""".split()


@pytest.fixture
def start(tmp_path):
    """A function that runs two ranks, each on a host with a directory of its own; it returns exit code and output."""
    for host in "host0", "host1":
        (tmp_path / host).mkdir()
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))

    def run(*words):
        done = run_torchrun(2, WORKER, tmp_path, *FLAGS, data, *words, check=False)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("shared", slow_except([True], [False, True]))
def test_hosts_share_the_directory_of_checkpoints(start, tiny_models, tmp_path, shared):
    save = tmp_path / "run" if shared else "run"
    code, output = start("--load-hf", tiny_models["qwen3"], "--save", save, "--train-iters", 1)
    left = [file.name for file in tmp_path.rglob("*") if file.name.startswith((".shared-", "iter_"))]
    if shared:
        assert code == 0 and left == ["iter_0000001"], output
        return
    assert code == 1 and left == [], output
    assert "error: --save run is another directory on host " in output.splitlines()[-1], output


MISSING = [
    ("--load run --train-iters 2", "--load: run/iter_0000001"),
    ("--pretrained-checkpoint run --use-checkpoint-args --train-iters 1", "--pretrained-checkpoint: run/iter_0000001"),
    ("--load-hf model --tokenizer-model run/hf_assets --train-iters 1", "--tokenizer-model: run/hf_assets"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "missing"), MISSING)
def test_what_only_the_host_of_rank_0_has_is_named(start, tiny_models, tmp_path, flags, missing):
    for host in "host0", "host1":
        (tmp_path / host / "model").symlink_to(tiny_models["qwen3"])
    here = tmp_path / "host0" / "run"
    assert start("--load-hf", "model", "--save", here, "--train-iters", 1)[0] == 0
    code, output = start(*flags.split(), "--save", tmp_path / "new")
    assert code == 1 and output.count("error: ") == 1, output
    assert f"[rank 1] error: {missing} is on the host of rank 0, and not on host " in output.splitlines()[-1], output
