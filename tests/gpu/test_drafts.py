"""Drafts on a GPU, in bf16: what tests/distributed/test_speculative.py finds on a CPU; real sleep of level 2."""

import json

import models
import pytest
import torch
from launch import engine_flags, torchrun
from test_engine import EAGER, SHARP, found
from test_speculative import LEAST_P_VALUE, p_value, run

ROUNDING = 0.15  # nats
FLAGS = ("--bf16", *engine_flags(64))


METHODS = ["ngram", "draft_model", "ngram, adapter", "draft_model, adapter", "mtp, qwen3_5_text", "mtp, qwen3_next"]
SUFFIX = [pytest.param(method, marks=pytest.mark.needs("arctic_inference")) for method in ("suffix", "suffix, adapter")]


@pytest.mark.parametrize("method", [*METHODS, *SUFFIX])
def test_samples_have_the_distribution_of_the_model(tmp_path, method):
    facts = run(tmp_path, method, *FLAGS, EAGER, launch=torchrun, dtype=torch.bfloat16)
    for name in ("sampled", "interrupted", "kept"):
        assert p_value(facts, getattr(facts, name), tolerance=ROUNDING) > LEAST_P_VALUE, name
    assert all(0 < asked["drafts"][2] <= asked["drafts"][1] for asked in facts.greedy)
    assert facts.differences == []


@pytest.mark.alone
def test_a_draft_model_returns_after_sleep(tmp_path):
    """The draft model is the policy: all its drafts are accepted except for rounding, and no others would be."""
    model = models.make(tmp_path / "model", "qwen3", SHARP)
    config = json.dumps({"model": model, "num_speculative_tokens": 3})
    flags = "--sleep-level", "2", "--vllm-speculative-config", config
    before, after = found(tmp_path / "out", 1, "drafts", model, *flags)[0]["drafts"]  # with CUDA graphs
    assert min(before, after) > 0.8, (before, after)
