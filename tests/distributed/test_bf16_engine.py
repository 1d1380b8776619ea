"""A colocated vLLM on a CPU beside a trainer, both in bf16: CPU kernels of vLLM pack other weights than in float32."""

import json

import models
import pytest
from ranks import run_torchrun
from slow import slow_except

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

SIZES: dict[str, dict] = {
    "nemotron_h": {"hybrid_override_pattern": "M*-M"},  # vLLM on a CPU has no experts without a gate
    "qwen3_5_text": {},
    "qwen3": {},
    "minimax_m2": {},
    "glm4_moe_lite": {},
}
LOGITS = 0.3  # standard deviation: models without anything in common differ by about 0.3 nats
LIMIT = 0.03  # nats: what rounding leaves; one layer of Nemotron-H without its attention is 0.05


@pytest.mark.parametrize("family", slow_except(["nemotron_h"], SIZES))
def test_an_engine_in_bf16_has_the_trainers_weights_after_each_sync(family, tmp_path):
    model = models.make(tmp_path / "model", family, LOGITS, **SIZES[family])
    words = "--load-hf", model, "--use-distributed-optimizer"
    run_torchrun(1, "tests/gpu/engine_worker.py", tmp_path, "compared,weights", *words)
    facts = json.loads((tmp_path / "0.json").read_text())
    before, stale, after = facts["weights"]
    assert facts["compared"] == []
    assert before < LIMIT and after < LIMIT < 0.2 * stale, facts["weights"]
