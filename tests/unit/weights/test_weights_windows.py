"""Sliding windows in config.json <-> --window-size and --window-attn-skip-freq."""

from argparse import Namespace

import pytest
from transformers import Gemma2Config, Gemma3TextConfig, MistralConfig, Qwen2Config

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.windows import read_windows, windowed_layers, write_windows

QWEN = {"use_sliding_window": True, "max_window_layers": 3}
CONFIGS = {
    "every layer": (MistralConfig(num_hidden_layers=5, sliding_window=8, layer_types=["sliding_attention"] * 5), None),
    "every second without": (Gemma2Config(num_hidden_layers=5, sliding_window=8), 2),
    "every sixth without": (Gemma3TextConfig(num_hidden_layers=13, sliding_window=8), 6),
    "the last ones": (Qwen2Config(num_hidden_layers=5, sliding_window=8, **QWEN), [0, 0, 0, 1, 1]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_windows_are_those_of_transformers(name):
    config, skip_freq = CONFIGS[name]
    found = read_windows(config.to_dict())
    assert found == {"window_size": [7, 0], "window_attn_skip_freq": skip_freq}
    args = Namespace(num_layers=config.num_hidden_layers, **found)
    assert windowed_layers(args) == [kind == "sliding_attention" for kind in config.layer_types]
    assert write_windows(args) == {"sliding_window": 8, "layer_types": config.layer_types}


@pytest.mark.parametrize("change", [{"sliding_window": None}, {"layer_types": ["full_attention"] * 3}])
def test_no_layer_has_a_window(change):
    found = read_windows({"num_hidden_layers": 3, "sliding_window": 8, **change})
    assert found == {"window_size": None, "window_attn_skip_freq": None}
    written = write_windows(Namespace(num_layers=3, **found))
    assert written == {"sliding_window": None, "layer_types": ["full_attention"] * 3}


def test_without_layer_types_the_familys_own_rule_says_which():
    found = read_windows({"num_hidden_layers": 4, "sliding_window": 2}, lambda layer: layer >= 2)
    assert found == {"window_size": [1, 0], "window_attn_skip_freq": [0, 0, 1, 1]}


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["full_attention", "chunked_attention", "full_attention"]])
def test_other_kinds_of_layers_are_refused(kinds):
    with pytest.raises(GrpoError, match="sliding_attention or full_attention for each of num_hidden_layers 3"):
        read_windows({"num_hidden_layers": 3, "sliding_window": 2, "layer_types": kinds})


@pytest.mark.parametrize("skip", [0, [1, 0]])
def test_a_pattern_that_does_not_fit_the_layers_is_refused(skip):
    with pytest.raises(GrpoError, match="for each of the 3 layers"):
        windowed_layers(Namespace(num_layers=3, window_size=[7, 0], window_attn_skip_freq=skip))
