"""The models of tools/benchmark/drafts.py know their text as well as the table of the benchmark says."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.weights import families
from tools.benchmark import drafts

NOISE, CYCLE = 0.2, 16


@pytest.mark.parametrize("which", [0, 1])
@torch.no_grad()
def test_the_next_token_of_the_cycle_has_the_rest_of_the_noise(which):
    options = SimpleNamespace(cycle=CYCLE, completion_length=8)
    args = drafts.parse(drafts.SHAPES["tiny"][which], options)
    config = families.for_args(args).hf_from_args(args)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    missing, unknown = model.load_state_dict(dict(drafts.weights(args, CYCLE, NOISE)), strict=False)
    assert not missing and not unknown
    text = torch.randperm(CYCLE, generator=torch.Generator().manual_seed(1))
    probabilities = model(text[None]).logits[0].double().softmax(-1)
    right = torch.full((CYCLE, args.vocab_size), 0.0, dtype=torch.float64)
    right[:, :CYCLE] = NOISE / (CYCLE - 1)
    right[torch.arange(CYCLE), (text + 1) % CYCLE] = 1 - NOISE
    assert (probabilities - right).abs().max() < 1e-4
