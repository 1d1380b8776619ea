"""A run whose rewards never differ within a prompt says so, once."""

import pytest
from bad_input_bench import Bench
from bad_input_runs import TRAIN, launch


@pytest.mark.parametrize(
    ("reward", "flags", "lines"),
    [
        ("return 0.25", "", 1),
        ("return 0.25", "--advantage-estimator reinforce_plus_plus", 0),  # compares with the whole batch
        ("import random; return random.random()", "", 0),
    ],
)
def test_a_run_without_differences_says_so_once(tiny_models, tmp_path, capfd, reward, flags, lines):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    plugin = bench.plugin(f"@register_reward('mine')\ndef mine(sample):\n    {reward}\n")
    assert launch(TRAIN, [*bench.good, *plugin, "--train-iters", "5", *flags.split()]) == 0
    out = capfd.readouterr().out
    assert out.count("note: in 3 rollouts all completions of each prompt had the same reward (mean 0.25)") == lines
