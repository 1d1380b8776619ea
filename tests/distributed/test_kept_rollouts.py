"""A real vLLM goes on with the requests of partial rollouts: completions are those of whole rollouts."""

import json

import numpy as np
import pytest
from kept_rollouts_worker import GENERATIONS, GROUPS, ROLLOUTS
from ranks import REPO
from test_decode_steps_run import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]


@pytest.mark.parametrize("flags", [[], ["--no-vllm-enable-prefix-caching"]], ids=["", "no prefix cache"])
def test_completions_are_those_of_whole_rollouts(torchrun, tmp_path, flags):
    """Weights are called new between the rollouts and stay the same. No request is submitted twice unless the engine
    has other work.
    """
    out = tmp_path / "found.json"
    torchrun(
        1, "tests/distributed/kept_rollouts_worker.py", out, *MODEL.split(), "--max-completion-length", 120, *flags
    )
    facts = json.loads(out.read_text())
    whole = facts.pop("whole")["found"]
    for name, of_run in facts.items():
        assert len(of_run["found"]) == GROUPS * GENERATIONS * ROLLOUTS
        for completion, (tokens, log_probs, versions) in of_run["found"].items():
            assert tokens == whole[completion][0], (name, completion)
            np.testing.assert_allclose(log_probs, whole[completion][1], atol=1e-5, err_msg=f"{name}, {completion}")
            assert versions == sorted(versions) and versions[-1] - versions[0] <= 2
        assert any(len(set(versions)) > 1 for *_, versions in of_run["found"].values()), name
    assert facts["kept"]["submitted"] == facts["kept"]["requests"]
    assert facts["again"]["submitted"] > facts["kept, other work"]["submitted"] > facts["kept"]["submitted"]


BROKEN = """
from megatron_grpo.rollout.vllm import colocate

load = colocate.VllmColocate._load

def broken(self, weights, version):
    if not self.has_weights:
        return load(self, weights, version)
    self._finish_step()
    for _ in weights:
        pass
    self._begin_version(version)

colocate.VllmColocate._load = broken
"""
FLAGS = """--micro-batch-size 8 --global-batch-size 16 --num-generations 4 --max-prompt-length 8
    --max-completion-length 24 --reward-funcs even_tokens --beta 0 --lr 1e-2 --train-iters 6 --transformer-impl local
    --no-save-hf --ignore-eos --partial-rollouts --max-staleness 2 --mismatch-limit 100 --weight-update keep
    --rollout-importance-sampling-mode token_truncate""".split()


def test_weights_that_do_not_reach_running_requests_end_the_run(torchrun, tiny_models, tmp_path):
    """Once beside requests that go on: no completion may be of the newest weights alone."""
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{a}+1="}}\n' for a in range(10)))
    words = ["--load-hf", tiny_models["qwen3"], "--train-data-path", tmp_path / "train.jsonl"]
    words += ["--save", tmp_path / "run", "--external-plugins", REPO / "tools/benchmark/even_tokens.py"]
    result = torchrun(1, "pretrain_grpo.py", *FLAGS, *words, tmp_path / "broken.py", check=False)
    assert result.returncode != 0
    assert "the engine does not hold the trainer's weights of update" in result.stdout
