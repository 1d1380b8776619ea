"""What the trainer keeps watch on by itself."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_grpo.checkpointing.checkpoint_directory import LATEST
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.rollout.rollout_metrics import mean_of_scored
from megatron_grpo.rollout.source import RolloutSource, SourceState, Synced, WholeRollouts
from megatron_grpo.rollout.weight_sync.weight_check import newest_tokens
from megatron_grpo.training import saves as saves_module
from megatron_grpo.training import trainer as trainer_module
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.device_memory import DeviceMemory
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.saves import Position, Saves
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import EngineLost, GrpoError


def check(versions, gap, synced=4, bf16=False, flags=(), skipped=False):
    lifecycle = SimpleNamespace(args=parse_args(["--bf16"] * bf16 + [*flags]), synced=Synced(synced))
    row = {} if gap is None else {"mismatch/mean_abs": gap, "mismatch/max_abs": gap}
    row["update/skipped"] = float(skipped)
    batch = SimpleNamespace(weight_version=np.array(versions), response_mask=np.ones(len(versions)))
    EngineLifecycle.check(lifecycle, batch, row, synced + 1)


@pytest.mark.parametrize("gap, bf16", [(None, False), (1e-6, False), (0.01, True)])
def test_an_engine_with_the_trainers_weights_passes(gap, bf16):
    check([4, 4, 4], gap, bf16=bf16)


@pytest.mark.parametrize(
    "versions, gap, bf16", [([3, 3], None, False), ([4, 3], 1e-6, False), ([4, 4], 0.01, False), ([4, 4], 0.5, True)]
)
def test_an_engine_with_other_weights_stops_the_run(versions, gap, bf16):
    with pytest.raises(GrpoError, match="does not hold the trainer's weights"):
        check(versions, gap, bf16=bf16)


@pytest.mark.parametrize(
    ("flags", "passes", "ends"),
    [
        ("", 1e-3, 1.1e-3),
        ("--vllm-dtype bfloat16", 0.2, 0.21),
        ("--bf16 --vllm-quantization fp8", 0.43, 1.1),  # 0.43: measured on equal weights
        ("--bf16 --mismatch-limit 0.05", 0.05, 0.06),
        ("--mismatch-limit 1e9", 1e9, float("nan")),
    ],
)
def test_the_limit_of_the_mismatch_depends_on_precision_and_flag(flags, passes, ends):
    check([4], passes, flags=flags.split())
    with pytest.raises(GrpoError, match="--mismatch-limit"):
        check([4], ends, flags=flags.split())


def test_log_probs_that_are_not_finite_are_no_fault_of_the_engine():
    """--on-bad-update has left the update out, and the run goes on."""
    for gap in (float("nan"), float("inf")):
        check([4], gap, flags=["--exact-log-probs"], skipped=True)
        with pytest.raises(GrpoError, match="does not hold the trainer's weights"):
            check([3], gap, skipped=True)
    with pytest.raises(GrpoError, match="does not hold the trainer's weights"):
        check([4], 0.5, skipped=True)


def test_with_exact_log_probs_any_difference_ends_the_run():
    check([4], 0.0, flags=["--exact-log-probs"])
    with pytest.raises(GrpoError, match=r"in update 5 .* by up to 1e-06 nats"):
        check([4], 1e-6, flags=["--exact-log-probs"])


@pytest.mark.parametrize(
    ("update", "continued", "begun_anew", "passes"),
    [
        ("interrupt", 0.0, 0.0, True),
        ("interrupt", 0.5, 0.0, False),
        ("keep", 0.5, 0.0, True),
        ("keep", 0.0, 0.5, False),
    ],
)
def test_tokens_with_keys_and_values_of_older_weights_are_not_compared(update, continued, begun_anew, passes):
    """``continued`` and ``begun_anew``: gaps of a completion that has tokens of the version before, and of another."""
    batch = RolloutBatch.from_completions(
        [[5], [6]], [[1, 2, 3], [4, 5]], [[-1.0] * 3, [-1.0] * 2], [[3, 4, 4], [4, 4]], [0, 0], [0, 0], [0, 1],
        [FinishReason.STOP] * 2,
    )  # fmt: skip
    gaps = np.array([0, 9, continued, continued, 0, begun_anew, begun_anew])
    compared = newest_tokens(batch, 4, update == "keep") == 1
    args = parse_args(["--max-staleness", "1", "--weight-update", update, "--mismatch-limit", "0.01"])
    args = replaced(args, updates_per_rollout=1)
    lifecycle = SimpleNamespace(args=args, synced=Synced(4))
    with contextlib.nullcontext() if passes else pytest.raises(GrpoError, match="does not hold the trainer's weights"):
        EngineLifecycle.check(lifecycle, batch, {"mismatch/newest_mean_abs": gaps[compared].mean()}, 5)


class Lost:
    """A trainer at update 4, with its saves, whose engine is lost, and what was done with it."""

    def __init__(self, tmp_path, newest: int | None, save=True, reload_fails=False):
        self.args, self.background = SimpleNamespace(save=str(tmp_path) if save else None), None
        self.iteration, self.done, self._reload_fails = 4, [], reload_fails
        self.saves = self
        self.source = WholeRollouts.__new__(WholeRollouts)
        self.source.engine = SimpleNamespace(close=lambda: self.done.append("close"))
        self.lifecycle = SimpleNamespace(reload=self._reload, complete=lambda: self.done.append("complete"))
        if newest is not None:
            self._write(newest)

    def _write(self, iteration: int) -> None:
        Path(self.args.save, LATEST).write_text(str(iteration))

    def _reload(self) -> None:
        self.done.append("reload")
        if self._reload_fails:
            raise GrpoError("the GPU is full")

    def position(self) -> Position:
        return Position(self.iteration, {})

    def write(self, position, state, last) -> None:
        self.done.append(state())
        self._write(position.iteration)

    holds, write_lost = Saves.holds, Saves.write_lost

    def end(self) -> EngineLost:
        with pytest.raises(EngineLost) as caught:
            Trainer._raise_engine_lost(self, EngineLost("no server is left"), lambda: {"rollouts": 7})
        return caught.value


def test_without_an_engine_the_run_is_saved_as_it_was_before(tmp_path, one_process):
    lost = Lost(tmp_path, newest=2)
    error = lost.end()
    expected = f"no server is left. The run is saved at iteration 4: --load {tmp_path} resumes from it"
    assert str(error) == expected and error.saved
    assert lost.done == ["close", "reload", "complete", {"rollouts": 7}]


def test_a_checkpoint_of_this_iteration_is_not_written_again(tmp_path, one_process):
    lost = Lost(tmp_path, newest=4)
    assert "The run is saved at iteration 4" in str(lost.end()) and lost.done == ["close", "reload", "complete"]


def test_a_device_that_does_not_answer_is_left_alone(tmp_path, one_process, monkeypatch):
    monkeypatch.setattr(trainer_module, "device_answers", lambda: False)
    lost = Lost(tmp_path, newest=2)
    error = lost.end()
    expected = f"The run could not be saved. The newest checkpoint is iteration 2: --load {tmp_path} resumes from it"
    assert str(error) == f"no server is left. {expected}" and not error.saved and lost.done == []
    lost = Lost(tmp_path / "none", newest=None)
    assert str(lost.end()).endswith("The run could not be saved. There is no checkpoint: start the run again")


def test_a_rank_that_cannot_take_its_tensors_back_keeps_all_from_saving(tmp_path, one_process, capfd):
    lost = Lost(tmp_path, newest=2, reload_fails=True)
    assert "newest checkpoint is iteration 2" in str(lost.end()) and lost.done == ["close", "reload"]
    assert "[rank 0] the run cannot be saved: the GPU is full" in capfd.readouterr().out


def test_without_save_nothing_is_saved(tmp_path, one_process):
    assert str(Lost(tmp_path, None, save=False).end()) == "no server is left. Nothing is saved: there is no --save"


class Recorder:
    """A part of the trainer that notes the calls of its methods by name."""

    def __init__(self, name: str, notes: list[str], **attributes):
        self._name, self._notes = name, notes
        vars(self).update(attributes)

    def __getattr__(self, method: str):
        return lambda *_, **__: self._notes.append(f"{self._name}.{method}")


def lifecycle_of(notes: list[str], has_weights: bool, check: bool = False):
    lifecycle = Recorder("lifecycle", notes, synced=Synced(3), adapter_probed=False)
    flags = {"check_weight_sync": check, "lora_weight_sync": None, "rollout_ranks": 0, "max_staleness": 0}
    lifecycle.args = SimpleNamespace(**flags)
    lifecycle.engine = Recorder("engine", notes, has_weights=has_weights)
    lifecycle.device_memory = DeviceMemory(lifecycle.args)
    lifecycle.state_offloader, lifecycle.weight_offloader = "state", "weights"
    lifecycle.timers = lambda _: contextlib.nullcontext()
    lifecycle._offload = lambda what, margins: notes.append(f"offload {what}") or 0
    lifecycle._check_probe = lambda probe: notes.append(f"check {probe}")
    return lifecycle


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_the_steps_of_the_engines_turn(has_weights, check):
    notes = []

    def begin_probe():
        notes.append("probe begins")
        return lambda: notes.append("probe ends") or "answers"

    with EngineLifecycle.awake(lifecycle_of(notes, has_weights, check), 3, begin_probe):
        notes.append("body")
    expected = ["offload state", "engine.wake_weights", *["lifecycle.sync"] * (not has_weights), "offload weights"]
    probes = check and not has_weights
    expected += ["engine.wake_cache", *["probe begins"] * probes, "body", *["probe ends"] * probes, "engine.sleep"]
    expected += ["lifecycle.reload", *["check answers"] * probes]
    assert notes == expected


def test_an_engine_lost_in_its_turn_ends_the_run_at_the_state_before():
    notes, ended = [], []
    lifecycle = lifecycle_of(notes, has_weights=True)
    source = RolloutSource(args=None, dataset=None, sampler=SimpleNamespace(state_dict=lambda: {}), timers=None)
    trainer = SimpleNamespace(iteration=3, source=source, _probe=None)
    trainer.lifecycle = SimpleNamespace(awake=lambda *words: EngineLifecycle.awake(lifecycle, *words))

    def end(error, state):
        ended.append(state().position)
        raise error

    trainer._raise_engine_lost = end
    with pytest.raises(EngineLost), Trainer.engine_awake(trainer):
        source.taken += 1
        raise EngineLost("gone")
    assert ended == [{"sampler": {}, "rollouts": 0}]
    assert "engine.sleep" not in notes and "lifecycle.reload" not in notes


@pytest.mark.parametrize("transfer", ["save", "load"])
def test_a_checkpoint_waits_for_the_return_of_the_optimizer_state(transfer, monkeypatch):
    notes: list[str] = []
    load = {"load_checkpoint": lambda *_: notes.append("checkpoint.load") or (2, {})}
    monkeypatch.setattr(saves_module, "checkpoint", Recorder("checkpoint", notes, **load))
    newest = 2 if transfer == "load" else None
    monkeypatch.setattr(saves_module, "on_rank_0", lambda *_, **__: newest)
    args = SimpleNamespace(save="runs", tokenizer_model=None, chat_template=None, overlap_param_gather=False)
    args = replaced(args, min_image_pixels=None, max_image_pixels=None, max_checkpoints_to_keep=None)
    parts = {"model": [], "optimizer": None, "scheduler": None, "reference": None, "early_exit": None}
    parts |= {name: Recorder(name, notes) for name in ("source", "logger", "lifecycle")}
    saves = Saves(args=args, timers=lambda _: contextlib.nullcontext(), **parts)
    saves.write(Position(3, {}), lambda: SourceState({"rollouts": 1})) if transfer == "save" else saves.restore()
    name = {"save": "checkpoint.save_checkpoint", "load": "checkpoint.load"}[transfer]
    assert notes.index("lifecycle.complete") < notes.index(name)


def test_mean_of_scored():
    assert mean_of_scored(np.array([1.0, np.nan, 0.0])) == 0.5
    assert np.isnan(mean_of_scored(np.array([np.nan])))
