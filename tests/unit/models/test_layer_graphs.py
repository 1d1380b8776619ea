"""Layers replayed from graphs: padded packs, and the gradients' way to DDP's buffers. A GPU's graphs are imitated."""

import json

import numpy as np
import pytest
from good_args import validated
from hypothesis import given
from hypothesis import strategies as st
from slow import slow_except

from megatron_grpo.models.layer_graphs import Size
from megatron_grpo.utils.errors import GrpoError

WORKER = "tests/unit/models/layer_graphs_worker.py"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_a_size_holds_its_pack_and_wastes_little(lengths):
    total = sum(lengths)
    size = Size.of(total, len(lengths), max(lengths))
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    offsets = size.offsets(cu_seqlens)
    assert total <= size.tokens <= total * (1 + 1 / 16)
    assert max(lengths) <= size.longest <= max(lengths) * 1.25 + 1
    assert len(offsets) == size.sequences + 1 and offsets[-1] == size.tokens
    assert (offsets[: len(cu_seqlens)] == cu_seqlens).all()
    assert (np.diff(offsets) >= 0).all() and np.diff(offsets).max() <= size.longest


def test_few_sizes():
    """Packs of a budget have few sizes: each is recorded."""
    assert len({Size.of(tokens, 20, 900) for tokens in range(15000, 16385)}) <= 6


@pytest.mark.distributed
@pytest.mark.parametrize("flags", slow_except([""], ["", "--lora-rank 4", "--gradient-accumulation-fusion"]))
def test_updates_are_those_without_graphs(flags, torchrun):
    """Three updates of packs of other lengths: weights and metrics are the same to the last bit on a CPU."""
    result = json.loads(torchrun(1, WORKER, *flags.split()).stdout.strip().splitlines()[-1])
    assert result["replays"] >= 4 and result["difference"] == 0, result
    assert result["plain"] == result["graphs"], result


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cuda-graphs", "needs a GPU"),
        ("--cuda-graphs --offload-model", "addresses of the weights"),
        ("--cuda-graphs --recompute-granularity full", "recomputation"),
        ("--cuda-graphs --lora-rank 4 --lora-dropout 0.1", "random numbers"),
    ],
)
def test_what_cannot_be_recorded_is_refused(flags, words):
    with pytest.raises(GrpoError, match=words):
        validated(flags)


def test_only_whole_models():
    with pytest.raises(GrpoError, match="only whole models"):
        validated("--cuda-graphs --tensor-model-parallel-size 2", world_size=2)
