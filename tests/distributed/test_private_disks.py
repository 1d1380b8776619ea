"""A --save that the hosts of a run do not share is refused at the start, before a checkpoint is lost."""

import json

import pytest
from ranks import run_torchrun

pytestmark = pytest.mark.distributed
WORKER = "tests/distributed/private_disk_worker.py"


@pytest.mark.parametrize("shared", [False, True])
def test_hosts_share_the_directory_of_checkpoints(tiny_models, tmp_path, shared):
    for host in "host0", "host1":
        (tmp_path / host).mkdir()
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
    flags = """--rollout-engine megatron --transformer-impl local --num-generations 2 --micro-batch-size 2
        --global-batch-size 4 --max-prompt-length 8 --max-completion-length 2 --train-iters 1 --lr 1e-4 --beta 0
        --reward-funcs repetition --no-save-hf""".split()
    places = [
        "--load-hf",
        tiny_models["qwen3"],
        "--train-data-path",
        data,
        "--save",
        tmp_path / "run" if shared else "run",
    ]
    done = run_torchrun(2, WORKER, tmp_path, *places, *flags, check=False)
    left = [file.name for file in tmp_path.rglob("*") if file.name.startswith((".shared-", "iter_"))]
    if shared:
        assert done.returncode == 0 and left == ["iter_0000001"], done.stdout
        return
    assert done.returncode == 1 and left == [], done.stdout
    assert "error: --save run is another directory on host " in done.stdout.splitlines()[-1], done.stdout
