"""`check_engine.py --steps`: what is said to be computed is not found in the prefix cache, which engines keep."""

import json

import pytest
from test_decode_steps_run import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]
BLOCK = 32  # tokens
SIZES = f"""--max-prompt-length 100 --max-completion-length 40 --vllm-engine-kwargs
    {{"block_size":{BLOCK},"kv_cache_memory_bytes":{2**26}}}""".split()


def test_prompts_are_computed_except_in_the_question_about_hits(torchrun, tmp_path):
    torchrun(1, "tests/distributed/engine_steps_worker.py", tmp_path / "found.json", *MODEL.split(), *SIZES)
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"prompts", "prompts with hits of the prefix cache"} <= set(found["asked"])
    computed = [call["requests"] for call in found["calls"] if not call["cached"]]
    assert len(computed) == 8 and not any(hit for requests in computed for _, hit in requests)
    asked = found["calls"][-1]
    assert asked["cached"] and all(hit == (tokens - 1) // BLOCK * BLOCK for tokens, hit in asked["requests"])
