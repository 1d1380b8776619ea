"""Compute what grows with the number of ranks, for made-up worlds of published models, in one process.

    python tools/benchmark/scale.py
    python tools/benchmark/scale.py --models 671B --ranks 1024 --completions 8192 --replayed-layers 58 \\
        --flags "--max-completion-length 15360 --max-tokens-per-microbatch 16384"

The launch scripts of docs/model_sizes.md give the flags. A larger world has more data-parallel ranks, and as many more
completions, up to 8,192. This process takes the place of one rank after the other: torch's fake process groups stand
for real ones, and the program's own functions decide who sends what. Numbers are what these functions return or do: the
groups that they create, the files and the store that they ask, the messages of a weight sync, and the plan of a save,
for which models and optimizers are built on a device without memory. A start resumes from a made-up checkpoint with a
file a rank, and reads a made-up .jsonl: an audit hook counts what it opens and lists, wrappers of os.stat and os.lstat
(they have no audit event) what it asks for, /proc/self/io the bytes. Only seconds follow from a formula: the bytes that
the fullest host receives by --host-gigabytes a second, plus --message-microseconds for each message of each round; of a
weight sync, by --weights-gigabytes a second.
"""

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
import time
import tracemalloc
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.checkpoint.planner import SavePlan
from torch.testing._internal.distributed.fake_pg import FakeStore

import pretrain_grpo
from megatron_grpo.checkpointing import background_writer, checkpoint, checkpoint_directory, optimizer_state
from megatron_grpo.checkpointing.checksums import CHECKSUMS
from megatron_grpo.data.batch import FIELDS, FinishReason, RolloutBatch
from megatron_grpo.data.prefix_tree import HASHED_LENGTHS
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.row_files import Blocks
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.estimate import host_memory
from megatron_grpo.estimate.memory import GIB, Plan
from megatron_grpo.models import forward, gpt
from megatron_grpo.parallel import exchange, initialize
from megatron_grpo.rollout.dispatcher import PromptDispatcher
from megatron_grpo.training import setup, train_step
from megatron_grpo.utils.arguments import args_to_json, replaced
from megatron_grpo.weights import stream
from tools import generate_model_sizes_doc as published
from tools.data.common import Bytes

MODELS = {"8B": "Qwen3-8B", "70B": "Llama-3.1-70B", "30B-A3B": "Qwen3-30B-A3B"}
MODELS |= {"235B-A22B": "Qwen3-235B-A22B", "671B": "DeepSeek-V3, 671B"}
HOST = 8  # ranks
MOST_COMPLETIONS = 8192
SLOWEST = 60.0  # seconds that one rank is behind the others
DATA_BYTES, ROWS_OF_BLOCK, BLOCK_BYTES = 10 * 2**30, 1000, 4 * 2**20  # of the training data
START_ROWS, START_ROW = 4096, 1024  # of the data that a start reads, and bytes of a row
MIB = 2**20
META = torch.device("meta")


@dataclass(frozen=True)
class Group:
    """A process group: its backend, megatron-core's name for it, and its ranks."""

    backend: str
    name: str
    ranks: tuple[int, ...]


@dataclass
class Numbers:
    """What a world of one model needs: names and units are the table's."""

    model: str
    ranks: int
    completions: int
    rounds: int = 0  # of the exchange
    sent_mib: float = 0.0  # by the rank that sends most
    received_mib: float = 0.0  # by the rank that receives most
    network_mib: float = 0.0  # of the host that receives or sends most to others
    exchange_seconds: float = 0.0
    planner_mib: float = 0.0  # of the tables of an exchange, on every rank
    sampler_mib: float = 0.0
    groups: int = 0  # that a rank is in
    gloo_sockets: int = 0  # of a rank
    store_requests: float = 0.0  # a second, of all ranks that wait for one
    save_stats: float = 0.0  # a second, of all writers that wait for one
    start_opens: int = 0  # files that all ranks open, and folders that they list, at a start
    start_stats: int = 0  # questions of all ranks about files at a start
    start_mib: float = 0.0  # that all ranks read at a start
    sync_rounds: int = 0  # buckets of weights
    sync_network_gib: float = 0.0  # of the host that receives most from others
    sync_seconds: float = 0.0
    save_gib: float = 0.0  # of a checkpoint, by the rank that writes most into its file
    save_items: int = 0  # tensors and objects in the file that has most
    host_gib: float = 0.0  # host memory of a host
    device_gib: float = 0.0  # of the fullest rank in training


def arguments(model: str, ranks: int, completions: int | None = None, flags: str = "") -> Namespace | None:
    """Return the validated arguments of a published model in a world of ``ranks``; None if it is too small."""
    row = next(row for row in published.ROWS if row.model == MODELS[model])
    if ranks < row.gpus or ranks % row.gpus:
        return None
    batch = published.plan(row)[0].global_batch_size
    batch = completions or min(batch * ranks // row.gpus, max(batch, MOST_COMPLETIONS))
    return published.plan(row._replace(gpus=ranks, flags=f"{row.flags} --global-batch-size {batch} {flags}"))[0]


@contextlib.contextmanager
def made_up_rank(args: Namespace, rank: int, ranks: int) -> Iterator[list[Group]]:
    """Context in which this process is a rank of a world on GPUs; it has the groups of all ranks."""
    created: list[Group] = []
    init, new_group = dist.init_process_group, dist.new_group

    def recorded_init(backend, **_):
        created.append(Group(backend, "world", tuple(range(ranks))))
        init("fake", rank=rank, world_size=ranks, store=FakeStore())

    def recorded_group(of=None, timeout=None, backend=None, pg_options=None, *more, ranks=None, **named):
        chosen = tuple(of or ranks or range(dist.get_world_size()))
        created.append(Group(backend or "nccl", named.get("group_desc") or "", chosen))
        return new_group(chosen, timeout, "fake", None, *more, **named)

    environment = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % HOST)}
    with (
        mock.patch.dict(os.environ, environment | {"MASTER_ADDR": "made-up", "MASTER_PORT": "1"}),
        mock.patch.object(dist, "init_process_group", recorded_init),
        mock.patch.object(dist, "new_group", recorded_group),
        mock.patch.object(torch.distributed, "new_group", recorded_group),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 8),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        initialize.initialize_distributed(args)
    try:
        yield created
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        initialize._host_group = None


def rollout(args: Namespace, completions: int, replayed_layers: int = 0) -> tuple[RolloutBatch, int]:
    """Return made-up completions without their tokens, and the bytes that a token has in the arrays of a rollout.

    Lengths are log-normal: the median is a third of the longest, which ends one in seven.
    """
    longest, prompt = args.max_completion_length, args.max_prompt_length // 4
    lengths = np.random.default_rng(1).lognormal(np.log(longest / 3), 1.0, completions)
    lengths = np.clip(lengths.astype(np.int64), 16, longest)
    routed = [np.zeros((3, replayed_layers, args.moe_router_topk), np.int64)] if replayed_layers else []
    one = RolloutBatch.from_completions(
        [[1]], [[2, 3]], [[0.0, 0.0]], [[1, 1]], [0], [0], [0], [FinishReason.STOP], routed_experts=routed
    )
    arrays = [getattr(one, name) for name, spec in FIELDS.items() if spec.axis == "token"]
    row = sum(exchange._row_bytes(array) for array in arrays if array is not None)
    number = np.arange(completions)
    hashes = np.full((completions, 1 + len(HASHED_LENGTHS)), -1)  # completions of a group have the prompt in common
    hashes[:, -1] = number // args.num_generations
    batch = RolloutBatch(
        **{name: np.zeros((0, *array.shape[1:]), array.dtype) for name, array in one.arrays().items()}
        | {
            "cu_seqlens": np.zeros(completions + 1, np.int64),
            "prompt_lengths": np.full(completions, prompt, np.int32),
            "group_ids": number // args.num_generations,
            "row_ids": number // args.num_generations,
            "sample_ids": number,
            "finish_reasons": np.full(completions, FinishReason.STOP, np.uint8),
            "turns": np.ones(completions, np.int32),
            "prefix_hashes": hashes,
            "repeated_tokens": np.zeros(completions, np.int64),
            "all_lengths": prompt + lengths,
            "all_response_lengths": lengths,
        }
    )
    return batch, row


def needed(args: Namespace, batch: RolloutBatch, groups: Sequence[Group], ranks: int) -> np.ndarray:
    """Return [ranks, n] which completions each rank computes in an update."""
    _, of_places = forward.assignment(args, batch, np.arange(batch.num_completions))
    result = np.zeros((ranks, batch.num_completions), bool)
    for group in groups:
        if group.name == "DATA_PARALLEL_GROUP_WITH_CP":
            for place, rank in enumerate(group.ranks):
                result[rank, np.concatenate(of_places[place])] = True
    assert result.any(1).all(), "a rank without completions"
    return result


def sources(args: Namespace, batch: RolloutBatch, ranks: int) -> np.ndarray:
    """Return [n] the rank whose engine replica makes each completion."""
    width, size = args.vllm_tensor_parallel_size, args.num_generations
    result = np.full(batch.num_completions, -1)
    for replica in range(ranks // width):
        engine: Any = SimpleNamespace(replica=replica, num_replicas=ranks // width, is_lead=True)
        for prompt in PromptDispatcher(engine, batch.num_completions // size, size, None).first:
            result[prompt * size : (prompt + 1) * size] = replica * width
    assert (result >= 0).all(), "a prompt without an engine"
    return result


def fill_exchange(numbers: Numbers, hops: Sequence[exchange.Hop], sizes: np.ndarray, options: Namespace) -> None:
    """Set the numbers of an exchange."""
    for hop in hops:
        sent, received = hop.traffic(sizes)
        hosts = -(-numbers.ranks // HOST)
        copies = np.add.reduceat(hop.to.astype(np.int16), np.arange(0, numbers.ranks, HOST), axis=0)
        copies[hop.source // HOST, np.arange(len(sizes))] = 0  # to ranks of its own host
        into = [int((copies[host] * sizes).sum()) for host in range(hosts)]
        out = np.bincount(hop.source // HOST, copies.sum(0) * sizes, hosts)
        rounds = hop.rounds(sizes)
        numbers.rounds += rounds
        numbers.sent_mib += sent.max() / MIB
        numbers.received_mib += received.max() / MIB
        fullest = max(*into, *out)
        numbers.network_mib += fullest / MIB
        messages = rounds * (numbers.ranks - 1) * options.message_microseconds / 1e6
        numbers.exchange_seconds += fullest / (options.host_gigabytes * 1e9) + messages


@contextlib.contextmanager
def measured() -> Iterator[list[float]]:
    """Context that appends the peak of this process's new memory, in MiB."""
    peak: list[float] = []
    tracemalloc.start()
    yield peak
    peak.append(tracemalloc.get_traced_memory()[1] / MIB)
    tracemalloc.stop()


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the seconds so far."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds


class CountedStore:
    """A store whose last rank arrives after SLOWEST seconds; it counts the requests of one rank."""

    def __init__(self, ranks: int, clock: Clock):
        self.requests, self._ranks, self._clock = 0, ranks, clock

    def add(self, key: str, amount: int) -> int:
        """Return how many ranks have arrived."""
        self.requests += 1
        return self._ranks - (self._clock.now < SLOWEST)

    def check(self, keys: list[str]) -> bool:
        """Return whether the last rank has set the keys."""
        self.requests += 1
        return self._clock.now >= SLOWEST

    def get(self, key: str) -> bytes:
        """Return that no rank has failed."""
        self.requests += 1
        return b""


def store_requests(ranks: int) -> float:
    """Return the requests to the store in a second, while all ranks wait for one in `all_finish`."""
    clock = Clock()
    store = CountedStore(ranks, clock)
    with (
        mock.patch.object(initialize, "time", clock),
        mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: store),
        initialize.all_finish(),
    ):
        pass
    return store.requests * ranks / SLOWEST


def save_stats(ranks: int) -> float:
    """Return the questions to the file server in a second, while the writers of all ranks wait for one of them."""
    clock, asked, real = Clock(), [0], Path.exists

    def exists(path: Path) -> bool:
        asked[0] += 1
        if clock.now >= 1.5 * SLOWEST:  # a writer that waits for the directory: it is published, long after
            return False
        return real(path)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(background_writer, "time", clock),
        mock.patch.object(Path, "exists", exists),
    ):
        background_writer._write(background_writer.Job(Path(folder)), [])
    return asked[0] * (ranks - 1) / max(clock.now, 1.0)


@dataclass
class Reads:
    """What a process reads of files."""

    opens: int = 0
    stats: int = 0
    bytes: int = 0


_counted: Reads | None = None


def _on_event(event: str, _: tuple) -> None:
    if _counted is not None and event in ("open", "os.listdir", "os.scandir"):
        _counted.opens += 1


@contextlib.contextmanager
def reads() -> Iterator[Reads]:
    """Context that counts what this process reads in it."""
    global _counted

    def asked[Result](function: Callable[..., Result]) -> Callable[..., Result]:
        def counting(*arguments, **named) -> Result:
            counted.stats += 1
            return function(*arguments, **named)

        return counting

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    if not getattr(_on_event, "added", False):
        sys.addaudithook(_on_event)  # for good: none can be removed
        _on_event.added = True  # type: ignore[attr-defined]
    counted, began = Reads(), so_far()
    with mock.patch.object(os, "stat", asked(os.stat)), mock.patch.object(os, "lstat", asked(os.lstat)):
        _counted = counted
        try:
            yield counted
        finally:
            _counted = None
    counted.bytes = so_far() - began


class Recorded:
    """A process group of ``ranks`` whose rank 0 has been here before: the others receive what it has sent."""

    def __init__(self, ranks: int):
        self.place, self.sent, self._ranks = 0, list[torch.Tensor](), ranks

    def rank(self) -> int:
        """Return the rank that this process takes the place of."""
        return self.place

    def size(self) -> int:
        """Return the number of ranks."""
        return self._ranks

    def broadcast(self, tensor: torch.Tensor, root: int) -> "Recorded":
        """Keep what rank 0 sends, or fill the tensor of another rank with it."""
        if self.place == 0:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))
        return self

    def wait(self) -> None:
        """Do nothing: all is there."""


def start_reads(args: Namespace, ranks: int, folder: Path) -> list[Reads]:
    """Return what rank 0 and any other rank read until the model is built, in a run that resumes from ``folder``."""
    data, save = folder / "data.jsonl", folder / "run"
    data.write_text((json.dumps({"prompt": "x" * (START_ROW - 15)}) + "\n") * START_ROWS)
    temporary = checkpoint_directory.start(save, args.updates_per_rollout)
    parts = {f"__{rank}_0.distcp": [[len("made up"), ""]] for rank in range(ranks)}
    for name in (*checkpoint_directory.CORE_FILES, *parts):
        (temporary / name).write_text("made up")
    (temporary / CHECKSUMS).write_text(json.dumps(parts))
    checkpoint_directory.publish(temporary, args_to_json(args))
    found, group = [], Recorded(ranks)
    for group.place in 0, 1:
        own = replaced(args, load=str(save), save=str(save), finetune=False, dry_run=False)
        own = replaced(own, max_prompt_length=None, curriculum=False, reward_routing=None)
        with (
            mock.patch.dict(os.environ, {"RANK": str(group.place)}),
            mock.patch.object(setup, "launch_group", lambda: group),
            contextlib.redirect_stdout(io.StringIO()),
            reads() as counted,
        ):
            assert setup._read_origin(own)[1] == args.updates_per_rollout
            assert len(setup._read_data(PromptDataset, [str(data)], Bytes(), own)) == START_ROWS
        found.append(counted)
    assert not group.sent, "other ranks have received less than rank 0 has sent"
    return found


def _cuda_type(tensor: torch.Tensor, *given: Any, _type=torch.Tensor.type, **named: Any) -> Any:
    """Return what ``tensor.type`` returns, for a tensor on the meta device as if it were on a GPU."""
    result = _type(tensor, *given, **named)
    return result.replace("meta.", "") if isinstance(result, str) else result


def on_host[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that makes its tensors in the host's memory."""

    def call(*arguments: P.args, **named: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*arguments, **named)

    return call


# Arguments of a model on a device without memory: the same weights without Transformer Engine, which needs a GPU; the
# moments are then in float32.
WITHOUT_MEMORY = {"use_cpu_initialization": True, "perform_initialization": False, "transformer_impl": "local"}
WITHOUT_MEMORY |= {"use_precision_aware_optimizer": False}


@contextlib.contextmanager
def on_meta(args: Namespace) -> Iterator[forward.Model]:
    """Context with this rank's model, on a device without memory; ``args`` have `WITHOUT_MEMORY`."""
    with (
        META,
        mock.patch.object(forward, "device", lambda: META),
        mock.patch.object(gpt, "frequencies", on_host(gpt.frequencies)),  # of positions: transformers copies them
        mock.patch.object(torch.cuda, "current_device", lambda: META),
        mock.patch.object(torch.Tensor, "type", _cuda_type),
    ):
        yield forward.build_model(args, pretrain_grpo.model_provider)


def save_plan(args: Namespace, model: forward.Model) -> SavePlan:
    """Return what this rank writes of a checkpoint: the plan of `checkpoint.write_state`."""
    with mock.patch.object(train_step, "_learning_rate_schedule"):  # it needs the length of the run
        wrapped, optimizer, _ = train_step.setup_optimizer(args, model)
    metadata = checkpoint._with_group(checkpoint.CONTENT_METADATA)
    state = checkpoint._model_state(wrapped, metadata)
    state["optimizer"] = optimizer_state.state_to_save(optimizer, state, metadata)
    without_others = partial(checkpoint.save_preprocess, validate_access_integrity=False)
    with (
        mock.patch.object(torch.distributed.checkpoint, "save") as save,
        mock.patch.object(checkpoint, "save_preprocess", without_others),
    ):
        checkpoint.write_state(state, Path("made-up"))
    planner = save.call_args.kwargs["planner"]
    planner.set_up_planner(save.call_args.args[0], None, dist.get_rank() == 0)
    return planner.create_local_plan()


def stream_traffic(
    args: Namespace, model: forward.Model, stages: dict[str, int]
) -> tuple[int, Counter[tuple[tuple[int, ...], int | None]]]:
    """Return (buckets, bytes) of a weight sync, in which all ranks take part.

    The bytes are those of each message, by the ranks of its group and the place of the sender: None if all send.
    """
    sent: Counter[tuple[tuple[int, ...], int | None]] = Counter()
    buckets = 0

    def broadcast(tensor, src, group):
        ranks = tuple(dist.get_process_group_ranks(group))
        sent[ranks, ranks.index(src)] += tensor.nbytes

    def gather(result, tensor, group):
        if tensor.device != META:  # the coordinates of the experts' group: tensor parallelism is its inner dimension
            size = parallel_state.get_expert_tensor_parallel_world_size()
            places = [[rank // size, rank % size] for rank in range(dist.get_world_size(group))]
            assert places[dist.get_rank(group)] == tensor.tolist()
            result.copy_(torch.tensor(places, device="cpu").view(-1))
        else:
            sent[tuple(dist.get_process_group_ranks(group)), None] += tensor.nbytes

    def counted(*given):
        nonlocal buckets
        for bucket in plan(*given):
            buckets += 1
            yield bucket

    plan = stream._buckets
    with mock.patch.object(dist, "all_gather_into_tensor", gather), torch.device("cpu"):
        experts = stream._expert_group()
    with (
        mock.patch.object(stream, "_expert_group", lambda: experts),
        mock.patch.object(stream, "_buckets", counted),
        mock.patch.object(stream, "device", lambda: META),
        mock.patch.object(stream.model_weights, "owning_stages", lambda *_: stages),
        mock.patch.object(dist, "all_gather_into_tensor", gather),
        mock.patch.object(dist, "broadcast", broadcast),
    ):
        for _ in stream.stream_hf(model, args):
            pass
    return buckets, sent


def into_hosts(sent: Counter[tuple[tuple[int, ...], int | None]], groups: Sequence[Group], ranks: int) -> np.ndarray:
    """Return the bytes that each host receives from others, where all ranks do what ``sent`` says of rank 0."""
    into = np.zeros(-(-ranks // HOST))
    for (own, place), size in sent.items():
        name = next(group.name for group in groups if group.ranks == own)
        for group in {group.ranks for group in groups if group.name == name}:
            for rank in group:
                senders = group if place is None else [group[place]]
                into[rank // HOST] += size * sum(sender // HOST != rank // HOST for sender in senders)
    return into


def fill_weights(numbers: Numbers, options: Namespace) -> None:
    """Set the numbers of a weight sync and of a checkpoint, from the models of all pipeline stages."""
    args = arguments(numbers.model, numbers.ranks, options.completions, options.flags)
    assert args is not None
    with made_up_rank(args, 0, numbers.ranks) as groups:
        pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        weights = stream.streamed(args, only_trained=False)
    args = replaced(args, **WITHOUT_MEMORY)
    held: dict[str, int] = {}  # the first stage of each weight; of experts, by what is equal for all of a layer
    for stage, rank in reversed([*enumerate(pipeline)]):
        with made_up_rank(args, rank, numbers.ranks), on_meta(args) as model:
            own = stream.local_shards(model, args)
            held |= {stream._expert_group_key(w) or w.name: stage for w in weights if w.name in own}
            if rank == 0:
                stages = {w.name: held[stream._expert_group_key(w) or w.name] for w in weights}
                numbers.sync_rounds, sent = stream_traffic(args, model, stages)
            items = save_plan(args, model).items
        data = [item.tensor_data for item in items if item.tensor_data is not None]
        size = sum(math.prod(d.chunk.sizes) * d.properties.dtype.itemsize for d in data)
        numbers.save_gib, numbers.save_items = max(numbers.save_gib, size / GIB), max(numbers.save_items, len(items))
    network = into_hosts(sent, groups, numbers.ranks).max()
    numbers.sync_network_gib = network / GIB
    numbers.sync_seconds = network / (options.weights_gigabytes * 1e9)


def numbers_of(model: str, ranks: int, options: Namespace) -> Numbers | None:
    """Return the numbers of a model in a world of ``ranks``; None if it is too small for the model."""
    args = arguments(model, ranks, options.completions, options.flags)
    if args is None:
        return None
    batch, row = rollout(args, args.global_batch_size, options.replayed_layers)
    numbers = Numbers(model, ranks, batch.num_completions)
    plan = Plan(args)
    numbers.device_gib = max(memory.total for memory in plan.memories) / GIB
    numbers.host_gib = host_memory.needed(args, min(HOST, ranks)) / GIB
    for rank in {0, ranks - 1}:
        with made_up_rank(args, rank, ranks) as groups:
            own = [group for group in groups if rank in group.ranks]
            sockets = sum(len(group.ranks) - 1 for group in own if group.backend == "gloo")
            numbers.groups, numbers.gloo_sockets = max(numbers.groups, len(own)), max(numbers.gloo_sockets, sockets)
            if rank == 0:
                source, table = sources(args, batch, ranks), needed(args, batch, groups, ranks)
                numbers.store_requests = store_requests(ranks)
    sizes = batch.lengths * row
    with measured() as peak:
        hops = exchange.hops(source, table, sizes)
        for hop in hops:
            hop.rounds(sizes)
    numbers.planner_mib = peak[0] + table.nbytes / MIB
    fill_exchange(numbers, hops, sizes, options)
    numbers.save_stats = save_stats(ranks)
    with tempfile.TemporaryDirectory() as folder:
        first, other = start_reads(args, ranks, Path(folder))
    whole = Reads(*(getattr(first, f.name) + (ranks - 1) * getattr(other, f.name) for f in fields(Reads)))
    numbers.start_opens, numbers.start_stats, numbers.start_mib = whole.opens, whole.stats, whole.bytes / MIB
    with measured() as peak:
        count = DATA_BYTES // BLOCK_BYTES
        blocks = Blocks(np.full(count, ROWS_OF_BLOCK), np.full(count, BLOCK_BYTES), np.arange(count))
        PromptSampler(count * ROWS_OF_BLOCK, 1, blocks=blocks).next(batch.num_completions // args.num_generations)
    numbers.sampler_mib = peak[0]
    return numbers


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="[all]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 128, 1024], metavar="N", help="[8 64 128 1024]")
    parser.add_argument("--completions", type=int, metavar="N", help="of a rollout [grows with the ranks, to 8192]")
    parser.add_argument("--flags", default="", metavar="FLAGS", help="of pretrain_grpo.py, after the script's [none]")
    parser.add_argument(
        "--replayed-layers", type=int, default=0, metavar="N", help="layers whose experts a rollout has (R3) [0]"
    )
    parser.add_argument("--host-gigabytes", type=float, default=2.5, metavar="X", help="a second, over gloo [2.5]")
    parser.add_argument("--weights-gigabytes", type=float, default=50.0, metavar="X", help="the same, over NCCL [50]")
    parser.add_argument("--message-microseconds", type=float, default=10.0, metavar="X", help="[10]")
    return parser


def main() -> None:
    """Print a table of all worlds."""
    options = build_parser().parse_args()
    names = list(asdict(Numbers("", 0, 0)))
    print("| " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|---" + "|--:" * (len(names) - 1) + "|")
    began = time.monotonic()
    for model in options.models:
        for ranks in options.ranks:
            if (numbers := numbers_of(model, ranks, options)) is not None:
                fill_weights(numbers, options)
                cells = [f"{v:,.1f}" if isinstance(v, float) else str(v) for v in asdict(numbers).values()]
                print("| " + " | ".join(cells) + " |", flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
