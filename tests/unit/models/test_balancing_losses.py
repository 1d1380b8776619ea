"""Balancing of experts: losses and counts against loops over single sequences with the published formulas.

The model runs on one sequence at a time without any balancing; its router logits give the expected losses in float64:
arXiv:2101.03961 (section 2.2), arXiv:2412.19437 (equations 17 to 20), arXiv:2501.11873 (section 3), arXiv:2202.08906
(equation 5), arXiv:2408.15664 (algorithm 1).
"""

from dataclasses import replace

import numpy as np
import pytest
import ranks
import torch
from megatron.core.utils import unwrap_model
from slow import slow_except

import pretrain_grpo
from megatron_grpo.models import balancing, forward
from megatron_grpo.models.router import Router
from megatron_grpo.training.bad_updates import BadUpdates
from tools import made_up

COMMON = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --normalization RMSNorm
    --swiglu --disable-bias-linear --qk-layernorm --vocab-size 61 --max-position-embeddings 512
    --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2
    --moe-ffn-hidden-size 32 --moe-router-dtype fp32 --clip-grad 0 --beta 0"""
SOFTMAX = f"{COMMON} --model-family qwen3_moe --group-query-attention --num-query-groups 2 --kv-channels 32"
SIGMOID = f"""{COMMON} --model-family deepseek_v3 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16
    --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --rotary-scaling-factor 4
    --original-max-position-embeddings 128 --moe-layer-freq [0,1] --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.1"""
EXPERTS, TOPK = 4, 2
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
PACKS = ["--micro-batch-size 1", "--micro-batch-size 4", "--max-tokens-per-microbatch 70"]


def build(flags: str, lengths: list[int] | None = None):
    """Return arguments, trainer, a rollout (with completions of these lengths) and the completions of an update."""
    args = made_up.parse(flags.split(), 1)
    trainer = made_up.trainer(args)
    batch = made_up.off_policy(args, trainer, made_up.rollout(args, lengths, 2))
    return args, trainer, batch, np.arange(batch.num_completions // 2)


def gradients(trainer) -> dict[str, torch.Tensor]:
    (model,) = unwrap_model(trainer.model)
    return {name: parameter.main_grad.detach().clone().double() for name, parameter in model.named_parameters()}


def update(flags: str):
    """Return the metrics of one update, its gradients, and the trainer."""
    args, trainer, batch, completions = build(flags)
    row = pretrain_grpo.update(args, trainer, batch, completions)
    return row, gradients(trainer), trainer


def loop(flags: str) -> tuple[list[dict], list[torch.Tensor], object]:
    """Run the update's sequences one by one: ({(is_mtp_layer, number): logits [tokens, E]} and outputs, with their
    graphs, and the trainer).
    """
    args, trainer, batch, completions = build(f"{flags} --micro-batch-size 1")
    batch = replace(batch, weights=np.ones(batch.num_completions, np.float32))
    (chunk,) = trainer.model
    chunk.zero_grad_buffer()
    found, sequences, outputs = {}, [], []
    original = Router.gating

    def gating(self, x):
        found[self.is_mtp_layer, self.layer_number] = logits = original(self, x)
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "gating", gating)
        for i in completions:
            (pack,) = forward.micro_batches(args, batch, np.array([i]))
            outputs.append(pretrain_grpo.forward_step(iter([pack]), chunk, args, 1)[0])
            # The first multi-token-prediction layer has no input for the last token: no token follows it.
            length = int(batch.lengths[i])
            sequences.append({key: logits.view(-1, EXPERTS)[: length - key[0]] for key, logits in found.items()})
    balancing.end_of_pass(trainer.model)
    return sequences, outputs, trainer


def scores_and_counts(logits: torch.Tensor, sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized scores s / sum(s) ``[T, E]`` and how many tokens have each expert among their K largest."""
    scores = torch.sigmoid(logits.double()) if sigmoid else torch.exp(logits.double())
    scores = scores / scores.sum(1, keepdim=True)
    counts = torch.zeros(EXPERTS, dtype=torch.float64)
    for row in scores.detach():
        counts[row.argsort(descending=True)[:TOPK]] += 1
    return scores, counts


def expected_losses(sequences: list, sigmoid: bool) -> dict[str, torch.Tensor]:
    """Return each loss, mean over layers, of the router logits of the sequences."""
    total = {"seq_aux_loss": 0.0, "global_aux_loss": 0.0, "z": 0.0}
    layers = sequences[0].keys()
    for layer in layers:
        parts = [scores_and_counts(logits[layer], sigmoid) for logits in sequences if len(logits[layer])]
        for scores, counts in parts:
            f, p = counts / (TOPK * len(scores)), scores.mean(0)
            total["seq_aux_loss"] += EXPERTS * (f * p).sum() / len(parts)
        tokens = sum(len(scores) for scores, _ in parts)
        f = sum(counts for _, counts in parts) / (TOPK * tokens)
        p = sum(scores.sum(0) for scores, _ in parts) / tokens
        total["global_aux_loss"] += EXPERTS * (f * p).sum()
        total["z"] += sum(torch.logsumexp(each[layer].double(), 1).square().sum() for each in sequences) / tokens
    return total | {"layers": len(layers)}


KINDS = ["seq_aux_loss", "global_aux_loss", "z"]


@pytest.fixture(scope="module", params=slow_except([SIGMOID], [SOFTMAX, SIGMOID]), ids=["softmax", "sigmoid"])
def looped(request, world):
    """Return the flags of a family, each loss and its gradients from a loop over sequences, and those without it."""
    family = request.param
    sequences, outputs, trainer = loop(family)
    want, of_losses = expected_losses(sequences, family is SIGMOID), {}
    for kind in KINDS:
        trainer.model[0].zero_grad_buffer()
        # The graph of the outputs is part of the backward pass, so that DDP's hooks see every weight; it adds nothing.
        (2 * want[kind] + 0.0 * sum(output.sum() for output in outputs)).backward(retain_graph=True)
        of_losses[kind] = gradients(trainer)
    return family, want, of_losses, update(f"{family} --micro-batch-size 4")[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_a_loop_over_sequences(looped, kind):
    family, want, of_losses, without = looped
    own = f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 2" if kind != "z" else "--moe-z-loss-coeff 2"
    of_loss = of_losses[kind]
    assert max(float(torch.linalg.norm(gradient)) for gradient in of_loss.values()) > 1e-3
    recomputed = BLOCK if family is SIGMOID else FULL
    every = [*PACKS, f"{PACKS[2]} {recomputed}", f"{PACKS[1]} --moe-layer-recompute"]
    few = [every[2 if family is SIGMOID else 0], *every[3:]]
    for packs in every if ranks.thorough else few:
        row, found, _ = update(f"{family} {own} {packs}")
        if kind != "z":
            assert row["moe/balance_loss"] == pytest.approx(want[kind].item() / want["layers"], rel=1e-6), packs
        for name, gradient in found.items():
            gap = torch.linalg.norm(gradient - without[name] - of_loss[name])
            scale = torch.linalg.norm(of_loss[name]) + 0.05 * torch.linalg.norm(without[name])
            assert gap <= 1e-4 * scale + 1e-7, (packs, name)


@pytest.mark.parametrize("kind", ["seq_aux_loss", "global_aux_loss"])
def test_the_order_of_packs_does_not_matter(world, kind, monkeypatch):
    """Packs of 12 and 48 tokens, in both orders, and one pack of both."""
    flags = f"{SOFTMAX} --moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 2"
    flags += " --global-batch-size 2 --num-generations 2 --max-completion-length 46"
    in_order, found = forward.micro_batches, []
    for size, step in (1, 1), (1, -1), (2, 1):

        def ordered(*words, step=step):
            packs = in_order(*words)[::step]
            return forward.MicroBatches([lambda length, pack=pack: pack for pack in packs])

        monkeypatch.setattr(forward, "micro_batches", ordered)
        args, trainer, batch, completions = build(f"{flags} --micro-batch-size {size}", [12, 48])
        row = pretrain_grpo.update(args, trainer, batch, completions)
        found.append((row["moe/balance_loss"], gradients(trainer)))
    first, of_first = found[0]
    for loss, of_order in found[1:]:
        assert loss == pytest.approx(first, rel=1e-6) and loss > 1.01
        for name, gradient in of_first.items():
            torch.testing.assert_close(of_order[name], gradient, rtol=1e-5, atol=2e-6, msg=name)


def by_layer(trainer) -> dict[tuple[bool, int], Router]:
    return {(router.is_mtp_layer, router.layer_number): router for router in balancing.routers(*trainer.model)}


@pytest.mark.parametrize("more", slow_except(["--bf16"], ["", FULL, "--moe-layer-recompute", "--bf16"]))
def test_counts_and_biases_are_those_of_a_loop_over_sequences(world, more):
    """Once for each token, whether its layer is recomputed or not; neither passes without gradients nor padding."""
    flags = SIGMOID.partition("--mtp-num-layers")[0] if more == FULL else SIGMOID  # refused with FULL
    sequences, _, trainer = loop(f"{flags} {more}" if more == "--bf16" else flags)
    before = {layer: router.expert_bias.clone() for layer, router in by_layer(trainer).items()}
    want = {layer: torch.zeros(EXPERTS) for layer in before}
    for layer, bias in before.items():
        for row in torch.cat([logits[layer].detach() for logits in sequences]):
            want[layer][(torch.sigmoid(row.float()) + bias).argsort(descending=True)[:TOPK]] += 1
    args, trainer, batch, completions = build(f"{flags} {more} --max-tokens-per-microbatch 70")
    forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, batch)
    pretrain_grpo.update(args, trainer, batch, completions)
    assert by_layer(trainer).keys() == want.keys()
    for layer, router in by_layer(trainer).items():
        assert router.tokens_of_update.tolist() == want[layer].tolist()
        moved = 1e-3 * torch.sign(want[layer].mean() - want[layer])
        torch.testing.assert_close(router.expert_bias, before[layer] + moved, rtol=0, atol=1e-7)


def test_no_cast_reaches_the_counts(world):
    """bf16 has 8 bits: 256 + 1 is 256."""
    _, trainer, _, _ = build(f"{SIGMOID} --bf16 --micro-batch-size 4")
    for router in by_layer(trainer).values():
        one_token = torch.tensor([[True, True, False, False]])
        for _ in range(400):
            router._apply_expert_bias(one_token)
        assert router.local_tokens_per_expert.tolist() == [400, 400, 0, 0]
        assert router.state_dict().keys() == {"weight", "expert_bias"}
        assert router.state_dict()["expert_bias"].dtype == torch.float32


@pytest.mark.parametrize("skipped", [False, True])
def test_a_skipped_update_leaves_the_biases(world, skipped):
    args, trainer, batch, completions = build(f"{SIGMOID} --micro-batch-size 4")
    trainer.bad_updates = BadUpdates("skip", None, None)
    trainer.bad_updates.restore_due = skipped
    before = {layer: router.expert_bias.clone() for layer, router in by_layer(trainer).items()}
    row = pretrain_grpo.update(args, trainer, batch, completions)
    assert row["update/skipped"] == skipped
    for layer, router in by_layer(trainer).items():
        assert router.tokens_of_update.any() and not router.local_tokens_per_expert.any()
        assert torch.equal(router.expert_bias, before[layer]) == skipped
