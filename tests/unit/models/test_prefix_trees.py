"""A pack with shared prefixes gives the log-probabilities, the loss and the gradients of its sequences one by one."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.utils import unwrap_model
from slow import slow_except

import pretrain_grpo
from megatron_grpo.data.batch import FinishReason, RolloutBatch, offsets
from megatron_grpo.data.pack import pack_completions
from tools import made_up

COMMON = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --normalization RMSNorm
    --swiglu --disable-bias-linear --vocab-size 37 --max-position-embeddings 128 --make-vocab-size-divisible-by 1
    --clip-grad 0 --untie-embeddings-and-output-weights --max-tokens-per-microbatch 4096 --share-prompts
    --entropy-coef 0.01"""
DENSE = f"{COMMON} --model-family qwen3 --qk-layernorm --group-query-attention --num-query-groups 2 --kv-channels 16"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-dtype fp32"
YARN = '{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":128,"beta_fast":32,"beta_slow":1}'
MODELS = {
    "dense": DENSE,
    "adapters": f"{DENSE} --lora-rank 4 --lora-alpha 4 --lora-target-modules all-linear",
    "windows and sinks": f"""{COMMON} --rope-scaling {YARN} --no-swiglu
        --model-family gpt_oss --group-query-attention --num-query-groups 2
        --kv-channels 16 --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1 --add-bias-linear
        --add-qkv-bias --softmax-type learnable --window-size 5,0 --window-attn-skip-freq 2 --norm-epsilon 1e-5
        --expert-tensor-parallel-size 1 {EXPERTS} --moe-ffn-hidden-size 48""",
    "delta nets": f"""{COMMON} --model-family qwen3_next --qk-layernorm --group-query-attention --num-query-groups 2
        --kv-channels 16 --apply-layernorm-1p --attention-output-gate --rotary-percent 0.25 {EXPERTS}
        --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --linear-attention-freq 2
        --experimental-attention-variant gated_delta_net --linear-num-key-heads 2 --linear-num-value-heads 4
        --linear-key-head-dim 8 --linear-value-head-dim 8 --norm-epsilon 1e-6""",
}


@st.composite
def rollouts(draw) -> RolloutBatch:
    """Completions whose sequences go on from prefixes of others, some of several samples, with their own values."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(2, 9))):
        begin = draw(st.sampled_from(sequences)) if sequences and draw(st.integers(0, 3)) else []
        begin = begin[: draw(st.integers(0, len(begin)))]
        more = draw(st.lists(st.integers(3, 30), max_size=6))
        sequences.append([*begin, *more] or [7])
    ends = sorted({*draw(st.lists(st.integers(1, len(sequences)))), len(sequences)})  # of the completions
    samples = [sequences[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    prompts = [own[0][: draw(st.integers(1, len(own[0])))] for own in samples]
    whole = [list(chain.from_iterable(own)) for own in samples]
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    completions = [all_[len(prompt) :] for all_, prompt in zip(whole, prompts, strict=True)]
    starts = [(offsets(np.array([len(s) for s in own]))[1:-1] - len(p)).tolist() for own, p in zip(samples, prompts)]
    masks = [(rng.random(len(completion)) < 0.8).astype(int) for completion in completions]
    for mask, own in zip(masks, starts, strict=True):
        mask[own] = 0
    n = len(prompts)
    batch = RolloutBatch.from_completions(
        prompts,
        completions,
        log_probs=[(-3 - rng.random(len(completion))).tolist() for completion in completions],
        weight_version=0,
        group_ids=list(range(n)),
        row_ids=list(range(n)),
        sample_ids=list(range(n)),
        finish_reasons=[FinishReason.STOP] * n,
        response_masks=[mask.tolist() for mask in masks],
        sample_starts=starts,
    )
    total = len(batch.tokens)
    normal = rng.standard_normal((4, max(total, n))).astype(np.float32)
    return replace(
        batch,
        old_log_probs=-3.6 + 0.2 * normal[0, :total],
        ref_log_probs=-3.6 + 0.2 * normal[1, :total],
        advantages=normal[2, :n],
        weights=np.abs(normal[3, :n]),
    )


def results(args, chunk, batch: RolloutBatch, packs) -> tuple[np.ndarray, float, dict[str, torch.Tensor]]:
    """Return log-probabilities [2, total], the loss and the gradients of the packs."""
    chunk.zero_grad_buffer()
    flat, total = np.zeros((2, len(batch.tokens))), 0.0
    for pack in packs:
        output, loss_func = pretrain_grpo.forward_step(iter([pack]), chunk, args, 1)
        flat[:, pack.token_index] = loss_func(output, non_loss_data=True).detach().numpy()
        loss, _ = loss_func(output)
        total += float(loss.detach())
        loss.backward()
    (model,) = unwrap_model([chunk])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return flat, total, {name: p.main_grad.detach().clone() for name, p in trained.items()}


@pytest.fixture(scope="module", params=slow_except(["dense"], MODELS))
def model(request, world):
    args = made_up.parse(MODELS[request.param].split(), 1)
    trainer = made_up.trainer(args)
    return args, trainer.model[0]


def check(args, chunk, batch: RolloutBatch) -> None:
    everything = np.arange(batch.num_completions)
    forest = pack_completions(batch, everything, share_prompts=True)
    got = results(args, chunk, batch, [forest])
    want = results(args, chunk, batch, [pack_completions(batch, [i]) for i in everything])
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    assert got[1] == pytest.approx(want[1], abs=1e-5)
    size = torch.stack([gradient.norm() for gradient in want[2].values()]).norm()
    for name, gradient in want[2].items():
        assert (got[2][name] - gradient).norm() <= 1e-5 * max(float(size), 0.1), name


@settings(deadline=None, max_examples=25)
@given(batch=rollouts())
def test_a_forest_is_its_sequences(model, batch):
    check(*model, batch)


def test_kept_tokens_that_differ_are_predictions_of_their_own(world):
    """Two completions are equal, but their second tokens were sampled from other kept tokens, and their third alike."""
    args = made_up.parse([*MODELS["dense"].split(), "--top-k", "3"], 1)
    trainer = made_up.trainer(args)
    kept = [
        np.array([[9, 4, -1], [8, 5, 6], [7, 3, 2]], np.int32),
        np.array([[9, 4, -1], [8, 5, -1], [7, 3, 2]], np.int32),
    ]
    batch = RolloutBatch.from_completions(
        [[5, 6, 4]] * 2,
        [[9, 8, 7]] * 2,
        log_probs=[[-1.0, -1.5, -0.5]] * 2,
        weight_version=0,
        group_ids=[0, 0],
        row_ids=[0, 0],
        sample_ids=[0, 1],
        finish_reasons=[FinishReason.STOP] * 2,
        kept_token_ids=kept,
    )
    values = {name: np.float32([0.3, -1.2]) for name in ("advantages", "weights")}
    batch = replace(batch, **values, ref_log_probs=batch.rollout_log_probs, old_log_probs=batch.rollout_log_probs)
    pack = pack_completions(batch, [0, 1], share_prompts=True)
    assert pack.num_labels == 6 and len(pack.own_labels) == 4 and len(pack.tokens) == 7
    check(args, trainer.model[0], batch)


TURNS = "--environment calculator --max-turns 4 --max-environment-tokens 24 --on-rewritten-history split"


@pytest.mark.parametrize("more", ["", TURNS])
def test_the_rollouts_of_parity_tests_have_trees(more, world):
    """tools/check_parallel.py compares layouts on completions of which several have the same sampled tokens."""
    args = made_up.parse([*MODELS["dense"].split(), *more.split()], 1)
    batch = made_up.rollout(args)
    pack = pack_completions(batch, np.arange(16), share_prompts=True)
    assert len(pack.own_labels) < pack.num_labels
