#!/usr/bin/env python3
"""Write one HTML file that shows a run, or compares several; it loads nothing, so it can be sent and kept.

    python tools/report.py RUN_DIR [RUN_DIR ...] -o report.html [--rollouts N]

RUN_DIR is a run's --save directory, of a run that may still go on. Shown are the curves of everything logged, the
seconds of each phase, completions with the probability or advantage of each token, arguments (those that differ between
the runs are marked), and the environment. The page itself is in tools/report/.
"""

import argparse
import datetime
import json
import math
import string
import sys
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_grpo.observability.metric_guide import METRICS, TITLES, documented, heading, remedy
from megatron_grpo.observability.run_folder import Record, Run, labels, read_record
from megatron_grpo.utils.errors import GrpoError

PAGE = Path(__file__).resolve().parent / "report"
PHASES = ("rollout", "update", "scoring", "logprobs", "sync", "offload", "eval", "save")  # from the bottom up


# ---- what the script draws


def drawn(records: list[Record], num_rollouts: int) -> dict[str, Any]:
    """The data of tools/report/script.js: runs by column, sections of metrics, their meanings, rollouts."""
    runs = [{"label": record.run.label} | columns(record.run.rows) for record in records]
    for run, record in zip(runs, records, strict=True):
        kept = evenly(sorted({sample["iteration"] for sample in record.completions}), num_rollouts)
        run["completions"] = [sample for sample in record.completions if sample["iteration"] in kept]
    logged = dict.fromkeys(name for run in runs for name in run["metrics"])
    order = {name: place for place, name in enumerate(METRICS)}
    names = sorted(logged, key=lambda name: order.get(documented(name), len(order)))
    shown = {name for run in runs for name in run["phases"]["seconds"]}
    return {
        "runs": runs,
        "sections": [section for title in TITLES if (section := _section(title, names, runs))],
        "meanings": {name: (METRICS[known], remedy(known)) for name in names if (known := documented(name))},
        "phases": [*PHASES, *sorted(shown - {*PHASES, "rest"})],
        "rollouts": sorted({sample["iteration"] for run in runs for sample in run["completions"]}),
    }


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics by name, with None where a row has none; the values of x: updates, tokens, minutes; seconds by phase."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "iteration"))
    tokens, minutes = [0.0], [0.0]  # so far
    for row in rows:
        tokens.append(_rounded(row.get("tokens/total")) or tokens[-1])
        minutes.append(minutes[-1] + (_rounded(row.get("time/step")) or 0.0) / 60)
    return {
        "x": {"iteration": [row["iteration"] for row in rows], "tokens": tokens[1:], "minutes": minutes[1:]},
        "metrics": {name: [_rounded(row.get(name)) for row in rows] for name in names},
        "phases": phase_seconds(rows),
    }


def phase_seconds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of each phase of the rows of updates, from the bottom of the bars up; ``rest`` is what no phase had."""
    timed = [row for row in rows if row["iteration"] > 0 and _rounded(row.get("time/step")) is not None]
    found = {name[5:] for row in timed for name in row if name.startswith("time/")} - {"step"}
    seconds = {
        phase: [_rounded(row.get(f"time/{phase}")) or 0.0 for row in timed]
        for phase in (*PHASES, *sorted(found - {*PHASES}))
        if phase in found
    }
    steps = [row["time/step"] for row in timed]
    seconds["rest"] = [
        _rounded(max(0.0, step - sum(parts))) or 0.0 for step, *parts in zip(steps, *seconds.values(), strict=True)
    ]
    return {"iteration": [row["iteration"] for row in timed], "seconds": seconds}


def _section(title: str, names: list[str], runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The metrics of a heading; those that have one value throughout, in all runs, need no curve."""
    drawn, constants = [], []
    for name in names:
        if heading(name) == title:
            values = {v for run in runs for v in run["metrics"].get(name, []) if v is not None}
            if len(values) > 1:
                drawn.append(name)
            elif values:
                constants.append([name, values.pop()])
    return {"title": title, "names": drawn, "constants": constants} if drawn or constants else None


def evenly(values: list[int], count: int) -> set[int]:
    """At most ``count`` of the values: the first, the last, and others at even distances."""
    if len(values) <= count:
        return set(values)
    return {values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(1, count)} | {values[0]}


def _rounded(value: float | None) -> float | None:
    """Six digits are more than a screen shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


# ---- what is plain HTML


def card(record: Record, number: int) -> str:
    """What a run came to, in a few figures."""
    run = record.run
    done, wanted = run.rows[-1]["iteration"], record.args.get("train_iters")
    seconds = sum(row.get("time/step") or 0.0 for row in run.rows)
    facts = [f"{done} of {wanted} updates", _duration(seconds), str(record.environment.get("device", ""))]
    figures = [("Training reward", _from_to(run, "reward/mean", 0.1))]
    figures += [(f"Held-out {kind}", _from_to(run, f"eval/{kind}_accuracy", 0.0)) for kind in ("greedy", "sampled")]
    figures += [
        ("Entropy, nats", _from_to(run, "entropy", 0.1)),
        ("Length, tokens", _from_to(run, "completion/length_mean", 0.1)),
    ]
    rates, gaps = run.series("perf/tokens_per_second")[1], run.series("mismatch/mean_abs")[1]
    figures.append(("Tokens per second", f"{median(rates):,.0f}" if rates else None))
    figures.append(("Largest engine gap", f"{max(gaps):.1e}" if gaps else None))
    failures = sum(run.series("reward/failures")[1])
    figures.append(("Failed rewards", f"{failures:.0f}" if failures else None))
    terms = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures if value)
    return (
        f'<article class="card" style="--own: var(--colour-{number % 8})"><h3>{escape(run.label)}</h3>'
        f"<p>{escape(' · '.join(filter(None, facts)))}</p><dl>{terms}</dl></article>"
    )


def _from_to(run: Run, name: str, share: float) -> str | None:
    """A metric at the start and at the end of a run, each the mean over this share of its values (at least one)."""
    values = run.series(name)[1]
    if not values:
        return None
    count = max(1, round(len(values) * share))
    return f"{fmean(values[:count]):.3g} → {fmean(values[-count:]):.3g}"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def table(names: list[str], values: list[dict[str, Any]], runs: list[str]) -> str:
    """One row a name and one column a run; rows whose values differ are marked."""
    head = "".join(f"<th>{escape(run)}</th>" for run in runs)
    body = []
    for name in names:
        cells = "".join(f"<td>{escape(_text(of_run.get(name)))}</td>" for of_run in values)
        mark = ' class="differs"' if differs(name, values) else ""
        body.append(f"<tr{mark}><th>{escape(name)}</th>{cells}</tr>")
    return (
        f'<div class="table"><table><thead><tr><th></th>{head}</tr></thead><tbody>\n'
        + "\n".join(body)
        + "</tbody></table></div>"
    )


def differs(name: str, values: list[dict[str, Any]]) -> bool:
    """Whether the runs have different values of this name."""
    return any(_text(of_run.get(name)) != _text(values[0].get(name)) for of_run in values[1:])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def configuration(records: list[Record]) -> str:
    """Arguments: first those that differ or that were given, then the others, folded."""
    values = [record.args for record in records]
    runs = [record.run.label for record in records]
    names = sorted({name for of_run in values for name in of_run})
    given = {name for record in records for name in record.environment["given"]}
    first = sorted((n for n in names if differs(n, values) or n in given), key=lambda n: (not differs(n, values), n))
    rest = [name for name in names if name not in first]
    differing = sum(differs(name, values) for name in names)
    note = f"{differing} differ between the runs and come first; then what" if len(records) > 1 else "What"
    return (
        f'<p class="note">{note} was given on the command line; the others are folded.</p>'
        '<div><input type="search" placeholder="find an argument" aria-label="Find an argument">'
        f"{table(first, values, runs)}"
        f'<details class="rest"><summary>{len(rest)} that were not given</summary>'
        f"{table(rest, values, runs)}</details></div>"
    )


def environment(records: list[Record]) -> str:
    """Where each run ran, and by which command."""
    values = []
    for record in records:
        flat = {name: value for name, value in record.environment.items() if name not in ("given", "packages")}
        packages = record.environment.get("packages")
        values.append(flat | (packages if isinstance(packages, dict) else {}))
    names = list(dict.fromkeys(name for of_run in values for name in of_run))
    return table(names, values, [record.run.label for record in records])


def page(records: list[Record], num_rollouts: int) -> str:
    """The whole file. Data goes in as JSON without a ``<``, everything else escaped: nothing in it can be markup."""
    runs = [record.run.label for record in records]
    data = json.dumps(drawn(records, num_rollouts), allow_nan=False, separators=(",", ":"))
    return string.Template((PAGE / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(runs[0] if len(runs) == 1 else f"{len(runs)} runs compared"),
        style=(PAGE / "style.css").read_text(encoding="utf-8"),
        script=(PAGE / "script.js").read_text(encoding="utf-8"),
        summary="\n".join(card(record, number) for number, record in enumerate(records)),
        configuration=configuration(records),
        environment=environment(records),
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        data=data.replace("<", "\\u003c").replace("&", "\\u0026"),
    )


def main(argv: list[str] | None = None) -> int:
    """Read and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="a run's --save directory")
    parser.add_argument("-o", "--output", required=True, type=Path, help="the HTML file")
    parser.add_argument(
        "--rollouts", type=int, default=30, metavar="N", help="rollouts of a run whose completions go in (default: 30)"
    )
    args = parser.parse_args(argv)
    try:
        if args.rollouts < 1:
            raise GrpoError(f"--rollouts {args.rollouts} must be at least 1")
        names = labels(args.runs) if len(args.runs) > 1 else ["/".join(args.runs[0].resolve().parts[-2:])]
        records = [read_record(path, name) for path, name in zip(args.runs, names, strict=True)]
        text = page(records, args.rollouts)
        try:
            args.output.write_text(text, encoding="utf-8", errors="replace")  # a lone surrogate has no UTF-8
        except OSError as error:
            raise GrpoError(f"--output {args.output} cannot be written: {error}") from error
    except GrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}, {len(text) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
