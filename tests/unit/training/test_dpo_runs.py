"""A whole run with --loss-type dpo: there is a reference model without a KL term."""

import math
import signal

import bad_input_runs
import pytest
from bad_input_bench import Bench
from bad_input_runs import TRAIN, StubEngine, launch
from run_files import metrics_of

from megatron_grpo.rollout.engine import Completion

REWARD = """
@register_reward("mine")
def mine(sample):
    return float(len(sample.completion) % 3)
"""


class Different(StubEngine):
    """The completions of a prompt have different lengths."""

    def poll(self):
        request = self.queue.pop()
        ids = [7] * (request.id % 3) + [request.sampling.stop_token_ids[0]]
        return [Completion(request.id, ids, None, "stop", [self.version] * len(ids))]


def test_the_policy_leaves_the_reference_by_its_pairs(tiny_models, tmp_path, monkeypatch):
    """Before the first update the policy is the reference: the margins are 0, and the loss is log 2."""
    monkeypatch.setattr(bad_input_runs, "StubEngine", Different)
    kept = signal.getsignal(signal.SIGTERM)
    bench = Bench(tmp_path, tiny_models["qwen3"])
    words = "--train-iters 4 --mismatch-limit 100 --no-save-hf --loss-type dpo --num-iterations 2".split()
    try:
        assert launch(TRAIN, [*bench.good, *bench.plugin(REWARD), *words]) == 0
    finally:
        signal.signal(signal.SIGTERM, kept)
    rows = [row for row in metrics_of(bench.save) if "dpo/loss" in row]
    assert len(rows) == 4 and all(row["dpo/pairs"] == 2 for row in rows)
    assert rows[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["dpo/margin"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["dpo/loss"] < rows[1]["dpo/loss"] < math.log(2) and rows[-1]["dpo/accuracy"] == 1
