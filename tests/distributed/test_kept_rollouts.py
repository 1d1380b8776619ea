"""A real vLLM goes on with the requests of partial rollouts: completions are those of whole rollouts."""

import json

import numpy as np
import pytest
from kept_rollouts_worker import GENERATIONS, GROUPS, ROLLOUTS
from test_decode_steps_run import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]


@pytest.mark.parametrize("flags", [[], ["--vllm-enable-prefix-caching"]], ids=["", "prefix cache"])
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
