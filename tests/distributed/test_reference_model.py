"""Reference and teacher in layouts, and of architectures, of their own; reference_worker.py has the checks."""

import pytest
import toy_checkpoints


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_reference_models_beside_the_policy(ranks, tmp_path, torchrun):
    toy_checkpoints.make(tmp_path / "teacher", "llama", False, vocab_size=250)
    out = torchrun(ranks, "tests/distributed/reference_worker.py", tmp_path).stdout
    claims = ("one reference in two layouts", "the updated reference survives a resume")
    claims += ("a reference of its own origin leaves the policy alone", "the teacher is transformers'")
    for claim in claims:
        assert out.count(claim) == ranks, out
