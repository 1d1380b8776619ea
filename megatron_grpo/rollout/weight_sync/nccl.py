"""Weight sync to vLLM servers over NCCL, by the weight-transfer engines of stock vLLM.

Rank 0 of the trainer and the workers of all servers form a process group, which is formed again after a server has
restarted. Weights are broadcast in the order of the stream, so no rank ever holds the whole model.
"""

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, cast
from urllib.parse import urlsplit

import torch

from megatron_grpo.parallel.initialize import free_port
from megatron_grpo.rollout.servers.pool import ServerPool
from megatron_grpo.rollout.servers.server import Server
from megatron_grpo.utils.errors import EngineLost, GrpoError
from megatron_grpo.utils.http_client import Fault, reads_answers
from megatron_grpo.weights.stream import Described, WeightStream, describe

Weights = Iterator[tuple[str, torch.Tensor]]
PACKED = {"packed": True, "packed_buffer_size_bytes": 2**28, "packed_num_buffers": 2}
PEER_TIMEOUT = 30.0  # seconds that one side of an exchange waits after the other has failed


class NcclTransfer:
    """Weight transfer of all weights, packed into buckets (``--weight-sync-method nccl``)."""

    packs = True

    def __init__(self, args):
        if not torch.cuda.is_available():
            raise GrpoError(f"--weight-sync-method {args.weight_sync_method} needs GPUs: on CPUs use checkpoint")
        self._args = args
        self._group: Any = None  # vLLM's PyNcclCommunicator
        self._members: list[tuple[str, str]] = []  # (URL, process) of the servers in the group

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        described = self._described(weights)
        self._connect(servers)
        update = {
            "names": [tensor.name for tensor in described],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in described],
            "shapes": [list(tensor.shape) for tensor in described],
        }
        update |= {} if _packing_in_init() else PACKED
        _update(servers, version, update, lambda: send_packed(weights, self._group))

    def _described(self, weights: Weights) -> list[Described]:
        """Return descriptions of the tensors of ``weights``: later syncs leave out frozen parts of a vision tower."""
        return describe(self._args, cast(WeightStream, weights).only_trained)

    def _connect(self, servers: ServerPool) -> None:
        """Form the process group again if the set of serving processes has changed."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        if servers.members() == self._members:
            return
        self._members = []  # until all servers have joined
        sizes: dict[str, int] = {}

        async def ask_size(server: Server) -> None:
            sizes[server.url] = await world_size(server, servers.timeout)

        servers.each(ask_size)
        members = servers.members()
        offsets, world = {}, 1
        for url, _ in members:
            offsets[url], world = world, world + sizes[url]
        address, port = address_for([url for url, _ in members]), free_port()
        packing = PACKED if self.packs and _packing_in_init() else {}

        async def join(server: Server) -> None:
            place = {"master_address": address, "master_port": port, "rank_offset": offsets[server.url]}
            info = {**place, "world_size": world, **packing}
            await server.call("POST", "/init_weight_transfer_engine", {"init_info": info}, timeout=servers.timeout)

        def join_here() -> None:
            group = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world)
            self._group = PyNcclCommunicator(group, device=torch.cuda.current_device())

        exchange(servers, join, join_here)
        self._members = members

    def close(self) -> None:
        self._group = None


@reads_answers
async def world_size(server: Server, timeout: float) -> int:
    """Return the number of a server's workers."""
    return int((await server.call("GET", "/get_world_size", timeout=timeout))["world_size"])


class SparseTransfer(NcclTransfer):
    """Weight transfer of changed elements only (``--weight-sync-method sparse``).

    At small learning rates most 16-bit numbers do not change. Rank 0 keeps the last sent weights in host memory. The
    first sync, and the first sync after a restart of a server, sends every element with its index.
    """

    packs = False

    def __init__(self, args):
        super().__init__(args)
        self._sent: dict[str, torch.Tensor] = {}
        self.sent_elements = 0  # in the newest sync

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        known = self._members
        self._connect(servers)
        if self._members != known:
            self._sent = {}
        places = runtime_places(self._described(weights))
        patches = []
        for hf_name, tensor in weights:
            (name, offset), (indices, values) = places[hf_name], self._changed(hf_name, tensor)
            if len(indices):
                patches.append((name, offset + indices, values))
        self.sent_elements = sum(len(indices) for _, _, indices in patches)
        update = {
            "names": [name for name, _, _ in patches],
            "dtype_names": [str(values.dtype).removeprefix("torch.") for _, _, values in patches],
            "shapes": [[len(values)] for _, _, values in patches],
            "num_updates_list": [len(values) for _, _, values in patches],
        }

        def broadcast() -> None:
            stream = torch.cuda.current_stream()
            for _, indices, values in patches:
                self._group.broadcast(indices, src=0, stream=stream)
                self._group.broadcast(values, src=0, stream=stream)
            stream.synchronize()

        _update(servers, version, update if patches else None, broadcast)

    def _changed(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (indices int32, values) of the elements that changed since the last sync."""
        flat = tensor.contiguous().view(-1)
        last = self._sent.get(name)
        if last is None:
            indices = torch.arange(len(flat), device=flat.device)
            self._sent[name] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        else:
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.element_size()]
            before = last.to(flat.device, non_blocking=True)
            indices = (flat.view(bits) != before.view(bits)).nonzero()[:, 0]
        self._sent[name].copy_(flat, non_blocking=True)
        return indices.int(), flat[indices]


def send_packed(weights: Weights, group) -> None:
    """Broadcast ``weights`` from rank 0 of ``group`` (vLLM's PyNcclCommunicator), packed into buckets."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    packed_nccl_broadcast_producer(
        _order_streams(weights, torch.cuda.current_stream()),
        group=group,
        src=0,
        post_iter_func=lambda pair: pair[1],
        buffer_size_bytes=PACKED["packed_buffer_size_bytes"],
        num_buffers=PACKED["packed_num_buffers"],
    )


def runtime_places(described: list[Described]) -> dict[str, tuple[str, int]]:
    """Return (vLLM's parameter, first element of the tensor in it) for each Hugging Face tensor.

    vLLM 0.26 patches its own parameters, which stack the projections of one input. Without tensor parallelism the
    projections are contiguous.
    """
    stacks = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    owner = {part: stack for stack, parts in stacks.items() for part in parts}
    sizes = {tensor.name: tensor.shape.numel() for tensor in described}
    places = {}
    for name in sizes:
        path, part, kind = (f"..{name}").rsplit(".", 2)
        stack = owner.get(part)
        if stack is None:
            places[name] = (name, 0)
            continue
        before = stacks[stack][: stacks[stack].index(part)]
        path = path.removeprefix("..")
        places[name] = (f"{path}.{stack}.{kind}", sum(sizes[f"{path}.{other}.{kind}"] for other in before))
    return places


def _update(servers: ServerPool, version: int, update: dict | None, broadcast: Callable[[], None]) -> None:
    """Broadcast to all servers, which receive as ``update`` describes; None means that no element changed."""

    async def receive(server: Server) -> None:
        await server.call("POST", "/start_weight_update", timeout=servers.timeout)
        if update is not None:
            await server.call("POST", "/update_weights", {"update_info": update}, timeout=servers.timeout)

    async def finish(server: Server) -> None:
        await server.call("POST", "/finish_weight_update", timeout=servers.timeout)

    exchange(servers, receive, broadcast if update is not None else lambda: None)
    servers.update_servers(version, finish)


def exchange(servers: ServerPool, theirs: Callable[[Server], Coroutine], ours: Callable[[], None]) -> None:
    """Run ``theirs`` for every server, and ``ours`` in a thread; both sides block until the other joins.

    A failed server is excluded. Raises EngineLost if ``ours`` fails, or still waits for a failed server after
    `PEER_TIMEOUT` seconds: a blocked NCCL call cannot be cancelled, so its thread remains until the process ends.
    """
    sending: Future[None] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def send() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # the current device is a property of the thread
            ours()
        except BaseException as error:
            sending.set_exception(error)
        else:
            sending.set_result(None)

    async def run(server: Server) -> None:
        answer = asyncio.ensure_future(theirs(server))
        try:
            await _wait_for_answer(answer, sending)
            if answer.done():
                answer.result()
        except Fault as fault:
            if not await _sender_ends(sending):
                raise EngineLost(f"server {server.url} failed in an exchange by NCCL: {fault}") from fault
            raise
        finally:
            answer.cancel()

    threading.Thread(target=send, daemon=True).start()
    servers.each(run)
    try:
        sending.result(servers.timeout)
    except TimeoutError as error:
        raise EngineLost(
            f"an exchange by NCCL did not end in {servers.timeout:g} s, though no server failed"
        ) from error
    except RuntimeError as error:
        raise EngineLost(f"the servers could not be reached by NCCL: {error}") from error


async def _wait_for_answer(answer: asyncio.Future, sending: Future) -> None:
    """Wait for a server's answer, but at most `PEER_TIMEOUT` seconds after a failure of the trainer's side."""
    failed = None
    while not answer.done():
        await asyncio.wait([answer], timeout=0.25)
        if sending.done() and sending.exception() is not None:
            failed = failed or time.monotonic()
            if time.monotonic() > failed + PEER_TIMEOUT:
                return


async def _sender_ends(sending: Future) -> bool:
    """Return whether the trainer's side ends within `PEER_TIMEOUT` seconds."""
    deadline = time.monotonic() + PEER_TIMEOUT
    while not sending.done() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return sending.done()


def _packing_in_init() -> bool:
    """Return whether vLLM expects the packing parameters when the group is formed (0.26: in every update)."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo

    return "packed" in {field.name for field in fields(NCCLWeightTransferInitInfo)}


def _order_streams(weights: Weights, last: torch.cuda.Stream) -> Weights:
    """Yield ``weights``, each ordered after all earlier work on stream ``last`` and on vLLM's packing streams.

    ``last`` is the caller's stream, passed as an argument because the generator's body runs on a stream of vLLM.
    """
    while True:
        if (now := torch.cuda.current_stream()) != last:
            now.wait_stream(last)
            last = now
        pair = next(weights, None)
        if pair is None:
            return
        yield pair


def address_for(urls: list[str]) -> str:
    """Return the address of this host on the interface towards the servers."""
    hosts = [urlsplit(url).hostname or "localhost" for url in urls]
    addresses = [socket.gethostbyname(host) for host in hosts]
    there = next((address for address in addresses if not ipaddress.ip_address(address).is_loopback), "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((there, 9))  # sends no packet, only selects the interface
        return probe.getsockname()[0]
