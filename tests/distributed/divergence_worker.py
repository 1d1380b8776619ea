"""Divergences from a teacher against a loop over tokens; test_divergence.py on one rank, test_head_sharded.py on more.

torchrun --nproc-per-node N tests/distributed/divergence_worker.py
"""

import torch
import torch.distributed as dist

from megatron_grpo.models import divergence
from megatron_grpo.models.divergence import Head, TopK, WholeVocabulary, vocab_parallel_divergence, vocab_parallel_top_k

TOKENS, HIDDEN, THEIRS, VOCAB, PADDED = 37, 16, 24, 45, 64  # on four ranks the last one has padding alone


def problem():
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, HIDDEN), (PADDED, HIDDEN), (TOKENS, THEIRS), (PADDED, THEIRS), (TOKENS,)
    return [0.5 * torch.randn(shape, generator=generator) for shape in shapes]


def of_one_token(log_p, log_q, beta: float, k: int | None):
    """The divergence of two float64 distributions, a class at a time, as the definitions are written."""
    p, q = log_p.exp(), log_q.exp()
    if k is not None:
        inside = sorted(range(VOCAB), key=lambda v: -float(p[v]))[:k]
        outside = [v for v in range(VOCAB) if v not in inside]
        p, q = (torch.stack([*(x[v] for v in inside), sum((x[v] for v in outside), 0 * x[0])]) for x in (p, q))

    def kl(one, other):
        return sum(a * (a / b).log() for a, b in zip(one, other, strict=True) if a > 0)

    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def expected(beta: float, k: int | None, temperature: float, caps):
    """Values, and gradients by autograd, of the loop in float64."""
    ours, weight, theirs, their_weight, upstream = (tensor.double() for tensor in problem())
    ours.requires_grad_(), weight.requires_grad_()
    both = zip(((theirs, their_weight), (ours, weight)), caps[::-1], strict=True)
    log_p, log_q = (
        torch.log_softmax((z if cap is None else cap * torch.tanh(z / cap)) / temperature, -1)
        for (hidden, head), cap in both
        for z in [hidden @ head[:VOCAB].T]
    )
    values = torch.stack([of_one_token(log_p[t], log_q[t], beta, k) for t in range(TOKENS)])
    (values * upstream).sum().backward()
    return values.detach(), ours.grad, weight.grad


def check(group, rank: int, world: int, beta: float, k: int | None, temperature=0.7, chunk=8, caps=(None, None)):
    """Compare values and gradients, with a trained and a frozen output weight."""
    want = expected(beta, k, temperature, caps)
    for frozen in (False, True):
        ours, weight, theirs, their_weight, upstream = problem()
        shard = weight.chunk(world)[rank].clone().requires_grad_(not frozen)
        ours.requires_grad_()
        if k is None:
            # another padding of the teacher's vocabulary
            head = torch.nn.functional.pad(their_weight[:VOCAB], (0, 0, 0, PADDED - VOCAB)).chunk(world)[rank]
            teacher = WholeVocabulary(theirs, Head(head, caps[1]))
        else:
            padded = torch.nn.functional.pad(their_weight[:VOCAB], (0, 0, 0, 48 - VOCAB), value=3.0)
            teacher = vocab_parallel_top_k(
                theirs, padded.chunk(world)[rank], k, temperature, VOCAB, group, chunk, caps[1]
            )
            assert isinstance(teacher, TopK) and teacher.log_probs.shape == (TOKENS, k + 1)
        values = vocab_parallel_divergence(ours, shard, teacher, beta, temperature, VOCAB, group, chunk, caps[0])
        (values * upstream).sum().backward()
        if group is not None:
            dist.all_reduce(ours.grad, group=group)
        got = [values, ours.grad] + [shard.grad] * (not frozen)
        for name, a, b in zip(("value", "d hidden", "d weight"), got, want, strict=False):
            b = b.chunk(world)[rank] if name == "d weight" else b
            message = f"beta {beta}, k {k}: {name}: "
            torch.testing.assert_close(a.double(), b, atol=3e-5, rtol=3e-5, msg=lambda m, message=message: message + m)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    divergence.KEPT = 2  # the other chunks make the logits again
    for beta in (0.0, 0.3, 1.0):
        for k in (None, 1, 5, VOCAB):
            check(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), beta, k, caps=(2.5, None))
    dist.destroy_process_group()
