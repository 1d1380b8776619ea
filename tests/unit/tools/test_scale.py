"""tools/benchmark/scale.py: nothing grows faster with the ranks than stated; its counts are those of real groups."""

import threading
from dataclasses import asdict
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist
from open_links import open_links

from megatron_grpo.utils.arguments import replaced
from tools.benchmark import scale

# Powers of the number of ranks, where completions grow with them: 0 for what stays the same.
GROWTH = {
    "rounds": 0,
    "sent_mib": 0,
    "received_mib": 0,
    "network_mib": 0,
    "exchange_seconds": 1,  # in each round a message to every other rank
    "planner_mib": 2,  # a table [ranks, completions] of one byte
    "sampler_mib": 0,
    "groups": 0,
    "gloo_sockets": 1,  # a mesh of all ranks
    "store_requests": 1,
    "save_stats": 0,
    "start_opens": 1,
    "start_stats": 1,
    "start_mib": 1,
    "sync_rounds": 0,
    "sync_network_gib": 0,
    "sync_seconds": 0,
    "save_gib": 0,
    "save_items": 0,
    "host_gib": 0,
    "device_gib": 0,
}


@pytest.fixture(scope="module")
def worlds():
    options = scale.build_parser().parse_args([])
    found = [scale.numbers_of("30B-A3B", ranks, options) for ranks in (32, 128)]
    for numbers in found:
        scale.fill_weights(numbers, options)
    return found


@pytest.mark.slow
def test_nothing_grows_faster_than_stated(worlds):
    """From 32 to 128 ranks, and from 512 to 2,048 completions: at most a fifth more than the stated power."""
    small, large = map(asdict, worlds)
    assert small["completions"] * 4 == large["completions"]
    for name in small.keys() - {"model", "ranks", "completions"}:
        assert large[name] <= 1.2 * 4 ** GROWTH[name] * small[name], (name, small[name], large[name])


@pytest.mark.slow
def test_a_save_compares_no_pairs_of_shards(monkeypatch):
    """The experts of all layers are one tensor of 48 x 128 shards: torch would compare each with all others."""

    def compared(*_):
        raise AssertionError("torch compares the shards")

    monkeypatch.setattr("torch.distributed._shard.sharding_spec._internals._find_nd_overlapping_shards", compared)
    args = replaced(scale.arguments("30B-A3B", 32), **scale.WITHOUT_MEMORY)
    with scale.made_up_rank(args, 0, 32), scale.on_meta(args) as model:
        written = {item.index.fqn for item in scale.save_plan(args, model).items}
    assert any("experts" in name for name in written)


@pytest.mark.slow
def test_a_worlds_groups_are_those_of_real_ranks(worlds):
    """The gloo group of all ranks; those of megatron-core have the data-parallel ranks."""
    for numbers in worlds:
        assert numbers.gloo_sockets >= numbers.ranks - 1
        assert numbers.device_gib > 0 and numbers.host_gib == 0  # the script of 30B-A3B moves nothing


@pytest.mark.slow
def test_deepseek_v3_is_exchanged_in_as_many_rounds_as_its_fullest_rank_needs():
    """1,024 ranks, and 8,192 completions with the experts of 58 layers: no completion has a round of its own."""
    flags = "--max-completion-length 15360 --max-tokens-per-microbatch 16384"
    words = ["--completions", "8192", "--replayed-layers", "58", "--flags", flags]
    numbers = scale.numbers_of("671B", 1024, scale.build_parser().parse_args(words))
    assert numbers.rounds <= numbers.sent_mib * scale.MIB / scale.exchange.ROUND + 2
    assert numbers.sent_mib < 2 * numbers.received_mib  # no rank sends a copy to each of 64 others


@pytest.mark.slow
def test_one_rank_reads_the_checkpoint_and_the_data(worlds, tmp_path):
    """A checkpoint of 200 files and 4 MiB of rows: rank 0 asks for each file, and reads each byte twice."""
    options = scale.build_parser().parse_args([])
    args = scale.arguments("30B-A3B", 32, options.completions)
    first, other = scale.start_reads(args, 200, tmp_path)
    size = scale.START_ROWS * scale.START_ROW
    assert first.stats >= 200 and 2 * size <= first.bytes <= 2.1 * size
    assert other.stats < 20 and other.opens < 20 and other.bytes < 0.02 * size


def test_reads_are_those_that_happened(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    with scale.reads() as counted:
        assert (tmp_path / "a").exists() and not (tmp_path / "b").exists()
        (tmp_path / "a").read_bytes()
        list(tmp_path.iterdir())
    assert (counted.opens, counted.stats) == (2, 2) and 100_000 <= counted.bytes < 101_000


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_gloo_group_has_a_socket_for_each_other_rank(ranks):
    """Real groups, of threads: the sockets of one more rank."""
    store, groups = dist.HashStore(), [None] * ranks
    before = open_links("socket")

    def join(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listening = ranks
    assert len(open_links("socket") - before) - listening == ranks * (ranks - 1)


def test_the_exchange_of_a_small_world_by_hand():
    """4 ranks on 2 hosts: rank 0 made a completion of 4 MiB that ranks 2 and 3 need, and rank 1 one for itself."""
    numbers = scale.Numbers("made up", 4, 2)
    options = scale.build_parser().parse_args(["--host-gigabytes", "1", "--message-microseconds", "1000"])
    needed = np.array([[0, 0], [0, 1], [1, 0], [1, 0]], bool)
    sizes = np.array([4, 2]) * scale.MIB
    scale.HOST, whole = 2, scale.HOST
    try:
        scale.fill_exchange(numbers, scale.exchange.hops(np.array([0, 1]), needed, sizes), sizes, options)
    finally:
        scale.HOST = whole
    assert (numbers.rounds, numbers.sent_mib, numbers.received_mib, numbers.network_mib) == (2, 8, 8, 4)
    assert numbers.exchange_seconds == pytest.approx(4 * scale.MIB / 1e9 + 2 * 3 * 0.001)
