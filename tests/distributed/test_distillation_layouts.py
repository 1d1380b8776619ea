"""Updates from teachers' distributions are those of transformers' models; distillation_worker.py has the checks."""

import pytest
from distillation_worker import CASES, make
from slow import slow_except


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", slow_except([1], [1, 2]))
def test_the_gradient_is_that_of_transformers(ranks, tmp_path, torchrun):
    make(tmp_path)
    out = torchrun(ranks, "tests/distributed/distillation_worker.py", tmp_path).stdout
    assert out.count("as transformers") == ranks * len(CASES[ranks]), out
