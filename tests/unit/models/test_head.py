"""The head against torch.log_softmax on gathered logits: values and gradients, at TP 1, 2 and 4."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from head_worker import HIDDEN, VOCAB, check, kept_tokens, problem

from megatron_grpo.models import head
from megatron_grpo.models.head import vocab_parallel_log_probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [8, 1000])
@pytest.mark.parametrize("cap", [None, 2.5])
def test_one_rank(temperature, chunk, cap):
    check(None, 0, 1, temperature, chunk, cap)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("cap", [None, 2.5])
@pytest.mark.parametrize("rows", ["all sets", "some sets", "no set"])
def test_over_the_kept_tokens(temperature, cap, rows):
    kept = kept_tokens()
    if rows == "all sets":
        kept[::5, 0] = problem()[2][::5].int()  # a set of one token: its probability is 1, and its gradient 0
    elif rows == "no set":
        kept[:] = -1
    check(None, 0, 1, temperature, 8, cap, kept)


def test_without_entropy_gradient():
    hidden, weight, labels, upstream = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    chosen, _ = vocab_parallel_log_probs(hidden, weight, labels, 1.0, VOCAB, None, 8)
    (chosen * upstream[0]).sum().backward()
    got = hidden.grad, weight.grad
    hidden, weight, labels, upstream = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    log_p = torch.log_softmax(hidden @ weight[:VOCAB].T, -1)
    (log_p.gather(1, labels[:, None])[:, 0] * upstream[0]).sum().backward()
    torch.testing.assert_close(got, (hidden.grad, weight.grad), atol=6e-6, rtol=6e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("of_entropy", [False, True])
def test_with_log_probabilities_of_the_engines_kernel(monkeypatch, temperature, of_entropy):
    """Entropies and gradients come from its log-probabilities and the logits, which it divides in place."""

    def log_probs_of_shards(logits, token_ids, temperature, columns, group):
        assert columns == [VOCAB] and group is None
        logits /= temperature
        return logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]

    own = SimpleNamespace(float32_logits=head.float32_logits, log_probs_of_shards=log_probs_of_shards)
    monkeypatch.setattr(head, "_exact_head", lambda: own)
    results = []
    for exact in (True, False):
        hidden, weight, labels, upstream = problem()
        hidden.requires_grad_(), weight.requires_grad_()
        if exact:
            found = vocab_parallel_log_probs(
                hidden, weight, labels, temperature, VOCAB, chunk=8, entropy_gradient=of_entropy, exact=True
            )
        else:
            log_p = torch.log_softmax(hidden @ weight[:VOCAB].T / temperature, -1)
            found = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        ((found[0] * upstream[0]).sum() + (found[1] * upstream[1]).sum() * of_entropy).backward()
        results.append((*(x.detach() for x in found), hidden.grad, weight.grad))
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)


def test_accumulated_gradient():
    """Of two micro-batches, added in float32 to what the buffer of a bfloat16 weight holds; DDP's hook adds nothing."""
    hidden, weight, labels, upstream = problem()
    weight = weight.bfloat16().requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    want = torch.ones(weight.shape)
    for part in slice(0, 10), slice(10, None):
        chosen, _ = vocab_parallel_log_probs(
            hidden[part].bfloat16(), weight, labels[part], 1.0, VOCAB, chunk=8, accumulate=True
        )
        (chosen * upstream[0][part]).sum().backward()
        leaf = weight.detach().float().requires_grad_()
        log_p = torch.log_softmax(hidden[part].bfloat16().float() @ leaf[:VOCAB].T, -1)
        (log_p.gather(1, labels[part, None])[:, 0] * upstream[0][part]).sum().backward()
        want += leaf.grad
        assert weight.grad_added_to_main_grad
        weight.grad = None
    torch.testing.assert_close(weight.main_grad, want, atol=0.15, rtol=0.07)


def test_an_entropy_against_the_promise():
    """A loss that has the entropy all the same fails: its gradient would be missing."""
    hidden, weight, labels, _ = problem()
    hidden.requires_grad_()
    chosen, entropy = vocab_parallel_log_probs(hidden, weight, labels, 1.0, VOCAB, chunk=8, entropy_gradient=False)
    with pytest.raises(RuntimeError, match="the loss has an entropy"):
        (chosen.sum() + entropy.sum()).backward()


def test_no_tokens():
    _, weight, _, _ = problem()
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    chosen, entropy = vocab_parallel_log_probs(hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, VOCAB)
    (chosen.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, HIDDEN)


def test_the_logits_of_one_chunk_at_a_time(monkeypatch):
    """No logits and no gradient of a chunk are left when those of the next are made, forward and backward."""
    made: list[weakref.ref] = []

    def recorded(function):
        def call(*args):
            assert not [tensor for tensor in (ref() for ref in made) if tensor is not None and len(tensor) == 8]
            result = function(*args)
            made.append(weakref.ref(result))
            return result

        return call

    monkeypatch.setattr(head, "float32_logits", recorded(head.float32_logits))
    gradient = head._gradient
    monkeypatch.setattr(head, "_gradient", lambda *args: made.append(weakref.ref(it := gradient(*args))) or it)
    hidden, weight, labels, upstream = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    chosen, entropy = vocab_parallel_log_probs(hidden, weight, labels, 1.0, VOCAB, None, 8)
    ((chosen * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
    chunks = -(-len(labels) // 8)
    assert len(made) == 3 * chunks > 3
