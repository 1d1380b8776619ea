"""The estimate of the memory of --loss-type gkd, against the tensors that an update of the head allocates."""

import pytest
import torch
from save_memory_worker import Allocations
from torch.utils._python_dispatch import _disable_current_modes

from megatron_grpo.estimate import dry_run
from megatron_grpo.estimate.memory import Plan
from megatron_grpo.models import divergence
from megatron_grpo.models.divergence import Head, TopK, WholeVocabulary, vocab_parallel_divergence
from tools import made_up

GKD = "--loss-type gkd --beta 0 --max-tokens-per-microbatch"


def as_one_kernel(function, counted):
    """Return a function whose temporary tensors do not count: on a GPU it is compiled to one kernel."""

    def call(*arguments):
        with _disable_current_modes():
            result = function(*arguments)
        counted.live.setdefault(result.untyped_storage(), result.untyped_storage().nbytes())
        counted.peak = max(counted.peak, sum(counted.live.values()))
        return result

    return call


@pytest.mark.parametrize("tokens", [150, 400], ids=["all chunks kept", "some made again"])
@pytest.mark.parametrize("k", [None, 1, 32])
def test_an_update_allocates_what_the_estimate_says(k, tokens, tiny_models, monkeypatch):
    monkeypatch.setattr(divergence, "CHUNK", 64)
    monkeypatch.setattr(divergence, "KEPT", 3)
    flags = f"{GKD} {tokens} --load-hf {tiny_models['qwen3']} --teacher-load-hf {tiny_models['llama']}"
    args = made_up.parse([*flags.split(), *([] if k is None else ["--gkd-logits-topk", str(k)])], 1)
    (teacher_args,) = dry_run.teacher_args(args)
    h, theirs, rows = args.hidden_size, teacher_args.hidden_size, args.padded_vocab_size
    weight = torch.randn(rows, h, requires_grad=True)
    with Allocations() as counted:
        for name in ("_mass", "_sums", "_gradient"):
            monkeypatch.setattr(divergence, name, as_one_kernel(getattr(divergence, name), counted))
        held = [torch.randn(tokens, h) for _ in range(2)]  # gathered, selected
        hidden = torch.randn(tokens, h, requires_grad=True)
        if k is None:
            held.append(torch.randn(tokens, theirs))
            teacher = WholeVocabulary(torch.randn(tokens, theirs), Head(torch.randn(rows, theirs)))
        else:
            ids = torch.arange(k, dtype=torch.int32).repeat(tokens, 1)
            teacher = TopK(ids, torch.full((tokens, k + 1), -3.0))
        vocab_parallel_divergence(hidden, weight, teacher, 0.5, 0.8, rows, chunk=64).sum().backward()
    share = counted.peak / Plan(args).memories[0].head
    assert 0.85 < share < 1.05 and held  # numbers of a token, and of its likely tokens, are not in the estimate


def test_the_dry_run_names_what_the_host_keeps(tiny_models):
    """Two numbers of 4 bytes for each likely token and one for the others; hidden states of the teacher in float32."""
    flags = f"{GKD} 64 --load-hf {tiny_models['qwen3']} --teacher-load-hf {tiny_models['llama']}"
    args = made_up.parse(flags.split(), 1)
    (teacher_args,) = dry_run.teacher_args(args)
    assert f"distributions of a rollout: {4 * teacher_args.hidden_size:,} bytes a token" in dry_run.dry_run_report(
        args, 1
    )
    args = made_up.parse([*flags.split(), "--gkd-logits-topk", "32"], 1)
    assert "distributions of a rollout: 260 bytes a token" in dry_run.dry_run_report(args, 1)
