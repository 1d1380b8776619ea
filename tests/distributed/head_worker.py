"""The head against torch.log_softmax on gathered logits; test_head.py on one rank, test_head_sharded.py on several.

torchrun --nproc-per-node N tests/distributed/head_worker.py
"""

import torch
import torch.distributed as dist

from megatron_grpo.models.exact import head
from megatron_grpo.models.head import vocab_parallel_log_probs

TOKENS, HIDDEN, VOCAB, PADDED = 37, 16, 45, 64  # on four ranks the last one has padding alone


def kept_tokens():
    """Sets of up to 6 tokens with the label among them, at any place; every fifth token has the whole vocabulary."""
    generator = torch.Generator().manual_seed(1)
    labels = problem()[2]
    kept = torch.full((TOKENS, 6), -1, dtype=torch.int32)
    for token in range(TOKENS):
        if token % 5:
            ids = torch.randperm(VOCAB, generator=generator)[: token % 6]
            ids = torch.cat([ids[ids != labels[token]], labels[token : token + 1]])
            kept[token, : len(ids)] = ids[torch.randperm(len(ids), generator=generator)]
    return kept


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    upstream = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, labels, upstream


def expected(temperature: float, cap: float | None, kept=None, with_entropy: bool = True):
    """log_softmax of the whole float64 logits, -inf outside the kept tokens, and the gradients by autograd."""
    hidden, weight, labels, upstream = problem()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight[:VOCAB].T
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    logits = logits / temperature
    for row, ids in zip(range(TOKENS), [] if kept is None else kept.tolist()):
        inside = [token for token in ids if token >= 0] or range(VOCAB)
        outside = torch.tensor([token not in inside for token in range(VOCAB)])
        logits = logits.masked_fill(outside & (torch.arange(TOKENS) == row)[:, None], float("-inf"))
    log_p = torch.log_softmax(logits, -1)
    finite = log_p.masked_fill(log_p == float("-inf"), 0.0)
    chosen, entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * finite).sum(-1)
    (chosen * upstream[0] + with_entropy * entropy * upstream[1]).sum().backward()
    return chosen.detach(), entropy.detach(), hidden.grad, weight.grad


def check(group, rank: int, world: int, temperature: float, chunk: int, cap: float | None = None, kept=None) -> None:
    """Compare losses with and without the entropy, and trained and frozen output weights."""
    _check(group, rank, world, temperature, chunk, cap, kept, with_entropy=True, frozen=False)
    _check(group, rank, world, temperature, chunk, cap, kept, with_entropy=False, frozen=False)
    _check(group, rank, world, temperature, chunk, cap, kept, with_entropy=False, frozen=True)


def _check(group, rank: int, world: int, temperature, chunk: int, cap, kept, with_entropy: bool, frozen: bool) -> None:
    hidden, weight, labels, upstream = problem()
    shard = weight.chunk(world)[rank].clone().requires_grad_(not frozen)
    hidden.requires_grad_()
    chosen, entropy = vocab_parallel_log_probs(
        hidden, shard, labels, temperature, VOCAB, group, chunk, cap, kept, entropy_gradient=with_entropy
    )
    (chosen * upstream[0] + with_entropy * entropy * upstream[1]).sum().backward()
    grad_hidden = hidden.grad
    if group is not None:
        dist.all_reduce(grad_hidden, group=group)  # partial sums, as copy_to_tensor_model_parallel_region adds them up
    want = expected(temperature, cap, kept, with_entropy)
    got = [chosen, entropy, grad_hidden]
    if not frozen:
        got.append(shard.grad)
    want = *want[:3], want[3].chunk(world)[rank]
    for name, a, b in zip(("log-probability", "entropy", "d hidden", "d weight"), got, want, strict=False):
        torch.testing.assert_close(a.double(), b, atol=4e-5, rtol=4e-5, msg=lambda m, name=name: f"{name}: {m}")


def check_whole_rows(group, rank: int, world: int) -> None:
    """vLLM's kernel gets whole rows of logits (--exact-log-probs), each from one rank, in parts of 8 tokens."""
    hidden, weight, labels, _ = problem()
    whole = (hidden @ weight[:VOCAB].T).float()
    seen: list[int] = []

    def instead_of_vllms(logits, token_ids, temperature):
        at = [int((row == whole).all(1).nonzero()[0, 0]) for row in logits]
        assert torch.equal(token_ids, labels[at]) and temperature == 0.7
        seen.extend(at)
        return torch.tensor(at).float()

    head.token_log_probs, head.WHOLE_ROWS = instead_of_vllms, 8
    size = PADDED // world
    columns = [max(0, min(VOCAB - first, size)) for first in range(0, PADDED, size)]
    shard = whole.split(columns, 1)[rank]
    found = head.log_probs_of_shards(shard, labels, 0.7, columns, group)
    assert found.tolist() == list(range(TOKENS))
    of_ranks: list[list[int]] = [[]] * world
    dist.all_gather_object(of_ranks, seen)
    assert sorted(number for own in of_ranks for number in own) == list(range(TOKENS))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for temperature in (1.0, 0.7):
        for cap in (None, 2.5):
            for kept in (None, kept_tokens()):
                check(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), temperature, 8, cap, kept)
    check_whole_rows(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
