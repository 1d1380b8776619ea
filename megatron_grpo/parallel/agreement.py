"""Agreement of ranks: what rank 0 finds, what a lead rank says, and a lost engine (in bounded time: not all answer)."""

import contextlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.parallel.initialize import host_group, timeout_of_collectives
from megatron_grpo.utils.errors import EngineLost, GrpoError, InputError, described, of_file, rebuilt

DEVICE_ANSWERS = 20.0  # seconds that a device has to finish its work after the loss of an engine
STORE_PAUSE = 5.0  # seconds between a rank's questions to the store
RANKS_ANSWER = 120.0  # seconds that all ranks have then to take their tensors back

_contexts = 0  # equal on all ranks


def on_rank_0[Result](
    function: Callable[..., Result], *arguments: Any, problem: str = "", group: dist.ProcessGroup | None = None
) -> Result:
    """Call a function on rank 0 alone; return its result on all ranks, or raise its GrpoError or OSError there.

    Collective. ``problem`` begins the message of the error, unless a file that was read is at fault (`InputError`).
    ``group``: [`host_group`]. A process without process groups is alone.
    """
    if group is None and dist.is_initialized():
        group = host_group()
    result, message = None, ""
    if group is None or group.rank() == 0:
        try:
            result = function(*arguments)
        except (GrpoError, OSError) as error:
            message = of_file(error) if isinstance(error, OSError) else str(error)
            if problem and not isinstance(error, InputError):
                message = f"{problem}: {message}"
    if group is not None and group.size() > 1:
        result, message = _broadcast((result, message), group)
    if message:
        raise GrpoError(message)
    return result  # type: ignore[return-value]


def on_all_ranks[Result](step: Callable[[], Result], problem: str) -> list[Result]:
    """Call ``step`` and return the results of all ranks; raise GrpoError on all ranks if one fails. Collective.

    The message begins with ``problem``, unless a file that was read is at fault.
    """
    result, message = None, None
    try:
        result = step()
    except InputError as error:
        message = str(error)
    except (OSError, GrpoError) as error:
        message = f"{problem}: {error}"
    results: list[Any] = []
    for other, problem_there in gathered((result, message)):
        if problem_there is not None:
            raise GrpoError(problem_there)
        results.append(other)
    return results


def gathered[Value](value: Value) -> list[Value]:
    """Return the value of each rank, in the order of ranks. Collective."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value, group=host_group())
    return everywhere


def raise_on_all_ranks(problem: str | None) -> None:
    """Raise GrpoError if a rank has a problem, with that of the first one. Collective."""
    for message in filter(None, gathered(problem)):
        raise GrpoError(message)


def _broadcast[Value](value: Value, group: dist.ProcessGroup) -> Value:
    """Return the object of the group's rank 0 on all its ranks. Collective.

    Arrays are sent from where they are and received where they stay, without a copy: the index of the rows is large.
    """

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        # The method of the group: that of all roles is not registered, as torch's function expects.
        group.broadcast(tensor, 0).wait()
        return tensor

    if group.rank() == 0:
        arrays: list[torch.Tensor] = []
        text = pickle.dumps(value, 5, buffer_callback=lambda array: arrays.append(_as_tensor(array.raw())))
        head = _as_tensor(memoryview(pickle.dumps((text, [len(array) for array in arrays]))))
        for tensor in (torch.tensor(len(head)), head, *arrays):
            broadcast(tensor)
        return value
    length = int(broadcast(torch.tensor(0)))
    text, sizes = pickle.loads(broadcast(torch.empty(length, dtype=torch.uint8)).numpy())
    return pickle.loads(text, buffers=[broadcast(torch.empty(size, dtype=torch.uint8)).numpy() for size in sizes])


def _as_tensor(data: memoryview) -> torch.Tensor:
    """Return bytes as a tensor; a copy if they are read-only, because torch warns of such a tensor."""
    if not len(data):  # torch refuses it
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)


@contextlib.contextmanager
def raised_on_every_rank() -> Iterator[None]:
    """Context in which an EngineLost of one rank is raised on every rank, with the same message. Collective.

    Every rank must leave the context, with EngineLost or without, however late. After a loss, a rank that cannot leave
    (it waits for the lost one in a collective of the engine) ends this context on the others after
    --distributed-timeout-minutes.
    """
    global _contexts
    _contexts += 1
    store, key = dist.distributed_c10d._get_default_store(), f"megatron_grpo/engine_lost/{_contexts}"
    lost = torch.zeros((), dtype=torch.int32)
    cause: Exception | None = None
    try:
        yield
    except EngineLost as error:
        cause = error
        lost += 1
        store.compare_set(key, "", described(error))  # the first message is everyone's
    try:
        _complete(dist.all_reduce(lost, dist.ReduceOp.MAX, group=host_group(), async_op=True), store, key)
    except RuntimeError as error:  # a rank did not answer
        if not store.check([key]):
            raise
        lost += 1
        cause = cause or error
    if lost:
        raise rebuilt(store.get(key).decode()) from cause


def _complete(work: dist.Work, store: dist.Store, key: str) -> None:
    """Wait for a collective, as long as it takes; RuntimeError if it takes --distributed-timeout-minutes after ``key``.

    Each rank asks the store for the key every five seconds: 200 requests a second of 1,024 ranks.
    """
    pause, asks, ends = 0.001, time.monotonic() + STORE_PAUSE, float("inf")
    while not work.is_completed():
        now = time.monotonic()
        if now > ends:
            raise RuntimeError("a rank does not answer after the loss of an engine")
        if ends == float("inf") and now > asks:
            asks = now + STORE_PAUSE
            if store.check([key]):
                ends = now + timeout_of_collectives().total_seconds()
        time.sleep(pause)
        pause = min(2 * pause, 0.005)  # a sync and a rollout end here
    work.wait()  # raises its error


def of_lead(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the JSON value of the group's first rank on all its ranks; None is a group of one rank. Collective."""
    if group is None or group.size() == 1:
        return value
    return json.loads(_broadcast(json.dumps(value) if group.rank() == 0 else "", group))


def peer_has_ended(error: BaseException) -> bool:
    """Return whether a collective failed because the process of another rank has ended."""
    return isinstance(error, RuntimeError) and "Connection" in str(error)  # gloo's words


def device_answers(seconds: float = DEVICE_ANSWERS) -> bool:
    """Return whether all queued work of this rank's device completes within ``seconds``; True on a CPU."""
    if not torch.cuda.is_available():
        return True
    device, answers = torch.cuda.current_device(), []

    def synchronize() -> None:
        with contextlib.suppress(RuntimeError):  # a device after an illegal memory access
            torch.cuda.synchronize(device)
            answers.append(True)

    thread = threading.Thread(target=synchronize, daemon=True)  # stays behind if a kernel is blocked
    thread.start()
    thread.join(seconds)
    return bool(answers)


def all_ranks_agree(vote: bool, seconds: float = RANKS_ANSWER) -> bool:
    """Return whether every rank votes True within ``seconds``. After a False no collective may follow."""
    votes = torch.tensor(vote, dtype=torch.int32)
    deadline = time.monotonic() + seconds
    try:
        work = dist.all_reduce(votes, dist.ReduceOp.MIN, group=host_group(), async_op=True)
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        work.wait()
    except RuntimeError:  # a rank has ended
        return False
    return bool(votes)
