"""Bad updates: what is one, what each choice of --on-bad-update does, and the files for a replay."""

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from slow import slow_except

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron.core import parallel_state

import pretrain_grpo
from megatron_grpo.algorithm.rollout_advantages import estimate_advantages
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.models import forward
from megatron_grpo.parallel import initialize
from megatron_grpo.training.bad_updates import ENOUGH, IN_A_ROW, BadUpdates
from megatron_grpo.training.train_step import _parameters
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from tools import made_up

pytestmark = pytest.mark.usefixtures("one_process")


MODEL = """--model-family llama --num-layers 1 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 61 --max-position-embeddings 512
    --make-vocab-size-divisible-by 1 --position-embedding-type rope --micro-batch-size 2 --lr 1e-5 --fp16""".split()


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
    assert "step_with_ready_grads" not in vars(optimizer)  # the object is as before


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parameters_that_are_not_finite_already_are_named(value, tmp_path):
    """No replay and no restore of the newest checkpoint helps then: the message says so."""
    bad, weight = BadUpdates("stop", None, tmp_path), torch.ones(2, 3)
    named = [("empty", torch.ones(0)), ("norm.weight", torch.ones(3)), ("output.weight", weight)]
    run(bad, Optimizer(True), [(math.nan, 1.0)])
    bad.look_at(named)
    with pytest.raises(GrpoError, match="The parameters are those before it"):
        bad.react(7, batch(), np.array([0]), {})
    weight[1, 2] = value
    bad.look_at(named)
    with pytest.raises(
        GrpoError, match=r"not finite already \(output\.weight\).*There is no checkpoint: start .* again$"
    ):
        bad.react(7, batch(), np.array([0]), {})
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(
        GrpoError, match=rf"iteration 4: .*an earlier one into {tmp_path}/latest_checkpointed_iteration"
    ):
        bad.react(7, batch(), np.array([0]), {})
    with pytest.raises(GrpoError, match=r"there is no --save$"):
        bad.save = None
        bad.react(7, batch(), np.array([0]), {})


def test_a_parameter_has_its_name_in_the_whole_model():
    """A pipeline stage counts its layers from 0."""
    chunk, layer = torch.nn.Module(), torch.nn.Linear(2, 2)
    layer.layer_number = 7
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList([layer])
    assert [name for name, _ in _parameters([chunk])] == ["decoder.layers.6.weight", "decoder.layers.6.bias"]


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


def test_updates_that_only_wait_for_the_restore_are_not_counted(tmp_path):
    """Of a rollout of 8 updates the first is bad: 1 in a row, then 2 when the next rollout begins with a bad one."""
    bad, optimizer = BadUpdates("restore", None, tmp_path), Optimizer(True)
    number = 0
    for rollout in (1, 2):
        for value in [(math.nan, 1.0)] + [(0.5, 1.0)] * 7:
            number += 1
            assert run(bad, optimizer, [value]) == [False]
            bad.react(number, batch(), np.array([0]), {})
        assert bad.in_a_row == rollout
        bad.restore_due = False  # as the trainer after it has loaded the checkpoint
    assert run(bad, optimizer, [(0.5, 1.0)]) == [True] and bad.in_a_row == 0
    for rollout in range(1, IN_A_ROW):
        run(bad, optimizer, [(math.nan, 1.0)])
        bad.react(number + rollout, batch(), np.array([0]), {})
        bad.restore_due = False
    run(bad, optimizer, [(math.nan, 1.0)])
    with pytest.raises(GrpoError, match="the 5th in a row"):
        bad.react(number + IN_A_ROW, batch(), np.array([0]), {})


def test_updates_without_a_gradient_are_not_in_the_median():
    """Groups with equal rewards have a gradient of 0: the median is of the other updates."""
    bad, optimizer = BadUpdates("skip", 10.0, None), Optimizer(True)
    assert all(run(bad, optimizer, [(0.0, 0.0)] * 60 + [(0.02, 2.0)] * ENOUGH + [(0.0, 0.0)] * 60))
    assert run(bad, optimizer, [(0.02, 19.0), (0.02, 21.0)]) == [True, False]
    assert bad.problem == "the gradient norm is 21, 10.5 times the median"


@pytest.fixture
def fp16_update():
    """Return a function that runs updates of a small model in float16 and returns its trainer and their metrics."""

    def updates(count: int, *flags: str):
        args = made_up.parse([*MODEL, *flags], 1)
        initialize.initialize_distributed(args)
        trainer = made_up.trainer(args)
        trainer.bad_updates = BadUpdates("skip", args.bad_update_factor, None)
        batch = made_up.off_policy(args, trainer, made_up.rollout(args))
        half = np.arange(batch.num_completions // 2)
        return trainer, [pretrain_grpo.update(args, trainer, batch, half) for _ in range(count)]

    yield updates
    parallel_state.destroy_model_parallel()


@pytest.fixture
def off_policy():
    """Return arguments, a trainer, a rollout, and a function that computes its old log-probabilities.

    The function takes a change ``(number of the micro-batch, output [2, l])`` of what the model returns.
    """
    args = made_up.parse([*MODEL[:-1], "--beta", "0"], 1)
    initialize.initialize_distributed(args)
    trainer, batch = made_up.trainer(args), made_up.rollout(args)
    trainer.bad_updates = BadUpdates("skip", None, None)

    def log_probs(change):
        numbers = itertools.count()

        def forward_step(*arguments, **options):
            output, loss = pretrain_grpo.forward_step(*arguments, **options)
            return change(next(numbers), output), loss

        return forward.log_probs(args, trainer.model, forward_step, batch)

    yield args, trainer, batch, log_probs
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_a_nan_of_the_old_policy_costs_the_update_that_has_it(off_policy, kl_in_reward):
    args, trainer, batch, log_probs = off_policy

    def change(number, output):
        spoiled = output.clone()
        spoiled[0, -1] = math.nan
        return spoiled if number == 0 else output

    in_loss = batch.response_mask == 1
    batch.old_log_probs = log_probs(change)
    (token,) = np.flatnonzero(np.isnan(batch.old_log_probs) & in_loss)
    completion = batch.completion_of_tokens[token]
    batch.ref_log_probs = log_probs(lambda number, output: output)
    if kl_in_reward:
        args = replaced(args, beta=0.1, kl_in_reward=True)
        batch, metrics = estimate_advantages(args, batch, batch.rewards[:, 0])
        assert np.flatnonzero(np.isnan(batch.advantages)).tolist() == [completion]
        assert metrics["reward/kl_penalty"] == 0  # of the other tokens: both passes have the same weights
    halves = np.split(np.arange(batch.num_completions), 2)
    rows = [pretrain_grpo.update(args, trainer, batch, half) for half in halves]
    assert [row["update/skipped"] for row in rows] == [completion in half for half in halves]
    assert [math.isfinite(row["loss"]) for row in rows] == [completion not in half for half in halves]


def test_a_pass_that_misses_tokens_is_an_error(off_policy, monkeypatch):
    _, _, batch, log_probs = off_policy
    divided, lost = forward.micro_batches, []

    def without_last(*arguments):
        *packs, last = divided(*arguments)
        lost.append(last)
        return packs

    monkeypatch.setattr(forward, "micro_batches", without_last)
    with pytest.raises(ValueError, match="the pass has missed") as error:
        log_probs(lambda number, output: output)
    (last,) = lost
    samples = batch.sample_ids[np.sort(last.indices)].tolist()
    assert f"missed {last.num_labels} tokens in the loss, of samples {samples}" in str(error.value)


@pytest.mark.slow
def test_a_loss_scale_that_overflows_is_not_in_the_median(fp16_update):
    """The scale halves from 2^50 in every update until gradients fit; then 25 updates of one batch are alike."""
    flags = ("--initial-loss-scale", str(2**50), "--hysteresis", "1", "--bad-update-factor", "10")
    trainer, rows = fp16_update(60, *flags)
    overflows = [row["grad_norm"] == 0 for row in rows]
    first = overflows.index(False)
    assert first > ENOUGH and not any(overflows[first:])
    assert [row["update/skipped"] for row in rows] == [0] * 60
    assert len(trainer.bad_updates.norms) == 60 - first


@pytest.mark.parametrize(
    "scale", slow_except(["--loss-scale"], ["--loss-scale", f"--min-loss-scale {2**50} --initial-loss-scale"])
)
def test_an_overflow_that_no_smaller_loss_scale_can_cure_is_bad(fp16_update, scale):
    with pytest.raises(
        GrpoError, match=r"the gradients overflow float16 at the smallest loss scale.* the 5th in a row"
    ):
        fp16_update(10, *scale.split(), str(2**50))


def test_a_loss_that_is_not_finite_is_bad_under_a_loss_scale(one_process):
    class Overflows(Optimizer):
        def step(self):
            return False, None, None  # as megatron-core's when a scaled gradient is not finite

    bad = BadUpdates("skip", None, None)
    assert run(bad, Overflows(True), [(math.nan, 0.0)]) == [False]
    assert bad.problem == "the loss is nan" and bad.in_a_row == 1
