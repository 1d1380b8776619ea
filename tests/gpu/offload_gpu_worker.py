"""What tests/gpu/test_offload_gpu.py runs: updates with offloads before them, and without.

torchrun --nproc-per-node 1 tests/gpu/offload_gpu_worker.py FLAGS
"""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests" / "helpers")]
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import numpy as np
import torch
from late_offloader import LateOffloader
from megatron.core.utils import get_model_config

import pretrain_grpo
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training.offload import (
    Offloader,
    free_bytes,
    gradient_tensors,
    optimizer_tensors,
    weight_tensors,
)
from megatron_grpo.utils.device import device

UPDATES = 3


def given_gradients(model, *_, **__) -> None:
    """Replace the gradients by numbers that depend on nothing: those of some kernels differ from run to run."""
    for number, gradients in enumerate(gradient_tensors(model)):
        gradients.normal_(generator=torch.Generator(device()).manual_seed(number))


def leave_and_return(weights: Offloader, state: Offloader) -> None:
    """Offload everything, write to the memory that is free then, and let the optimizer state return later."""
    size = state.to_host().size + weights.to_host().size
    torch.full((size,), 255, dtype=torch.uint8, device=device())
    torch.cuda.empty_cache()  # else weights and state return into one segment of torch's allocator, which no part frees
    weights.to_device()
    state.to_device(background=True)


def run(args, kind: type[Offloader] | None) -> list[torch.Tensor]:
    """Return what the trainer holds after the updates, before each of which an offloader of ``kind`` has moved it."""
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    get_model_config(trainer.model[0]).finalize_model_grads_func = given_gradients
    batch, completions = made_up.rollout(args), np.arange(args.global_batch_size)
    if kind is not None:
        weights = kind(trainer.model, trainer.optimizer, True, False, False)
        state = kind(trainer.model, trainer.optimizer, False, True, True)
    for _ in range(UPDATES):
        if kind is not None:
            leave_and_return(weights, state)
        pretrain_grpo.update(args, trainer, batch, completions)
    if kind is not None:
        check_part(args, trainer)
    held = [*weight_tensors(trainer.model), *optimizer_tensors(trainer.optimizer)]
    held = [tensor.detach().cpu().clone() for tensor in held]
    made_up.release(trainer)
    return held


def check_part(args, trainer) -> None:
    """Offload so much that half of the optimizer state's bytes become free; the last tensor frees too much.

    Transformer Engine's optimizer has tensors in memory that torch's allocator shares with others: all may have to go.
    """
    largest = max(tensor.nbytes for tensor in optimizer_tensors(trainer.optimizer))
    state = Offloader(trainer.model, trainer.optimizer, False, False, True)
    whole = state.to_host().copied
    state.to_device()
    torch.cuda.empty_cache()
    wanted = free_bytes() + whole // 2
    part = state.to_host(wanted).copied
    if device().type == "cuda":
        enough = whole // 2 <= part <= whole and free_bytes() >= wanted
        most = whole if args.use_precision_aware_optimizer else 0.6 * whole + largest
        assert enough and part <= most, (part, whole, largest, free_bytes(), wanted)
    state.to_device()


def main() -> None:
    args = made_up.parse(sys.argv[1:], 1)
    plain = run(args, None)
    for kind in (Offloader, LateOffloader):
        held = run(args, kind)
        different = [i for i, (a, b) in enumerate(zip(held, plain, strict=True)) if not torch.equal(a, b)]
        assert not different, f"{kind.__name__}: tensors {different} of {len(plain)} differ"
        print(f"equal: {len(held)} tensors, {kind.__name__}", flush=True)


if __name__ == "__main__":
    main()
