"""Host memory of the ranks of one host, estimated before the start: later the kernel would kill a process silently."""

from argparse import Namespace
from pathlib import Path

import psutil

from megatron_grpo.estimate.memory import GIB, Plan
from megatron_grpo.models.config import params_dtype
from megatron_grpo.rollout.arguments import has_servers
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

# Limits of a container, in bytes or "max": cgroup versions 2 and 1.
LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
FLAGS = "offload_optimizer", "offload_model", "async_save"  # each keeps tensors in host memory


def check_host_memory(args: Namespace, ranks: int) -> None:
    """Raise GrpoError if the tensors that ``ranks`` ranks keep in host memory do not fit into this host's memory."""
    need, have = needed(args, ranks), host_bytes()
    if need <= have:
        return
    cures = []
    for dest in FLAGS:
        less = need - needed(replaced(args, **{dest: False}), ranks)
        if less > 0:
            cures.append(f"leave out --{dest.replace('_', '-')} ({less / GIB:.0f} GiB less)")
    if args.sleep_level == 1 and not has_servers(args):
        less = need - needed(replaced(args, sleep_level=2), ranks)
        cures.append(f"give --sleep-level 2 ({less / GIB:.0f} GiB less)")
    raise GrpoError(
        f"the {ranks} processes of this host keep {need / GIB:.0f} GiB of tensors in host memory, and it has "
        f"{have / GIB:.0f} GiB: {', '.join([*cures, 'use more hosts'])}"
    )


def needed(args: Namespace, ranks: int) -> float:
    """Return the bytes that ``ranks`` ranks keep in host memory, at most."""
    plan = Plan(args)
    most = max(memory.host for memory in plan.memories)
    if args.rollout_engine == "vllm" and args.sleep_level == 1 and not has_servers(args):
        most += plan.engine() * params_dtype(args).itemsize
    staged = max(plan.staged(stage, ranks) for stage in range(len(plan.stages))) if args.async_save else 0
    return most * ranks + staged


def host_bytes() -> int:
    """Return the memory that the processes of this host, or of this container, can use."""
    found = [psutil.virtual_memory().total]
    for path in LIMITS:
        text = path.read_text().strip() if path.is_file() else "max"
        found += [int(text)] if text.isdigit() else []
    return min(found)
