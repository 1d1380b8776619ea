"""Packed attention under process groups, against a plain masked softmax.

torchrun --nproc-per-node 4 tests/distributed/attention_worker.py DIR
    context and tensor parallel on gloo, float64; checkpoints go to DIR (run by test_attention_parallel.py)
torchrun --nproc-per-node 2 tests/distributed/attention_worker.py --cuda [PackedAttention|FlashPackedAttention]
    the flash kernels of GPUs in bf16, one line a case; all processes are one context-parallel group (tests/gpu)
"""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.models.attention import FlashPackedAttention, PackedAttention
from megatron_grpo.parallel import initialize
from megatron_grpo.parallel.zigzag import zigzag

NAMES = "output", "d q", "d k", "d v", "d sink"


@dataclass(frozen=True)
class Case:
    """One problem: lengths of the sequences, heads and their sizes, window (tokens to the left), softmax, soft cap."""

    lengths: tuple[int, ...]
    heads: int = 4
    groups: int = 2
    size: int = 16  # of queries and keys
    value_size: int = 16
    left: int | None = None
    softmax: str = "vanilla"
    scale: float | None = None
    cap: float | None = None

    def tensors(self, device="cpu", dtype=torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
        """q, k, v and the sinks; the upstream gradient. Rounded to ``dtype``, the same on every rank and device."""
        generator = torch.Generator().manual_seed(0)
        total, h, g, d, dv = sum(self.lengths), self.heads, self.groups, self.size, self.value_size
        shapes = (total, h, d), (total, g, d), (total, g, dv), (h,), (total, h * dv)
        draws = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        *leaves, upstream = [x.to(device=device, dtype=dtype) for x in draws]
        return [x.requires_grad_() for x in leaves], upstream

    def packed(self, device="cpu") -> PackedSeqParams:
        host = torch.tensor([0, *self.lengths]).cumsum(0).int()
        cu, longest = host.to(device), max(self.lengths)
        return PackedSeqParams("thd", cu, cu, host, host, longest, longest)

    def config(self, dtype=torch.float64, tp_size=1, **kwargs) -> TransformerConfig:
        return TransformerConfig(
            num_layers=1,
            hidden_size=self.heads * self.size,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            softmax_type=self.softmax,
            window_size=None if self.left is None else (self.left, 0),
            params_dtype=dtype,
            tensor_model_parallel_size=tp_size,
            perform_initialization=False,
            cuda_graph_modules=[],
            **kwargs,
        )

    def module(self, groups: ProcessGroupCollection, dtype=torch.float64, kind=PackedAttention) -> PackedAttention:
        return kind(
            self.config(dtype, groups.tp.size()),
            1,
            None,
            "self",
            softmax_scale=self.scale,
            k_channels=self.size,
            v_channels=self.value_size,
            pg_collection=groups,
            softcap=self.cap,
        )


def plain(case: Case, q, k, v, sink) -> torch.Tensor:
    """Every sequence and query head by itself, with an explicit mask: ``[t, heads * value size]``."""
    k, v = (x.repeat_interleave(case.heads // case.groups, dim=1) for x in (k, v))
    outputs = []
    for one_q, one_k, one_v in zip(*(x.split(case.lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("shd,thd->hst", one_q, one_k) * (case.scale or 1 / math.sqrt(case.size))
        if case.cap is not None:
            scores = torch.tanh(scores / case.cap) * case.cap
        behind = torch.arange(len(one_q))[:, None] - torch.arange(len(one_q))  # how far to the left a key is
        seen = (behind >= 0) & (behind <= (math.inf if case.left is None else case.left))
        scores = scores.masked_fill(~seen.to(scores.device), -math.inf)
        if case.softmax != "vanilla":
            logit = sink if case.softmax == "learnable" else torch.zeros_like(sink)
            scores = torch.cat([logit[:, None, None].expand(-1, len(one_q), 1), scores], dim=2)
        weights = scores.softmax(-1)[:, :, -len(one_q) :]
        outputs.append(torch.einsum("hst,thd->shd", weights, one_v).flatten(1))
    return torch.cat(outputs)


def results(case: Case, attend, tensors, upstream) -> list[torch.Tensor]:
    """Output, and the gradients of q, k, v and (learnable) the sinks."""
    out = attend(*tensors)
    leaves = tensors if case.softmax == "learnable" else tensors[:3]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def reference(case: Case, dtype=torch.float64, device="cpu", exact=torch.float64) -> list[torch.Tensor]:
    """The results of `plain`, computed in ``exact`` from tensors that were rounded to ``dtype``."""
    tensors, upstream = case.tensors(device, dtype)
    tensors = [x.detach().to(exact).requires_grad_() for x in tensors]
    return results(case, lambda *x: plain(case, *x), tensors, upstream.to(exact))


def module_results(
    case: Case, groups: ProcessGroupCollection, device="cpu", dtype=torch.float64, kind=PackedAttention
) -> list[torch.Tensor]:
    """The results of this rank's module, put together over tensor- and context-parallel ranks."""
    tensors, upstream = case.tensors(device, dtype)
    tp, cp = groups.tp, groups.cp
    positions = torch.from_numpy(zigzag(case.packed().cu_seqlens_q.numpy(), cp.size(), cp.rank())).to(device)

    def share(x):  # this rank's tokens and heads
        return x.index_select(0, positions).unflatten(1, (tp.size(), -1)).select(1, tp.rank())

    q, k, v = (share(x.detach()).requires_grad_() for x in tensors[:3])
    sink = tensors[3].detach().view(tp.size(), -1)[tp.rank()].clone().requires_grad_()
    module = case.module(groups, dtype, kind)
    if case.softmax == "learnable":
        module.softmax_offset = torch.nn.Parameter(sink)
        sink = module.softmax_offset
    packed = case.packed(device)
    got = results(
        case,
        lambda q, k, v, _: module(q, k, v, None, packed_seq_params=packed),
        [q, k, v, sink],
        share(upstream.unflatten(1, (case.heads, -1))).flatten(1),
    )

    def whole(x, like):  # every rank fills in its part of a tensor of zeros
        full = torch.zeros(like.shape, dtype=x.dtype, device=device)
        heads = full.view(len(like), tp.size(), -1)[:, tp.rank()]
        heads[positions] = x.flatten(1)
        return total(full)

    def total(x):
        for group in (tp, cp):
            if group.size() > 1:
                dist.all_reduce(x, group=group)
        return x

    put = [whole(x, y) for x, y in zip(got[:4], [upstream, *tensors[:3]], strict=True)]
    if case.softmax == "learnable":
        sinks = torch.zeros_like(tensors[3]).detach()
        sinks.view(tp.size(), -1)[tp.rank()] = got[4]
        put.append(total(sinks))
    return put


def layouts(directory: str) -> None:
    """Every case in every layout of four processes; the sinks of one layout's checkpoint in the next."""
    dist.init_process_group("gloo")
    initialize._host_group = dist.group.WORLD  # for the checkpoint
    cases = [
        Case((8, 24, 8)),
        Case((16, 8), groups=4, size=6, value_size=4, scale=0.3),
        Case((8, 40, 16), left=5),
        Case((32, 8), groups=1, left=11, softmax="learnable"),
        Case((16, 24, 8), left=7, cap=0.8),
        Case((24, 8), softmax="off-by-one", left=64, size=4, value_size=8),
    ]
    previous = None
    for tp_size, cp_size in ((2, 2), (1, 4)):
        parallel_state.initialize_model_parallel(tp_size, context_parallel_size=cp_size)
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        for case in cases:
            if case.groups % tp_size:
                continue
            got, want = module_results(case, groups), reference(case)
            for name, a, b in zip(NAMES, got, want, strict=False):
                torch.testing.assert_close(
                    a, b, atol=1e-12, rtol=1e-12, msg=lambda m, where=(name, case, tp_size, cp_size): f"{where}: {m}"
                )
        previous = check_checkpoint(Path(directory, f"tp{tp_size}cp{cp_size}"), previous, groups)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def check_checkpoint(path: Path, previous: Path | None, groups: ProcessGroupCollection) -> Path:
    """Sinks drawn for four heads are not the same on two ranks, are saved, and come back in the next layout."""
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    config = Case((8,), softmax="learnable").config(tp_size=groups.tp.size())
    config.perform_initialization = True
    module = PackedAttention(config, 1, None, "self", pg_collection=groups)
    sinks = module.softmax_offset
    assert sinks.tensor_model_parallel and sinks.partition_dim == 0
    drawn = [torch.empty_like(sinks.data) for _ in range(groups.tp.size())]
    dist.all_gather(drawn, sinks.data, group=groups.tp)
    assert len(torch.cat(drawn).unique()) == config.num_attention_heads
    saved = torch.arange(4, dtype=torch.float64) + 0.5
    if previous is not None:
        state = module.sharded_state_dict("layer.")
        module.load_state_dict(
            {"softmax_offset": dist_checkpointing.load(state, str(previous))["layer.softmax_offset"]}
        )
        assert torch.equal(sinks.data, saved.view(groups.tp.size(), -1)[groups.tp.rank()])
    with torch.no_grad():
        sinks.copy_(saved.view(groups.tp.size(), -1)[groups.tp.rank()])
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    checkpoint.write_state(module.sharded_state_dict("layer."), path)
    return path


class Alone:
    """A process group of one, where no torch.distributed is needed."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


_LENGTHS = (64, 1024, 16, 304, 2048, 16)
_BASE = Case(_LENGTHS, heads=8, groups=2, size=64, value_size=64)
_MLA = Case(_LENGTHS, heads=4, groups=4, size=192, value_size=128)
GPU_CASES = {
    "causal": _BASE,
    "lengths of any kind": replace(_BASE, lengths=(1, 777, 130, 2, 1)),
    "scale": replace(_BASE, scale=0.3),
    "window 127": replace(_BASE, left=127),
    "window 1500": replace(_BASE, left=1500),
    "window 1": replace(_BASE, left=1),
    "sinks": replace(_BASE, softmax="learnable"),
    "off by one": replace(_BASE, softmax="off-by-one"),
    "sinks, window 127": replace(_BASE, softmax="learnable", left=127),
    "MLA": _MLA,
    "MLA, sinks, window 100": replace(_MLA, softmax="learnable", left=100),
    "head size 128": replace(_BASE, size=128, value_size=128),
    "soft cap": replace(_BASE, cap=5.0),
    "soft cap, window 127": replace(_BASE, cap=5.0, left=127),
    "soft cap, other lengths": replace(_BASE, cap=5.0, lengths=(1040, 32, 2416)),
    "soft cap, 88 tokens": replace(_BASE, cap=5.0, lengths=(8, 64, 16)),
    "soft cap, head size 256": replace(_BASE, cap=5.0, size=256, value_size=256),
}


def on_gpu(kind: type[PackedAttention]) -> None:
    """Relative errors (norm of the difference by norm) of output and gradients in bf16 against float32, same data."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    groups = ProcessGroupCollection(tp=Alone(), cp=Alone())
    if world > 1:
        dist.init_process_group("nccl", device_id=device)
        parallel_state.initialize_model_parallel(context_parallel_size=world)
        groups.cp = parallel_state.get_context_parallel_group()
    worst = 0.0
    for name, case in GPU_CASES.items():
        if case.cap is not None and kind is FlashPackedAttention:
            continue  # caps have a kernel of their own
        if world > 1 and any(length % (2 * world) for length in case.lengths):
            continue
        got = module_results(case, groups, device, torch.bfloat16, kind)
        want = reference(case, torch.bfloat16, device, torch.float32)
        errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
        worst = float(torch.tensor([worst, *errors]).max())  # NaN, too
        if not dist.is_initialized() or dist.get_rank() == 0:
            numbers = "  ".join(f"{label} {error:.1e}" for label, error in zip(NAMES, errors, strict=False))
            print(f"cp {world}  {name:24s} {kind.__name__:20s} {numbers}", flush=True)
    assert worst < 2e-2, f"worst relative error {worst}"
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "--cuda":
        on_gpu({kind.__name__: kind for kind in (PackedAttention, FlashPackedAttention)}[sys.argv[2]])
    else:
        layouts(sys.argv[1])
