"""A run with SGD goes on from a checkpoint as if it had not been interrupted."""

import pytest
import torch
from bad_input_bench import Bench
from bad_input_runs import TRAIN, launch
from safetensors.torch import load_file

# The stub engine answers each prompt alike: the whole batch is the baseline, and rewards differ by prompt.
REWARD = "@register_reward('mine')\ndef mine(sample):\n    return float(int(sample.row['answer']) % 3)\n"


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--sgd-momentum 0.9", "--sgd-momentum 0", "--sgd-momentum 0.9 --bf16"])
def test_sgd_resumes(tiny_models, tmp_path, flags):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    words = [*bench.good, *bench.plugin(REWARD), "--advantage-estimator", "reinforce_plus_plus", "--optimizer", "sgd"]
    words += [*flags.split(), "--train-iters", "4"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert launch(TRAIN, [*words, "--save", str(whole)]) == 0
    assert launch(TRAIN, [*words, "--save", str(parts), "--exit-interval", "2"]) == 0
    assert launch(TRAIN, [*words, "--save", str(parts), "--load", str(parts)]) == 0
    expected, found = (load_file(run / "hf_model" / "model.safetensors") for run in (whole, parts))
    start = load_file(f"{tiny_models['qwen3']}/model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(tensor, start[name].to(tensor.dtype)) for name, tensor in expected.items())
