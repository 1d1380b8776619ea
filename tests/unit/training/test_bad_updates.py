"""Bad updates: what is one, what each choice of --on-bad-update does, and the files for a replay."""

import json
import math
import re

import numpy as np
import pytest

from megatron_grpo.utils import cpu_backend

cpu_backend.install()

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.training.bad_updates import IN_A_ROW, BadUpdates
from megatron_grpo.utils.errors import GrpoError

pytestmark = pytest.mark.usefixtures("one_process")


class Optimizer:
    """As megatron-core's: the norm is computed within the step, before the parameters change."""

    def __init__(self, chained: bool):
        self.weight, self.norm, self.chained = 1.0, 1.0, chained

    def get_grad_norm(self):
        return self.norm

    def clip_grad_norm(self, limit):
        return self.norm

    def step_with_ready_grads(self):
        self.weight -= 0.1
        return True

    def step(self):
        norm = self.get_grad_norm() if self.chained else self.clip_grad_norm(1.0)
        return self.step_with_ready_grads(), norm, None


def batch() -> RolloutBatch:
    return RolloutBatch.from_completions([[1, 2]], [[3, 4]], [[-1.0, -2.0]], 1, [0], [0], [0], [0])


def run(bad: BadUpdates, optimizer: Optimizer, values: list[tuple[float, float]]) -> list[bool]:
    """Return which of the updates with these (loss, norm) were done."""
    done = []
    for loss, optimizer.norm in values:
        done.append(bad.step(optimizer, loss)[0])
    return done


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("value", [(math.nan, 1.0), (0.5, math.nan), (0.5, math.inf)])
def test_a_value_that_is_not_finite_leaves_the_parameters_as_they_are(chained, value):
    bad, optimizer = BadUpdates("skip", None, None), Optimizer(chained)
    assert run(bad, optimizer, [(0.5, 1.0), value, (0.5, 1e9)]) == [True, False, True]
    assert optimizer.weight == pytest.approx(0.8)
    assert "get_grad_norm" not in vars(optimizer)  # the object is as before


def test_a_spike_is_measured_by_the_median_of_the_updates_before():
    bad, optimizer = BadUpdates("skip", 10.0, None), Optimizer(True)
    usual = [(0.02, 2.0)] * 20
    assert all(run(bad, optimizer, [*usual[:-1], (0.02, 100.0)]))  # too few to judge, and no outlier of a median
    assert run(bad, optimizer, [(0.02, 19.0), (0.02, 21.0)]) == [True, False]
    assert bad.problem == "the gradient norm is 21, 10.5 times the median"
    assert run(bad, optimizer, [(-9.0, 2.0), (-11.0, 2.0)]) == [True, False]  # losses are small: 1 is their size
    assert bad.problem == "the loss is -11, 11.0 times the usual size"
    again = BadUpdates("skip", 10.0, None)  # a resumed run judges alike
    again.load_state_dict(json.loads(json.dumps(bad.state_dict())))
    assert run(again, optimizer, [(0.02, 21.0), (0.02, 19.0)]) == [False, True]


def test_the_batch_is_written_and_the_run_ends(tmp_path):
    bad = BadUpdates("stop", None, tmp_path)
    run(bad, Optimizer(True), [(0.5, math.nan)])
    message = r"update 7 is bad: the gradient norm is nan \(its batch: .*There is no checkpoint"
    with pytest.raises(GrpoError, match=message):
        bad.react(7, batch(), np.array([0]), {"loss": 0.5, "grad_norm": math.nan})
    written = tmp_path / "bad_updates" / "iteration_0000007"
    assert RolloutBatch.load(written).tokens.tolist() == [1, 2, 3, 4]
    record = json.loads(written.with_suffix(".json").read_text())
    assert record["completions"] == [0] and record["metrics"] == {"loss": 0.5, "grad_norm": "nan"}


def test_a_full_disk_ends_no_run_that_skips(tmp_path, capsys):
    full = tmp_path / "bad_updates" / "iteration_0000007" / "00000.npz"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    bad = BadUpdates("skip", None, tmp_path)
    run(bad, Optimizer(True), [(0.5, math.nan)])
    bad.react(7, batch(), np.array([0]), {})
    assert re.search(r"update 7 is bad: .*batch cannot be written .*No space left.*skipped", capsys.readouterr().out)


def test_skip_goes_on_until_too_many_follow_each_other(tmp_path, capsys):
    bad, optimizer = BadUpdates("skip", None, tmp_path), Optimizer(True)
    for number in range(1, IN_A_ROW):
        run(bad, optimizer, [(math.nan, 1.0)])
        bad.react(number, batch(), np.array([0]), {})
    assert "update 1 is bad: the loss is nan" in capsys.readouterr().out and not bad.restore_due
    run(bad, optimizer, [(math.nan, 1.0)])
    with pytest.raises(GrpoError, match="the 5th in a row"):
        bad.react(IN_A_ROW, batch(), np.array([0]), {})


def test_restore_also_leaves_out_the_other_updates_of_the_rollout(tmp_path):
    bad, optimizer = BadUpdates("restore", None, tmp_path), Optimizer(True)
    for number, (value, done) in enumerate([((0.5, 1.0), True), ((math.nan, 1.0), False), ((0.5, 1.0), False)]):
        assert run(bad, optimizer, [value]) == [done]
        bad.react(number, batch(), np.array([0]), {})
    assert bad.restore_due
    assert len(list((tmp_path / "bad_updates").glob("*/*.npz"))) == 1
