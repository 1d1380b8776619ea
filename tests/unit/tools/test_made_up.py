"""tools/made_up.py: the flags of updates with made-up completions."""

import pytest
import toy_checkpoints

from tools import made_up


@pytest.mark.parametrize(("flags", "lr"), [([], 1e-4), (["--lr", "1e-3"], 1e-3)])
def test_the_learning_rate_of_loaded_weights_is_smaller_unless_given(tmp_path, flags, lr):
    toy_checkpoints.make(tmp_path, "qwen3", tied=True)
    assert made_up.parse(["--load-hf", str(tmp_path), *flags], 1).lr == lr
