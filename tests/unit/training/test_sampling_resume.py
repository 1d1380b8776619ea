"""Whole runs with --dynamic-sample, --over-sampling-ratio and --curriculum, and with several updates of a rollout: a
run that ends early and goes on as if nothing was.

pretrain_grpo.py runs in this process, with an engine whose completions depend on the seed, as vLLM's do.
"""

import json
import signal

import bad_input_runs
import numpy as np
import pytest
from bad_input_bench import Bench
from bad_input_runs import TRAIN, StubEngine, launch
from noted_signal import raise_noted_signal
from run_files import json_lines, metrics_of, without

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.utils.errors import EngineLost

UPDATES, STOP = 4, 3
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1), "pass_rate": a % 4 / 4} for a in range(1, 9)]
REWARD = "@register_reward('mine')\ndef mine(sample):\n    return float(sample.token_ids[0] > 40)\n"
FLAGS = f"""--train-iters {UPDATES} --save-interval 2 --dynamic-sample --max-resample-times 2 --over-sampling-ratio 1.5
    --curriculum --exit-signal-handler --no-save-hf --steps-per-generation 1 --num-completions-to-log 8"""


class SeededEngine(StubEngine):
    """A completion's ids and length are drawn from the rollout's seed; one step gives one token to all."""

    rollouts, sigterm_in, lost_in = 0, None, None

    def rollout(self, seed):
        type(self).rollouts += 1
        if self.rollouts == self.sigterm_in:
            raise_noted_signal(signal.SIGTERM)
        if self.rollouts == self.lost_in:
            raise EngineLost("all servers are gone")
        self.rng, self.running = np.random.default_rng(seed), {}
        return super().rollout(seed)

    def submit(self, requests):
        for request in requests:
            first = 50 if self.rng.random() < 0.8 else 30  # so that a group has four times in ten no signal
            self.running[request.id] = [first, *self.rng.integers(3, 200, self.rng.integers(0, 3)).tolist()]
            self.running[request.id] = [[*self.running[request.id], *request.sampling.stop_token_ids[:1]], 0]

    def poll(self):
        for entry in self.running.values():
            entry[1] += 1
        done = [number for number, (ids, steps) in self.running.items() if steps == len(ids)]
        ids = {number: self.running.pop(number)[0] for number in done}
        return [Completion(number, ids[number], None, "stop", [self.version] * len(ids[number])) for number in done]

    def abort(self, ids):
        for number in ids:
            del self.running[number]


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    """The --save directories of a run left alone, of one that got SIGTERM, and of that when it had gone on."""
    kept = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bad_input_runs, "StubEngine", SeededEngine)
        benches = {}
        for name, sigterm_in in (("alone", None), ("stopped", STOP)):
            root = tmp_path_factory.mktemp(name)
            bench = benches[name] = Bench(root, tiny_models["qwen3"])
            words = [*bench.good, *bench.data(*map(json.dumps, ROWS), name="rated.jsonl"), *bench.plugin(REWARD)]
            bench.words = [*words, *FLAGS.split()]
            SeededEngine.rollouts, SeededEngine.sigterm_in = 0, sigterm_in
            assert launch(TRAIN, bench.words) == 0
        stopped = benches["stopped"]
        assert latest_iteration(stopped.save) == STOP - 1  # the signal ends its rollout
        SeededEngine.sigterm_in = None
        assert launch(TRAIN, [*stopped.words, "--load", str(stopped.save)]) == 0
    signal.signal(signal.SIGTERM, kept)
    return benches["alone"].save, stopped.save


def test_a_run_that_got_sigterm_goes_on_to_the_very_same_end(runs):
    alone, stopped = runs
    first, second = (without(metrics_of(save)) for save in runs)
    assert [row["iteration"] for row in first] == list(range(1, UPDATES + 1))
    assert first == second
    assert json_lines(alone / "completions.jsonl") == json_lines(stopped / "completions.jsonl")


def test_groups_were_replaced_and_aborted(runs):
    metrics = metrics_of(runs[0])
    assert sum(row["sampling/resampled_groups"] for row in metrics) > 0
    assert sum(row["sampling/aborted_groups"] for row in metrics) > 0
    # What was looked at: kept groups and replaced ones; the others come again.
    used = [2 + row["sampling/resampled_groups"] for row in metrics]
    assert [row["consumed/prompts"] for row in metrics] == np.cumsum(used).tolist()
    assert metrics[0]["reward/zero_std_groups"] <= 0.5


def test_easy_prompts_come_first(runs):
    """Of the first rollout all that was looked at is among the easiest of the three and four that it may begin."""
    first = {row["row"] for row in json_lines(runs[0] / "completions.jsonl") if row["iteration"] == 1}
    assert {ROWS[row]["pass_rate"] for row in first} <= {0.75, 0.5}


def test_an_engine_lost_in_an_evaluation_costs_nothing_of_the_update_before(tiny_models, tmp_path, monkeypatch):
    """The reference's move was due after it, and its metrics: a run that goes on begins with the next rollout."""
    monkeypatch.setattr(bad_input_runs, "StubEngine", SeededEngine)
    monkeypatch.setattr(SeededEngine, "rollouts", 0)
    monkeypatch.setattr(SeededEngine, "lost_in", 2)  # the second is the evaluation after the first update
    bench = Bench(tmp_path, tiny_models["qwen3"])
    flags = f"--beta 0.1 --sync-ref-model --ref-model-sync-steps 1 --eval-interval 1 --valid-data-path {bench.train}"
    assert launch(TRAIN, [*bench.good, *flags.split()]) == 1
    assert latest_iteration(bench.save) == 1
    assert (bench.save / "iter_0000001" / "reference").is_dir()
    (row,) = metrics_of(bench.save)
    assert row["iteration"] == 1 and row["tokens/total"] == row["tokens/update"] > 0
    monkeypatch.setattr(SeededEngine, "lost_in", None)
    assert launch(TRAIN, [*bench.good, *flags.split(), "--load", str(bench.save)]) == 0
    first, second, *_ = metrics_of(bench.save)
    assert [first["iteration"], second["iteration"]] == [1, 2]
    assert second["tokens/total"] == first["tokens/update"] + second["tokens/update"]


def test_checkpoints_with_an_averaged_reference_change_no_update(tiny_models, tmp_path, monkeypatch):
    """Its float32 weights are written from the modules of a policy in bfloat16, which trains on."""
    monkeypatch.setattr(bad_input_runs, "StubEngine", SeededEngine)
    flags = "--bf16 --beta 0.1 --sync-ref-model --ref-model-sync-steps 1 --train-iters 3 --no-save-hf --save-interval"
    updates = []
    for interval in ("1", "3"):
        (tmp_path / interval).mkdir()
        bench = Bench(tmp_path / interval, tiny_models["qwen3"])
        assert launch(TRAIN, [*bench.good, *bench.plugin(REWARD), *flags.split(), interval]) == 0
        updates.append([(row["loss"], row["grad_norm"]) for row in metrics_of(bench.save)])
    assert len(updates[0]) == 3 and updates[0] == updates[1]
    assert all(grad_norm > 0 for _, grad_norm in updates[0])


@pytest.mark.parametrize("interval", [2, 5])
def test_after_a_bad_update_the_schedule_goes_on_where_the_weights_are(
    tiny_models, tmp_path, monkeypatch, capsys, interval
):
    """Update 3 of 5 is bad. There is a checkpoint of update 2, or none yet."""
    monkeypatch.setattr(bad_input_runs, "StubEngine", SeededEngine)
    judged = []
    monkeypatch.setattr(BadUpdates, "_judge", lambda *_: "made up" if judged.append(0) or len(judged) == 3 else None)
    bench = Bench(tmp_path, tiny_models["qwen3"])
    flags = f"""--train-iters 5 --no-save-hf --on-bad-update restore --save-interval {interval}
        --lr 1e-3 --min-lr 0 --lr-decay-style linear --lr-decay-iters 10""".split()
    assert launch(TRAIN, [*bench.good, *bench.plugin(REWARD), *flags]) == 0
    done = [0, 1, 2, 2, 3]  # updates before each
    assert [row["lr"] for row in metrics_of(bench.save)] == pytest.approx([1e-3 * (1 - n / 10) for n in done])
    assert ("the run goes on without the bad update" in "".join(capsys.readouterr())) == (interval == 5)


@pytest.mark.slow
def test_shuffled_updates_are_the_same_after_a_resume(tiny_models, tmp_path, monkeypatch):
    """Two rollouts, each used for two updates twice: left alone, and with a new process for the second."""
    monkeypatch.setattr(bad_input_runs, "StubEngine", SeededEngine)
    monkeypatch.setattr(SeededEngine, "sigterm_in", None)
    flags = "--train-iters 8 --global-batch-size 16 --steps-per-generation 2 --num-iterations 2"
    benches = []
    for name, ends in (("alone", [""]), ("stopped", ["--exit-interval 4", ""])):
        (tmp_path / name).mkdir()
        bench = Bench(tmp_path / name, tiny_models["qwen3"])
        words = [*bench.good, *bench.plugin(REWARD), *flags.split()]
        for end in ends:
            load = ["--load", str(bench.save)] if latest_iteration(bench.save) else []
            assert launch(TRAIN, [*words, *end.split(), *load]) == 0
        benches.append(bench)
    first, second = ([(row["loss"], row["grad_norm"]) for row in metrics_of(bench.save)] for bench in benches)
    assert len(set(first)) == 8 and first == second
    weights = [(bench.save / "hf_model" / "model.safetensors").read_bytes() for bench in benches]
    assert weights[0] == weights[1]
