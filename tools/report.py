#!/usr/bin/env python3
"""Write a report of one run, or a comparison of several runs, as one HTML file without external resources.

    python tools/report.py RUN_DIR [RUN_DIR ...] -o report.html [--rollouts N]

RUN_DIR is the --save directory of a finished or running run. The report has the curves of all logged metrics, the
seconds of each phase, the device's time in the phases of a profile (--profile), completions with the probability or
advantage of each token, completions of held-out prompts over time, arguments (differences between the runs are marked),
and the environment. tools/report/ has the template of the page.
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
from megatron_grpo.observability.run_folder import PROFILE_COLUMNS, Record, Run, labels, read_record
from megatron_grpo.utils.errors import GrpoError

PAGE = Path(__file__).resolve().parent / "report"
PHASES = ("rollout", "update", "scoring", "logprobs", "sync", "offload", "eval", "save")  # from the bottom up


# ---- data of the script


def drawn(records: list[Record], num_rollouts: int) -> dict[str, Any]:
    """Return the data of tools/report/script.js: runs by column, sections of metrics, their meanings, rollouts."""
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
    """Return the columns of a run: metrics by name (None where missing), values of the x axis, and seconds by phase.

    The values of the x axis are updates, tokens and minutes.
    """
    names = list(dict.fromkeys(name for row in rows for name in row if name != "iteration"))
    tokens, minutes = [0.0], [0.0]  # cumulative
    for row in rows:
        tokens.append(_rounded(row.get("tokens/total")) or tokens[-1])
        minutes.append(minutes[-1] + (_rounded(row.get("time/step")) or 0.0) / 60)
    return {
        "x": {"iteration": [row["iteration"] for row in rows], "tokens": tokens[1:], "minutes": minutes[1:]},
        "metrics": {name: [_rounded(row.get(name)) for row in rows] for name in names},
        "phases": phase_seconds(rows),
    }


def phase_seconds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds of each phase of the updates, from the bottom of the bars up; ``rest`` is in no phase."""
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
    """Return the metrics of a heading: those with a curve, and those with one constant value in all runs."""
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
    """Return at most ``count`` of the values: the first, the last, and others at even distances."""
    if len(values) <= count:
        return set(values)
    return {values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(1, count)} | {values[0]}


def _rounded(value: float | None) -> float | None:
    """Round to six significant digits, more than a screen shows; return None for a value that is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


# ---- static HTML


def card(record: Record, number: int) -> str:
    """Return the summary card of a run."""
    run = record.run
    done, wanted = run.rows[-1]["iteration"], record.args.get("train_iters")
    seconds = sum(row.get("time/step") or 0.0 for row in run.rows)
    facts = [f"{done} of {wanted} updates", _duration(seconds), str(record.environment.get("device", ""))]
    figures = [("Training reward", _start_and_end(run, "reward/mean", 0.1))]
    figures += [
        (f"Held-out {kind}", _start_and_end(run, f"eval/{kind}_accuracy", 0.0)) for kind in ("greedy", "sampled")
    ]
    figures += [
        ("Entropy, nats", _start_and_end(run, "entropy", 0.1)),
        ("Length, tokens", _start_and_end(run, "completion/length_mean", 0.1)),
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


def _start_and_end(run: Run, name: str, share: float) -> str | None:
    """Return a metric at the start and at the end of a run, as means over ``share`` of its values (at least one)."""
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
    """Return a table with one row per name and one column per run; rows with different values are marked."""
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
    """Return whether the runs have different values of this name."""
    return any(_text(of_run.get(name)) != _text(values[0].get(name)) for of_run in values[1:])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def configuration(records: list[Record]) -> str:
    """Return the arguments: first the different and the given ones, then the others, folded."""
    values = [record.args for record in records]
    runs = [record.run.label for record in records]
    names = sorted({name for of_run in values for name in of_run})
    given = {name for record in records for name in record.environment["given"]}
    first = sorted((n for n in names if differs(n, values) or n in given), key=lambda n: (not differs(n, values), n))
    rest = [name for name in names if name not in first]
    differing = sum(differs(name, values) for name in names)
    given_first = "Arguments of the command line come first"
    note = f"{differing} arguments differ between the runs and come first, then those of the command line"
    return (
        f'<p class="note">{note if len(records) > 1 else given_first}; the others are folded.</p>'
        '<div><input type="search" placeholder="find an argument" aria-label="Find an argument">'
        f"{table(first, values, runs)}"
        f'<details class="rest"><summary>{len(rest)} arguments that were not given</summary>'
        f"{table(rest, values, runs)}</details></div>"
    )


def environment(records: list[Record]) -> str:
    """Return the table of each run's environment and command."""
    values = []
    for record in records:
        flat = {name: value for name, value in record.environment.items() if name not in ("given", "packages")}
        packages = record.environment.get("packages")
        values.append(flat | (packages if isinstance(packages, dict) else {}))
    names = list(dict.fromkeys(name for of_run in values for name in of_run))
    return table(names, values, [record.run.label for record in records])


def profiles(records: list[Record]) -> str:
    """Return a table of phases for each profile of the runs; nothing if there is none."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in PROFILE_COLUMNS.values())
    tables = []
    for record in records:
        for profile in record.profiles:
            first, last = profile["updates"]
            title = f"{record.run.label}, rank {profile['rank']}, updates {first} to {last}"
            body = []
            for phase in profile["phases"]:
                values = (phase[name] for name in PROFILE_COLUMNS)
                cells = "".join(f"<td>{_figure(value)}</td>" for value in values)
                body.append(f"<tr><th>{escape(phase['name'])}</th>{cells}</tr>")
            tables.append(
                f'<div class="table"><table><thead><tr><th>{escape(title)}</th>{head}</tr></thead><tbody>\n'
                + "\n".join(body)
                + "</tbody></table></div>"
            )
    if not tables:
        return ""
    note = (
        "Seconds of the device. It waits for launches while it is idle and the host has not launched what comes next; "
        "busy, waiting and idle otherwise add up to the phase."
    )
    return f'<section>\n<h2>Profile</h2>\n<p class="note">{note}</p>\n' + "\n".join(tables) + "\n</section>"


def held_out(records: list[Record], num_rollouts: int) -> str:
    """Return a folded table of completions for each logged held-out prompt, by update; nothing if there is none."""
    folded = []
    for record in records:
        kept = evenly(sorted({sample["iteration"] for sample in record.held_out}), num_rollouts)
        prompts: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for sample in record.held_out:
            if sample["iteration"] in kept:
                prompts.setdefault((sample["file"], sample["row"]), []).append(sample)
        for (file, row), samples in prompts.items():
            title = f"{record.run.label}: " * (len(records) > 1) + f"{file}, row {row}: {samples[0]['prompt'][-120:]}"
            folded.append(
                f"<details><summary>{escape(title)}</summary>"
                f'<div class="tokens prompt">{escape(samples[0]["prompt"])}</div>'
                '<div class="table"><table><thead><tr><th>update</th><th>rewards</th><th>length</th><th>completion</th>'
                f"</tr></thead><tbody>\n{_held_out_rows(samples)}</tbody></table></div></details>"
            )
    if not folded:
        return ""
    note = "The same prompts at every evaluation."
    return (
        f'<section>\n<h2>Held-out completions</h2>\n<p class="note">{note}</p>\n' + "\n".join(folded) + "\n</section>"
    )


def _held_out_rows(samples: list[dict[str, Any]]) -> str:
    rows = []
    for sample in samples:
        rewards = ", ".join(
            f"{name} {'not scored' if value is None else format(value, '.3g')}"
            for name, value in sample["rewards"].items()
        )
        cells = (rewards, f"{sample['length']}, {sample['finish_reason']}")
        rows.append(
            f"<tr><th>{sample['iteration']} {escape(sample['kind'])}</th>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + f'<td class="tokens">{escape(sample["completion"])}</td></tr>\n'
        )
    return "".join(rows)


def _figure(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def page(records: list[Record], num_rollouts: int) -> str:
    """Return the whole file.

    Data is inserted as JSON without ``<``, all other text is escaped: neither can contain markup.
    """
    runs = [record.run.label for record in records]
    data = json.dumps(drawn(records, num_rollouts), allow_nan=False, separators=(",", ":"))
    return string.Template((PAGE / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(runs[0] if len(runs) == 1 else f"{len(runs)} runs compared"),
        style=(PAGE / "style.css").read_text(encoding="utf-8"),
        script=(PAGE / "script.js").read_text(encoding="utf-8"),
        summary="\n".join(card(record, number) for number, record in enumerate(records)),
        profiles=profiles(records),
        held_out=held_out(records, num_rollouts),
        configuration=configuration(records),
        environment=environment(records),
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        data=data.replace("<", "\\u003c").replace("&", "\\u0026"),
    )


def main(argv: list[str] | None = None) -> int:
    """Read the runs, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="a run's --save directory")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="the HTML file")
    parser.add_argument(
        "--rollouts",
        type=int,
        default=30,
        metavar="N",
        help="rollouts per run with completions in the report [30]",
    )
    args = parser.parse_args(argv)
    try:
        if args.rollouts < 1:
            raise GrpoError(f"--rollouts {args.rollouts} must be at least 1")
        names = labels(args.runs) if len(args.runs) > 1 else ["/".join(args.runs[0].resolve().parts[-2:])]
        records = [read_record(path, name) for path, name in zip(args.runs, names, strict=True)]
        text = page(records, args.rollouts)
        try:
            args.output.write_text(text, encoding="utf-8", errors="replace")  # UTF-8 cannot encode a lone surrogate
        except OSError as error:
            raise GrpoError(f"--output {args.output} cannot be written: {error}") from error
    except GrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}, {len(text) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
