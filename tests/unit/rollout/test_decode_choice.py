"""The choice of the attention kernel of decode steps: by given times, alike on all ranks, and what is measured."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from interpreted import last_line

from megatron_grpo.patches import cpu_backend
from megatron_grpo.rollout.vllm import scheduler
from megatron_grpo.rollout.vllm.decode_choice import (
    SPREADS,
    Measurement,
    by_times,
    fixed_rule,
    lengths_of,
    made_up_batch,
    mean_lengths,
    sizes_of,
)

SIZES = [8, 64, 512]


@pytest.mark.parametrize(
    ("theirs", "ours", "least"),
    [
        ([10, 20, 100], [15, 18, 60], 64),
        ([10, 20, 100], [5, 10, 60], 8),  # always
        ([10, 20, 100], [15, 25, 110], math.inf),  # never
        ([10, 20, 100], [15, 19.5, 60], 512),  # saves 2.5% with 64
        ([10, 20, 100], [5, 25, 60], 512),  # no gain with 64, so that 8 do not count
        ([10, 20, 100], [5, 10, 98], math.inf),
    ],
)
def test_our_kernel_is_faster_from_a_size_on(theirs, ours, least):
    assert by_times(SIZES, theirs, ours).least == least


def test_the_choice_in_words():
    always, never, some = (by_times(sizes, [10], [ours]) for sizes, ours in (([1], 5), ([1], 20), ([4], 5)))
    assert str(always) == (
        "attention of decode steps: our kernel (our time over FlashAttention's, by sequences: 1: 0.50)"
    )
    assert "steps: FlashAttention (our time over FlashAttention's, by sequences: 1: 2.00)" in str(never)
    assert "steps: our kernel from 4 sequences on, FlashAttention below (" in str(some)


@pytest.mark.parametrize(("key_heads", "least"), [(8, 32), (2, 128), (3, 86), (1, 256)])
def test_the_fixed_rule_needs_256_programs(key_heads, least):
    choice = fixed_rule(key_heads, "no memory")
    assert choice.least == least and str(choice).endswith("(a fixed rule: no memory)")


def test_sizes_are_those_of_graphs():
    vllms = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert sizes_of(vllms, 512) == [1, 2, 4, 8, 16, 32, 40, 64, 72, 128, 136, 256, 272, 512]
    assert sizes_of(vllms, 48) == [1, 2, 4, 8, 16, 32, 40, 48]
    assert sizes_of([12, 6], 8) == [6]
    assert sizes_of([], 8) == []


@given(st.integers(1, 700), st.integers(2, 40_000), st.sampled_from(SPREADS))
def test_lengths_have_their_mean_and_fit_the_longest(number, longest, spread):
    for mean in mean_lengths(longest):
        lengths = lengths_of(number, mean, spread).double()
        assert lengths.min() >= max(1, (1 - spread) * mean) and lengths.max() <= max(longest, (1 + spread) * mean + 1)
        assert mean - 1e-3 <= lengths.mean() < mean + 1


@dataclass
class Batch:
    """The fields of vLLM's description of a batch that a measurement gives."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor


def own_batch(longest: int, size: int) -> Batch:
    """Return an engine's own description of a batch. Its table of blocks is a slice of a wider table."""
    table = torch.zeros(4, longest // size + 8, dtype=torch.int32)[:, : -(-longest // size)]
    empty = torch.zeros(0)
    return Batch(empty, empty, empty, 4, 4, 1, longest, table, empty, empty)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.sampled_from([16, 32]), st.integers(0, 3))
def test_sequences_of_a_made_up_batch_share_the_blocks_of_a_prompt(lengths, size, common_blocks):
    shared = common_blocks * size
    common = own_batch(200, size)
    lengths = [shared + length for length in lengths]
    batch = made_up_batch(common, torch.tensor(lengths, dtype=torch.int32), size, shared)
    needed = [-(-length // size) for length in lengths]
    own = [row[:held].tolist() for row, held in zip(batch.block_table_tensor, needed, strict=True)]
    groups = [own[first : first + 8] for first in range(0, len(own), 8)]
    assert all(row[:common_blocks] == group[0][:common_blocks] for group in groups for row in group)
    once = [row[common_blocks * (place > 0) :] for group in groups for place, row in enumerate(group)]
    blocks = [block for row in once for block in row]
    assert sorted(blocks) == list(range(len(blocks)))
    assert batch.block_table_tensor.stride() == common.block_table_tensor.stride()
    assert batch.query_start_loc.tolist() == list(range(len(lengths) + 1))


def choose(times, *, blocks=4096, layers=12, group=None, longest=4096, sizes=SIZES, shared=0):
    """A measurement in which ``times(sequences, kernel)`` takes the place of a clock: choice, and what was run."""
    runs: list[tuple] = []
    names = ["flash", "ours"]

    def kernel(name):
        return lambda layer, query, meta, output: runs.append((name, layer.number, len(query), meta))

    def seconds(calls):
        found = []
        for call in calls:
            before = len(runs)
            call()
            name, _, number, _ = runs[before]
            found.append(times(number, name))
        return found

    cache = torch.zeros(1).expand(blocks, 2, 16, 128)  # 128: keys and values of 64 channels
    measurement = Measurement(
        layers=[SimpleNamespace(number=number, kv_cache=cache) for number in range(layers)],
        kernels=(kernel(names[0]), kernel(names[1])),
        query=lambda number: torch.zeros(number, 4, 64),
        output=lambda number: torch.zeros(number, 4, 64),
        build=lambda batch: batch,
        common=own_batch(longest, 16),
        sizes=sizes,
        group=group,
        shared=shared,
        seconds=seconds,
    )
    return measurement.choose(), runs


@pytest.fixture(scope="module")
def alone():
    if dist.is_initialized():
        pytest.fail("a group of an earlier test")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def crossing(number, kernel):
    """Seconds: our kernel starts later and is twice as fast; both take 3 with 20 sequences."""
    return 2 + number / 20 if kernel == "flash" else 2.5 + number / 40


def test_both_kernels_see_the_same_batches(alone):
    choice, runs = choose(crossing, group=alone)
    assert choice.least == 64
    theirs, ours = ([run[1:] for run in runs if run[0] == name] for name in ("flash", "ours"))
    assert [run[:2] for run in theirs] == [run[:2] for run in ours]
    assert all(one[2] is other[2] for one, other in zip(theirs, ours, strict=True))
    metas = [meta for _, _, _, meta in runs]
    assert all(meta.max_seq_len == 4096 and meta.max_query_len == 1 for meta in metas)
    assert max(int(meta.block_table_tensor.max()) for meta in metas) < 4096
    # 512 tokens and a quarter of the longest; the cache of 4,096 blocks of 16 tokens holds less of many sequences.
    means = {(len(meta.seq_lens), int(meta.seq_lens.double().mean())) for meta in metas}
    assert means == {(8, 512), (8, 1024), (64, 512), (64, 992), (512, 96)}


@pytest.mark.parametrize("shared", [700, 3000])
def test_groups_share_long_prompts_in_some_batches(alone, shared):
    """As far as the cache of 4,096 blocks has room: beside 512 completions of 48 tokens, 24 blocks for each group."""
    _, runs = choose(crossing, group=alone, shared=shared)
    wanted = {8: (shared // 16 * 16, 512), 64: (shared // 16 * 16, 496), 512: (24 * 16, 48)}
    for number, (prompt, completion) in wanted.items():
        metas = [meta for _, _, rows, meta in runs if rows == number]
        assert all(int(meta.block_table_tensor.max()) < 4096 and int(meta.seq_lens.max()) <= 4096 for meta in metas)
        groups = [meta.block_table_tensor[:8, : prompt // 16] for meta in metas]
        of_group = [meta for meta, blocks in zip(metas, groups, strict=True) if (blocks == blocks[0]).all()]
        assert {int(meta.seq_lens.double().mean()) for meta in of_group} == {prompt + completion}
        means = {int(meta.seq_lens.double().mean()) for meta in metas} - {prompt + completion}
        assert means == ({96} if number == 512 else {512, 992 if number == 64 else 1024})


def test_graphs_read_more_than_a_gpus_cache(alone):
    """256 MiB or more: a token has 1 KiB in a layer, so 8 sequences of 512 tokens 4 MiB, 512 of 96 some 48."""
    _, runs = choose(crossing, group=alone, layers=200)

    def layers(number, mean):
        return {layer for _, layer, rows, meta in runs if rows == number and int(meta.seq_lens.double().mean()) == mean}

    assert layers(8, 512) == set(range(64)) and layers(8, 1024) == set(range(32))
    assert layers(512, 96) == set(range(6))


@pytest.mark.parametrize(
    ("kind", "said"),
    [("memory", "there was no memory to measure"), ("profile", "a cache of 64 blocks is too small to measure")],
)
def test_a_fixed_rule_where_nothing_can_be_measured(alone, kind, said):
    def out_of_memory(number, kernel):
        if number == 8:  # the last
            raise torch.OutOfMemoryError("made up")
        return 1.0

    choice, runs = choose(out_of_memory, group=alone, blocks=64 if kind == "profile" else 4096)
    assert choice == fixed_rule(2, said) and choice.least == 128
    assert bool(runs) == (kind == "memory")


def test_errors_of_kernels_are_not_hidden(alone):
    def fails(number, kernel):
        raise RuntimeError("made up")

    with pytest.raises(RuntimeError, match="made up"):
        choose(fails, group=alone)


@pytest.fixture
def of_vllm(monkeypatch):
    """The module with vLLM's classes, in which calls of FlashAttention and of our kernel are noted."""
    cpu_backend.install()
    from megatron_grpo.rollout.vllm import decode_attention as module

    calls: list[str] = []
    monkeypatch.setattr(module.FlashAttentionImpl, "forward", lambda *args, **options: calls.append("flash"))
    monkeypatch.setattr(module.DecodeAttention, "decode", lambda *args: calls.append("ours"))
    return module, calls


def layer_of(module, choice):
    impl = object.__new__(module.DecodeAttention)
    own = {"choice": choice, "num_heads": 4, "head_size": 64, "kv_cache_dtype": "auto", "dcp_world_size": 1}
    vars(impl).update(own)
    return SimpleNamespace(impl=impl, kv_cache=torch.zeros(64, 2, 16, 128))


@pytest.mark.vllm
def test_a_batch_takes_the_kernel_of_the_choice(of_vllm):
    module, calls = of_vllm

    def kernel(choice, sequences, queries=1):
        meta = SimpleNamespace(max_query_len=queries, use_cascade=False, seq_lens=torch.ones(sequences))
        layer_of(module, choice).impl.forward(None, None, None, None, None, meta, None)
        return calls.pop()

    some = by_times([4], [10], [5])
    assert [kernel(some, n) for n in (1, 3, 4, 9)] == ["flash", "flash", "ours", "ours"]
    assert kernel(some, 9, queries=2) == "flash"
    assert kernel(by_times([4], [10], [20]), 512) == "flash" and kernel(None, 512) == "flash"


@pytest.mark.vllm
def test_an_engine_measures_before_its_first_graph(of_vllm, monkeypatch):
    """Once, for the layers that can have our kernel; --exact-log-probs has no such layer."""
    module, calls = of_vllm
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    chosen, made = by_times([4], [10], [5]), []

    def measurement(**parts):
        made.append(parts)
        return SimpleNamespace(choose=lambda: calls.append("choice") or chosen)

    monkeypatch.setattr(module, "Measurement", measurement)
    monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "build_for_cudagraph_capture", lambda self, common: calls.append("graph")
    )
    first = fixed_rule(2, "nothing yet")
    layers = {"a": layer_of(module, first), "windows": layer_of(module, None), "b": layer_of(module, first)}
    layers["exact"] = SimpleNamespace(impl=object())

    def builder(*names, keeps=True):
        made_up = object.__new__(module.DecodeMetadataBuilder)
        made_up.layer_names, made_up.dcp_world_size, made_up.device = names, 1, torch.device("cpu")
        made_up.compilation_config = SimpleNamespace(static_forward_context=layers, cudagraph_capture_sizes=[1, 2, 4])
        made_up.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            scheduler_config=SimpleNamespace(max_num_seqs=3),
            cache_config=SimpleNamespace(enable_prefix_caching=keeps),
        )
        return made_up

    def batch(queries):
        return SimpleNamespace(max_query_len=queries)

    monkeypatch.setattr(module.DecodeMetadataBuilder, "longest_prompt", 2048)
    own = builder("a", "windows", "b")
    for queries in 2, 1, 1:  # drafts, decode steps
        own.build_for_cudagraph_capture(batch(queries))
    assert calls == ["graph", "choice", "graph", "graph"]
    (parts,) = made
    assert parts["layers"] == [layers["a"], layers["b"]] and parts["sizes"] == [1, 2] and parts["shared"] == 1024
    assert parts["query"](3).shape == (3, 4, 64) and parts["query"](3).dtype == torch.bfloat16
    assert [getattr(layer.impl, "choice", None) for layer in layers.values()] == [chosen, None, chosen, None]
    builder("exact", "windows").build_for_cudagraph_capture(batch(1))
    assert len(made) == 1
    builder("a", keeps=False).build_for_cudagraph_capture(batch(1))
    monkeypatch.setattr(module.DecodeMetadataBuilder, "longest_prompt", 1000)
    builder("a").build_for_cudagraph_capture(batch(1))
    assert [parts["shared"] for parts in made[1:]] == [0, 0]  # no prefixes are kept; prompts are shorter than a part
    engine = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=own.compilation_config))
    assert scheduler.attention_choices(engine) == [chosen]


@pytest.fixture(scope="module")
def worker():
    """What the worker found."""
    return json.loads(last_line(Path(__file__).with_name("decode_choice_worker.py")))


@pytest.mark.vllm
def test_our_kernel_attends_over_made_up_batches(worker):
    assert worker["kernel"] == []


@pytest.mark.vllm
def test_all_ranks_choose_alike(worker):
    """By the larger times, and by the fixed rule if one has no memory."""
    first, second = worker["ranks"]
    assert first == second
    assert "our kernel from 512 sequences on" in first[0] and "no memory" in first[1]
