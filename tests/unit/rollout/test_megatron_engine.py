"""--rollout-engine megatron: the training model generates what transformers' model does.

test_megatron_engine_layouts.py has every layout.
"""

from dataclasses import replace

import pytest
import torch
from megatron_engine_reference import TIED, by_transformers, check, toys  # noqa: F401 (a fixture)
from megatron_engine_worker import EOS, GREEDY, MAX_TOKENS, complete, decode, make_engine, prompts
from slow import slow_except
from toy_checkpoints import FAMILIES, HYBRID, MAMBA, MAMBA_MOE, VOCAB, logits

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.initialize import destroy_rank_groups
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.utils.errors import GrpoError


def state(model) -> list:
    """Which modules a model is made of, in which mode, and which attributes they have."""
    return [
        (name, id(module), module.training, sorted((key, id(value)) for key, value in vars(module).items()))
        for chunk in model
        for name, module in chunk.named_modules()
    ]


@pytest.mark.parametrize("family", slow_except(["deepseek_v3"], (*FAMILIES, MAMBA_MOE)))
def test_families(toys, family):
    root, models = toys
    theirs = models[family]
    model, engine = make_engine(root / f"{family}-{TIED[family]}")
    try:
        before, random_state = state(model), torch.get_rng_state()
        done = complete(engine, [Request(i, prompt, GREEDY) for i, prompt in enumerate(prompts())])
        check(done, by_transformers(theirs))
        assert len({tuple(ids) for ids, _, _ in done.values()}) > 4
        assert state(model) == before and torch.equal(torch.get_rng_state(), random_state)
        # ... and the trainer's own forward, over packs, gives the same log-probabilities.
        for number, (ids, log_probs, _) in done.items():
            tokens = torch.tensor(prompts()[number] + ids)
            log_p = logits(model[0], tokens)[:, :109].float().log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
            torch.testing.assert_close(log_p[-len(ids) :], torch.tensor(log_probs), atol=1e-4, rtol=0)
    finally:
        destroy_rank_groups()


@pytest.fixture
def engine(toys):
    """(model, engine, transformers' model) of a small Qwen3."""
    root, models = toys
    theirs = models["qwen3"]
    model, engine = make_engine(root / "qwen3-False")
    yield model, engine, theirs
    destroy_rank_groups()


def test_sampling(engine):
    """Seeds give the same completions again; log-probabilities are after the temperature, before truncation."""
    _, engine, theirs = engine
    sampling = Sampling(MAX_TOKENS, temperature=0.6, top_k=20, log_probs=True)
    requests = [Request(i, prompts()[i // 4], sampling) for i in range(8)]
    first, again, other = (complete(engine, requests, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(ids) for ids, _, _ in first.values()}) == 8
    for number, (ids, log_probs, reason) in first.items():
        assert len(ids) == MAX_TOKENS and reason == "length"
        tokens = torch.tensor(prompts()[number // 4] + ids)
        with torch.no_grad():
            log_p = (theirs(tokens[None]).logits[0, :-1] / 0.6).log_softmax(-1)
        rank = (log_p > log_p.gather(1, tokens[1:, None])).sum(1)[-MAX_TOKENS:]
        assert rank.max() < 20 and rank.max() > 0
        expected = log_p.gather(1, tokens[1:, None])[-MAX_TOKENS:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=2e-5, rtol=0)
    assert complete(engine, [replace(requests[0], sampling=Sampling(1))])[0][1] is None


def test_ends(engine):
    """A stop word of two tokens ends a completion with its last token; the end of the sequence may be ignored."""
    _, engine, theirs = engine
    whole = dict(enumerate(ids for ids, _ in by_transformers(theirs)))
    longest = max(whole, key=lambda number: len(whole[number]))
    word = decode(whole[longest][3:5])
    stopping = replace(GREEDY, stop=("nowhere", word))
    done = complete(engine, [Request(i, prompt, stopping) for i, prompt in enumerate(prompts())])
    assert done[longest][0] == whole[longest][:5] and done[longest][2] == "stop"
    for number, (ids, _, _) in done.items():
        assert ids == whole[number][: len(ids)] and (word in decode(ids) or len(ids) == len(whole[number]))
    # The model's own end of sequence: made the likeliest token by a penalty's opposite.
    wanting = replace(GREEDY, stop_token_ids=())
    assert all(len(ids) == MAX_TOKENS for ids, _, _ in complete(engine, [Request(0, [5, EOS, 7], wanting)]).values())


def test_aborted_requests_do_not_come_back(engine):
    _, engine, _ = engine
    engine.wake_cache()
    with engine.rollout(0):
        engine.submit([Request(i, prompt, replace(GREEDY, stop_token_ids=())) for i, prompt in enumerate(prompts())])
        assert not engine.poll()
        engine.abort([0, 6])  # one runs, one waits
        done = [completion.id for _ in range(6 * MAX_TOKENS) for completion in engine.poll()]
    assert sorted(done) == [1, 2, 3, 4, 5]


@torch.no_grad()
@pytest.mark.parametrize("family", slow_except(["qwen3_5_text"], (*HYBRID, *MAMBA, MAMBA_MOE)))
def test_an_interrupted_completion_of_a_hybrid_goes_on(toys, family):
    """With other weights: the states of recurrent layers are computed again from the prompt and the tokens so far."""
    root, models = toys
    assert models[family]  # makes the checkpoint
    model, engine = make_engine(root / f"{family}-{TIED[family]}")
    requests = [Request(i, prompt, replace(GREEDY, stop_token_ids=())) for i, prompt in enumerate(prompts()[:3])]

    def of_trainer(number: int, ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor(prompts()[number] + ids)
        table = logits(model[0], tokens)[:, :VOCAB].float().log_softmax(-1)
        return table[:-1].gather(1, tokens[1:, None])[-len(ids) :, 0]

    try:
        engine.wake_cache()
        with engine.rollout(0):
            engine.submit(requests)
            assert not [engine.poll() for _ in range(4)][-1]
            begun = {completion.id: completion for completion in engine.interrupt()}
        early = {number: of_trainer(number, completion.token_ids) for number, completion in begun.items()}
        assert len(begun) == 3 and all(len(values) == 4 for values in early.values())
        generator = torch.Generator().manual_seed(4)
        for parameter in model[0].parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        engine.update_weights(iter(()), 1)
        with engine.rollout(1):
            done = list(generate(engine, [replace(request, begun=begun[request.id]) for request in requests]))
        for completion in done:
            ids, number = completion.token_ids, completion.id
            late = of_trainer(number, ids)
            assert len(ids) == MAX_TOKENS and (late[:4] - early[number]).abs().max() > 1e-2  # the weights differ
            expected = torch.cat([early[number], late[4:]])
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)
            assert list(completion.weight_versions) == [0] * 4 + [1] * (MAX_TOKENS - 4)
    finally:
        destroy_rank_groups()


def test_refusals_and_versions(engine, toys):
    model, engine, _ = engine
    before = state(model)
    engine.wake_cache()
    with pytest.raises(GrpoError, match="does not fit into the engine's 33 tokens"), engine.rollout(0):
        engine.submit([Request(0, [5] * 24, GREEDY)])
    assert state(model) == before
    engine.update_weights((1 / 0 for _ in range(1)), version=7)  # nothing is taken from the stream
    with engine.rollout(0):
        (completion,) = generate(engine, [Request(3, [5], GREEDY)])
        assert completion.weight_versions == [7] * len(completion.token_ids)
    engine.sleep()
    destroy_rank_groups()
    _, large = make_engine(toys[0] / "qwen3-False", inference_max_requests=10**6)
    with pytest.raises(GrpoError, match=r"takes \d+\.\d\d GiB on each rank, but .* lower --inference-max-requests"):
        large.wake_cache()
