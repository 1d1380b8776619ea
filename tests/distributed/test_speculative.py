"""Drafts change no completion: --vllm-speculative-config against the exact probabilities of transformers' model."""

import copy
import json
from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_torchrun
from safetensors.torch import save_file
from slow import slow_except
from speculative_worker import DISTURBED, GREEDY, MANY, PROMPTS, SAMPLED_TOKENS, SAMPLES, TOP_K
from toy_checkpoints import DELTA, HYBRID, add_mtp, make
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_grpo.utils.packages import missing

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

VOCABULARY, TEMPERATURE = 6, 0.8
TOLERANCE = 1e-5  # nats
DRAFTS = 2  # tokens of a draft
METHODS = ("ngram", "suffix", "draft_model", "draft_model, sampled drafts", "mtp")
METHODS += ("ngram, adapter", "suffix, adapter", "draft_model, adapter")
RANK = 2  # of the adapter


def qwen3(directory, dtype=torch.float32):
    """Return a model of six tokens; no token is nearly certain, and no distribution is flat."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 1,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
            parameter.copy_(parameter.to(dtype))
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def near(model, directory):
    """Return a model that agrees with another one on some tokens only."""
    torch.manual_seed(1)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.ndim > 1:
            parameter.add_(0.2 * parameter.std() * torch.randn(parameter.shape))
    other.save_pretrained(directory)
    return other


@torch.no_grad()
def add_adapter(model, directory, dtype) -> None:
    """Add an adapter of all linear layers to the model and, as a file, to its directory."""
    generator, tensors = torch.Generator().manual_seed(2), {}
    for name, layer in model.model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            a = (torch.randn(RANK, layer.in_features, generator=generator) / layer.in_features**0.5).to(dtype)
            b = (torch.randn(layer.out_features, RANK, generator=generator) / RANK**0.5).to(dtype)
            layer.weight.add_(b.float() @ a.float())
            tensors |= {f"model.{name}.lora_A.weight": a, f"model.{name}.lora_B.weight": b}
    (directory / "adapter").mkdir()
    save_file(tensors, directory / "adapter" / "adapter.safetensors")


@torch.no_grad()
def run(tmp, method: str, *flags: str, launch=run_torchrun, dtype=torch.float32) -> SimpleNamespace:
    """Return what the engine gave with a method, the policy, and a function from a text to its greedy draft.

    The policy's weights are rounded to ``dtype``, which is the engine's.
    """
    name, *more = method.split(", ")
    family = next((one for one in more if one in HYBRID), "glm4_moe")
    config = {"method": name, "num_speculative_tokens": DRAFTS}
    draft = None
    if name == "mtp":
        sizes = {"head_dim": 32}
        if family in HYBRID:
            sizes, flags = DELTA, (*flags, "--vllm-dtype", "bfloat16", "--mtp-num-layers", "1")
        model = make(tmp / "policy", family, False, dtype, vocab_size=VOCABULARY, **sizes).eval().float()
        layer = add_mtp(tmp / "policy", model)
        draft = lambda ids: mtp_draft(model, layer, ids)  # noqa: E731
    else:
        model = qwen3(tmp / "policy", dtype)
    if "adapter" in more:
        add_adapter(model, tmp / "policy", dtype)
        flags = (*flags, "--lora-rank", str(RANK), "--lora-weight-sync", "adapter")
    if name == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if name == "draft_model":
        other = near(model, tmp / "draft")
        config |= {"model": str(tmp / "draft")}
        config |= {"draft_sample_method": "probabilistic"} if "sampled drafts" in more else {}
        draft = lambda ids: greedy(other, ids, DRAFTS)  # noqa: E731
    flags = ("--vllm-speculative-config", json.dumps(config), "--temperature", str(TEMPERATURE), *flags)
    launch(1, "tests/distributed/speculative_worker.py", tmp / "policy", tmp / "found.json", *flags)
    return SimpleNamespace(**json.loads((tmp / "found.json").read_text()), model=model, draft=draft)


def greedy(model, ids: list[int], count: int) -> list[int]:
    text = list(ids)
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def mtp_draft(model, mtp, ids: list[int]) -> list[int]:
    """Return the tokens that a multi-token-prediction layer of transformers proposes after ``ids``.

    As in vLLM, the layer gets no embedding at position 0, and reads its own output for every token but the first.
    """
    layer, text = mtp.layers[0], list(ids)
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    for _ in range(DRAFTS):
        embedded, positions = mtp.embed_tokens(torch.tensor([text[1:]])), torch.arange(len(text) - 1)[None]
        embedded[:, 0] = 0
        causal = torch.full((len(text) - 1,) * 2, -torch.inf).triu(1)[None, None]
        rotary = mtp.rotary_emb(embedded, positions)
        out = layer(embedded, hidden[None, : len(text) - 1], rotary, causal, positions, None)
        text.append(int(mtp.shared_head(out)[0, -1].argmax()))
        hidden = torch.cat([hidden[: len(ids) - 1], out[0, len(ids) - 2 :]])
    return text[len(ids) :]


def skip_without_package(method: str) -> None:
    if method.startswith("suffix") and missing("arctic_inference"):
        pytest.skip("needs arctic-inference, which is not installed")


@pytest.fixture(scope="module", params=slow_except((), METHODS))
def found(request, tmp_path_factory):
    """What a method gave; the default test is test_a_draft_model_that_is_the_policy_is_always_accepted."""
    skip_without_package(request.param)
    return run(tmp_path_factory.mktemp("speculative"), request.param)


def exact(model, sequences, prompt_length: int) -> np.ndarray:
    """Return transformers' log-probabilities of all tokens [sequences, tokens of a completion, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor(sequences)).logits[:, prompt_length - 1 : -1].double()
    return torch.log_softmax(logits / TEMPERATURE, -1).numpy()


def of_tokens(tables: np.ndarray, ids) -> np.ndarray:
    return np.take_along_axis(tables, np.array(ids)[..., None], axis=-1)[..., 0]


def test_greedy_completions_and_their_log_probs_are_those_of_the_model(found):
    check_greedy(found)


def check_greedy(found) -> None:
    for prompt, asked in zip(PROMPTS, found.greedy, strict=True):
        (ids,), (log_probs,) = asked["ids"], asked["log_probs"]
        table = exact(found.model, [[*prompt, *ids]], len(prompt))[0]
        assert ids == table.argmax(-1).tolist() and len(ids) == GREEDY.max_tokens
        at_temperature_1 = np.log(np.exp(table.max(-1) * TEMPERATURE) / np.exp(table * TEMPERATURE).sum(-1))
        assert np.abs(np.array(log_probs) - at_temperature_1).max() < TOLERANCE  # greedy decoding has none
    assert sum(asked["steps"] for asked in found.greedy) < len(PROMPTS) * GREEDY.max_tokens  # a token a step, else
    assert found.differences == []  # between the weights of the engine, also of its drafting layers, and the policy's


@torch.no_grad()
def test_drafts_are_those_of_the_model_that_drafts(found):
    """The drafts of transformers' model give the number of engine steps, and vLLM's counts of drafts."""
    if found.draft is None:
        pytest.skip("no model drafts")
    accepted, rejected = 0, 0
    for prompt, asked in zip(PROMPTS, found.greedy, strict=True):
        count, counted = drafts_of(found.model, found.draft, prompt, asked["ids"][0])
        assert asked["steps"] == count
        assert asked["drafts"] == [count - 1, DRAFTS * (count - 1), counted]
        accepted, rejected = accepted + counted, rejected + DRAFTS * (count - 1) - counted
    assert accepted > 5 and rejected > 5


def test_a_draft_model_returns_after_sleep(found):
    """Of level 2, as vLLM's CPU build cannot sleep: its tensors are overwritten."""
    if not hasattr(found, "after sleep"):
        pytest.skip("no model drafts")
    lost, returned = getattr(found, "after sleep")
    assert lost > 10 and returned == 0


def test_the_dry_run_counts_the_memory_of_drafts(found):
    if not hasattr(found, "size"):
        pytest.skip("no model drafts")
    parameters, share = getattr(found, "estimated size")
    # The dry run does not count the biases of a router: of the layer of multi-token prediction.
    assert parameters + getattr(found.model.config, "n_routed_experts", 0) == found.size[0]
    assert share == pytest.approx(found.size[1])


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRID)
def test_drafts_of_a_hybrid(tmp_path, family):
    """The engine is in bfloat16, the only type in which vLLM computes delta nets on a CPU.

    Rounding breaks near ties of tokens, drafts and experts differently: the bounds are of averages over many prompts.
    """
    found = run(tmp_path, f"mtp, {family}", "--many")
    assert found.differences == []  # between the weights of the engine, also of its drafting layer, and the policy's
    parameters, share = getattr(found, "estimated size")
    assert parameters == found.size[0] and share == pytest.approx(found.size[1])
    given, steps, expected, wrong = [], [], [], []
    below_best, from_exact = [], []  # of each token, nats
    for prompt, asked in zip(MANY, found.greedy, strict=True):
        (ids,), (log_probs,) = asked["ids"], asked["log_probs"]
        table = exact(found.model, [[*prompt, *ids]], len(prompt))[0]
        below_best += list(table.max(-1) - of_tokens(table, ids))
        at_temperature_1 = table * TEMPERATURE - np.log(np.exp(table * TEMPERATURE).sum(-1, keepdims=True))
        from_exact += list(np.abs(of_tokens(at_temperature_1, ids) - log_probs))
        given.append(asked["drafts"]), steps.append(asked["steps"])
        expected.append(drafts_of(found.model, found.draft, prompt, ids)[1])
        wrong.append(drafts_of(found.model, lambda text: found.draft([*text[:-1], text[-1] ^ 1]), prompt, ids)[1])
    assert np.mean(below_best) < 0.02 and np.mean(from_exact) < 0.05
    assert [drafts for drafts, _, _ in given] == [count - 1 for count in steps]
    assert sum(steps) < len(MANY) * GREEDY.max_tokens  # a token a step, else
    # Drafts after another token are right about as often, but at other places.
    differences, others = ([abs(got[2] - want) for got, want in zip(given, these)] for these in (expected, wrong))
    assert sum(differences) < sum(others) / 2, (given, expected, wrong)


def drafts_of(model, draft, prompt: list[int], ids: list[int]) -> tuple[int, int]:
    """Return the engine's steps for a completion, and the tokens of drafts that are right as vLLM counts them."""
    further = [*ids, *greedy(model, [*prompt, *ids], DRAFTS)]  # vLLM counts those behind the end, too
    sampled, count, counted = 1, 1, 0  # the step of the prompt
    while sampled < len(ids):
        proposed, right = draft([*prompt, *ids[:sampled]]), 0
        while right < DRAFTS and proposed[right] == further[sampled + right]:
            right += 1
        counted += right
        sampled, count = sampled + min(right, len(ids) - sampled) + 1, count + 1
    return count, counted


def test_a_draft_model_that_is_the_policy_is_always_accepted(tmp_path):
    """The greedy completions are the model's."""
    policy = tmp_path / "policy"
    model = qwen3(policy)
    config = {"model": str(policy), "num_speculative_tokens": DRAFTS}
    flags = ("--vllm-speculative-config", json.dumps(config), "--greedy")
    run_torchrun(1, "tests/distributed/speculative_worker.py", policy, tmp_path / "found.json", *flags)
    found = SimpleNamespace(**json.loads((tmp_path / "found.json").read_text()), model=model)
    check_greedy(found)
    for asked in found.greedy:
        drafts, proposed, accepted = asked["drafts"]
        assert proposed == accepted == DRAFTS * drafts and drafts == asked["steps"] - 1


LEAST_P_VALUE = 1e-4  # of each of some 40 tests; a rule of acceptance that is wrong gives less than 1e-6


def p_value(found, samples: dict, kept: int = VOCABULARY, tolerance: float = TOLERANCE) -> float:
    """Return that of Pearson's chi-square test over all sequences of three tokens.

    ``kept`` is the number of likeliest tokens that are sampled from. Cells of less than five expected sequences are
    merged. The log-probabilities are compared, too.
    """
    every = list(product(range(VOCABULARY), repeat=SAMPLED_TOKENS))
    tables = exact(found.model, [[*PROMPTS[0], *ids] for ids in every], len(PROMPTS[0]))
    tables = np.where(tables < np.sort(tables, -1)[..., -kept, None], -np.inf, tables)
    tables -= np.log(np.exp(tables).sum(-1, keepdims=True))
    log_probs = dict(zip(every, of_tokens(tables, every), strict=True))
    count = len(samples["ids"])
    assert count >= DISTURBED
    expected = [log_probs[tuple(sample)] for sample in samples["ids"]]
    off = np.abs(np.array(samples["log_probs"]) - expected).max(-1)
    wrong = [
        (int(i), samples["ids"][i], samples["log_probs"][i], expected[i]) for i in np.flatnonzero(off >= tolerance)
    ]
    assert not wrong, f"{len(wrong)} of {count} samples (number, tokens, log-probabilities, right ones): {wrong[:10]}"
    if kept < VOCABULARY:
        likeliest = {ids: np.argsort(table, -1)[:, -kept:] for ids, table in zip(every, tables, strict=True)}
        for ids, tokens in zip(samples["ids"], samples["kept_token_ids"], strict=True):
            assert np.array_equal(np.sort(tokens, -1), np.sort(likeliest[tuple(ids)], -1))
    probability = {sample: np.exp(values.sum()) for sample, values in log_probs.items()}
    assert sum(probability.values()) == pytest.approx(1)
    sampled = Counter(map(tuple, samples["ids"]))
    statistic, cells, expected, observed = 0.0, 0, 0.0, 0
    for sample in sorted(probability, key=probability.__getitem__):
        expected += count * probability[sample]
        observed += sampled[sample]
        if expected >= 5:
            statistic += (observed - expected) ** 2 / expected
            cells, expected, observed = cells + 1, 0.0, 0
    assert cells > kept**SAMPLED_TOKENS / (2.5 if count == SAMPLES else 6)
    half = torch.tensor([cells - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


def test_samples_have_the_distribution_of_the_model(found):
    assert p_value(found, found.sampled) > LEAST_P_VALUE


def test_truncated_samples_have_their_distribution_and_kept_tokens(found):
    assert p_value(found, found.top_k, kept=TOP_K) > LEAST_P_VALUE


@pytest.mark.parametrize("disturbance", ["interrupted", "kept"])
def test_disturbed_samples_have_the_distribution_of_the_model(found, disturbance):
    """Interrupted and continued with a new KV cache; or under way at new weights, with the old one."""
    assert p_value(found, getattr(found, disturbance)) > LEAST_P_VALUE


def test_drafts_of_samples_are_accepted_and_rejected(found):
    """Otherwise their distribution would not depend on the rule of acceptance."""
    _, proposed, accepted = found.sampled["drafts"]
    assert SAMPLES / 20 < accepted < proposed - SAMPLES / 20


def test_a_seed_gives_the_same_samples_in_a_later_rollout(found):
    """Drafts do not depend on the completions of earlier rollouts, and so a resumed run samples the same."""
    again = np.array(found.again["ids"])
    assert (again == np.array(found.sampled["ids"][: len(again)])).all()


def test_tokens_before_new_weights_have_the_old_version(found):
    assert len(found.seams) == DISTURBED
    assert all(before == old for before, old in found.seams)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_a_wrong_acceptance_of_drafts_is_found(tmp_path, method):
    skip_without_package(method)
    found = run(tmp_path, method, "--wrong-acceptance")
    assert p_value(found, found.sampled) < 1e-6
