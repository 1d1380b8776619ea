"""Frequencies of rotary position embeddings; transformers' functions compute the scaling (``--rope-scaling``).

`rotate_pack` replaces megatron-core's rotation of packed queries and keys.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_grpo.parallel.context_parallel import place_in_pack
from megatron_grpo.parallel.zigzag import zigzag
from megatron_grpo.utils.device import to_device
from megatron_grpo.utils.errors import GrpoError

# rope_scaling of config.json: {"rope_type": "yarn", "factor": 4.0, ...}; None: frequencies without scaling.
Scaling = Mapping[str, Any] | None

# rope_type -> (required parameters, optional parameters), which transformers and vLLM interpret alike. LongRoPE's other
# parameters are excluded: only transformers reads attention_factor, only vLLM short_mscale and long_mscale. So are
# YaRN's attention_factor, mscale and mscale_all_dim, which vLLM 0.26 ignores without latent attention.
PARAMETERS = {
    "linear": ("factor", ""),
    "llama3": ("factor low_freq_factor high_freq_factor original_max_position_embeddings", ""),
    "yarn": ("factor original_max_position_embeddings", "beta_fast beta_slow truncate"),
    "longrope": ("short_factor long_factor original_max_position_embeddings", "factor"),
}


def check_scaling(scaling: Scaling, max_position_embeddings: int) -> None:
    """Refuse a scaling of an unknown type, with a missing parameter, or with an unknown or invalid one."""
    if scaling is None:
        return
    kind = scaling.get("rope_type")
    if kind not in PARAMETERS:
        more = ": its frequencies depend on the length of each sequence" if kind == "dynamic" else ""
        raise GrpoError(f"rope scaling of type {kind!r} is not supported{more}; supported are {', '.join(PARAMETERS)}")
    needed, optional = (names.split() for names in PARAMETERS[kind])
    for name in needed:
        if scaling.get(name) is None:
            raise GrpoError(f"rope scaling of type {kind!r} lacks {name!r}: {dict(scaling)}")
    for name, value in scaling.items():
        if name not in ("rope_type", *needed, *optional):
            raise GrpoError(
                f"rope scaling of type {kind!r} has {name!r}, which is not supported: remove it from {dict(scaling)}"
            )
        if name != "rope_type" and not isinstance(
            value, list if name.endswith("_factor") and kind == "longrope" else int | float
        ):
            raise GrpoError(f"rope scaling of type {kind!r} has a {name} of the wrong type: {value!r}")
    if kind == "longrope" and "factor" in scaling:
        ratio = max_position_embeddings / scaling["original_max_position_embeddings"]
        if scaling["factor"] != ratio:
            raise GrpoError(
                f"rope scaling of type 'longrope' has factor {scaling['factor']}, but max_position_embeddings "
                f"({max_position_embeddings}) / original_max_position_embeddings = {ratio}, and vLLM uses the latter: "
                "make both equal"
            )


def frequencies(args: Namespace, base: float, scaling: Scaling) -> tuple[torch.Tensor, float]:
    """Return (angles per token [rotated channels / 2] in float32, factor of cosines and sines) of a rotary embedding.

    Uses LongRoPE's factors for short sequences, because `check_rope` refuses longer ones. Raises GrpoError for
    parameters that transformers' function cannot process.
    """
    channels = int(args.kv_channels * args.rotary_percent)  # rounded as in megatron-core
    if scaling is None:
        return 1.0 / base ** (torch.arange(0, channels, 2, dtype=torch.float) / channels), 1.0
    check_scaling(scaling, args.max_position_embeddings)
    from transformers import PreTrainedConfig  # the import takes a second; only scaling needs it
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PreTrainedConfig()
    config.head_dim = config.hidden_size = channels  # size of one head; the functions read one or the other
    config.num_attention_heads, config.max_position_embeddings = 1, args.max_position_embeddings
    config.rope_parameters = {**scaling, "rope_theta": base}
    try:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise GrpoError(f"rope scaling {dict(scaling)} cannot be computed: {error}") from error
    if not inv_freq.isfinite().all():
        raise GrpoError(f"rope scaling {dict(scaling)} does not give finite frequencies")
    return inv_freq, float(factor)


def check_rope(args: Namespace) -> None:
    """Refuse a rotary embedding that trainer and engine compute differently or that cannot be computed."""
    if args.multi_latent_attention:
        return
    channels = int(args.kv_channels * args.rotary_percent)
    if channels % 2 or not 0 < channels <= args.kv_channels:
        raise GrpoError(
            f"--rotary-percent ({args.rotary_percent}) of --kv-channels ({args.kv_channels}) are {channels} channels: "
            f"give an even number from 2 to {args.kv_channels}, because pairs of channels are rotated"
        )
    _, factor = frequencies(args, args.rotary_base, args.rope_scaling)
    if args.apply_rope_fusion and (factor != 1 or args.rotary_interleaved):
        raise GrpoError(
            "--apply-rope-fusion: the fused kernel for packs supports neither --rotary-interleaved nor the attention "
            f"factor ({factor:.4g}) of --rope-scaling: leave --apply-rope-fusion out"
        )
    if args.rope_scaling and args.rope_scaling["rope_type"] == "longrope":
        original = args.rope_scaling["original_max_position_embeddings"]
        if args.vllm_max_model_len > original:
            raise GrpoError(
                f"--vllm-max-model-len ({args.vllm_max_model_len}) exceeds the original_max_position_embeddings "
                f"({original}) of --rope-scaling: beyond this length transformers uses LongRoPE's other factors for "
                "long sequences only, vLLM for all; reduce --max-prompt-length or --max-completion-length"
            )


def set_attention_factor(config: TransformerConfig, factor: float) -> None:
    """Make megatron-core's attention multiply cosines and sines by `factor`.

    For every kind of embedding megatron-core computes (0.1 mscale ln(scale) + 1) / (0.1 mscale_all_dim ln(scale) + 1)
    from attributes of the configuration (_yarn_get_concentration_factor).
    """
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale = 10 * (factor - 1)
    config.yarn_mscale_all_dim = 0.0


def rotate_pack(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *, cp_group: ProcessGroup, **kind: Any
) -> torch.Tensor:
    """Rotate the queries or keys ``[t, heads, d]`` of a context-parallel rank's tokens of a pack.

    ``cu_seqlens`` ``[n + 1]``: offsets of the whole sequences. ``freqs`` ``[s, 1, 1, channels]``: angles of the
    positions in a sequence; or of all tokens of the pack, if it has as many rows. ``kind``: the other arguments of
    megatron-core's function, in whose place a model has this one (`ROPE_OF_PACK`): that cuts and joins the angles
    sequence by sequence in every layer, and launches a dozen kernels. On a GPU this is one kernel.
    """
    rows = rows_of_pack(t, cu_seqlens, freqs, cp_group)
    if not t.is_cuda:
        return _rotate(t, freqs, rows, kind)
    # Packs differ in their tokens, queries and keys in their heads.
    for tensor, axis in ((t, 0), (t, 1), (freqs, 0), (rows, 0)):
        torch._dynamo.maybe_mark_dynamic(tensor, axis)
    return _compiled()(t, freqs, rows, kind)


def host_offsets(packed: PackedSeqParams) -> torch.Tensor:
    """Return the offsets ``[n + 1]`` of a pack's sequences on the host, where reading them does not wait for a GPU."""
    return getattr(packed, "on_host", packed.cu_seqlens_q_padded)


def rows_of_pack(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, cp_group: ProcessGroup
) -> torch.Tensor:
    """Return the row of ``freqs`` for each of the tokens ``t`` ``[t, ...]``, int64 ``[t]``; see `rotate_pack`."""
    offsets = tuple(cu_seqlens.tolist())
    return _rows(offsets, len(freqs) == offsets[-1], *place_in_pack(len(t), offsets, cp_group), t.device)


@lru_cache(maxsize=2)  # the layers of a micro-batch share the result; a kernel would compute it again for each head
def cosines_and_sines(
    freqs: torch.Tensor, rows: torch.Tensor, factor: float, interleaved: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the tokens' angles, times the attention factor, ``[t, 1, 1, channels]`` each.

    Sines of the first channels of the pairs are negative, as `rotate` needs them.
    """
    angles = freqs.index_select(0, rows)
    sines = angles.sin() * factor
    first = sines.unflatten(-1, (-1, 2) if interleaved else (2, -1)).select(-1 if interleaved else -2, 0)
    first.neg_()
    return (angles.cos() * factor).to(dtype), sines.to(dtype)


def rotate(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first channels of ``[t, a, b, d]`` by angles with these `cosines_and_sines`; the others stay.

    A rotated pair is (x cos - y sin, y cos + x sin). Its channels are neighbours if ``interleaved``, otherwise half of
    the rotated channels lie between them. Exchanging them is an index, which a compiler fuses; a cat is a copy.
    """
    turned, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
    pairs, axis = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    turned = turned * cos + turned.unflatten(-1, pairs).flip(axis).flatten(-2) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


@lru_cache(maxsize=8)  # the layers of a micro-batch share the result
def _rows(cu_seqlens: tuple[int, ...], whole: bool, cp_size: int, cp_rank: int, device: torch.device) -> torch.Tensor:
    """Return the row of the angles for each of the rank's tokens, int64 ``[t]``; ``whole``: a row for every token."""
    offsets = np.array(cu_seqlens)
    rows = zigzag(offsets, cp_size, cp_rank)
    if not whole:
        rows -= offsets[np.searchsorted(offsets, rows, side="right") - 1]
    return to_device(torch.from_numpy(rows), device)


def _rotate(t: torch.Tensor, freqs: torch.Tensor, rows: torch.Tensor, kind: Mapping[str, Any]) -> torch.Tensor:
    return rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs.index_select(0, rows), **kind)[:, 0]


@cache
def _compiled() -> Callable:
    return torch.compile(_rotate)
