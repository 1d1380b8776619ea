"""--rollout-engine megatron: the training model generates what transformers' model does, in every layout."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import run_torchrun
from megatron_engine_worker import EOS, GREEDY, LAYOUTS, LENGTHS, MAX_TOKENS, complete, decode, make_engine, prompts
from toy_checkpoints import FAMILIES, logits, make

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.initialize import leave_layout
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.utils.errors import GrpoError

MODELS = [(family, family not in ("gpt_oss",) and "gemma" in family) for family in FAMILIES]


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """(directory of all checkpoints, {family: transformers' model})."""
    root = tmp_path_factory.mktemp("toys")
    yield root, {family: make(root / f"{family}-{tied}", family, tied).eval() for family, tied in MODELS}
    if torch.distributed.is_initialized():  # not when only the test with its own torchrun has used the toys
        torch.distributed.destroy_process_group()


@torch.no_grad()
def by_transformers(model) -> list[tuple[list[int], list[float]]]:
    """(ids, log-probabilities) of greedy completions of all prompts, each by itself, without a cache."""
    made = []
    for prompt in prompts():
        ids, values = list(prompt), []
        while len(values) < MAX_TOKENS and (not values or ids[-1] != EOS):
            log_p = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(log_p.argmax()))
            values.append(float(log_p.max()))
        made.append((ids[len(prompt) :], values))
    return made


def check(done: dict, expected: list) -> None:
    assert sorted(done) == list(range(len(LENGTHS)))
    for number, (ids, log_probs) in enumerate(expected):
        assert done[number][0] == ids, number
        torch.testing.assert_close(torch.tensor(done[number][1]), torch.tensor(log_probs), atol=1e-4, rtol=0)
        assert done[number][2] == ("stop" if ids[-1] == EOS else "length")


def state(model) -> list:
    """Which modules a model is made of, in which mode, and which attributes they have."""
    return [
        (name, id(module), module.training, sorted((key, id(value)) for key, value in vars(module).items()))
        for chunk in model
        for name, module in chunk.named_modules()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(toys, family):
    root, models = toys
    model, engine = make_engine(root / f"{family}-{dict(MODELS)[family]}")
    try:
        before, random_state = state(model), torch.get_rng_state()
        done = complete(engine, [Request(i, prompt, GREEDY) for i, prompt in enumerate(prompts())])
        check(done, by_transformers(models[family]))
        assert len({tuple(ids) for ids, _, _ in done.values()}) > 4
        assert state(model) == before and torch.equal(torch.get_rng_state(), random_state)
        # ... and the trainer's own forward, over packs, gives the same log-probabilities.
        for number, (ids, log_probs, _) in done.items():
            tokens = torch.tensor(prompts()[number] + ids)
            log_p = logits(model[0], tokens)[:, :109].float().log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
            torch.testing.assert_close(log_p[-len(ids) :], torch.tensor(log_probs), atol=1e-4, rtol=0)
    finally:
        leave_layout()


@pytest.mark.distributed
def test_layouts(toys, tmp_path):
    root, models = toys
    run_torchrun(2, "tests/megatron_engine_worker.py", root, tmp_path)
    for name, (family, _, _) in LAYOUTS.items():
        parts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}.?.json"))]
        assert len(parts) == parts[0]["replicas"] == (2 if name in ("CP2", "DP2") else 1), name
        done = {int(number): completion for part in parts for number, completion in part["done"].items()}
        check(done, by_transformers(models[family]))


@pytest.fixture
def engine(toys):
    """(model, engine, transformers' model) of a small Qwen3."""
    root, models = toys
    model, engine = make_engine(root / "qwen3-False")
    yield model, engine, models["qwen3"]
    leave_layout()


def test_sampling(engine):
    """Seeds give the same completions again; log-probabilities are after the temperature, before truncation."""
    _, engine, theirs = engine
    sampling = Sampling(MAX_TOKENS, temperature=0.6, top_k=20, log_probs=True, ignore_eos=True)
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
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)
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
    wanting = replace(GREEDY, ignore_eos=True)
    assert all(len(ids) == MAX_TOKENS for ids, _, _ in complete(engine, [Request(0, [5, EOS, 7], wanting)]).values())


def test_aborted_requests_do_not_come_back(engine):
    _, engine, _ = engine
    engine.wake_cache()
    with engine.rollout(0):
        engine.submit([Request(i, prompt, replace(GREEDY, ignore_eos=True)) for i, prompt in enumerate(prompts())])
        assert not engine.poll()
        engine.abort([0, 6])  # one runs, one waits
        done = [completion.id for _ in range(6 * MAX_TOKENS) for completion in engine.poll()]
    assert sorted(done) == [1, 2, 3, 4, 5]


def test_refusals_and_versions(engine, toys):
    model, engine, _ = engine
    before = state(model)
    engine.wake_cache()
    with pytest.raises(GrpoError, match="does not fit into the engine's 33 tokens"), engine.rollout(0):
        engine.submit([Request(0, [5] * 24, GREEDY)])
    assert state(model) == before
    engine.update_weights((1 / 0 for _ in range(1)), version=7)  # nothing is taken from the stream
    with engine.rollout(0):
        assert [completion.weight_version for completion in generate(engine, [Request(3, [5], GREEDY)])] == [7]
    engine.sleep()
    leave_layout()
    _, large = make_engine(toys[0] / "qwen3-False", inference_max_requests=10**6)
    with pytest.raises(GrpoError, match=r"takes \d+\.\d\d GiB on each rank, but .* lower --inference-max-requests"):
        large.wake_cache()
