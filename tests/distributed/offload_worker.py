"""What test_offload_ranks.py runs under torchrun: updates with an absence between them, and without.

torchrun --nproc-per-node 2 tests/distributed/offload_worker.py HF_DIR OUT_DIR CASE...
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
from late_offloader import LateOffloader
from megatron.core import dist_checkpointing

import pretrain_grpo
from megatron_grpo.checkpointing import checkpoint, checkpoint_directory
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import (
    destroy_rank_groups,
    host_group,
    initialize_distributed,
    set_random_seed,
)
from megatron_grpo.training import offload, train_step
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.update_flops import UpdateFlops
from megatron_grpo.utils.device import device
from megatron_grpo.weights import hf

DISTRIBUTED = "--use-distributed-optimizer"
CASES = {
    "float32": "",
    "bf16": "--bf16",
    "bf16 gradients": "--bf16 --grad-reduce-in-bf16",
    "distributed": DISTRIBUTED,
    "bf16 distributed": f"--bf16 {DISTRIBUTED}",
    "bf16 overlapped": f"--bf16 {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
    "buckets": f"{DISTRIBUTED} --overlap-grad-reduce --ddp-bucket-size 20000",
    "experts": DISTRIBUTED,
    "bf16 experts": f"--bf16 {DISTRIBUTED}",
}


def build(name: str, hf_dir: str, save: Path):
    """Arguments, the model with its optimizer and schedule, and a made-up rollout."""
    flags = f"--load-hf {hf_dir} --global-batch-size 8 --micro-batch-size 2 --save {save} {CASES[name]}"
    args = made_up.parse(flags.split(), int(os.environ["WORLD_SIZE"]))
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = forward.build_model(args, model_provider)
    hf.load_hf(model, args, hf_dir)
    if "experts" in name:  # marked as megatron-core marks experts' parameters: buffers and an optimizer of their own
        for parameter_name, parameter in model[0].named_parameters():
            parameter.allreduce = "mlp" not in parameter_name
    model, optimizer, scheduler = train_step.setup_optimizer(args, model)
    batch = made_up.rollout(args)
    bad_updates = BadUpdates("stop", None, None)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "flops": UpdateFlops(args, None)}
    trainer = SimpleNamespace(**parts, bad_updates=bad_updates, iteration=0)
    batch = made_up.off_policy(args, trainer, batch)
    return args, trainer, batch


def held(trainer) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each kind, taken from where megatron-core documents them."""
    weights, gradients, state = {}, {}, {}
    for name, parameter in trainer.model[0].named_parameters():
        weights[name], gradients[name] = parameter.data, parameter.main_grad
    model_memory = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    for i, part in enumerate(trainer.optimizer.chained_optimizers):
        for j, parameter in enumerate(
            parameter for group in part.optimizer.param_groups for parameter in group["params"]
        ):
            moments = part.optimizer.state.get(parameter, {})
            state |= {f"{i}.{j}.{name}": tensor for name, tensor in moments.items()}
            if parameter.untyped_storage().data_ptr() not in model_memory:
                state[f"{i}.{j}.main"] = parameter.data
    return {"weights": weights, "gradients": gradients, "optimizer_state": state}


def sizes(tensors: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().nbytes() for tensor in tensors.values() if tensor.numel()}


def foreign_memory(count: int) -> None:
    """Another owner takes and writes as much memory as was given up, so that nothing is right by having stayed."""
    place = device()
    for size in (1 << 12, 1 << 14, 1 << 18, count):
        junk = [torch.full((size,), 255, dtype=torch.uint8, device=place) for _ in range(max(1, count // size))]
        del junk


def absence(offloader: offload.Offloader, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    """Out and in, twice, with a look at what is where."""
    before = {kind: sizes(group) for kind, group in tensors.items()}
    optimizer, host = offloader.optimizer, None
    for _ in range(2):
        out = offloader.to_host()
        assert offloader.is_out and offloader.to_host() == (0, 0, 0.0)
        for kind, group in tensors.items():
            assert sizes(group) == ({0} if before[kind] else set()), kind
        assert all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])
        foreign_memory(out.size)
        back = offloader.to_device()
        assert not offloader.is_out and offloader.to_device() == (0, 0, 0.0)
        assert out[:2] == back[:2]
        assert {kind: sizes(group) for kind, group in tensors.items()} == before
        assert not any(gradient.any() for gradient in tensors["gradients"].values())
        addresses = [block.data_ptr() for block in offloader._blocks]
        assert host in (None, addresses), "the second absence took other host memory than the first"
        host = addresses
        assert 0 <= offloader.host_bytes - out.copied < offload.BLOCK_BYTES, "more than the last block is waste"


def check_bytes(name: str, trainer) -> None:
    """Each kind alone: what it moves, in bytes worked out from the number of parameters."""
    kinds = ("weights", "gradients", "optimizer_state")
    count, replicas = sum(parameter.numel() for parameter in trainer.model[0].parameters()), dist.get_world_size()
    bf16, distributed = "bf16" in name, DISTRIBUTED in CASES[name]
    for kind in kinds:
        offloader = offload.Offloader(trainer.model, trainer.optimizer, *(kind == other for other in kinds))
        before = {other: {k: t.clone() for k, t in tensors.items()} for other, tensors in held(trainer).items()}
        moved = torch.tensor(offloader.to_host()[:2])
        foreign_memory(int(moved[0]))
        offloader.to_device()
        for other, tensors in held(trainer).items():
            if other != "gradients" or kind != "gradients":
                assert all(torch.equal(t, before[other][k]) for k, t in tensors.items()), (kind, other)
        dist.all_reduce(moved, group=host_group())
        size, copied = moved.tolist()
        if kind == "optimizer_state":
            assert size == copied == (12 if bf16 else 8) * count * (1 if distributed else replicas)
            continue
        expected = replicas * count * (2 if (kind == "weights" and bf16) or name == "bf16 gradients" else 4)
        if distributed or kind == "gradients":  # in buffers, which have a little padding
            assert expected <= size < 1.05 * expected, (kind, size, expected)
        else:
            assert size == expected, (kind, size, expected)
        assert copied == (0 if kind == "gradients" else size)


def check_parts(trainer) -> None:
    """The weights and the rest with an Offloader each, in either order, also while the other is out."""
    kept = {name: tensor for kind in ("weights", "optimizer_state") for name, tensor in held(trainer)[kind].items()}
    before = {name: tensor.clone() for name, tensor in kept.items()}
    weights = offload.Offloader(trainer.model, trainer.optimizer, True, False, False)
    rest = offload.Offloader(trainer.model, trainer.optimizer, False, True, True)
    for order in ((weights, rest), (rest, weights)):
        for part in order:
            foreign_memory(part.to_host().size)
        for part in order:
            part.to_device()
        check_equal(kept, before)


def run(name: str, hf_dir: str, save: Path, away: bool):
    """Two updates, with an absence before each and after them, or without; returns what the trainer then holds."""
    args, trainer, batch = build(name, hf_dir, save)
    offloader = offload.Offloader(trainer.model, trainer.optimizer, True, True, True)
    rows = []
    with LateOffloader(trainer.model, trainer.optimizer, False, True, True) as late:
        for completions in np.split(np.arange(batch.num_completions), 2):
            if away:
                with forward.parameters_complete(trainer.model):
                    absence(offloader, held(trainer))
                    late.to_host()
                late.to_device(background=True)
            rows.append(pretrain_grpo.update(args, trainer, batch, completions))
    if away:
        absence(offloader, held(trainer))
        assert len(trainer.optimizer.chained_optimizers) == (2 if "experts" in name else 1)
        check_bytes(name, trainer)
        check_parts(trainer)
        absence(offloader, held(trainer))
    if "experts" not in name:  # no true experts: their checkpoint would not be one
        with forward.parameters_complete(trainer.model):
            checkpoint.save_checkpoint(args, 2, trainer.model, trainer.optimizer, trainer.scheduler, {})
    tensors = held(trainer)
    destroy_rank_groups()
    return rows, tensors["weights"] | tensors["optimizer_state"]


def stored(save: Path) -> dict[str, torch.Tensor]:
    state = dist_checkpointing.load_plain_tensors(str(checkpoint_directory.find(save)[1]))
    return {key: value for key, value in state.items() if torch.is_tensor(value)}


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different, different


def main() -> None:
    hf_dir, out, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    offload.BLOCK_BYTES = 1 << 16  # so that storages are cut, and share blocks
    for name in names:
        saves = [out / f"{name.replace(' ', '-')}-{i}" for i in range(2)]
        rows, tensors = run(name, hf_dir, saves[0], away=False)
        rows_away, tensors_away = run(name, hf_dir, saves[1], away=True)
        assert rows == rows_away, (rows, rows_away)
        check_equal(tensors, tensors_away)
        if "experts" not in name:
            check_equal(stored(saves[0]), stored(saves[1]))
        os.write(1, f"equal: {name} on rank {dist.get_rank()}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
