"""A pack with shared prefixes gives the log-probabilities, the loss and the gradients of its sequences one by one."""

from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.utils import unwrap_model
from slow import slow_except

import pretrain_grpo
from megatron_grpo.data.batch import FinishReason, RolloutBatch, offsets
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.estimate.throughput import ModelFlops
from megatron_grpo.models import balancing, forward, router_replay
from megatron_grpo.parallel import initialize
from megatron_grpo.reference.model_args import reference_args
from megatron_grpo.training.update_flops import computed
from megatron_grpo.utils.arguments import replaced
from tools import made_up

COMMON = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --normalization RMSNorm
    --swiglu --disable-bias-linear --vocab-size 37 --max-position-embeddings 128 --make-vocab-size-divisible-by 1
    --clip-grad 0 --untie-embeddings-and-output-weights --max-tokens-per-microbatch 4096 --share-prompts
    --entropy-coef 0.01"""
DENSE = f"{COMMON} --model-family qwen3 --qk-layernorm --group-query-attention --num-query-groups 2 --kv-channels 16"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-dtype fp32"
YARN = '{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":128,"beta_fast":32,"beta_slow":1}'
LATENT = """--model-family deepseek_v3 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm
    --rotary-scaling-factor 4 --original-max-position-embeddings 64"""
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
    "Mamba-2": f"""{COMMON} --model-family nemotron_h --group-query-attention --num-query-groups 2 --kv-channels 16
        --no-swiglu --squared-relu --position-embedding-type none --num-layers 4 --hybrid-layer-pattern M*-M
        --mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8 --norm-epsilon 1e-5""",
    "latent attention": f"""{COMMON} {LATENT} {EXPERTS} --moe-layer-freq [0,1] --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 16 --mtp-num-layers 2
        --mtp-loss-scaling-factor 0.3""",
    "soft caps": f"""{COMMON} --model-family gemma2 --group-query-attention --num-query-groups 2 --kv-channels 16
        --no-swiglu --geglu --apply-layernorm-1p --sandwich-norm --scale-embeddings --attn-logit-softcapping 5
        --final-logit-softcapping 3 --window-size 4,0 --window-attn-skip-freq 2 --softmax-scale 0.25
        --no-untie-embeddings-and-output-weights""",
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
    lengths = [draw(st.integers(1, len(sequences[begin]))) for begin in (0, *ends[:-1])]
    return rollout_of(sequences, ends, lengths, draw(st.integers(0, 9)))


def rollout_of(sequences: list[list[int]], ends: list[int], prompt_lengths: list[int], seed: int) -> RolloutBatch:
    """Return completions. Each ends with a sequence of ``ends``; ``prompt_lengths`` are the tokens of their prompts."""
    samples = [sequences[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    prompts = [own[0][:length] for own, length in zip(samples, prompt_lengths, strict=True)]
    whole = [list(chain.from_iterable(own)) for own in samples]
    rng = np.random.default_rng(seed)
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
        flat[:, pack.token_index] = loss_func(output, non_loss_data=True)[:2].detach().numpy()
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
    everything, layers = np.arange(batch.num_completions), forward._further_tokens(args)
    forest = pack_completions(batch, everything, share_prompts=True, mtp_layers=layers)
    got = results(args, chunk, batch, [forest])
    want = results(args, chunk, batch, [pack_completions(batch, [i], mtp_layers=layers) for i in everything])
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    assert got[1] == pytest.approx(want[1], rel=1e-6, abs=1e-5)
    size = torch.stack([gradient.norm() for gradient in want[2].values()]).norm()
    for name, gradient in want[2].items():
        assert (got[2][name] - gradient).norm() <= 1e-5 * max(float(size), 0.1), name


def deep_forest() -> RolloutBatch:
    """Six levels, eight branches at the last, an end at each branch point, whole duplicates, and one token alone."""
    path = [[3 + 5 * level + k for k in range(1 + level % 3)] for level in range(6)]
    spine = [list(chain.from_iterable(path[:level])) for level in range(1, 7)]
    branches = [[*spine[-1], branch, branch + 1, 2] for branch in range(20, 28)]
    sides = [[*begin, 30, 31] for begin in spine]
    sequences = [*spine, *branches, *sides, *branches[:2], [9]]
    ends = [*range(1, len(sequences), 2), len(sequences)]
    return rollout_of(sequences, ends, [1] * len(ends), 3)


@settings(deadline=None, max_examples=25)
@example(batch=deep_forest())
@given(batch=rollouts())
def test_a_forest_is_its_sequences(model, batch):
    check(*model, batch)


@settings(deadline=None)
@given(batch=rollouts(), cp_size=st.sampled_from([1, 2]))
def test_tokens_and_flops_of_a_forest(batch, cp_size):
    """Each token of a pack once, with as many pairs as its path has tokens; each label that the head computes."""
    flops = ModelFlops(made_up.parse([*MODELS["dense"].split(), "--rotary-base", "10000"], 1))
    everything = np.arange(batch.num_completions)
    parts = [pack_completions(batch, everything, 1, None, cp_size, r, share_prompts=True) for r in range(cp_size)]
    tokens, tflop = computed(flops, parts[:1])
    real = sum(int((~pack.padding).sum()) for pack in parts)
    pairs = sum(int((pack.position_ids + 1)[~pack.padding].sum()) for pack in parts)
    labels = sum(len(pack.own_labels) for pack in parts)
    assert tokens == real
    forward_ = flops.per_token * real + flops.per_label * labels + flops.per_pair * 2 * pairs  # two layers
    assert tflop == pytest.approx(3 * forward_ / 1e12)


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


BALANCED = f"""{MODELS["latent attention"]} --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.5 0.7 0.9
    --moe-z-loss-coeff 0.3"""


@pytest.fixture(scope="module")
def balanced(world):
    args = made_up.parse(BALANCED.split(), 1)
    return args, made_up.trainer(args).model


def balance(args, model, batch: RolloutBatch, packs) -> tuple[dict[str, torch.Tensor], float, list[list[int]]]:
    """Return the gradients of one micro-batch, its balancing losses, and the tokens of each expert."""
    for router in balancing.routers(*model):
        router.local_tokens_per_expert.zero_()
    step = partial(pretrain_grpo.forward_step, args=args, num_microbatches=1)
    balancing.begin_update(packs, model, lambda counted: forward.run_schedule(step, counted, model, forward_only=True))
    _, _, gradients = results(args, model[0], batch, packs)
    balancing.end_of_pass(model)
    routers = balancing.routers(*model)
    return gradients, balancing.mean_loss(model, 1), [router.local_tokens_per_expert.tolist() for router in routers]


@settings(deadline=None, max_examples=8)
@given(batch=rollouts())
def test_tokens_of_several_sequences_count_for_each_of_them(balanced, batch):
    """Losses that balance experts, and the counts that move their biases, are those of a pack of whole sequences."""
    args, model = balanced
    packs = (
        [pack_completions(batch, np.arange(batch.num_completions), share_prompts=share, mtp_layers=2)]
        for share in (True, False)
    )
    got, want = (balance(args, model, batch, pack) for pack in packs)
    assert got[1] == pytest.approx(want[1], abs=1e-6) and got[2] == want[2]
    size = torch.stack([gradient.norm() for gradient in want[0].values()]).norm()
    for name, gradient in want[0].items():
        assert (got[0][name] - gradient).norm() <= 1e-6 * max(float(size), 0.1), name


MOE = f"""{COMMON} --model-family qwen3_moe --qk-layernorm --group-query-attention --num-query-groups 2 --kv-channels 16
    {EXPERTS}"""


@pytest.fixture(scope="module", params=["R2", "R3"])
def replaying(request, world):
    args = made_up.parse([*MOE.split(), "--router-replay-mode", request.param], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialize, "_model_group", initialize.host_group())  # of a run with R2
        yield args, made_up.trainer(args).model


@settings(deadline=None, max_examples=15)
@given(batch=rollouts(), data=st.data())
def test_tokens_are_shared_up_to_the_first_other_route(replaying, batch, data):
    """R2 records the experts of each completion in a pass over a forest, R3 brings those of the engine: some of them
    are unknown, and of some completions they differ in the middle of what the tokens share.
    """
    args, model = replaying
    total, everything = len(batch.tokens), np.arange(batch.num_completions)
    if args.router_replay_mode == "R2":
        forest = pack_completions(batch, everything, share_prompts=True)
        step = partial(pretrain_grpo.forward_step, args=args, num_microbatches=1)
        recorded = []
        for packs in [forest], [pack_completions(batch, [i]) for i in everything]:
            with router_replay.recording(args, model) as with_experts:
                forward.forward_scores(step, packs, model, batch)
            recorded.append(with_experts(batch).routed_experts)
        np.testing.assert_array_equal(recorded[0], recorded[1])
        again = pack_completions(replace(batch, routed_experts=recorded[0]), everything, share_prompts=True)
        assert again.tokens.tolist() == forest.tokens.tolist()
    # Equal tokens after equal beginnings have equal experts, but for what is drawn.
    seeds, experts = {}, np.empty((total, 2, 2), np.int16)
    lengths, _ = batch.sequences(everything)
    for a, b in pairwise(offsets(lengths).tolist()):
        for end in range(a + 1, b + 1):
            rng = np.random.default_rng(seeds.setdefault(tuple(batch.tokens[a:end]), len(seeds)))
            experts[end - 1] = rng.permuted(np.tile(np.arange(4), (2, 1)), axis=1)[:, :2]
    for token in data.draw(st.lists(st.integers(0, total - 1), max_size=4)):
        experts[token] = data.draw(st.sampled_from([-1, 0])) + np.array([0, 1]) * (experts[token] >= 0)
    experts[experts.min((1, 2)) < 0] = -1
    check(args, model[0], replace(batch, routed_experts=experts))


TURNS = "--environment calculator --max-turns 4 --max-environment-tokens 24 --on-rewritten-history split"


@pytest.mark.parametrize("more", ["", TURNS])
def test_the_rollouts_of_parity_tests_have_trees(more, world):
    """tools/check_parallel.py compares layouts on completions of which several have the same sampled tokens."""
    args = made_up.parse([*MODELS["dense"].split(), *more.split()], 1)
    batch = made_up.rollout(args)
    pack = pack_completions(batch, np.arange(16), share_prompts=True)
    assert len(pack.own_labels) < pack.num_labels


def test_passes_without_gradients_are_those_of_whole_sequences(world):
    """Log-probabilities and entropies under the old policy and the reference, of episodes that repeat their past."""
    args = made_up.parse([*MODELS["dense"].split(), *TURNS.split(), "--max-tokens-per-microbatch", "90"], 1)
    alone = replaced(args, share_prompts=False, max_tokens_per_microbatch=None, micro_batch_size=1)
    trainer, batch, everything = made_up.trainer(args), made_up.rollout(args), np.arange(32)
    assert batch.sample_starts.any()
    want = forward.scores(alone, trainer.model, pretrain_grpo.forward_step, batch, everything)
    for own in args, reference_args(args):
        packs = forward.micro_batches(own, batch, everything)
        assert sum(pack.real_lengths.sum() for pack in packs) < batch.lengths.sum() - 50
        got = forward.scores(own, trainer.model, pretrain_grpo.forward_step, batch, everything)
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("more", ["", f"--model-family qwen3_moe {EXPERTS} --moe-token-dispatcher-type allgather"])
def test_a_pack_is_made_once_while_the_one_before_is_computed(more, world, monkeypatch):
    args = made_up.parse([*MODELS["dense"].split(), *more.split(), "--max-tokens-per-microbatch", "90"], 1)
    trainer, batch, events = made_up.trainer(args), made_up.rollout(args), []

    def make(*given):
        events.append("pack")
        return pack_completions(*given)

    def step(*given, **named):
        output = pretrain_grpo.forward_step(*given, **named)
        events.append("pass")
        return output

    monkeypatch.setattr(forward, "pack_completions", make)
    packs = forward.micro_batches(args, batch, np.arange(16))
    own = partial(step, args=args, num_microbatches=len(packs))
    forward.forward_scores(own, packs, trainer.model, batch)
    assert len(packs) > 2 and events == ["pack", "pass"] * len(packs)
    assert not more or len({len(pack.tokens) for pack in packs}) == 1


@pytest.mark.parametrize(("prompt", "length", "shared"), [(20, 40, 7 * 19), (5, 45, 7 * 4), (5, 60, 0)])
def test_little_in_common_is_not_shared(prompt, length, shared, world):
    """Eight completions of a prompt: with 28 of 360 tokens in common an update shares them, with 28 of 480 not."""
    rng = np.random.default_rng(0)
    begin = rng.integers(3, 30, prompt).tolist()
    sequences = [[*begin, number + 3, *rng.integers(3, 30, length - prompt - 1).tolist()] for number in range(8)]
    batch = rollout_of(sequences, list(range(1, 9)), [prompt] * 8, 0)
    (pack,) = forward.micro_batches(made_up.parse(MODELS["dense"].split(), 1), batch, np.arange(8))
    assert batch.lengths.sum() - pack.real_lengths.sum() == shared
