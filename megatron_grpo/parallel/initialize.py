"""Initialisation of a run: process groups, seeds, waiting for rank 0, and printing on one rank."""

import contextlib
import datetime
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_grpo.parallel.roles import Joint, check_same_split, connect, of_rank_0, role_of
from megatron_grpo.utils.batch_sizes import check_hosts
from megatron_grpo.utils.errors import GrpoError, described, rebuilt
from megatron_grpo.utils.launch import rank

_timeout = datetime.timedelta(minutes=10)
_host_group: dist.ProcessGroup | None = None
_model_group: dist.ProcessGroup | None = None
_joint: Joint | None = None  # with --rollout-ranks
_met: tuple[dist.Store, int, int] | None = None  # what `_meet` returned, until `join` takes it
_led = 0  # number of led_by_rank_0 contexts so far, for unique keys in the store


def join(args) -> None:
    """Join torchrun's process group, unless this process has; a single process needs no torchrun.

    With --rollout-ranks the process group is that of this rank's role.
    """
    global _host_group, _timeout
    _timeout = timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, value)
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        if args.rollout_engine == "sglang":
            # SGLang's servers set this: all NCCL ranks of one host must share memory in the same way.
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        if torch.cuda.is_available():
            _choose_gpu(args)
        # No device_id: with it each of megatron-core's groups would allocate its memory (7 GiB of one GPU) at once,
        # used or not, and keep it while the engine generates.
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        with _explained():
            dist.init_process_group(backend, timeout=timeout, **_rendezvous(args, timeout))
            _host_group = dist.new_group(backend="gloo", timeout=timeout)


def agreed_rollout_ranks(calculate: Callable[[], int], minutes: float) -> int:
    """Return --rollout-ranks auto, which rank 0 calculates for all; GrpoError on all ranks if it cannot.

    Only rank 0 reads files: hosts of engines may not have them. Comes before `join`; collective.
    """
    global _met
    with _explained():
        _met = store, rank, _ = _meet(datetime.timedelta(minutes=minutes))
        if rank > 0:
            return of_rank_0(store)
    try:
        found = calculate()
    except GrpoError as error:
        store.set("rollout_ranks", described(error))
        raise
    store.set("rollout_ranks", str(found))
    return found


def _choose_gpu(args) -> None:
    """Make the GPU with the number of this process on its host the current one; GrpoError if there are fewer GPUs.

    All processes of the host raise it: the first one prints it, and the others would wait for the last ones. Ranks that
    drive servers (--rollout-ranks with --vllm-mode server) compute on no GPU and may be beyond the last.
    """
    process, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    # A launcher that does not tell the number of processes may show one GPU to each of them.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if gpus == 1 else process + 1))
    first = rank() - process
    drivers = 0
    if args.vllm_mode == "server":
        drivers = max(0, min(here, first + here - int(os.environ["WORLD_SIZE"]) + args.rollout_ranks))
    if here - drivers > gpus:
        raise GrpoError(
            f"{here - drivers} processes of host {socket.gethostname()} need a GPU each, and {gpus} are visible there: "
            f"give torchrun --nproc-per-node {gpus + drivers} (GPUS_PER_NODE), or show more (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(process % gpus)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Context in which the ranks meet; GrpoError with the place to look at in place of an error of store or sockets."""
    try:
        yield
    except RuntimeError as error:
        host, store = socket.gethostname(), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        if "failed to listen" in str(error):
            raise GrpoError(
                f"port {os.environ['MASTER_PORT']} of host {host} is taken by another program, such as another run: "
                "start by torchrun --standalone, or with another --master-port (MASTER_PORT)"
            ) from error
        raise GrpoError(
            f"host {host} has not met the other ranks, whose store is {store} ({reason}). "
            "Either a rank or the torchrun of another host has ended: read the logs of all hosts, that of rank 0 "
            f"first. Or hosts do not reach each other: check {store}, the ports between the hosts, and that the name "
            "of each host is its address in their network (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another)"
        ) from error


def initialize_distributed(args) -> None:
    """Join torchrun's process group and create megatron-core's; ranks of engines have none of these."""
    global _model_group
    join(args)
    if _joint is not None and _joint.role.replica is not None:
        return
    initialize_model_parallel(args)
    if args.router_replay_mode == "R2":
        replica = torch.tensor(parallel_state.get_data_parallel_rank())
        replicas = [torch.empty_like(replica) for _ in range(dist.get_world_size())]
        dist.all_gather(replicas, replica, group=_host_group)
        for number in range(parallel_state.get_data_parallel_world_size()):
            ranks = [rank for rank, other in enumerate(replicas) if other == number]
            group = dist.new_group(ranks, timeout=_timeout, backend="gloo")
            if number == replica:
                _model_group = group


def _rendezvous(args, timeout: datetime.timedelta) -> dict[str, Any]:
    """Return the arguments of ``init_process_group`` for torchrun's store; {} where torch makes a store of its own.

    With --rollout-ranks each role has a prefix of its own.
    """
    global _joint, _met
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not args.rollout_ranks:
        return {}
    (store, rank, world_size), _met = _met or _meet(timeout), None
    if not args.rollout_ranks:
        return {"store": store, "rank": rank, "world_size": world_size}
    check_same_split(args.rollout_ranks, store, rank)
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    check_hosts(world_size - args.rollout_ranks, args.rollout_ranks, args.vllm_tensor_parallel_size, ranks_per_host)
    role = role_of(rank, world_size, args.rollout_ranks, args.vllm_tensor_parallel_size)
    _joint = connect(args, role, store, rank, world_size, timeout)
    return {"store": dist.PrefixStore(role.name, store), "rank": role.rank, "world_size": role.size}


def _meet(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of this attempt of the launch, this process's rank and the number of ranks. Collective.

    torchrun keeps one store over all attempts of --max-restarts, so a rank would find the addresses of ranks that have
    ended. All ranks of this attempt therefore agree on a prefix. torchrun gives them no common number: after the loss
    of a node, its agents count different restarts.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    prefix = agreed_attempt(store, rank, world_size, timeout.total_seconds())
    return dist.PrefixStore(prefix, store), rank, world_size


def agreed_attempt(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """Return a name that all ranks of this attempt have in common, and no earlier attempt with the same store has.

    Rank r asks by ``join/r`` under a new name; rank 0 answers to that name, also to one of an earlier attempt that the
    store still holds, until each rank has confirmed.
    """
    own, common = uuid.uuid4().hex, "megatron_grpo/attempt"
    if rank > 0:
        store.set(f"{common}/join/{rank}", own)
        attempt = store.get(f"{common}/answer/{own}").decode()  # waits
        store.set(f"{common}/confirmed/{attempt}/{rank}", "")
        return attempt
    missing, answered = set(range(1, world_size)), set()
    deadline = time.monotonic() + timeout
    while missing:
        for other in sorted(missing):
            if store.check([f"{common}/confirmed/{own}/{other}"]):
                missing.remove(other)
            elif store.check([join := f"{common}/join/{other}"]) and (name := store.get(join).decode()) not in answered:
                answered.add(name)
                store.set(f"{common}/answer/{name}", own)
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)[:8]))
            raise GrpoError(f"ranks {ranks} have not started within {timeout:.0f} s: read their logs")
        time.sleep(0.01 * bool(missing))
    return own


def initialize_model_parallel(args) -> None:
    """Create megatron-core's process groups for the sizes in ``args``."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        hybrid_context_parallel=args.hybrid_context_parallel,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=False,  # three meshes of sockets that only megatron-core's own checkpoints use
    )


def destroy_rank_groups() -> None:
    """Destroy the rank groups of `initialize_distributed`; tools and tests try several configurations in one process.

    megatron-core forgets its process groups without destroying them, and each group keeps polling threads.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in (dist.group.WORLD, _host_group):
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def host_group() -> dist.ProcessGroup:
    """Return the gloo process group of all ranks, for tensors in host memory, and for what takes ranks unequal time.

    A rank that has finished a rollout, a file or a request waits here for the others, who may need hours more. In a run
    with a watchdog, and while rank 0 reads checkpoints and data, such a wait has no time-out (`wait_without_time_out`);
    elsewhere and in collectives of the model's groups it is --distributed-timeout-minutes.
    """
    assert _host_group is not None, "join comes first"
    return _host_group


def launch_group() -> dist.ProcessGroup:
    """Return the gloo process group of all ranks of the launch: with --rollout-ranks, of trainers and engines."""
    return host_group() if _joint is None else _joint.group


def wait_without_time_out() -> None:
    """Take the time-out from `host_group` and `launch_group`."""
    _set_time_out(datetime.timedelta(days=365))


def wait_with_time_out() -> None:
    """Give `host_group` and `launch_group` the time-out --distributed-timeout-minutes again."""
    _set_time_out(_timeout)


def _set_time_out(timeout: datetime.timedelta) -> None:
    dist.distributed_c10d._set_pg_timeout(timeout, host_group())
    if _joint is not None:
        _joint.group._set_default_timeout(timeout)


def await_ranks() -> None:
    """Wait for all ranks as long as it takes: the model's collectives that follow have a time-out. Collective."""
    dist.barrier(group=host_group())


def timeout_of_collectives() -> datetime.timedelta:
    """Return --distributed-timeout-minutes."""
    return _timeout


def model_group() -> dist.ProcessGroup:
    """Return the gloo process group of the ranks with this rank's part of the data (TP x CP x PP); with R2 only."""
    assert _model_group is not None, "initialize_distributed comes first"
    return _model_group


def joint() -> Joint | None:
    """Return what connects trainers and engine ranks; None without --rollout-ranks."""
    return _joint


@contextlib.contextmanager
def led_by_rank_0(meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait on all other ranks, without a time-out, until rank 0 leaves this context; re-raise rank 0's error there.

    Every rank must enter. Collectives inside the context still time out, so only rank 0 may do long work. The other
    ranks poll the store of the process group, which fails when rank 0 or torchrun's agent exits.
    """
    global _led
    _led += 1
    store, key = dist.distributed_c10d._get_default_store(), f"megatron_grpo/led/{_led}"
    if dist.get_rank() == 0:
        outcome = "Exception\nrank 0 has failed"
        try:
            yield
            outcome = ""
        except GrpoError as error:
            outcome = described(error)
            raise
        finally:
            store.set(key, outcome)
        return
    yield
    _wait_until(lambda: store.check([key]), meanwhile)
    if outcome := store.get(key).decode():
        raise rebuilt(outcome)


@contextlib.contextmanager
def all_finish() -> Iterator[None]:
    """Wait, without a time-out, until every rank leaves this context; raise the error of one rank on every rank.

    Every rank must enter. For work of unequal length without collectives, such as requests to a server.
    """
    global _led
    _led += 1
    store, key = dist.distributed_c10d._get_default_store(), f"megatron_grpo/finished/{_led}"
    outcome = "Exception\nanother rank has failed"
    try:
        yield
        outcome = ""
    except GrpoError as error:
        outcome = described(error)
        raise
    finally:
        if outcome or store.add(f"{key}/ranks", 1) == dist.get_world_size():
            store.compare_set(key, "", outcome)  # the first error is everyone's; the last rank sets it otherwise
    _wait_until(lambda: store.check([key]))
    if outcome := store.get(key).decode():
        raise rebuilt(outcome)


def _wait_until(holds: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Poll the store, in a long wait 400 times a second from all ranks; its own wait has a time-out and warns."""
    began, longest = time.monotonic(), max(0.25, dist.get_world_size() / 400)
    while not holds():
        time.sleep(min(longest, 0.005 + (time.monotonic() - began) / 20))
        meanwhile()


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy, torch and megatron-core's RNG tracker.

    Seeds are equal on all data-parallel ranks and differ between pipeline stages.
    """
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def free_port() -> int:
    """Return an unused port of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
