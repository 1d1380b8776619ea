"""Model FLOPs, tokens per second and model FLOPs utilization (MFU)."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_grpo.lora.table import adapter_table
from megatron_grpo.models.config import attention_layers, recurrent_layers, recurrent_sizes
from megatron_grpo.models.gemma4 import PER_LAYER_INPUTS, with_layer
from megatron_grpo.vision.kinds import Grid, is_trained, kind_of, merged, tower_shapes
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight

# Part of the device's name -> dense 16-bit TFLOP/s in the vendor's data sheet; the first match is used.
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
    """Return --device-peak-tflops, else the 16-bit peak of this device; None if it is unknown.

    It is that of 16 bits with --fp8-format, too: runs then compare, and attention and the head compute in 16 bits.
    """
    if args.device_peak_tflops or not torch.cuda.is_available() or not (args.bf16 or args.fp16):
        return args.device_peak_tflops
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


class ModelFlops:
    """FLOPs of the model's matrix products: 2 for each multiply-add.

    Per token: the matrices of every layer, with --moe-router-topk experts of a mixture. Per pair of query and key
    within causal mask and window: 2 (size of a key + size of a value) in each head. Per token of a gated delta net: 6
    products of the sizes of a key and a value in each value head (recall, correction, output); of Mamba-2 4, without
    the recall. Per token of the response mask: the output layer. Multi-token-prediction layers count if they are
    trained. Padding, recomputation and elementwise operations do not count (Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B). The backward pass has two products for each one of the forward pass, and one for a frozen matrix.
    """

    def __init__(self, args: Namespace):
        self.args = args
        extra = args.mtp_num_layers if args.mtp_num_layers and args.mtp_loss_scaling_factor else 0
        self.per_token = 2 * sum(_multiplications(args, weight) for weight in _matrices(args, bool(extra)))
        self.per_token += 2 * sum(
            prod(weight.shard_shape(1))
            for weight in model_weights.table(args)
            if weight.name == f"{PER_LAYER_INPUTS}.projection.weight"
        )
        self.per_label = 2 * args.hidden_size * args.vocab_size * (1 + extra)
        adapters = [weight for weight in adapter_table(args) if not weight.expert] if args.lora_rank else []
        self.per_token_of_adapters = 2 * sum(_multiplications(args, weight) for weight in adapters)
        self.per_pair = _flops_per_pair(args)
        self.recurrent, self.has_attention = recurrent_layers(args), attention_layers(args)
        self.per_token_of_recurrence = 0
        if any(self.recurrent):
            sizes = recurrent_sizes(args)
            products = 2 if args.hybrid_layer_pattern else 3
            self.per_token_of_recurrence = 2 * products * sizes.heads * sizes.key * sizes.value
        full = [number for number, attention in enumerate(self.has_attention, start=1) if attention]
        numbers = [*full, *[args.num_layers] * extra]
        # (window, FLOPs of a pair) -> layers
        self.attention = Counter(
            (_window_size(args, number), _flops_per_pair(with_layer(args, number - 1))) for number in numbers
        )

    def forward(self, lengths: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> float:
        """Return the FLOPs of a forward pass over sequences with ``lengths [n]`` and numbers of ``labels [n]``."""
        return sum(self._parts(lengths, labels))

    def update(self, lengths: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> float:
        """Return the TFLOP of forward and backward pass."""
        of_weights, others = self._parts(lengths, labels)
        return ((2 if self.args.lora_rank else 3) * of_weights + 3 * others) / 1e12

    def _parts(self, lengths: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> tuple[float, float]:
        """Return the FLOPs of a forward pass with the model's matrices, and with adapters and in attention."""
        in_attention = sum(
            layers * per_pair * _attention_pairs(lengths, window)
            for (window, per_pair), layers in self.attention.items()
        )
        of_weights = self.per_token * lengths.sum() + self.per_label * labels.sum()
        per_token = self.per_token_of_adapters + sum(self.recurrent) * self.per_token_of_recurrence
        return float(of_weights), float(per_token * lengths.sum() + in_attention)


class TowerFlops:
    """FLOPs of the vision tower's and the projector's matrix products, counted as in `ModelFlops`.

    Per patch: the matrices of the tower. Per visual token: those of the projector. Per pair of patches of an image, a
    tile, or a window where the tower has some: 4 x width in each block.
    """

    def __init__(self, args: Namespace):
        self.args, self.kind, vision = args, kind_of(args), args.vision_config["vision_config"]
        shapes = {name: shape for name, shape in tower_shapes(args).items() if name.endswith("weight")}
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(self.kind.unused)}
        projector = {name for name in shapes if name.startswith(self.kind.projector)}
        self.per_token = 2 * sum(prod(shapes[name]) for name in projector if len(shapes[name]) == 2)
        positions = {"pos_embed.weight", "vision_tower.embeddings.position_embedding.weight"}
        tower = [shape for name, shape in shapes.items() if name not in projector | positions]
        self.per_patch = 2 * sum(prod(shape) for shape in tower if len(shape) == 2)
        self.per_pixels = 2 * sum(
            prod(shape) for shape in tower if len(shape) > 2
        )  # the convolution that makes a patch
        depth = vision["depth"] if "depth" in vision else vision["num_hidden_layers"]
        self.whole = len(vision["fullatt_block_indexes"]) if "fullatt_block_indexes" in vision else depth
        self.windowed, self.per_pair = depth - self.whole, 4 * vision["hidden_size"]
        self.window = vision["window_size"] // vision["patch_size"] if self.windowed else 0  # patches along a side
        parts = {name in projector: is_trained(args, name) for name in shapes}
        self.tower_trained, self.projector_trained = parts[False], parts[True]

    def forward(self, grids: Iterable[Grid]) -> float:
        """Return the FLOPs of a forward pass over images with these patches."""
        return sum(self._parts(grids))

    def update(self, grids: Iterable[Grid]) -> float:
        """Return the TFLOP of forward and backward pass; frozen parts below the trained ones have no backward pass."""
        tower, projector = self._parts(grids)
        passes = 3 if self.projector_trained else 1 + self.tower_trained
        return ((3 if self.tower_trained else 1) * tower + passes * projector) / 1e12

    def _parts(self, grids: Iterable[Grid]) -> tuple[float, float]:
        tower = projector = 0
        for count, rows, columns, *_ in grids:  # frames or tiles: patches of one see those of another nowhere
            seen = rows * columns + self.kind.class_token
            pairs = self.whole * seen**2 + self.windowed * self._squares(rows) * self._squares(columns)
            tower += count * (seen * self.per_patch + rows * columns * self.per_pixels + self.per_pair * pairs)
            projector += merged(self.args, (count, rows, columns)) * self.per_token
        return tower, projector

    def _squares(self, patches: int) -> int:
        """Return the sum of squares of the windows' lengths along a side."""
        whole, rest = divmod(patches, self.window or patches)
        return whole * self.window**2 + rest**2


def stage_costs(args: Namespace) -> tuple[list[float], float]:
    """Return the FLOPs of an update for a token: those of each decoder layer, and those on the last stage besides them.

    The last stage has the output layer, for the share of response tokens at the longest prompt and completion, and
    multi-token-prediction layers. Sequences are as long as they may become. The layers' backward pass has two products
    for each one of the forward pass, one with adapters, and the forward pass again with full recomputation.
    """
    flops = ModelFlops(args)
    longest = args.max_prompt_length + args.max_completion_length
    backward = 1 if args.lora_rank else 2
    passes = 1 + backward + (args.recompute_granularity == "full")
    attention_passes = passes + (backward == 1)  # its backward pass has two products in any case
    matrices: Counter[int] = Counter()
    for weight in _matrices(args, False):
        matrices[int(weight.name.split(".")[2])] += 2 * _multiplications(args, weight)

    def attention(number: int) -> float:
        if not flops.has_attention[number - 1]:
            return flops.recurrent[number - 1] * flops.per_token_of_recurrence
        pairs = _attention_pairs(np.array([longest]), _window_size(args, number))
        return _flops_per_pair(with_layer(args, number - 1)) * pairs / longest

    layers = [passes * matrices[layer] + attention_passes * attention(layer + 1) for layer in range(args.num_layers)]
    products = backward + 1 + bool(args.entropy_coef)  # models/head.py
    head = 2 * products * args.hidden_size * args.vocab_size * args.max_completion_length / longest
    trained = args.mtp_num_layers if args.mtp_num_layers and args.mtp_loss_scaling_factor else 0
    return layers, head + trained * (layers[-1] + head)


def _flops_per_pair(args: Namespace) -> int:
    """Return the FLOPs of a pair of query and key in a layer."""
    key, value = args.kv_channels, args.kv_channels
    if args.multi_latent_attention:
        key, value = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return 2 * args.num_attention_heads * (key + value)


def _matrices(args: Namespace, mtp: bool) -> list[Weight]:
    """Return the layers' matrices; of the experts of a layer only the first."""
    found = {
        weight.name: weight
        for weight in model_weights.table(args)
        if not weight.expert and weight.name.startswith(("decoder.layers.", "mtp.") if mtp else "decoder.layers.")
    }
    return [weight for weight in found.values() if len(weight.part_shapes[0]) == 2]


def _multiplications(args: Namespace, weight: Weight) -> int:
    """Return the multiplications of a token with this matrix, times the number of experts that a token is sent to."""
    return prod(weight.shard_shape(1)) * (1 if weight.expert is None else args.moe_router_topk)


def _window_size(args: Namespace, layer_number: int) -> int | None:
    """Return the number of earlier tokens that layer ``layer_number`` (from 1) attends to; None for all."""
    windowed = is_layer_window_attention(args.window_size, args.window_attn_skip_freq, layer_number)
    return args.window_size[0] if windowed else None


def _attention_pairs(lengths: npt.NDArray[np.int64], window: int | None) -> int:
    """Return the number of (query, key) pairs under the causal mask, at most ``window`` tokens apart."""
    lengths = lengths.astype(np.int64)
    seen = lengths if window is None else np.minimum(lengths, window + 1)
    return int((seen * (seen + 1) // 2 + (lengths - seen) * seen).sum())


def rates(row: dict[str, float], devices: int, peak: float | None, every: bool) -> dict[str, float]:
    """Return the rates of a row of metrics (tokens or FLOPs divided by seconds), under the names of METRICS.

    ``peak``: TFLOP/s of a device. ``every``: include the metrics of --include-performance-metrics.
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
