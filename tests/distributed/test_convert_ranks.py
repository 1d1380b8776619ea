"""Conversions by two processes; convert_worker.py has the trainer's side of them."""

from pathlib import Path

import pytest
from convert_tool import check_same
from toy_checkpoints import make


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_and_the_layouts_of_training(tmp_path, torchrun):
    """Checkpoints cut for TP2, loaded under TP2, PP2 and EP2, and those that these layouts train, optimizer and all."""
    make(tmp_path / "llama", "llama", tied=False)
    make(tmp_path / "qwen3_moe", "qwen3_moe", tied=False, mlp_only_layers=[])
    out = torchrun(2, Path(__file__).with_name("convert_worker.py"), tmp_path).stdout
    assert out.count(": loaded\n") == 2 * 4 and out.count("verified: ") == 2, out
    for back in tmp_path.glob("* back"):
        check_same(tmp_path / back.name.split()[0], back)
    sizes = {len(list(path.glob("iter_*/__*.distcp"))) for path in tmp_path.glob("* converted")}
    assert sizes == {2}  # each process wrote a file of its own
