"""A checkpoint that was written before the package had folders (commit 7110ccd) still loads and is gone on from.

tests/data/checkpoint_before_the_folders.tar.xz holds the run folder (two updates of a toy, one process, distributed
optimizer, --rollout-engine megatron) with the Hugging Face export that the same run made, and its data.
"""

import shutil

import pytest
import torch
from ranks import REPO, run_torchrun
from run_files import metrics_of
from safetensors.torch import load_file

FLAGS = """--rollout-engine megatron --transformer-impl local --num-generations 4 --global-batch-size 8
    --max-prompt-length 8 --max-completion-length 4 --reward-funcs even_tokens --beta 0 --lr 1e-3 --train-iters 4
    --use-distributed-optimizer --use-checkpoint-args""".split()


@pytest.fixture
def earlier(tmp_path):
    """The unpacked run."""
    shutil.unpack_archive(REPO / "tests/data/checkpoint_before_the_folders.tar.xz", tmp_path)
    return tmp_path


@pytest.mark.distributed
def test_weights_are_those_of_the_export(earlier):
    """The export is another format, written at the same moment by the same code as the checkpoint."""
    words = "--load", earlier / "run", "--save", earlier / "again"
    run_torchrun(1, "tools/checkpoint/convert.py", "--megatron-to-hf", *words)
    want, got = (load_file(earlier / folder / "model.safetensors") for folder in ("run/hf_model", "again"))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.distributed
def test_the_run_goes_on(earlier):
    plugin = REPO / "tools/benchmark/even_tokens.py"
    places = ["--load", earlier / "run", "--save", earlier / "run", "--external-plugins", plugin]
    run_torchrun(2, "pretrain_grpo.py", *FLAGS, *places, "--train-data-path", earlier / "data/train.jsonl")
    rows = metrics_of(earlier / "run")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["consumed/prompts"] > rows[1]["consumed/prompts"] and rows[3]["grad_norm"] > 0
