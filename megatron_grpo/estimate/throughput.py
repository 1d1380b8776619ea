"""How fast a run is, and how near to what its devices could do: model FLOPs, and rates from sums of a row."""

from argparse import Namespace
from collections import Counter
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight

# Dense TFLOP/s in 16 bits by a part of the device's name, as the makers' data sheets have it; the first that fits.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_tflops(args: Namespace) -> float | None:
    """--device-peak-tflops, else what is known of this device for 16-bit training; None where nothing is."""
    if args.device_peak_tflops or not torch.cuda.is_available() or not (args.bf16 or args.fp16):
        return args.device_peak_tflops
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


class ModelFlops:
    """What the model's matrix products take, by its shape: 2 for each multiplication and its addition.

    A token passes the matrices of every layer, of a mixture of experts those of --moe-router-topk experts; each pair of
    query and key that causality and the window leave takes 2 (size of a key + size of a value) in each head; the head
    is computed for the tokens in the loss only. Multi-token-prediction layers count where they are trained. Padding,
    recomputation and elementwise work do not count (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """

    def __init__(self, args: Namespace):
        self.args = args
        extra = args.mtp_num_layers if args.mtp_num_layers and args.mtp_loss_scaling_factor else 0
        self.per_token = 2 * sum(_multiplications(args, weight) for weight in _matrices(args, bool(extra)))
        self.per_label = 2 * args.hidden_size * args.vocab_size * (1 + extra)
        heads, key, value = args.num_attention_heads, args.kv_channels, args.kv_channels
        if args.multi_latent_attention:
            key, value = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
        self.per_pair = 2 * heads * (key + value)
        numbers = [*range(1, args.num_layers + 1), *[args.num_layers] * extra]
        self.windows = Counter(_window(args, number) for number in numbers)

    def forward(self, lengths: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> float:
        """FLOPs of one forward pass over sequences of these lengths ``[n]`` with so many labels ``[n]`` each."""
        pairs = sum(layers * _pairs(lengths, window) for window, layers in self.windows.items())
        return float(self.per_token * lengths.sum() + self.per_pair * pairs + self.per_label * labels.sum())

    def update(self, lengths: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> float:
        """TFLOP of forward and backward passes: the latter takes two products for one of the former."""
        return 3 * self.forward(lengths, labels) / 1e12


def _matrices(args: Namespace, mtp: bool) -> list[Weight]:
    """The layers' matrices, of all experts of a layer the first's."""
    found = {
        weight.name: weight
        for weight in model_weights.table(args)
        if not weight.expert and weight.name.startswith(("decoder.layers.", "mtp.") if mtp else "decoder.layers.")
    }
    return [weight for weight in found.values() if len(weight.part_shapes()[0]) == 2]


def _multiplications(args: Namespace, weight: Weight) -> int:
    """Of a token with this matrix, or with those of all experts that it is sent to."""
    return prod(weight.shard_shape(1)) * (1 if weight.expert is None else args.moe_router_topk)


def _window(args: Namespace, layer_number: int) -> int | None:
    """How many tokens before its own a layer (from 1) looks at; None for all."""
    windowed = is_layer_window_attention(args.window_size, args.window_attn_skip_freq, layer_number)
    return args.window_size[0] if windowed else None


def _pairs(lengths: npt.NDArray[np.int64], window: int | None) -> int:
    """Pairs of query and key, of which the query is not the earlier, at most so many tokens apart."""
    lengths = lengths.astype(np.int64)
    seen = lengths if window is None else np.minimum(lengths, window + 1)
    return int((seen * (seen + 1) // 2 + (lengths - seen) * seen).sum())


def rates(row: dict[str, float], devices: int, peak: float | None, every: bool) -> dict[str, float]:
    """What follows from a row's sums: tokens and FLOPs over seconds, under the names of METRICS.

    ``peak`` is in TFLOP/s of a device; ``every`` adds those of --include-performance-metrics.
    """
    found = {}
    amounts = {
        "perf/tokens_per_second": ("tokens/update", "time/step", 1.0),
        "perf/mfu": ("flops/update", "time/update", devices * (peak or 0)),
    }
    if every:
        amounts |= {
            "perf/tokens_per_second_per_device": ("tokens/update", "time/step", devices),
            "perf/update_tokens_per_second": ("tokens/update", "time/update", 1.0),
            "perf/rollout_tokens_per_second": ("tokens/rollout", "time/rollout", 1.0),
            "perf/tflops_per_device": ("flops/update", "time/update", devices),
        }
    for name, (amount, seconds, divisor) in amounts.items():
        if amount in row and row.get(seconds) and divisor:
            found[name] = row[amount] / row[seconds] / divisor
    return found
