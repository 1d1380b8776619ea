"""Rope scaling: frequencies worked out by hand, and every refusal. Logits are compared in test_weights_hf.py."""

import json
from argparse import Namespace

import pytest
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron.core.models.common.embeddings.rotary_pos_embedding import _apply_rotary_pos_emb_thd as theirs
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config

from megatron_grpo.models.rope import check_rope, frequencies, rotate_pack, set_attention_factor
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2.0],
    "long_factor": [4.0, 8.0],
    "original_max_position_embeddings": 64,
}


def args(**changed) -> Namespace:
    """Four channels a head."""
    shape = {"kv_channels": 4, "max_position_embeddings": 4096, "vllm_max_model_len": 64}
    return replaced(parse_args([]), **shape | changed)


def test_frequencies_by_hand():
    plain, factor = frequencies(args(), 100, None)
    assert plain.tolist() == pytest.approx([1, 0.1]) and factor == 1
    linear, factor = frequencies(args(), 100, {"rope_type": "linear", "factor": 4.0})
    assert linear.tolist() == pytest.approx([0.25, 0.025]) and factor == 1
    half, _ = frequencies(args(rotary_percent=0.5), 100, {"rope_type": "linear", "factor": 4.0})
    assert half.tolist() == [0.25]
    short, factor = frequencies(args(), 100, LONGROPE)
    assert short.tolist() == pytest.approx([1, 0.05])
    assert factor == pytest.approx(2**0.5)  # sqrt(1 + log(4096 / 64) / log(64))


@pytest.mark.parametrize("factor", [1.0, 0.8, 1.37])
def test_megatron_core_takes_the_attention_factor(factor):
    config = Namespace()
    set_attention_factor(config, factor)
    assert _yarn_get_concentration_factor_from_config(config) == pytest.approx(factor, rel=1e-15)


REFUSED = [
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "depend on the length of each sequence"),
    ({"rope_scaling": {"factor": 2.0}}, "type None is not supported; supported are linear, llama3, yarn, longrope"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks 'original_max_position_embeddings'"),
    ({"rope_scaling": {**LONGROPE, "short_mscale": 1.2}}, "has 'short_mscale', which is not supported"),
    ({"rope_scaling": {**LONGROPE, "factor": 32.0}}, r"factor 32.0, but .*\(4096\) .* = 64.0"),
    ({"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 3}}, r"cannot be computed: The size of tensor a \(3\)"),
    ({"rope_scaling": LONGROPE, "vllm_max_model_len": 65}, r"\(65\) exceeds the original_max_position_embeddings \(64"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "does not give finite frequencies"),
    ({"rope_scaling": {"rope_type": "linear", "factor": [2.0]}}, r"factor of the wrong type: \[2.0\]"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
        "cannot be computed: math domain error|cannot be computed: expected a positive input",
    ),
    ({"rotary_percent": 0.25}, r"\(0.25\) of --kv-channels \(4\) are 1 channels"),
    ({"rotary_percent": 1.5}, "are 6 channels"),
    ({"apply_rope_fusion": True, "rotary_interleaved": True}, "--apply-rope-fusion: the fused kernel"),
    ({"apply_rope_fusion": True, "rope_scaling": LONGROPE}, r"attention factor \(1.414\)"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_cannot_work_is_refused(changed, message):
    with pytest.raises(GrpoError, match=message):
        check_rope(args(**changed))


def test_what_can_work_is_accepted():
    check_rope(args(rope_scaling=LONGROPE))
    check_rope(args(rotary_percent=0.5, rotary_interleaved=True))
    check_rope(args(rope_scaling={"rope_type": "linear", "factor": 8.0}, apply_rope_fusion=True))


def test_the_flag_reads_json():
    assert parse_args(["--rope-scaling", json.dumps(LONGROPE)]).rope_scaling == LONGROPE
    for text in ("8.0", "{"):
        with pytest.raises(SystemExit):
            parse_args(["--rope-scaling", text])


class Group:
    """A process group of ``count`` ranks, without torch.distributed."""

    def __init__(self, rank: int, count: int):
        self.rank, self.size = lambda: rank, lambda: count


@pytest.mark.parametrize("lengths", [(8,), (4, 12, 8), (4, 4)])
@pytest.mark.parametrize("whole", [False, True], ids=["a table of positions", "a row for every token"])
def test_a_pack_is_rotated_as_by_megatron_core(lengths, whole):
    """With and without context parallelism, as by the function that `rotate_pack` replaces."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    freqs = torch.randn(sum(lengths) if whole else max(lengths), 1, 1, 6)
    for cp, rank, interleaved, latent in ((1, 0, False, False), (2, 0, True, False), (2, 1, False, True)):
        t = torch.randn(sum(lengths) // cp, 3, 8)
        kind = {"rotary_interleaved": interleaved, "mla_rotary_interleaved": latent}
        kind |= {"mscale": 1.5, "cp_group": Group(rank, cp)}
        assert torch.equal(rotate_pack(t, cu_seqlens, freqs, **kind), theirs(t, cu_seqlens, freqs, **kind))
