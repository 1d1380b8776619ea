"""Drafts change no completion: --vllm-speculative-config against the exact probabilities of transformers' model."""

import json
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from ranks import run_torchrun
from speculative_worker import GREEDY, PROMPTS, SAMPLED_TOKENS, SAMPLES
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

VOCABULARY, TEMPERATURE = 6, 0.8
TOLERANCE = 1e-5  # nats
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of six tokens whose distributions are neither flat nor nearly certain."""
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
    model.name_or_path = str(tmp_path_factory.mktemp("speculative"))
    model.save_pretrained(model.name_or_path)
    return model


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("found") / "found.json"
    flags = ["--vllm-speculative-config", json.dumps(DRAFTS), "--temperature", str(TEMPERATURE)]
    run_torchrun(1, "tests/distributed/speculative_worker.py", model.name_or_path, out, *flags)
    return json.loads(out.read_text())


def exact(model, sequences, prompt_length: int) -> np.ndarray:
    """Return transformers' log-probabilities of all tokens [sequences, tokens of a completion, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor(sequences)).logits[:, prompt_length - 1 : -1].double()
    return torch.log_softmax(logits / TEMPERATURE, -1).numpy()


def of_tokens(tables: np.ndarray, ids) -> np.ndarray:
    return np.take_along_axis(tables, np.array(ids)[..., None], axis=-1)[..., 0]


def test_greedy_completions_and_their_log_probs_are_those_of_the_model(found, model):
    for prompt, ids, log_probs in zip(PROMPTS, found["greedy"]["ids"], found["greedy"]["log_probs"], strict=True):
        table = exact(model, [[*prompt, *ids]], len(prompt))[0]
        assert ids == table.argmax(-1).tolist() and len(ids) == GREEDY.max_tokens
        at_temperature_1 = np.log(np.exp(table.max(-1) * TEMPERATURE) / np.exp(table * TEMPERATURE).sum(-1))
        assert np.abs(np.array(log_probs) - at_temperature_1).max() < TOLERANCE  # greedy decoding has none
    assert found["greedy"]["steps"] < GREEDY.max_tokens  # one token a step without drafts


def test_samples_have_the_distribution_of_the_model(found, model):
    """Pearson's chi-square test over all sequences of three tokens; cells of less than five expected are merged."""
    every = list(product(range(VOCABULARY), repeat=SAMPLED_TOKENS))
    tables = exact(model, [[*PROMPTS[0], *ids] for ids in every], len(PROMPTS[0]))
    log_probs = dict(zip(every, of_tokens(tables, every), strict=True))
    ids, of_engine = (found["sampled"][name] for name in ("ids", "log_probs"))
    assert np.abs(np.array(of_engine) - [log_probs[tuple(sample)] for sample in ids]).max() < TOLERANCE
    probability = {sample: np.exp(values.sum()) for sample, values in log_probs.items()}
    assert sum(probability.values()) == pytest.approx(1)
    sampled = Counter(map(tuple, ids))
    statistic, cells, expected, observed = 0.0, 0, 0.0, 0
    for sample in sorted(probability, key=probability.__getitem__):
        expected += SAMPLES * probability[sample]
        observed += sampled[sample]
        if expected >= 5:
            statistic += (observed - expected) ** 2 / expected
            cells, expected, observed = cells + 1, 0.0, 0
    half = torch.tensor([cells - 1, statistic], dtype=torch.float64) / 2
    assert cells > 100 and torch.special.gammaincc(half[0], half[1]) > 1e-3
