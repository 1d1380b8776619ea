"""What is wrong with a run, from its rows of metrics: pure functions, without torch.

`findings` returns a line for each rule that a run breaks, the earliest first: a run often breaks several, and the first
one is the cause of the others. Limits and cures are those of ``metric_guide``. A rule looks at the end of the run: its
value is the mean of the last tenth of a metric's values (`_window`). The update of a finding is the first one from
which on the rule was broken without a pause.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import lt
from statistics import fmean, median, variance
from typing import Any, NamedTuple

from megatron_grpo.estimate.split import Sides, fastest, measured, step_seconds
from megatron_grpo.observability.metric_guide import remedy

FEW = 5  # values of a metric, below which no rule judges it
FLAT = 100  # rows, after which a reward should have risen
PROMPTS = 30  # held-out prompts that an accuracy has at least: its rows do not tell
PHASES = ("scoring", "logprobs", "sync", "offload", "save", "eval", "ledger")  # rollout and update may take most

# metric: (bad above this mean, sentence)
ABOVE = {
    "reward/zero_std_groups": (0.9, "{:.0%} of the groups have equal rewards, and no signal"),
    "completion/truncated": (0.1, "{:.0%} of the completions are truncated"),
    "clip/low": (0.2, "{:.0%} of the tokens are clipped at the lower bound"),
    "clip/high": (0.2, "{:.0%} of the tokens are clipped at the upper bound"),
    "clip/masked": (0.9, "{:.0%} of the tokens are masked"),
    "mismatch/clipped": (0.05, "{:.0%} of the tokens exceed the bound of the rollout importance weights"),
    "turns/malformed_calls": (0.1, "{:.2f} malformed tool calls in a turn"),
    "environment/failed": (0.05, "{:.0%} of the episodes failed"),
}
# metric: (share of time/step, sentence)
WAITS = {
    "stream/trainer_wait": (0.3, "the trainer waits for the engines for {:.0%} of the step"),
    "stream/engine_idle": (0.3, "an engine is idle for {:.0%} of the step"),
}


@dataclass(frozen=True)
class Finding:
    """A rule that a run breaks: its metric, since which update, what is wrong, and what to do."""

    update: int
    metric: str
    text: str

    @property
    def cure(self) -> str:
        """The remedy of the metric."""
        return remedy(self.metric)

    def as_json(self) -> dict[str, Any]:
        """Return the fields that a page shows."""
        return {"update": self.update, "metric": self.metric, "text": self.text, "cure": self.cure}


@dataclass(frozen=True)
class Series:
    """The values of a metric where it was logged as a number."""

    updates: list[int]
    values: list[float]

    @property
    def window(self) -> int:
        """Number of values that are one mean: a tenth, at least FEW."""
        return max(FEW, len(self.values) // 10)

    def start(self) -> float:
        """Return the mean of the first window."""
        return fmean(self.values[: self.window])

    def end(self) -> float:
        """Return the mean of the last window."""
        return fmean(self.values[-self.window :])

    def means(self) -> list[float]:
        """Return the mean of the window that ends at each value; the first ones have fewer values."""
        total, sums = 0.0, []
        for i, value in enumerate(self.values):
            total += value - (self.values[i - self.window] if i >= self.window else 0.0)
            sums.append(total / min(i + 1, self.window))
        return sums

    def since(self, broken: Callable[[float], bool]) -> int:
        """Return the first update from which on all means of the window break a rule."""
        first = len(self.values) - 1
        for i, mean in reversed(list(enumerate(self.means()))):
            if not broken(mean):
                break
            first = i
        return self.updates[first]


def findings(rows: Sequence[Mapping[str, Any]], placed: tuple[int, int] | None = None) -> list[Finding]:
    """Return the findings of a run's rows (of metrics.jsonl), by update. A value that is not finite is None there.

    ``placed``: the engine ranks (--rollout-ranks) and the trainer ranks of the launch.
    """
    rows = [row for row in rows if row["iteration"] > 0]  # row 0 is an evaluation before training
    found = [finding for rule in (*RULES, partial(_waits, placed=placed)) for finding in rule(rows)]
    return sorted(found, key=lambda finding: finding.update)


def lines(found: Sequence[Finding]) -> list[str]:
    """Return the findings as lines for a terminal, under a heading; none for a healthy run."""
    if not found:
        return []
    shown = [f"  since update {one.update}: {one.metric}: {one.text}. {one.cure}" for one in found]
    return ["What went wrong, first:", *shown]


def wanted(name: str) -> bool:
    """Return whether a rule reads this metric."""
    return name in READ or name.startswith(("time/", "reward/", "eval/"))


def _series(rows: Iterable[Mapping[str, Any]], name: str) -> Series | None:
    """Return a metric's values; None if they are too few to judge."""
    pairs = [(row["iteration"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    return Series([x for x, _ in pairs], [y for _, y in pairs]) if len(pairs) >= FEW else None


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    for name in ("loss", "grad_norm"):
        bad = [row["iteration"] for row in rows if name in row and row[name] is None]
        if bad:
            yield Finding(bad[0], name, f"not finite in {len(bad)} rows")


def _counted(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    for name, text in {
        "reward/failures": "{:.0f} calls of reward functions failed",
        "update/skipped": "{:.0f} bad updates were left out",
    }.items():
        bad = [(row["iteration"], row[name]) for row in rows if (row.get(name) or 0) > 0]
        if bad:
            yield Finding(bad[0][0], name, text.format(sum(value for _, value in bad)))


def _levels(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    for name, (limit, text) in ABOVE.items():
        series = _series(rows, name)
        none_scored = bool(rows) and rows[-1].get("reward/mean", 0) is None
        joined = any("sft/advantage" in row for row in rows)
        if name == "reward/zero_std_groups" and (none_scored or _at_ceiling(rows) or _has_teacher(rows) or joined):
            continue  # nothing is left to learn, or the signal is a teacher or a demonstration in the group
        if series and series.end() > limit:
            yield Finding(series.since(partial(lt, limit)), name, text.format(series.end()))
    name = "mismatch/effective_sample_size"
    series = _series(rows, name)
    if series and series.end() < 0.9:
        yield Finding(series.since(lambda mean: mean < 0.9), name, f"it is {series.end():.2f}")


def _reward(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    """Yield a collapsed reward, or a flat one (no significant rise in more than FLAT rows, not at its ceiling).

    It has collapsed if the mean of its last third is below that of an earlier third by four standard errors and by half
    of the rise.
    """
    series = _series(rows, "reward/mean")
    if series is None or len(series.values) < 30:
        return
    third = len(series.values) // 3
    first, middle, last = series.values[:third], series.values[third:-third], series.values[-third:]
    best = max(first, middle, key=fmean)
    start, top, end = fmean(first), fmean(best), fmean(last)
    if top - end > max(0.5 * (top - min(start, end)), 4 * _error(best, last)):
        means = series.means()[series.window - 1 :]  # of whole windows
        at = means.index(max(means)) + series.window - 1
        yield Finding(series.updates[at], "reward/mean", f"it fell from {top:.3g} to {end:.3g}")
    elif _has_teacher(rows):
        return
    elif len(series.values) > FLAT and end - start <= 2 * _error(first, last) and not _at_ceiling(rows):
        text = f"it did not rise in {len(series.values)} rows: {start:.3g}, then {end:.3g}"
        yield Finding(series.updates[0], "reward/mean", text)


def _has_teacher(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the run learns from a teacher: the divergence falls, is below 0.01 nats, or is young."""
    name = _divergence(rows)
    series = _series(rows, name)
    if series is None:
        return any(name in row for row in rows)
    return len(series.values) <= FLAT or series.end() <= 0.01 or _change(series) < 0


def _divergence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the run's metric of its divergence from a teacher."""
    return "teacher/divergence" if any("teacher/divergence" in row for row in rows) else "teacher/kl"


def _teacher(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    """Yield a divergence from the teacher that has not fallen in more than FLAT rows and is above 0.01 nats.

    None if the reward rises: a policy that learns from it leaves its teacher.
    """
    name = _divergence(rows)
    series, reward = _series(rows, name), _series(rows, "reward/mean")
    if series is None or _has_teacher(rows) or (reward is not None and _change(reward) > 0):
        return
    third = len(series.values) // 3
    start, end = fmean(series.values[:third]), fmean(series.values[-third:])
    text = f"it did not fall in {len(series.values)} rows: {start:.3g}, then {end:.3g} nats a token"
    yield Finding(series.updates[0], name, text)


def _change(series: Series) -> int:
    """Return the sign of the change from the first to the last third by more than two standard errors, else 0."""
    third = max(2, len(series.values) // 3)
    first, last = series.values[:third], series.values[-third:]
    change = fmean(last) - fmean(first)
    return 0 if abs(change) <= 2 * _error(first, last) else 1 if change > 0 else -1


def _error(*samples: Sequence[float]) -> float:
    """Return the standard error of the difference of two means."""
    return sum(variance(values) / len(values) for values in samples) ** 0.5


def _at_ceiling(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the reward functions lack at most 5% of their ranges, all together, in the last rows.

    The range of a function is that of its values in the whole run: a small penalty then counts little.
    """
    lacking = ranges = 0.0
    for name in dict.fromkeys(name for row in rows[-FEW:] for name in row if name.endswith("/max")):
        function = name.removesuffix("/max")
        tops = [row[name] for row in rows if row.get(name) is not None]
        means = [row[mean] for row in rows if row.get(mean := f"{function}/mean") is not None]
        lows = [row[low] for row in rows if row.get(low := f"{function}/min") is not None]
        if name.startswith("reward/") and tops and means:
            lacking += max(tops) - fmean(means[-FEW:])
            ranges += max(tops) - min(lows or means)
    return ranges > 0 and lacking <= 0.05 * ranges


def _entropy(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    series = _series(rows, "entropy")
    if series is None or series.start() <= 0:
        return
    start, end = series.start(), series.end()
    text = f"it went from {start:.3g} to {end:.3g} nats"
    # At the ceiling there is nothing left to explore, and a teacher may be sharp.
    if end < 0.1 * start and not _at_ceiling(rows) and not _has_teacher(rows):
        yield Finding(series.since(lambda mean: mean < 0.1 * start), "entropy", text)
    elif end > max(2 * start, start + 0.5):
        yield Finding(series.since(lambda mean: mean > max(2 * start, start + 0.5)), "entropy", text)


def _mismatch(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    """Yield a gap that is large for bfloat16 (0.05 nats), or that has grown threefold to at least 0.02."""
    series = _series(rows, "mismatch/mean_abs")
    if series is None:
        return
    start, end = series.start(), series.end()
    limit = 0.05 if end > 0.05 and start > 0.05 / 3 else max(0.02, 3 * start)
    if end > limit:
        text = f"engine and trainer differ by {end:.2g} nats a token, {start:.2g} at the start"
        yield Finding(series.since(lambda mean: mean > limit), "mismatch/mean_abs", text)


def _evaluation(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    """Yield an accuracy that fell since its best two evaluations while the training reward rose.

    It fell by more than a tenth, and by 3.5 binomial standard errors of an evaluation of PROMPTS prompts.
    """
    reward = _series(rows, "reward/mean")
    for kind in ("greedy", "sampled"):
        name = f"eval/{kind}_accuracy"
        pairs = [(row["iteration"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
        if reward is None or len(pairs) < 4 or reward.end() <= reward.start():
            continue
        means = [(at, (before + value) / 2) for (_, before), (at, value) in pairwise(pairs)]
        at, best = max(means, key=lambda pair: pair[1])
        end = means[-1][1]
        rate = (best + end) / 2
        if best - end > max(0.1, 3.5 * max(0.0, rate * (1 - rate) / PROMPTS) ** 0.5):
            yield Finding(at, name, f"it fell from {best:.3g} to {end:.3g} while the training reward rose")


def _seconds(rows: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    """Yield phases other than rollout and update that take a third of the time, and a falling speed."""
    steps = [row for row in rows if (row.get("time/step") or 0) > 0]
    if len(steps) < FEW:
        return
    all_seconds = sum(row["time/step"] for row in steps)
    for phase in PHASES:
        share = sum(row.get(f"time/{phase}") or 0 for row in steps) / all_seconds
        if share > 1 / 3:
            text = f"{phase} takes {share:.0%} of the time"
            yield Finding(steps[0]["iteration"], f"time/{phase}", text)
    series = _series(rows, "perf/tokens_per_second")
    if series and len(series.values) >= 4 * FEW:
        early, late = median(series.values[: len(series.values) // 2]), median(series.values[-series.window :])
        if late < early / 2:
            since = series.since(lambda mean: mean < early / 2)
            yield Finding(since, "perf/tokens_per_second", f"it fell from {early:,.0f} to {late:,.0f}")


class Split(NamedTuple):
    """Measured seconds of steps of one split: in all, an engine idle, the trainers waiting."""

    engines: int
    trainers: int
    step: float
    engine_idle: float
    trainer_wait: float

    def rank_seconds(self) -> tuple[float, float]:
        """Return the seconds that engines and trainers are busy, summed over the ranks of each side."""
        return self.engines * (self.step - self.engine_idle), self.trainers * (self.step - self.trainer_wait)

    def sides(self) -> Sides:
        """Return the seconds of both sides under other splits: each side's work, spread over its ranks without loss."""
        return measured(*self.rank_seconds())

    def balanced(self) -> float:
        """Return how many of all ranks would be engines if engines and trainers were busy equally long."""
        generate, train = self.rank_seconds()
        return (self.engines + self.trainers) * generate / (generate + train)

    def line(self, possible: Sequence[int], max_staleness: int) -> str:
        """Return which side waits, and the best one of ``possible`` numbers of engine ranks, as a line."""
        ranks = self.engines + self.trainers
        best = fastest(possible, ranks, self.sides(), max_staleness, self.engines)
        text = (
            f"a step takes {self.step:.3g} s; the trainers wait {self.trainer_wait:.3g} s of it for the engines, an "
            f"engine is idle for {self.engine_idle:.3g} s: "
        )
        if best == self.engines:
            return f"{text}no other --rollout-ranks of {ranks} would be much faster"
        seconds = step_seconds(self.sides(), best, ranks - best, max_staleness)
        return f"{text}--rollout-ranks {best} of {ranks} would take {seconds:.3g} s"


def measured_split(rows: Sequence[Mapping[str, Any]], placed: tuple[int, int], updates_per_batch: int) -> Split | None:
    """Return the means of the batches of one launch, without evaluations and saves; None for fewer than FEW rows.

    The first row is left out: in it engines start, and kernels are compiled. ``placed``: see `findings`.
    """
    rows = [row for row in rows if row["iteration"] > 0]
    steps = _batches(rows)[1:]
    if len(steps) < FEW - 1 or any(row.get(name) is None for row in steps for name in WAITS):
        return None
    before = max(row["iteration"] for row in rows if row["iteration"] < steps[0]["iteration"])
    batches = (rows[-1]["iteration"] - before) / updates_per_batch
    step = sum(row["time/step"] - (row.get("time/eval") or 0) - (row.get("time/save") or 0) for row in steps)
    idle, wait = (min(step, sum(row[name] for row in steps)) for name in ("stream/engine_idle", "stream/trainer_wait"))
    return Split(*placed, step / batches, idle / batches, wait / batches)


def _batches(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each batch of engines on ranks of their own: its step has all updates of the batch."""
    steps: list[dict[str, Any]] = []
    for row in rows:
        if steps and not any(row.get(name) is not None for name in WAITS):  # a further update of the same batch
            for name in ("time/step", "time/eval", "time/save"):
                steps[-1][name] = (steps[-1].get(name) or 0) + (row.get(name) or 0)
        elif row.get("time/step"):
            steps.append(dict(row))
    for row in steps:  # the first row has the engines' wait for the trainer's start, which is longer than the step
        row |= {name: min(row[name], row["time/step"]) for name in WAITS if row.get(name) is not None}
    return steps


def _waits(rows: Sequence[Mapping[str, Any]], placed: tuple[int, int] | None) -> Iterable[Finding]:
    """Yield the waits of trainer and engines that take a third of a step: all updates of a batch."""
    steps = _batches(rows)
    for name, (limit, text) in WAITS.items():
        shares = [row | {"share": row[name] / row["time/step"]} for row in steps if row.get(name) is not None]
        series = _series(shares, "share")
        if not series or series.end() <= limit:
            continue
        text = text.format(series.end())
        last = shares[-series.window :]
        if placed and all(row.get(other) is not None for row in last for other in WAITS):
            seconds = (
                sum(row[name] for row in last) for name in ("time/step", "stream/engine_idle", "stream/trainer_wait")
            )
            balanced = Split(*placed, *seconds).balanced()
            text += f", and --rollout-ranks {balanced:.1f} of {sum(placed)} would balance them"
        yield Finding(series.since(partial(lt, limit)), name, text)


RULES = (_not_finite, _counted, _levels, _reward, _teacher, _entropy, _mismatch, _evaluation, _seconds)
READ = {
    *ABOVE,
    *WAITS,
    "loss",
    "grad_norm",
    "update/skipped",
    "entropy",
    "mismatch/mean_abs",
    "teacher/kl",
    "teacher/divergence",
    "sft/advantage",
}
READ |= {"mismatch/effective_sample_size", "perf/tokens_per_second"}
