"""The best checkpoint of a run that goes on at an earlier one."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_grpo.checkpointing.checkpoint_directory import BEST, iteration_directory, read_best, write_best
from megatron_grpo.training.best_checkpoint import choose_again, new_best

METRIC = "eval/greedy_accuracy"


def best(iteration, value):
    return {"iteration": iteration, "metric": METRIC, "value": value}


@pytest.fixture
def run(tmp_path):
    """A run of --eval-interval 10 whose best of the evaluations .5, .3 and .6 is the third; set back to update 20."""
    rows = [(0, 0.9), (5, None), (10, 0.5), (15, None), (20, 0.3)]
    lines = [{"iteration": i} | ({METRIC: value} if value else {"loss": 0.0}) for i, value in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for iteration in (10, 20, 30):
        iteration_directory(tmp_path, iteration).mkdir()
    write_best(tmp_path, best(30, 0.6))
    return Namespace(save=str(tmp_path), keep_best=METRIC, eval_interval=10, log_interval=5)


def test_a_run_that_went_back_chooses_among_the_earlier_checkpoints(run):
    choose_again(run, after=20)
    assert read_best(run.save) == best(10, 0.5)
    assert new_best(run, 30, {METRIC: 0.35}) is None
    assert new_best(run, 30, {METRIC: 0.55}) == best(30, 0.55)


def test_a_deleted_checkpoint_is_not_chosen(run):
    iteration_directory(run.save, 10).rmdir()
    choose_again(run, after=20)
    assert read_best(run.save) == best(20, 0.3)


def test_the_best_stays_without_a_step_back(run):
    choose_again(run, after=30)
    assert read_best(run.save) == best(30, 0.6)


@pytest.mark.parametrize("change", [{"keep_best": None}, {"log_interval": 20}])
def test_without_values_of_single_evaluations_none_is_chosen(run, change):
    choose_again(Namespace(**vars(run) | change), after=20)
    assert not Path(run.save, BEST).exists()
