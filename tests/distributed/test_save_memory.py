"""Memory of a save and of a load with an optimizer that holds moments in other dtypes; save_memory_worker.py checks."""

import pytest

WORKER = "tests/distributed/save_memory_worker.py"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_save_and_a_load_copy_one_tensor_at_a_time(kind, tmp_path, torchrun):
    out = torchrun(2, WORKER, kind, tmp_path, timeout=300).stdout
    assert out.count("again: all tensors equal") == out.count(f"{kind}: held ") == 2, out
