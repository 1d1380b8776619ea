"""Models in float64: a difference that the rounding of float32 would hide is a factor of 10,000 above the bounds."""

import subprocess
import sys

import pytest

FILES = """tests/unit/weights/test_family_updates.py
 tests/unit/weights/test_weights_hf.py::test_logits_equal_transformers
 tests/unit/weights/test_weights_hf.py::test_logits_of_other_members_of_the_families
 tests/unit/weights/test_weights_hf.py::test_multi_token_prediction_equals_transformers
 tests/unit/models/test_hybrid_models.py::test_gradients_of_a_pack_equal_transformers
 tests/unit/models/test_hybrid_models.py::test_multi_token_prediction_of_a_pack"""


@pytest.mark.slow
def test_models_equal_transformers():
    """In a process of its own: float32 means float64 there before any model is imported."""
    words = "-m pytest --float64 -q -p no:cacheprovider".split()
    done = subprocess.run([sys.executable, *words, *FILES.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 100 and "skipped" not in done.stdout
