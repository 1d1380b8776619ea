"""Whole runs with --partial-rollouts: every group is trained on once and in time, and a run that was stopped, lost its
engine or crashed goes on to the very same end; a replay of its ledger, without an engine, ends there too.

pretrain_grpo.py runs in this process, with an engine that gives one token a step.
"""

import itertools
import json
import re
import signal

import bad_input_runs
import numpy as np
import pytest
from bad_input_bench import Bench
from bad_input_runs import TRAIN, StubEngine, launch
from noted_signal import raise_noted_signal
from run_files import json_lines, metrics_of, without
from slow import slow_except

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration
from megatron_grpo.checkpointing.checksums import CHECKSUMS
from megatron_grpo.checkpointing.data_files import COMMON_STATE_INDEX, Reader
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.utils.errors import EngineLost

UPDATES, STALENESS, GENERATIONS, LONGEST = 8, 2, 4, 40
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(1, 10)]
REWARD = """@register_reward('mine')
def mine(sample):
    if sample.completion is None:
        return None
    with open({log!r}, 'a') as log:
        log.write(sample.source + chr(10))
    return float(sample.token_ids[0] > 20)
"""
FLAGS = f"""--train-iters {UPDATES} --save-interval 2 --partial-rollouts --max-staleness {STALENESS}
    --rollout-importance-sampling-mode token_truncate --mismatch-limit 100 --exit-signal-handler --no-save-hf
    --max-completion-length {LONGEST} --num-completions-to-log 8 --steps-per-generation 1"""


class Slow(StubEngine):
    """A completion has a length by its number (not by the rollout); its tokens are drawn from the rollout's seed."""

    rollouts, stop_in, happens = 0, None, None

    def rollout(self, seed):
        type(self).rollouts += 1
        self.seed, self.running = seed, {}
        return super().rollout(seed)

    def submit(self, requests):
        for request in requests:
            assert request.begun is None or request.begun.finish_reason == "abort"
            self.running[request.id] = [request, []]

    def poll(self):
        if self.rollouts == self.stop_in:
            type(self).stop_in = None
            if self.happens == "SIGTERM":
                raise_noted_signal(signal.SIGTERM)
            else:
                raise self.happens
        done = []
        for number, (request, ids) in list(self.running.items()):
            rng = np.random.default_rng([self.seed, number, len(request.begun_ids) + len(ids)])
            ids.append(int(rng.integers(3, 60)))
            whole = len(request.begun_ids) + len(ids)
            if whole == min(int(np.random.default_rng(number).lognormal(1.5, 1)) + 1, LONGEST):
                ids[-1] = request.sampling.stop_token_ids[0]
                done.append(self._completion(number, "stop" if whole < LONGEST else "length"))
        return done

    def interrupt(self):
        return [self._completion(number, "abort") for number in sorted(self.running)]

    def _completion(self, number, reason):
        request, ids = self.running.pop(number)
        log_probs = [-1.0 - token / 100 for token in ids]
        return Completion(number, ids, log_probs, reason, [self.version] * len(ids)).after(request.begun)


def bench_of(root, model):
    bench = Bench(root, model)
    reward = REWARD.format(log=str(root / "scored"))
    bench.words = [*bench.good, *bench.data(*map(json.dumps, ROWS), name="rows.jsonl"), *bench.plugin(reward)]
    bench.words += FLAGS.split()
    return bench


HAPPENS = {"alone": None, "stopped": "SIGTERM", "lost": EngineLost("gone"), "crashed": RuntimeError("killed")}


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    """By name: the directory of a run left alone, and of runs to which something happened before they went on.

    Each is made at its first use.
    """

    class Runs(dict):
        def __missing__(self, name):
            words = ["--replay-rollouts", str(self["alone"])] if name == "replayed" else []
            kept = signal.getsignal(signal.SIGTERM)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(bad_input_runs, "StubEngine", None if words else Slow)
                bench = bench_of(tmp_path_factory.mktemp(name), tiny_models["qwen3"])
                run(name, [*bench.words, *words], bench.save)
            signal.signal(signal.SIGTERM, kept)
            return self.setdefault(name, bench.save)

    return Runs()


def run(name, words, save):
    """Run, and go on if something happened."""
    what = HAPPENS.get(name)
    Slow.rollouts, Slow.happens, Slow.stop_in = 0, what, 6 if what else None
    assert launch(TRAIN, words) == (what is not None and what != "SIGTERM")
    if what:
        # A signal and a lost engine end the rollout; a run that crashed saves nothing more, as a killed one.
        assert latest_iteration(save) == {"stopped": 5, "lost": 5, "crashed": 4}[name]
        assert launch(TRAIN, [*words, "--load", str(save)]) == 0


def tensors(checkpoint):
    """Length and checksum of each item of a checkpoint but the common state, which holds the position of the run."""
    place = Reader(checkpoint).read_metadata().storage_data[COMMON_STATE_INDEX]
    (items,) = json.loads((checkpoint / CHECKSUMS).read_text()).values()
    begins = itertools.accumulate([0, *(length for length, _ in items[:-1])])
    return [item for begin, item in zip(begins, items, strict=True) if begin != place.offset]


@pytest.mark.parametrize("name", slow_except(["stopped"], ["stopped", "lost", "crashed", "replayed"]))
def test_it_goes_on_to_the_very_same_end(runs, name):
    first, second = (without(metrics_of(runs[which])) for which in ("alone", name))
    assert [row["iteration"] for row in first] == list(range(1, UPDATES + 1))
    assert first == second
    assert json_lines(runs["alone"] / "completions.jsonl") == json_lines(runs[name] / "completions.jsonl")
    alone, other = (tensors(runs[which] / f"iter_{UPDATES:07d}") for which in ("alone", name))
    assert alone == other


def test_tokens_are_of_several_versions_within_the_bound(runs):
    metrics = metrics_of(runs["alone"])
    assert metrics[0]["staleness/max"] == 0 < max(row["staleness/max"] for row in metrics) <= STALENESS
    assert max(row["staleness/interrupted"] for row in metrics) > 0.2
    assert all(0 <= row["staleness/mean"] <= row["staleness/max"] for row in metrics)
    assert all(0 < row["mismatch/effective_sample_size"] <= 1 for row in metrics)


def test_every_group_is_trained_on_once(runs):
    """The rows of the first updates are those drawn first; at most the batches of the bound are ahead."""
    metrics = metrics_of(runs["alone"])
    groups = 8 // GENERATIONS
    assert [row["consumed/prompts"] for row in metrics] == [groups * (STALENESS + n) for n in range(1, UPDATES + 1)]
    trained = [row["row"] for row in json_lines(runs["alone"] / "completions.jsonl")][::GENERATIONS]
    assert len(trained) == groups * UPDATES
    for begin in range(len(trained) - 8):  # no row comes a third time before each has come once
        assert max(np.bincount(trained[begin : begin + 9])) <= 2


def test_a_complete_group_is_scored_once(runs):
    scored = (runs["alone"].parent / "scored").read_text().splitlines()
    trained = GENERATIONS * UPDATES * 8 // GENERATIONS
    assert trained <= len(scored) <= trained + STALENESS * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--max-staleness 3", "--max-staleness was 2 and is now 3"),
        ("--num-iterations 2", "in rollouts of 1 updates, and now there are 2"),
        ("--num-generations 8", "the prompts of a rollout .* was 2 and is now 1"),
        ("", "holds unfinished completions: add --partial-rollouts --max-staleness 2"),
    ],
)
def test_a_resume_with_other_flags_is_refused(runs, tiny_models, tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.setattr(bad_input_runs, "StubEngine", Slow)
    bench = bench_of(tmp_path, tiny_models["qwen3"])
    words = [*bench.words, *change.split(), "--load", str(runs["alone"]), "--save", str(runs["alone"])]
    if not change:
        del words[words.index("--partial-rollouts") : words.index("--rollout-importance-sampling-mode")]
    assert launch(TRAIN, [*words, "--train-iters", "10"]) == 1
    assert re.search(message, "".join(capsys.readouterr()))
