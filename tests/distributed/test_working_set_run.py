"""Episodes of a real vLLM whose cache holds some of them: turns that wait change no completion, and save work."""

import json

import numpy as np
import pytest
from working_set_worker import ANSWER, EPISODES, TOKENS, TURNS

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]
LONGEST = TURNS * TOKENS + (TURNS - 1) * ANSWER  # of a episode, behind its prompt
MODEL = f"""--model-family qwen3 --group-query-attention --num-query-groups 1 --kv-channels 32 --qk-layernorm --swiglu
 --normalization RMSNorm --disable-bias-linear --vocab-size 256 --max-position-embeddings 2048 --num-layers 1
 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 2 --vllm-enforce-eager --max-prompt-length 100
 --max-completion-length {LONGEST} --vllm-max-num-seqs {EPISODES}
 --vllm-engine-kwargs {{"num_gpu_blocks_override":32}}"""


def test_turns_that_wait_change_nothing_and_their_histories_are_kept(torchrun, tmp_path):
    torchrun(1, "tests/distributed/working_set_worker.py", tmp_path / "found.json", *MODEL.split())
    found = json.loads((tmp_path / "found.json").read_text())
    whole = EPISODES * (100 + LONGEST)
    assert whole / 4 < found["cache"] < whole / 2  # a third of all histories
    for (ids, log_probs), (expected, others) in zip(found["set"], found["all pass"], strict=True):
        assert ids == expected and len(ids) == LONGEST
        np.testing.assert_allclose(log_probs, others, atol=1e-5)
    assert whole <= found["set: computed"] < 0.6 * found["all pass: computed"]
