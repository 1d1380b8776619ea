"""Bad input that several ranks see, and one of them: one message, once."""

import bad_input_cases as cases
import pytest
from bad_input_runs import OUR_FRAME, TRAIN, bench, files, finished, model  # noqa: F401 (fixtures)


def output_of_two_ranks(torchrun, bench, *words):
    """What a run prints that fails; torchrun's own report at the end has a traceback, but no frame of ours."""
    before = files(bench.root)
    good = [
        word for word in bench.good if word != "--vllm-enforce-eager"
    ]  # which only vLLM takes, and a CPU has anyway
    result = torchrun(2, TRAIN, *good, *words, check=False)
    assert result.returncode != 0
    assert files(bench.root) == before
    assert not OUR_FRAME.search(result.stdout), result.stdout
    assert result.stdout.count("error: ") == 1, result.stdout
    return result.stdout


@pytest.mark.distributed
def test_two_ranks_say_it_once(torchrun, bench):
    output = output_of_two_ranks(torchrun, bench, *bench.data('{"prompt": 1}'))
    assert "pretrain_grpo.py: error: " in output and "bad.jsonl:1:" in output


# Both engines hand completions to the same reward code; a start of vLLM takes longer than the rest of the run.
ENGINES = pytest.mark.parametrize(
    "engine", ["megatron", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)


@pytest.mark.slow
@pytest.mark.distributed
@ENGINES
def test_a_reward_that_fails_on_every_rank(torchrun, bench, engine):
    words = cases.failing("return '1'")(bench)
    output = output_of_two_ranks(torchrun, bench, *words, "--rollout-engine", engine)
    assert 'pretrain_grpo.py: error: reward "mine" failed on all 8 samples' in output


@pytest.mark.slow
@pytest.mark.distributed
@ENGINES
def test_a_reward_that_fails_on_one_rank(torchrun, bench, engine):
    """The other rank fails because that one has left; only the cause is printed."""
    words = cases.failing("import os; return 1.0 if os.environ['RANK'] == '0' else '1'")(bench)
    output = output_of_two_ranks(torchrun, bench, *words, "--rollout-engine", engine)
    assert 'pretrain_grpo.py: [rank 1] error: reward "mine" failed on all 8 samples' in output
