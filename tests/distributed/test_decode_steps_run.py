"""Completions of a real vLLM with decode steps are those without, bit for bit: seeds, ends, aborts, interrupts."""

import json
from collections import Counter

import pytest
from decode_steps_worker import REQUESTS, TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]
MODEL = f"""--model-family qwen3 --group-query-attention --num-query-groups 1 --kv-channels 32 --qk-layernorm --swiglu
 --normalization RMSNorm --disable-bias-linear --vocab-size 256 --max-position-embeddings 2048 --num-layers 1
 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 2 --vllm-enforce-eager --max-prompt-length 16
 --max-completion-length {TOKENS} --temperature 0.7 --vllm-max-num-seqs 48"""


@pytest.mark.slow
def test_completions_are_those_without_decode_steps(torchrun, tmp_path):
    torchrun(1, "tests/distributed/decode_steps_worker.py", tmp_path / "found.json", *MODEL.split())
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["decode steps"] == found["vLLM"] == found["decode steps again"]
    completions = found["vLLM"]
    assert sorted(number for number, *_ in completions) == list(range(1, REQUESTS))  # 0 was aborted
    assert Counter(reason for *_, reason, _ in completions).keys() == {"stop", "length"}
    assert any(len(set(versions)) > 1 for *_, versions in completions)  # went on with new weights
    counts = found["decode steps: counts"]
    assert found["vLLM: counts"] == {"decode steps": 0, "steps": counts["steps"]}
    assert counts["decode steps"] > counts["steps"] * 0.8
