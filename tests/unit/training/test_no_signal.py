"""A run whose rewards never differ within a prompt says so, once; one without any reward says so, and ends."""

import pytest
from bad_input_bench import Bench
from bad_input_runs import TRAIN, launch


@pytest.mark.parametrize(
    ("reward", "flags", "lines"),
    [
        ("return 0.25", "", 1),
        # It compares with the whole batch.
        pytest.param("return 0.25", "--advantage-estimator reinforce_plus_plus", 0, marks=pytest.mark.slow),
        pytest.param("import random; return random.random()", "", 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_without_differences_says_so_once(tiny_models, tmp_path, capfd, reward, flags, lines):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    plugin = bench.plugin(f"@register_reward('mine')\ndef mine(sample):\n    {reward}\n")
    assert launch(TRAIN, [*bench.good, *plugin, "--train-iters", "5", *flags.split()]) == 0
    out = capfd.readouterr().out
    assert out.count("note: in 3 rollouts all completions of each prompt had the same reward (mean 0.25)") == lines


@pytest.mark.parametrize(
    ("body", "code", "notes"), [("1.0", 1, 1), ("global n; n += 1; return None if n < 16 or n >= 24 else 1.0", 0, 1)]
)
def test_a_function_without_return_ends_a_run_after_three_rollouts(tiny_models, tmp_path, capfd, body, code, notes):
    """One that scores the completions of the second rollout alone does not."""
    bench = Bench(tmp_path, tiny_models["qwen3"])
    plugin = bench.plugin(f"n = -1\n@register_reward('mine')\ndef mine(sample):\n    {body}\n")
    assert launch(TRAIN, [*bench.good, *plugin, "--train-iters", "5", "--reward-workers", "1"]) == code
    found = capfd.readouterr()
    text = 'reward "mine" returned None for every completion of the first'
    assert found.out.count(f"note: {text} rollout.") == notes
    assert found.err.count(f"pretrain_grpo.py: error: {text} 3 rollouts.") == code
    assert ("There is no checkpoint: start the run again" in found.err) == bool(code)


def test_a_function_that_never_returns_a_value_is_named_beside_another_one(tiny_models, tmp_path, capfd):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    code = "import random\n@register_reward('mine')\ndef mine(sample):\n    1.0\n"
    code += "@register_reward('other')\ndef other(sample):\n    return random.random()\n"
    flags = [*bench.good, *bench.plugin(code), "--reward-funcs", "mine", "other", "--train-iters", "4"]
    assert launch(TRAIN, flags) == 0
    assert capfd.readouterr().out.count('note: reward "mine" returned None for every completion of the first 3') == 1
