"""What went wrong, first: for each rule a run that breaks it, one that nearly does, and a healthy run."""

import math
import random

import pytest

from megatron_grpo.observability.findings import Split, findings, lines, measured_split
from megatron_grpo.observability.metric_guide import METRICS, remedy
from megatron_grpo.observability.metrics import aggregate


def healthy(n=100):
    """Rows of a run that learns: nothing in them is out of range."""
    noise = random.Random(0)
    return [
        {
            "iteration": i,
            "reward/mean": 0.2 + 0.5 * i / n + noise.gauss(0, 0.02),
            "reward/f/mean": 0.2 + 0.5 * i / n,
            "reward/f/max": 1.0,
            "reward/zero_std_groups": 0.3,
            "reward/failures": 0,
            "update/skipped": 0,
            "completion/truncated": 0.05,
            "clip/low": 0.01,
            "clip/high": 0.02,
            "entropy": 0.5 - 0.2 * i / n,
            "loss": 0.0,
            "grad_norm": 1.0,
            "mismatch/mean_abs": 0.01,
            "mismatch/effective_sample_size": 0.99,
            "turns/malformed_calls": 0.02,
            "stream/trainer_wait": 1.0,
            "time/rollout": 6.0,
            "time/update": 3.0,
            "time/sync": 0.5,
            "time/step": 10.0,
            "perf/tokens_per_second": 1000.0,
        }
        | ({"eval/greedy_accuracy": 0.2 + 0.5 * i / n} if i % 20 == 0 else {})
        for i in range(1, n + 1)
    ]


def with_values(name, value, n=100):
    """A healthy run in which a metric is ``value(i)``."""
    return [row | {name: value(row["iteration"])} for row in healthy(n)]


def only(rows):
    (finding,) = findings(rows)
    return finding.metric, finding.update


def test_a_healthy_run_has_none():
    assert findings(healthy()) == [] and lines([]) == []
    assert findings([]) == []
    assert findings(healthy()[:3]) == []  # too few rows to judge


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("reward/zero_std_groups", 0.95, 0.85),
        ("completion/truncated", 0.2, 0.08),
        ("clip/low", 0.3, 0.15),
        ("clip/high", 0.3, 0.15),
        ("clip/masked", 0.95, 0.5),
        ("mismatch/clipped", 0.1, 0.02),
        ("turns/malformed_calls", 0.5, 0.08),
        ("environment/failed", 0.2, 0.01),
        ("mismatch/effective_sample_size", 0.5, 0.95),
    ],
)
def test_a_level_is_bad_from_the_update_at_which_its_mean_crosses_the_limit(name, bad, good):
    assert only(with_values(name, lambda i: bad)) == (name, 1)
    assert findings(with_values(name, lambda i: good)) == []
    # From update 61 on bad: the mean of ten values crosses the limit a few updates later, by then all are bad.
    metric, update = only(with_values(name, lambda i: bad if i > 60 else good))
    assert metric == name and 61 <= update <= 70
    assert findings(with_values(name, lambda i: bad if 40 < i <= 60 else good)) == []  # it is over


def test_the_onset_is_where_the_mean_of_a_tenth_crosses():
    """0 until update 60, 1 after it: the mean of the last ten values is above 0.9 from the tenth 1 on."""
    assert only(with_values("reward/zero_std_groups", lambda i: float(i > 60))) == ("reward/zero_std_groups", 70)


def test_demonstrations_in_the_groups_are_a_signal():
    """--sft-loss-type luffy: one has another reward than the group's completions."""
    rows = with_values("reward/zero_std_groups", lambda i: 1.0)
    assert findings([row | {"sft/advantage": 1.5} for row in rows]) == []


def test_values_that_are_not_finite_and_counts_are_found_at_their_first_update():
    rows = with_values("grad_norm", lambda i: None if i in (7, 9) else 1.0)
    assert only(rows) == ("grad_norm", 7) and "2 rows" in findings(rows)[0].text
    assert only(with_values("loss", lambda i: None if i == 100 else 0.0)) == ("loss", 100)
    rows = with_values("reward/failures", lambda i: 3 * (i == 5))
    assert only(rows) == ("reward/failures", 5) and findings(rows)[0].text.startswith("3 calls")
    assert only(with_values("update/skipped", lambda i: int(i == 8))) == ("update/skipped", 8)


def test_a_flat_reward_is_found_and_not_one_at_its_ceiling():
    flat = with_values("reward/mean", lambda i: 0.3 + 0.01 * (-1) ** i, n=120)
    assert only([row | {"reward/f/mean": 0.3} for row in flat]) == ("reward/mean", 1)
    assert findings(flat[:100]) == []  # too early to say
    full = [
        row | {"reward/mean": 0.99 + 0.001 * (-1) ** row["iteration"], "reward/f/mean": 0.99, "reward/f/min": 0.0}
        for row in healthy(120)
    ]
    assert findings(full) == []


def test_a_run_that_reaches_its_goal_is_not_told_that_it_has_no_signal():
    """Binary rewards rise to 0.99: most groups are equal, and little entropy is left. A small penalty has maximum 0."""
    rows = [
        row
        | {"reward/mean": (mean := min(0.99, 0.4 + 0.012 * row["iteration"])) - 0.01}
        | {"reward/f/mean": mean, "reward/f/min": 0.0, "reward/length/mean": -0.01, "reward/length/max": 0.0}
        | {"reward/zero_std_groups": min(0.94, 0.2 + 0.015 * row["iteration"])}
        | {"entropy": max(0.02, 0.5 - 0.01 * row["iteration"])}
        for row in healthy()
    ]
    assert findings(rows) == []
    stuck = [row | {"reward/f/mean": 0.7} for row in rows]  # three in ten are unsolved, and the groups are equal
    assert {one.metric for one in findings(stuck)} == {"reward/zero_std_groups", "entropy"}
    nothing = [
        row | {"reward/f/mean": 0.0, "reward/f/max": 0.0} for row in with_values("reward/zero_std_groups", float)
    ]
    assert only(nothing)[0] == "reward/zero_std_groups"


@pytest.mark.parametrize("name", ["teacher/kl", "teacher/divergence"])
def test_a_distillation_is_judged_by_its_teacher_and_not_by_a_reward_that_is_constant_by_design(name):
    rows = [
        row
        | {"reward/mean": 0.0, "reward/f/mean": 0.0, "reward/f/max": 0.0, "reward/zero_std_groups": 1.0}
        | {"entropy": max(0.02, 0.5 - 0.01 * row["iteration"])}
        for row in healthy(150)
    ]
    assert {one.metric for one in findings(rows)} == {"reward/mean", "reward/zero_std_groups", "entropy"}  # no teacher

    def with_teacher(value):
        return [row | {name: value(row["iteration"])} for row in rows]

    assert findings(with_teacher(lambda i: 0.5 - 0.003 * i)) == []
    assert findings(with_teacher(lambda i: 0.005)) == []  # it is the teacher already
    stuck = with_teacher(lambda i: 0.5 + 0.01 * (-1) ** i)
    of_rewards = {"reward/mean", "reward/zero_std_groups", "entropy"}  # a teacher that teaches nothing excuses nothing
    assert {one.metric for one in findings(stuck)} == of_rewards | {name} and findings(stuck[:100]) == []
    growing = with_teacher(lambda i: 0.5 + 0.001 * i)
    assert {one.metric for one in findings(growing)} == of_rewards | {name}
    learns = [row | {"reward/mean": 0.2 + row["iteration"] / 300, "reward/zero_std_groups": 0.1} for row in growing]
    assert name not in {one.metric for one in findings(learns)}  # it leaves its teacher, for the reward
    falling = [row | {"reward/mean": 1 - row["iteration"] / 150} for row in with_teacher(lambda i: 0.5 - 0.003 * i)]
    assert only(falling)[0] == "reward/mean"  # a reward that collapses is told all the same


@pytest.mark.slow
def test_noise_is_no_finding():
    """At most 1% of the healthy runs have a finding: batch noise of the reward, evaluations of 30 prompts."""
    noise, alarms, runs = random.Random(1), 0, 0
    shapes = [
        lambda i, n: 0.5,  # flat
        lambda i, n: 0.99,  # at its ceiling
        lambda i, n: min(0.7, 0.3 + 0.8 * i / n),  # rises, then a plateau
        lambda i, n: 0.3 + 0.1 * i / n,
    ]
    for n in (10, 20, 30, 49, 60, 100):
        for shape in shapes:
            for _ in range(125):
                rows = []
                for i in range(1, n + 1):
                    mean = shape(i, n) + noise.gauss(0, 0.05 if shape(i, n) < 0.9 else 0.005)
                    row = {"iteration": i, "reward/mean": mean, "reward/f/mean": mean}
                    row |= {"reward/f/min": 0.0, "reward/f/max": 1.0, "reward/zero_std_groups": abs(2 * mean - 1)}
                    if i % max(1, n // 10) == 0:
                        row["eval/greedy_accuracy"] = sum(noise.random() < 0.3 for _ in range(30)) / 30
                    rows.append(row)
                alarms, runs = alarms + bool(findings(rows)), runs + 1
    assert alarms <= 0.01 * runs


def test_a_reward_that_falls_is_found_at_its_best_update():
    rows = with_values("reward/mean", lambda i: 0.01 * i if i <= 60 else max(0.0, 0.6 - 0.04 * (i - 60)))
    metric, update = only([row for row in rows if row.pop("eval/greedy_accuracy", None) or True])
    assert metric == "reward/mean" and 60 <= update <= 66
    assert findings(with_values("reward/mean", lambda i: 0.01 * min(i, 80))) == []  # it stops rising


def test_the_entropy_collapses_or_rises():
    assert only(with_values("entropy", lambda i: 0.5 if i < 50 else 0.01))[0] == "entropy"
    assert only(with_values("entropy", lambda i: 0.5 + 0.02 * i))[0] == "entropy"
    assert findings(with_values("entropy", lambda i: 0.5 if i < 50 else 0.1)) == []


def test_the_mismatch_grows_or_is_large():
    assert only(with_values("mismatch/mean_abs", lambda i: 0.01 * math.exp(i / 40)))[0] == "mismatch/mean_abs"
    assert only(with_values("mismatch/mean_abs", lambda i: 0.2)) == ("mismatch/mean_abs", 1)
    assert findings(with_values("mismatch/mean_abs", lambda i: 1e-6 * i)) == []  # float32: grown, and tiny


def test_an_evaluation_that_falls_while_the_reward_rises():
    def accuracy(i):
        return {20: 0.5, 40: 0.8, 60: 0.7, 80: 0.3, 100: 0.2}.get(i)

    rows = [
        row | ({"eval/greedy_accuracy": accuracy(row["iteration"])} if accuracy(row["iteration"]) else {})
        for row in healthy()
    ]
    assert only(rows) == ("eval/greedy_accuracy", 60)  # the second of the best two


def test_slow_phases_waits_and_a_falling_speed():
    assert only(with_values("time/sync", lambda i: 4.0)) == ("time/sync", 1)
    assert findings(with_values("time/sync", lambda i: 3.0)) == []
    assert findings(with_values("time/rollout", lambda i: 9.0)) == []  # a rollout may take most of a step
    assert only(with_values("stream/trainer_wait", lambda i: 4.0)) == ("stream/trainer_wait", 1)
    assert findings(with_values("stream/trainer_wait", lambda i: 2.0)) == []
    metric, update = only(with_values("perf/tokens_per_second", lambda i: 1000.0 if i <= 70 else 300.0))
    assert metric == "perf/tokens_per_second" and 71 <= update <= 80


def test_a_wait_names_the_ranks_that_would_balance():
    """Steps of 4 s: two engines work 3.5 s and two trainers 2 s, 7 and 4 rank seconds: 4 x 7 / 11 = 2.55 engines."""
    assert Split(2, 2, 4.0, 0.5, 2.0).balanced() == pytest.approx(28 / 11)
    assert Split(1, 1, 7.31, 0.0, 5.6).balanced() == pytest.approx(2 * 7.31 / (7.31 + 1.71))
    rows = [row | {"time/step": 4.0, "stream/trainer_wait": 2.0, "stream/engine_idle": 0.5} for row in healthy()]
    wait = "the trainer waits for the engines for 50% of the step"
    (found,) = [one for one in findings(rows, (2, 2)) if one.metric == "stream/trainer_wait"]
    assert found.text == f"{wait}, and --rollout-ranks 2.5 of 4 would balance them"
    (found,) = [one for one in findings(rows) if one.metric == "stream/trainer_wait"]
    assert found.text == wait


def split_rows(updates_per_batch, steps=5):
    """Steps of 4 s, the first one of 90; trainers wait 2 s, engines 0.5 s; the last update also evaluates for 10 s."""
    waits = {"stream/trainer_wait": 2.0, "stream/engine_idle": 0.5}
    rows = [{"iteration": i, "time/step": 4.0 / updates_per_batch} for i in range(1, steps * updates_per_batch + 1)]
    for row in rows[::updates_per_batch]:
        row |= waits
    rows[0] |= {"time/step": 90.0, "stream/engine_idle": 120.0}
    rows[-1] |= {"time/step": rows[-1]["time/step"] + 10, "time/eval": 10.0}
    return rows


@pytest.mark.parametrize("updates_per_batch", [1, 3])
def test_the_seconds_of_a_split(updates_per_batch):
    found = measured_split(split_rows(updates_per_batch), (2, 2), updates_per_batch)
    assert found == pytest.approx((2, 2, 4.0, 0.5, 2.0))
    assert found.sides()(3, 1) == pytest.approx((7 / 3, 4.0))  # 2 x 3.5 and 2 x 2 rank seconds
    assert measured_split(split_rows(updates_per_batch, steps=4), (2, 2), updates_per_batch) is None


def test_rows_of_several_batches_count_for_all_of_them():
    """--log-interval 5: a row has the seconds of five batches."""
    rows = [
        {"iteration": 5 * i, "time/step": 20.0, "stream/trainer_wait": 10.0, "stream/engine_idle": 2.5}
        for i in range(1, 6)
    ]
    assert measured_split(rows, (2, 2), 1) == pytest.approx((2, 2, 4.0, 0.5, 2.0))


def test_the_line_about_a_split_names_a_faster_one_if_there_is_one():
    """4 of 8 engines work 4 s, trainers 2 s: 16 and 8 rank seconds; 5 and 3 take 3.2 s, but must be even here."""
    found = measured_split([row | {"stream/engine_idle": 0.0} for row in split_rows(1)], (4, 4), 1)
    text = "a step takes 4 s; the trainers wait 2 s of it for the engines, an engine is idle for 0 s: "
    assert found.line([1, 2, 3, 4, 5, 6, 7], 1) == f"{text}--rollout-ranks 5 of 8 would take 3.2 s"
    assert found.line([2, 4, 6], 1) == f"{text}no other --rollout-ranks of 8 would be much faster"


def test_the_engines_wait_for_the_start_is_no_finding():
    """The first batch's wait is longer than its step; the share of a row is at most 1."""
    rows = [
        {"iteration": i, "time/step": 10.0, "stream/trainer_wait": 0.5, "stream/engine_idle": idle}
        for i, idle in enumerate([120.0, 1.0, 1.0, 1.0, 1.0], 1)
    ]
    assert findings(rows, (4, 4)) == []


def test_a_wait_counts_for_all_updates_of_its_batch():
    """Two updates of 4 s for a batch: waits of 3 s are 3/8 of a step, waits of 2 s a quarter."""
    for wait, found in ((3.0, ["stream/trainer_wait"]), (2.0, [])):
        rows = with_values("time/step", lambda i: 4.0)
        rows = [
            {
                name: value
                for name, value in row.items()
                if name != "stream/trainer_wait" and not name.startswith("time/r")
            }
            | ({"stream/trainer_wait": wait} if row["iteration"] % 2 else {"time/update": 1.0})
            for row in rows
        ]
        assert [one.metric for one in findings(rows) if one.metric.startswith("stream/")] == found


def test_a_row_of_several_updates_tells_the_same():
    """Seconds and counts of a row are sums: the trainer waits for 90 of 100 s; one update is left out."""
    updates = [
        {"time/step": 100.0, "time/rollout": 90.0, "stream/trainer_wait": 90.0, "update/skipped": float(i == 5)}
        for i in range(100)
    ]
    rows = [{"iteration": i + 10} | aggregate(updates[i : i + 10]) for i in range(0, 100, 10)]
    texts = {one.metric: one.text for one in findings(rows)}
    assert texts == {
        "stream/trainer_wait": "the trainer waits for the engines for 90% of the step",
        "update/skipped": "1 bad updates were left out",
    }


def test_the_first_comes_first_and_each_has_its_cure():
    rows = [
        row | {"reward/failures": int(row["iteration"] == 3), "completion/truncated": 0.5 * (row["iteration"] > 40)}
        for row in healthy()
    ]
    found = findings(rows)
    assert [one.metric for one in found] == ["reward/failures", "completion/truncated"]
    heading, first, second = lines(found)
    assert heading == "What went wrong, first:"
    assert first.startswith("  since update 3: reward/failures: ") and first.endswith(remedy("reward/failures"))
    assert "--max-completion-length" in second
    assert all(one.metric in METRICS and one.cure for one in found)


def test_a_row_before_training_and_names_of_no_rule_do_not_matter():
    assert findings([{"iteration": 0, "eval/greedy_accuracy": 0.9}, *with_values("__proto__", lambda i: None)]) == []
