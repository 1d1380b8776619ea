"""Sliding windows: window size and windowed layers, in config.json and in Megatron-LM's arguments."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import Config, need

SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(config: Config, windowed: Callable[[int], bool] = lambda layer: True) -> dict[str, Any]:
    """Return the arguments of `sliding_window` and `layer_types`.

    Without `layer_types`, layer i (from 0) has a window if `windowed(i)`. A token attends to itself and to the
    sliding_window - 1 tokens before it; Megatron-LM's window_size for that is (sliding_window - 1, 0).
    """
    layers, size = need(config, "num_hidden_layers"), config.get("sliding_window")
    kinds = config.get("layer_types") or [SLIDING if windowed(layer) else FULL for layer in range(layers)]
    if len(kinds) != layers or not {SLIDING, FULL}.issuperset(kinds):
        raise GrpoError(
            f"config.json has layer_types of {len(kinds)} layers, {', '.join(sorted(set(kinds)))}: give "
            f"{SLIDING} or {FULL} for each of num_hidden_layers {layers}"
        )
    if not size or SLIDING not in kinds:
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": [size - 1, 0], "window_attn_skip_freq": _skip_freq([kind == SLIDING for kind in kinds])}


def write_windows(args: Namespace) -> Config:
    """Return the config.json keys that read_windows reads."""
    windowed = windowed_layers(args)
    return {
        "sliding_window": args.window_size[0] + 1 if any(windowed) else None,
        "layer_types": [SLIDING if window else FULL for window in windowed],
    }


def read_window(config: Config, default: int | None = None) -> dict[str, Any]:
    """Return the arguments of a family with windows in all layers; `default`: `sliding_window` if it is missing."""
    found = read_windows({"sliding_window": default, **config, "layer_types": None})
    if found["window_size"] and FULL in (config.get("layer_types") or ()):
        raise GrpoError(
            f"config.json has sliding_window {found['window_size'][0] + 1} and layer_types with {FULL}, which vLLM "
            f"applies and transformers ignores: remove one of them"
        )
    return found


def write_window(args: Namespace) -> Config:
    """Return the config.json key that read_window reads."""
    return {"sliding_window": args.window_size[0] + 1 if args.window_size else None}


def windowed_layers(args: Namespace) -> list[bool]:
    """Return whether each decoder layer has a window (--window-size), by --window-attn-skip-freq."""
    skip = args.window_attn_skip_freq
    if skip == 0 or (isinstance(skip, list) and len(skip) != args.num_layers):
        raise GrpoError(
            f"--window-attn-skip-freq is {skip}: give n for full attention in every n-th layer, or a list with 1 "
            f"(window) or 0 for each of the {args.num_layers} layers"
        )
    return [is_layer_window_attention(args.window_size, skip, layer) for layer in range(1, args.num_layers + 1)]


def _skip_freq(windowed: Sequence[bool]) -> int | list[int] | None:
    """Return --window-attn-skip-freq in its shortest form: None for windows in all layers, n, or a list."""
    if all(windowed):
        return None
    every = list(windowed).index(False) + 1
    if all(window == (layer % every != 0) for layer, window in enumerate(windowed, start=1)):
        return every
    return [int(window) for window in windowed]
