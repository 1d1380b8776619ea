"""What the trainer keeps watch on by itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.trainer import Trainer, mean_of_scored
from megatron_grpo.utils.errors import GrpoError


def check(versions, gap, synced=4, bf16=False):
    trainer = SimpleNamespace(args=parse_args(["--bf16"] * bf16), synced_iteration=synced)
    row = {} if gap is None else {"mismatch/mean_abs": gap}
    Trainer.check_engine(trainer, SimpleNamespace(weight_version=np.array(versions)), row)


@pytest.mark.parametrize("gap, bf16", [(None, False), (1e-6, False), (0.01, True)])
def test_an_engine_with_the_trainers_weights_passes(gap, bf16):
    check([4, 4, 4], gap, bf16=bf16)


@pytest.mark.parametrize(
    "versions, gap, bf16", [([3, 3], None, False), ([4, 3], 1e-6, False), ([4, 4], 0.01, False), ([4, 4], 0.5, True)]
)
def test_an_engine_with_other_weights_stops_the_run(versions, gap, bf16):
    with pytest.raises(GrpoError, match="does not hold the trainer's weights"):
        check(versions, gap, bf16=bf16)


def asked(flags: str, rollouts: range) -> list[int]:
    """The rollouts for which the engine is asked for log-probabilities."""
    trainers = [SimpleNamespace(args=parse_args(flags.split()), rollouts=number) for number in rollouts]
    return [trainer.rollouts for trainer in trainers if Trainer.sampling.fget(trainer).log_probs]


def test_log_probabilities_are_asked_for_where_something_uses_them():
    assert asked("", range(1, 9)) == list(range(1, 9))
    assert asked("--mismatch-sample-rate 0", range(1, 99)) == []
    assert asked("--mismatch-sample-rate 0.25", range(1, 13)) == [4, 8, 12]
    assert asked("--mismatch-sample-rate 0.25", range(7, 13)) == [8, 12]  # a resumed run goes on in the same order
    correction = "--mismatch-sample-rate 0 --rollout-importance-sampling-mode token_truncate"
    assert asked(correction, range(1, 9)) == list(range(1, 9))


def test_evaluations_ask_for_none_and_the_greedy_one_changes_nothing():
    flags = "--temperature 0.7 --top-p 0.9 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 1"
    flags += " --frequency-penalty 1 --eval-num-generations 2 --ignore-eos --stop-words a --max-completion-length 9"
    (_, greedy, one), (_, sampled, two) = Trainer.eval_samplings.fget(SimpleNamespace(args=parse_args(flags.split())))
    assert (one, two) == (1, 2)
    assert greedy == Sampling(9, temperature=0.0, ignore_eos=True, stop=("a",))
    assert sampled == Sampling(9, 0.7, 0.9, 5, 0.1, 1.1, 1.0, 1.0, ignore_eos=True, stop=("a",))


def test_mean_of_scored():
    assert mean_of_scored(np.array([1.0, np.nan, 0.0])) == 0.5
    assert np.isnan(mean_of_scored(np.array([np.nan])))
