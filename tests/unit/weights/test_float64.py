"""Models in float64: a difference that the rounding of float32 would hide is a factor of 10,000 above the bounds."""

import subprocess
import sys

import pytest

FILES = """tests/unit/weights/test_family_updates.py
 tests/unit/weights/test_weights_hf.py::test_logits_equal_transformers
 tests/unit/weights/test_weights_hf.py::test_logits_of_other_members_of_the_families
 tests/unit/weights/test_weights_hf.py::test_multi_token_prediction_equals_transformers
 tests/unit/models/test_hybrid_models.py::test_gradients_of_a_pack_equal_transformers
 tests/unit/models/test_hybrid_models.py::test_multi_token_prediction_of_a_pack
 tests/unit/lora/test_lora_peft.py::test_one_update_equals_pefts
 tests/unit/vision/test_vision_model.py::test_log_probs_and_gradients_equal_transformers
 tests/unit/vision/test_videos.py::test_log_probs_and_gradients_equal_transformers
 tests/unit/vision/test_vision_lora.py::test_adapters_equal_pefts
 tests/unit/vision/test_qwen3_5_vision.py::test_logits_and_gradients_of_packs_equal_transformers
 tests/unit/vision/test_qwen3_5_vision.py::test_an_update_equals_transformers
 tests/unit/vision/test_qwen3_5_vision.py::test_the_language_model_alone"""


@pytest.mark.slow
def test_models_equal_transformers_and_peft():
    """In a process of its own: float32 means float64 there before any model is imported."""
    words = "-m pytest --float64 -q -p no:cacheprovider".split()
    done = subprocess.run([sys.executable, *words, *FILES.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 150 and "skipped" not in done.stdout
