"""What test_distillation_layouts.py runs under torchrun: updates from a teacher's distributions, in several layouts.

torchrun --nproc-per-node N tests/distributed/distillation_worker.py DIRECTORY     (with the models `make` puts there)
"""

import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import toy_checkpoints
from checkpoint_worker import say
from transformers import AutoModelForCausalLM

import pretrain_grpo
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import destroy_rank_groups, initialize_distributed
from megatron_grpo.reference.model_args import teacher_args
from megatron_grpo.reference.teacher import build_teachers
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights.arguments import architecture_of
from megatron_grpo.weights.stream import stream_hf
from tools import made_up
from tools.check_parallel import flags_of

# The policy after one step of SGD at this rate is the gradient.
RATE, TEMPERATURE, VOCAB = 0.5, 0.7, 250
FLAGS = f"""--loss-type gkd --beta 0 --global-batch-size 8 --num-generations 4 --steps-per-generation 1 --optimizer sgd
 --sgd-momentum 0 --clip-grad 0 --weight-decay 0 --lr {RATE} --temperature {TEMPERATURE} --train-iters 1
 --max-completion-length 24 --max-prompt-length 8 --reward-funcs exact_match --train-data-path unused --no-save-hf
 --tokenizer-model unused --transformer-impl local"""
# Layout of the policy, flags of the divergence, and layout and number of teachers
BUDGET = "--max-tokens-per-microbatch 90"
CASES = {
    1: [("TP1", f"--gkd-beta 0.3 {BUDGET}", "", 1), ("TP1", "--gkd-logits-topk 5 --micro-batch-size 2", "", 1)],
    2: [
        ("TP2 SP", f"--gkd-beta 0.3 {BUDGET}", "--teacher-tensor-model-parallel-size 1", 2),
        ("PP2", "--gkd-beta 1 --micro-batch-size 2", "--teacher-pipeline-model-parallel-size 1", 1),
        ("CP2", f"--gkd-beta 0 {BUDGET}", "", 2),
        ("TP1", "--gkd-beta 1 --micro-batch-size 4", "--teacher-tensor-model-parallel-size 2", 1),
        ("TP1", f"--gkd-logits-topk 3 {BUDGET}", "--teacher-context-parallel-size 2", 2),
        ("TP2", "--gkd-logits-topk 3 --gkd-beta 1 --micro-batch-size 2", "", 2),
        ("PP2", f"--gkd-logits-topk 7 --gkd-beta 0 {BUDGET} --no-share-prompts", "", 1),
        ("CP2", f"--gkd-logits-topk 7 {BUDGET}", "", 1),
    ],
}


def make(root: Path) -> None:
    """Save a policy, and two teachers of other families, sizes and paddings."""
    toy_checkpoints.make(root / "policy", "qwen3", False, vocab_size=VOCAB)
    toy_checkpoints.make(root / "one", "llama", True, seed=3, vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2)
    toy_checkpoints.make(root / "two", "gemma2", True, seed=4, vocab_size=VOCAB)


@cache
def model(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")


def divergence(log_p, log_q, beta: float, k: int | None):
    """The divergence of distributions [t, v]; with k of the teacher's likely tokens and one class of the others."""
    if k is not None:
        ids = log_p.topk(k, -1).indices
        outside = torch.ones_like(log_p).scatter(1, ids, 0.0)
        log_p, log_q = (
            torch.cat([x.gather(1, ids), (x.exp() * outside).sum(-1, keepdim=True).log()], 1) for x in (log_p, log_q)
        )
    p, q = log_p.exp(), log_q.exp()
    if beta in (0, 1):
        return (p * (log_p - log_q)).sum(-1) if beta == 0 else (q * (log_q - log_p)).sum(-1)
    m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (log_p - m)).sum(-1) + (1 - beta) * (q * (log_q - m)).sum(-1)


def expected(root: Path, batch: RolloutBatch, completions: np.ndarray, names: list[str], beta: float, k: int | None):
    """Loss, and gradients by parameter, of transformers' models in float64, a completion at a time."""
    policy = model(root / "policy")
    policy.zero_grad()
    values = []
    for i in completions:
        begin, end, prompt = batch.cu_seqlens[i], batch.cu_seqlens[i + 1], batch.prompt_lengths[i]
        ids = torch.from_numpy(batch.tokens[begin:end].astype(np.int64))[None]
        log_q, log_p = (
            torch.log_softmax(one(ids).logits[0, prompt - 1 : -1] / TEMPERATURE, -1)
            for one in (policy, model(root / names[batch.row_ids[i] % len(names)]))
        )
        values.append(divergence(log_p.detach(), log_q, beta, k))
    loss = torch.cat(values).mean()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in policy.named_parameters()}


class Rows:
    """A data set of whose rows every second one has the source two."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: int):
        return type("Prompt", (), {"row": {"data_source": ("one", "two")[row % 2]}})


def check(root: Path, layout: str, flags: str, of_teacher: str, count: int) -> None:
    names = ["one", "two"][:count]
    places = [f"{name}={root / name}" for name in names] if count > 1 else [str(root / "one")]
    words = [*FLAGS.split(), *flags.split(), "--load-hf", str(root / "policy"), *flags_of(layout), *of_teacher.split()]
    args = parse_args([*words, "--teacher-load-hf", *places])
    args = resolve_args(replaced(args, **architecture_of(args, args.load_hf)), int(os.environ["WORLD_SIZE"]))
    if dist.is_initialized():
        destroy_rank_groups()
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    trainer.teacher = build_teachers(args, teacher_args(args), model_provider, Rows())
    trainer.reference = None
    before = {name: tensor.clone() for name, tensor in stream_hf(trainer.model, args)}
    batch, completions = made_up.rollout(args), np.arange(args.global_batch_size)
    want, gradients = expected(root, batch, completions, names, args.gkd_beta, args.gkd_logits_topk)
    batch.advantages = None  # a divergence needs none
    batch = made_up.share(args, batch, [completions], trainer.teacher)
    batch = trainer.teacher.add_to(batch, trainer.model, pretrain_grpo.forward_step)
    batch = replace(batch, advantages=np.zeros(batch.num_completions, np.float32))
    with trainer.teacher.heads_on_device(trainer.model):
        row = pretrain_grpo.update(args, trainer, batch, completions)
    np.testing.assert_allclose([row["loss"], row["teacher/divergence"]], want, rtol=2e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, tensor in stream_hf(trainer.model, args):
        found = (before[name] - tensor) / RATE
        torch.testing.assert_close(
            found.double(), gradients[name], rtol=1e-3, atol=2e-4 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )
    say(f"{layout}: {flags}: as transformers")


if __name__ == "__main__":
    root = Path(sys.argv.pop())

    def main() -> None:
        for case in CASES[int(os.environ["WORLD_SIZE"])]:
            check(root, *case)

    run(main)
