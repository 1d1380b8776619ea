"""What test_save_memory.py runs on two ranks: the memory that a save and a load allocate, and what they keep."""

import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
import torch
import torch.distributed as dist
from checkpoint_worker import POSITION, build, check_equal, say, tensors, update
from helpers import precision_aware
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.offload import optimizer_tensors
from megatron_grpo.utils.arguments import replaced

FLAGS = """--bf16 --use-distributed-optimizer --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
    --moe-grouped-gemm --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
    --use-precision-aware-optimizer --num-layers 6""".split()
DTYPES = {"bf16": ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]}
DTYPES["fp16"] = ["--exp-avg-dtype", "fp16", "--exp-avg-sq-dtype", "fp16", "--main-params-dtype", "fp16"]


class Allocations(TorchDispatchMode):
    """``peak``: most bytes that were alive at once of the tensors that this thread allocated, as if on a device.

    Tensor.cpu() copies, and the copy does not count. Not seen: the thread that copies tensors to the host for the
    writer; bytes, such as the pickles of collectives.
    """

    def __init__(self):
        super().__init__()
        self.live = WeakIdKeyDictionary()  # storage: its bytes, 0 if it is older
        self.peak = 0

    def __enter__(self):
        self.host = mock.patch.object(torch.Tensor, "cpu", self.on_host)
        self.host.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.host.stop()
        return super().__exit__(*error)

    @staticmethod
    def on_host(tensor):
        with _disable_current_modes():
            return tensor.clone()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in filter(torch.is_tensor, tree_leaves((args, kwargs))):
            self.live.setdefault(tensor.untyped_storage(), 0)
        result = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            if tensor.device.type != "meta" and tensor.dtype != torch.uint8:
                self.live.setdefault(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def state(optimizer):
    return [tensor for tensor in optimizer_tensors(optimizer) if tensor.numel()]


def memory(root, kind):
    """A save copies nothing, or one tensor at a time if it has a scale; a load one at a time; both keep every bit."""
    precision_aware.install()
    flags = [*FLAGS, *DTYPES[kind]]
    args, *parts = build(*flags, "--save", str(root / "a"))
    for step in range(2):
        update(*parts, step)
    held = sum(value.nbytes for values in adam_states(parts[1]) for value in values.values())
    largest = max(4 * value.numel() for values in adam_states(parts[1]) for value in values.values())
    with Allocations() as saved:
        checkpoint.save_checkpoint(args, 2, *parts, POSITION)
    args = replaced(args, save=str(root / "background"), async_save=True)
    checkpoint.start_background_saves()
    with Allocations() as staged:
        checkpoint.save_checkpoint(args, 2, *parts, POSITION)
    checkpoint.wait_for_background()
    check_equal("background", root / "a", root / "background")
    stored = tensors(root / "a")
    moments = {key: value for key, value in stored.items() if "exp_avg" in key}
    assert len(moments) > 10 and {value.dtype for value in moments.values()} == {torch.float32}
    expected = sum(value.double().sum() for name, value in named_state(parts[1]) if name == "exp_avg_sq")
    dist.all_reduce(expected)
    found = sum(value.double().sum() for key, value in moments.items() if "exp_avg_sq" in key)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)

    fresh, *others = build(*flags, "--load", str(root / "a"), "--save", str(root / "b"), seed=9)
    with Allocations() as loaded:
        assert checkpoint.load_checkpoint(fresh, *others) == (2, POSITION)
    fresh = replaced(fresh, async_save=False)
    for mine, theirs in zip(state(parts[1]), state(others[1]), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    checkpoint.save_checkpoint(fresh, 2, *others, POSITION)
    check_equal("again", root / "a", root / "b")
    say(f"{kind}: held {held} largest {largest} saved {saved.peak} staged {staged.peak} loaded {loaded.peak}")
    assert held > 10 * largest
    assert max(saved.peak, staged.peak) < (1024 if kind == "bf16" else 2 * largest)
    assert loaded.peak < held + 2 * largest  # the load creates the state
    for step in (2, 3):  # training goes on alike
        update(*parts, step)
        update(*others, step)
    for mine, theirs in zip(state(parts[1]), state(others[1]), strict=True):
        assert torch.equal(mine, theirs)


def adam_states(optimizer):
    """Return the state of every parameter as Adam holds it."""
    return [values for part in optimizer.chained_optimizers for values in part.optimizer.state.values()]


def named_state(optimizer):
    """Yield (name, float32 values) of the state of every parameter."""
    for part in optimizer.chained_optimizers:
        for parameter, values in part.optimizer.state.items():
            for name in values:
                yield name, part.optimizer.get_unscaled_state(parameter, name)


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    sys.argv[1:] = []
    run(lambda: memory(folder, kind))
