"""What test_exact_log_probs.py runs in Triton's interpreter: an update with and without --exact-log-probs.

    torchrun --nproc-per-node N tests/unit/models/exact_worker.py FLAGS

Each rank prints the largest differences of log-probabilities and of gradients, relative to the norm of all of its own;
without --sequence-parallel also the first tensor that a change of one bit in each kernel reaches.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import numpy as np
import torch
from megatron.core.utils import unwrap_model
from planted import FIRST, LOG_PROBS, planted

import pretrain_grpo
from megatron_grpo.algorithm.mixing import with_token_weights
from megatron_grpo.models import forward
from megatron_grpo.models.exact import head
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.utils.arguments import replaced
from tools import tensor_differences

WORLD = int(os.environ["WORLD_SIZE"])
MODEL = """--num-layers 2 --hidden-size 96 --ffn-hidden-size 40 --num-attention-heads 6 --group-query-attention
    --num-query-groups 2 --kv-channels 16 --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 67
    --max-position-embeddings 64 --clip-grad 0""".split()


def of_torch(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return what vLLM's kernels return, which need a GPU, and divide the logits as they do."""
    logits /= temperature
    return logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]


def results(flags: list[str], exact: bool) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    args = made_up.parse([*MODEL, *flags], WORLD)
    args = replaced(args, exact_log_probs=exact)  # the flag is refused without a GPU
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    batch, chosen = made_up.one_update(args, [9, 5, 12, 7] * 4)
    log_probs = forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, batch)
    batch = made_up.off_policy(args, trainer, batch)
    batch, _ = with_token_weights(args, batch, chosen, None, 1)
    chunk = trainer.model[0]
    chunk.zero_grad_buffer()
    for pack in forward.micro_batches(args, batch, chosen):
        output, loss_func = pretrain_grpo.forward_step(iter([pack]), chunk, args, 1)
        loss, _ = loss_func(output)
        loss.backward()
    (model,) = unwrap_model([chunk])
    gradients = {name: p.main_grad.detach().clone() for name, p in model.named_parameters()}
    made_up.release(trainer)
    return log_probs, gradients


def first_differences() -> dict[str, str | None]:
    """Return by kernel the first tensor of the trainer that a change of one bit reaches."""
    args = replaced(made_up.parse([*MODEL, *sys.argv[1:]], WORLD), exact_log_probs=True, micro_batch_size=1)
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    batch, _ = made_up.one_update(args, [9, 5, 12, 7] * 4)
    one = batch.select([2])
    named = list(tensor_differences.places(args.num_layers))
    rows = tensor_differences.of_trainer(args, trainer.model, one, {name: place for name, _, place in named})
    for name, _, place in named:
        if place.module.endswith("linear_qkv"):
            rows[name] = tensor_differences.in_engines_order(args, rows[name])
    log_probs = forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, one)
    found: dict[str, str | None] = {}
    for kernel in FIRST:
        with planted(kernel):
            items = tensor_differences.against(args, rows, trainer.model, one)
            found[kernel] = next((name for name, count, *_ in items if count), None)
            again = forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, one)
        if found[kernel] is None and not np.array_equal(again, log_probs, equal_nan=True):
            found[kernel] = LOG_PROBS
    made_up.release(trainer)
    return found


head.token_log_probs = of_torch
plain, of_plain = results(sys.argv[1:], exact=False)
exact, of_exact = results(sys.argv[1:], exact=True)
size = torch.stack([gradient.norm() for gradient in of_plain.values()]).norm()
gradients = {name: float((of_exact[name] - gradient).norm() / size) for name, gradient in of_plain.items()}
found: dict = {"log_probs": float(np.abs(plain - exact)[~np.isnan(plain)].max()), "gradients": gradients}
if "--sequence-parallel" not in sys.argv:  # the tensors of both sides have all tokens
    found["first"] = first_differences()
print(json.dumps(found), flush=True)
