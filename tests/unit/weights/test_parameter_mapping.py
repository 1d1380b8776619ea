"""The algebra of weights: against formulas written with torch's own operations, and its properties."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.parameter_mapping import (
    Dimensions,
    ParameterMapping,
    fused,
    grouped_qkv,
    interleaved,
    same,
    stacked,
    vocabulary,
)

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

QKV = ParameterMapping("qkv", {"q": "q hidden", "k": "kv hidden", "v": "kv hidden"}, grouped_qkv, axis=0)
QKV_BIAS = ParameterMapping("qkv_bias", {"q": "q", "k": "kv", "v": "kv"}, grouped_qkv, axis=0)
GATE_UP = ParameterMapping("fc1", {"gate": "ffn hidden", "up": "ffn hidden"}, stacked, axis=0)
DOWN = ParameterMapping("fc2", {"down": "hidden ffn"}, same, axis=1)
NORM = ParameterMapping("norm", {"norm": "hidden"})
EMBEDDING = ParameterMapping("embedding", {"embed": "vocab hidden"}, vocabulary, axis=0)
FUSED_QKV = ParameterMapping("qkv", {"qkv": "q+2kv hidden"}, fused(grouped_qkv, "q", "kv", "kv"), axis=0)
FUSED_GATE_UP = ParameterMapping("fc1", {"gate_up": "2ffn hidden"}, fused(stacked, "ffn", "ffn"), axis=0)
IN_ALL = {"all_experts": True}
EXPERTS_GATE_UP = ParameterMapping(
    "{expert}.fc1", {"gate_ups": "experts hidden 2ffn"}, interleaved, axis=0, transposed=True, **IN_ALL
)
EXPERTS_GATE_UP_BIAS = ParameterMapping(
    "{expert}.fc1_bias", {"gate_up_biases": "experts 2ffn"}, interleaved, axis=0, **IN_ALL
)
EXPERTS_DOWN = ParameterMapping("{expert}.fc2", {"downs": "experts ffn hidden"}, axis=1, transposed=True, **IN_ALL)
EXPERTS_DOWN_BIAS = ParameterMapping("{expert}.fc2_bias", {"down_biases": "experts hidden"}, **IN_ALL)
OF_ALL_EXPERTS = (EXPERTS_GATE_UP, EXPERTS_GATE_UP_BIAS, EXPERTS_DOWN, EXPERTS_DOWN_BIAS)
ROWS = (QKV, QKV_BIAS, GATE_UP, DOWN, NORM, EMBEDDING, FUSED_QKV, FUSED_GATE_UP, *OF_ALL_EXPERTS)
EXPERTS = 3


def dims(hidden=6, ffn=8, head=4, heads=8, groups=4, vocab=13, padded_vocab=16):
    return Dimensions(
        {
            "hidden": hidden,
            "ffn": ffn,
            "q": heads * head,
            "kv": groups * head,
            "q+2kv": (heads + 2 * groups) * head,
            "2ffn": 2 * ffn,
            "experts": EXPERTS,
            "groups": groups,
            "vocab": vocab,
            "padded_vocab": padded_vocab,
        }
    )


@st.composite
def cases(draw):
    """A weight of random shape and a tensor-parallel size that divides it."""
    tp = draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    heads = groups * draw(st.integers(1, 3))
    vocab = draw(st.integers(1, 40))
    padded = -(-vocab // (4 * tp)) * 4 * tp + draw(st.integers(0, 2)) * 4 * tp
    sizes = dims(
        hidden=draw(st.integers(1, 5)),
        ffn=tp * draw(st.integers(1, 5)),
        head=4 * draw(st.integers(1, 2)),
        heads=heads,
        groups=groups,
        vocab=vocab,
        padded_vocab=padded,
    )
    return draw(st.sampled_from(ROWS)).weight(sizes, expert=draw(st.integers(0, EXPERTS - 1))), tp


def parts(weight, tensors):
    """What belongs to this weight: of tensors of all experts, one expert's."""
    return [tensor[weight.expert] if weight.all_experts else tensor for tensor in tensors]


def numbered(weight):
    """Hugging Face tensors whose elements are all different, over all tensors of the weight."""
    tensors, start = [], 1
    for shape in weight.hf.values():
        count = torch.Size(shape).numel()
        tensors.append(torch.arange(start, start + count, dtype=torch.float64).reshape(shape))
        start += count
    return tensors


def shards_of(weight, tensors, tp):
    by_name = dict(zip(weight.hf, tensors, strict=True))
    shards = []
    for rank in range(tp):
        shard = torch.full(weight.shard_shape(tp), torch.nan, dtype=torch.float64)
        weight.fill(shard, rank, tp, lambda name, index: by_name[name][index])
        shards.append(shard)
    return shards


@given(cases())
@settings(max_examples=200, deadline=None)
def test_split_inverts_fill_and_merge(case):
    weight, tp = case
    tensors = numbered(weight)
    for back in (weight.split(shards_of(weight, tensors, tp)), weight.split([weight.merge(tensors)])):
        for original, tensor in zip(parts(weight, tensors), back, strict=True):
            assert torch.equal(original, tensor)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_every_line_is_in_exactly_one_shard(case):
    weight, tp = case
    tensors = numbered(weight)
    shards = shards_of(weight, tensors, tp)
    held = torch.cat([shard.flatten() for shard in (shards if weight.axis is not None else shards[:1])])
    elements = torch.cat([tensor.flatten() for tensor in parts(weight, tensors)])
    assert not held.isnan().any()
    assert torch.equal(held[held > 0].sort().values, elements.sort().values)
    assert all(shard.shape == shards[0].shape for shard in shards)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_a_rank_reads_what_it_holds_and_little_more(case):
    """Nothing twice; of interleaved lines and of fused tensors no more than the runs that its lines lie in."""
    weight, tp = case
    by_name = dict(zip(weight.hf, numbered(weight), strict=True))
    read = [torch.empty(0, dtype=torch.float64)]

    def note(name, index):
        read.append(by_name[name][index].flatten())
        return by_name[name][index]

    for rank in range(tp):
        del read[1:]
        shard = torch.empty(weight.shard_shape(tp), dtype=torch.float64)
        weight.fill(shard, rank, tp, note)
        assert torch.equal(torch.cat(read).sort().values, shard[shard > 0].sort().values)
        assert len(read) - 1 <= 3


@given(cases(), st.data())
@settings(max_examples=200, deadline=None)
def test_coordinates_say_where_each_element_lies_in_the_files(case, data):
    weight, tp = case
    tensors = numbered(weight)
    rank = data.draw(st.integers(0, tp - 1))
    shard = shards_of(weight, tensors, tp)[rank]
    positions = torch.tensor(data.draw(st.lists(st.integers(0, shard.numel() - 1), max_size=9)), dtype=torch.int64)
    sources, flat = weight.coordinates(positions, rank, tp)
    for position, source, place in zip(positions, sources, flat, strict=True):
        expected = tensors[source].flatten()[place] if source >= 0 else 0
        assert shard.flatten()[position] == expected


@pytest.mark.parametrize("row", [QKV, GATE_UP, FUSED_QKV, FUSED_GATE_UP])
def test_low_rank_factors_follow(row):
    """W = B A: the factor B has W's lines, so the same row with r columns lays it out."""
    weight = row.weight(dims())
    r = 3
    b_row = replace(weight, hf={name: (shape[0], r) for name, shape in weight.hf.items()})
    b = [torch.randn(shape, dtype=torch.float64) for shape in b_row.hf.values()]
    a = torch.randn(r, 6, dtype=torch.float64)
    torch.testing.assert_close(weight.merge([part @ a for part in b]), b_row.merge(b) @ a, **EXACT)


def test_a_gate_and_an_up_that_alternate():
    """gpt-oss: columns 0, 2, 4, ... of an expert's [hidden, 2 ffn] are the gate's."""
    weight = EXPERTS_GATE_UP.weight(dims(), expert=1)
    (stored,) = numbered(weight)
    gate, up = stored[1, :, ::2].T, stored[1, :, 1::2].T
    expected = [torch.cat(pair) for pair in zip(gate.chunk(2), up.chunk(2), strict=True)]
    for shard, one in zip(shards_of(weight, [stored], 2), expected, strict=True):
        assert torch.equal(shard, one)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_query_groups_are_interleaved_as_megatron_reads_them(tp, groups, bias):
    """Attention views linear_qkv's output as [groups, (heads per group + 2) * head size] and splits the last axis.

    With more ranks than groups, megatron-core cuts the same rows evenly and gathers the output.
    """
    weight = (QKV_BIAS if bias else QKV).weight(dims(groups=groups))
    q, k, v = numbered(weight)
    by_group = [t.reshape(groups, -1, *t.shape[1:]) for t in (q, k, v)]
    full = torch.cat(by_group, dim=1).flatten(0, 1)
    assert torch.equal(weight.merge([q, k, v]), full)
    for shard, expected in zip(shards_of(weight, [q, k, v], tp), full.chunk(tp), strict=True):
        assert torch.equal(shard, expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_stacks_its_gate_on_its_up(tp):
    weight = GATE_UP.weight(dims())
    gate, up = numbered(weight)
    expected = [torch.cat(pair) for pair in zip(gate.chunk(tp), up.chunk(tp), strict=True)]
    for shard, one in zip(shards_of(weight, [gate, up], tp), expected, strict=True):
        assert torch.equal(shard, one)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_parallel_weights_are_cut_by_columns_and_norms_are_whole(tp):
    down, norm = DOWN.weight(dims()), NORM.weight(dims())
    for weight, expected in (
        (down, numbered(down)[0].chunk(tp, dim=1)),
        (norm, numbered(norm) * tp),
    ):
        for shard, one in zip(shards_of(weight, numbered(weight), tp), expected, strict=True):
            assert torch.equal(shard, one)


def test_vocabulary_is_padded_with_zeros_on_the_last_ranks():
    weight = EMBEDDING.weight(dims(vocab=7, padded_vocab=16))
    (embed,) = numbered(weight)
    full = torch.nn.functional.pad(embed, (0, 0, 0, 9))
    assert torch.equal(weight.merge([embed]), full)
    for shard, one in zip(shards_of(weight, [embed], 4), full.chunk(4), strict=True):
        assert torch.equal(shard, one)


def test_fill_converts_the_dtype_in_place():
    weight = DOWN.weight(dims())
    (down,) = numbered(weight)
    shard = torch.empty(weight.shard_shape(2), dtype=torch.bfloat16)
    weight.fill(shard, 1, 2, lambda name, index: down[index])
    assert torch.equal(shard, down[:, 4:].to(torch.bfloat16))


def test_names_carry_the_layer_and_the_expert():
    row = ParameterMapping("decoder.layers.{layer}.x", {"model.layers.{layer}.y": "hidden"})
    weight = row.weight(dims(), layer=11)
    assert (weight.name, weight.hf, weight.expert) == ("decoder.layers.11.x", {"model.layers.11.y": (6,)}, None)
    row = ParameterMapping("mtp.layers.{mtp}.e.{expert}.x", {"model.layers.{layer}.e.{expert}.y": "hidden"})
    weight = row.weight(dims(), layer=11, mtp=0, expert=7)
    assert (weight.name, weight.hf, weight.expert) == ("mtp.layers.0.e.7.x", {"model.layers.11.e.7.y": (6,)}, 7)


def test_sizes_that_do_not_divide_are_refused_by_name():
    with pytest.raises(GrpoError, match=r"fc1 cannot be sharded with tensor-parallel size 3: 8 lines"):
        GATE_UP.weight(dims()).slices(0, 3)
    with pytest.raises(GrpoError, match=r"embedding .* padded_vocab_size \(12\) is smaller than vocab_size \(13\)"):
        EMBEDDING.weight(dims(padded_vocab=12)).shard_shape(1)
