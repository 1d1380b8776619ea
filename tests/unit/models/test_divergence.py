"""Divergences from a teacher: against a loop in float64, TRL's formula, and limits."""

import pytest
import torch
from divergence_worker import VOCAB, check, problem

from megatron_grpo.models import divergence
from megatron_grpo.models.divergence import Head, TopK, WholeVocabulary, vocab_parallel_divergence

BETAS = [0.0, 0.1, 0.5, 1.0]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [None, 1, 6, VOCAB])
def test_one_rank(beta, k, monkeypatch):
    monkeypatch.setattr(divergence, "KEPT", 2)  # the other chunks make the logits again
    check(None, 0, 1, beta, k)


@pytest.mark.parametrize("k", [None, 6])
def test_soft_caps_and_one_chunk(k):
    check(None, 0, 1, 0.5, k, 1.0, 1000, (2.5, 3.0))


@pytest.mark.parametrize("beta", BETAS)
def test_trls_formula(beta):
    """Of its GKDTrainer, from equation 1 of the paper: mixtures of log-probabilities by logsumexp, kl_div on them."""
    ours, weight, theirs, their_weight, _ = problem()
    got = vocab_parallel_divergence(
        ours, weight, WholeVocabulary(theirs, Head(their_weight)), beta, 0.9, VOCAB, chunk=8
    )
    student, teacher = (
        torch.log_softmax(hidden.double() @ head[:VOCAB].double().T / 0.9, -1)
        for hidden, head in ((ours, weight), (theirs, their_weight))
    )

    def kl_div(log_input, log_target):  # torch's arguments: KL(target, input)
        return torch.nn.functional.kl_div(log_input, log_target, reduction="none", log_target=True).sum(-1)

    if beta == 0:
        want = kl_div(student, teacher)
    elif beta == 1:
        want = kl_div(teacher, student)
    else:
        weights = torch.tensor([1 - beta, beta], dtype=torch.float64).log()
        mixture = torch.logsumexp(torch.stack([student + weights[0], teacher + weights[1]]), 0)
        want = beta * kl_div(mixture, teacher) + (1 - beta) * kl_div(mixture, student)
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=5e-6)


def far_apart(beta, teacher):
    """A policy that is certain of token 0 and a teacher that is certain of token 1: logits 80 above the others."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.zeros(8, 1)
    weight[0] = 80.0
    value = vocab_parallel_divergence(hidden, weight, teacher, beta, 1.0, 8)
    value.sum().backward()
    return value, hidden.grad


@pytest.mark.parametrize("beta", BETAS)
def test_certain_and_opposite_models(beta):
    """Their whole distributions, and the teacher's one token with a tail: finite, and by hand."""
    head = torch.zeros(8, 1)
    head[1] = 80.0
    whole = WholeVocabulary(torch.ones(1, 1), Head(head))
    top = TopK(torch.tensor([[1]], dtype=torch.int32), torch.tensor([[0.0, -80.0]]))
    jensen_shannon = -beta * torch.tensor(beta).log() - (1 - beta) * torch.tensor(1 - beta).log()
    want = 80.0 if beta in (0, 1) else float(jensen_shannon)
    for teacher in (whole, top):
        value, gradient = far_apart(beta, teacher)
        assert value.item() == pytest.approx(want, rel=1e-6)
        assert torch.isfinite(gradient).all()


def test_equal_models_have_neither_divergence_nor_gradient():
    ours, weight, *_ = problem()
    ours.requires_grad_()
    for beta in BETAS:
        teacher = WholeVocabulary(ours.detach(), Head(weight))
        values = vocab_parallel_divergence(ours, weight, teacher, beta, 0.7, VOCAB, chunk=8)
        values.sum().backward()
        assert values.abs().max() < 1e-6 and ours.grad.abs().max() < 1e-6


def test_no_tokens():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(8, 4, requires_grad=True)
    teacher = TopK(torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 3))
    vocab_parallel_divergence(hidden, weight, teacher, 0.5, 1.0, 8).sum().backward()
    assert hidden.grad.shape == (0, 4) and not weight.grad.any()
