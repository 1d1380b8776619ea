"""Start and end of a run: process groups, seeds, the banner, and how an error leaves the program."""

import contextlib
import datetime
import os
import random
import socket
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_grpo.utils.errors import EngineLost, GrpoError

_host_group: dist.ProcessGroup | None = None
_led = 0  # how often rank 0 has led


def initialize_distributed(args) -> None:
    """Join torchrun's process group and lay out megatron-core's; a single process needs no torchrun."""
    global _host_group
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, value)
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        if args.rollout_engine == "sglang":
            # As its servers do for themselves: NCCL's ranks of one host must share memory in the same way.
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            # Without a device_id: with one, each of megatron-core's groups would take its memory (7 GiB of one GPU) at
            # once, used or not, and keep it while the engine has its turn.
            dist.init_process_group("nccl", timeout=timeout)
            _host_group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
            _host_group = dist.group.WORLD
    initialize_model_parallel(args)


def initialize_model_parallel(args) -> None:
    """Lay out megatron-core's process groups as ``args`` say."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )


def leave_layout() -> None:
    """Undo the layout of `initialize_distributed`, so that another can follow (tools and tests try many in a process).

    megatron-core forgets its process groups but does not end them, and each keeps threads that poll.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in (dist.group.WORLD, _host_group):
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def host_group() -> dist.ProcessGroup:
    """The process group of all ranks for tensors in host memory (gloo)."""
    assert _host_group is not None, "initialize_distributed comes first"
    return _host_group


@contextlib.contextmanager
def led_by_rank_0() -> Iterator[None]:
    """Within, rank 0 works; the others leave only after it, as long as that takes, and with its error if it has one.

    Every rank must enter. Collectives may be used within, and they do time out; what takes its time is rank 0's alone.
    The others look into the store of the process group: it goes when rank 0, or torchrun's agent, goes.
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
            outcome = f"{type(error).__name__}\n{error}"
            raise
        finally:
            store.set(key, outcome)
        return
    yield
    began = time.monotonic()
    while not store.check([key]):  # its own way to wait has a time-out, and complains
        time.sleep(min(0.25, 0.005 + (time.monotonic() - began) / 20))
    kind, _, message = store.get(key).decode().partition("\n")
    if kind:
        raise EngineLost(message) if kind == EngineLost.__name__ else GrpoError(message)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy, torch and megatron-core's RNG tracker: equal over data-parallel ranks, different by stage."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def print_rank_0(message: str) -> None:
    """Print once for the whole run."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(message, flush=True)


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
