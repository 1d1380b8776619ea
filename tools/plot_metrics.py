#!/usr/bin/env python3
"""Draw the curves of one or more runs: reward, KL, length or turns, entropy, gradient norm, and seconds by phase.

    python tools/plot_metrics.py RUN_DIR [RUN_DIR ...] --output curves.png [--smooth N]

RUN_DIR is a run's --save directory (or a metrics.jsonl). The panel of a metric that no run has logged is empty. Each
run has a colour. With several runs the last panel compares tokens per second instead of seconds by phase.
"""

import argparse
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_grpo.observability.run_folder import Run, labels, read_run
from megatron_grpo.utils.errors import GrpoError

RUN_COLOURS = ["#2a6fbb", "#d9622b", "#2f9e6e", "#8d5fb8", "#b8860b", "#5b6770"]
PHASES = {
    "rollout": "#2a6fbb",
    "scoring": "#e3a72f",
    "logprobs": "#8d5fb8",
    "update": "#2f9e6e",
    "sync": "#d9622b",
}  # phases of every step; evaluations and saves are rare and would be spikes
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": "#444444",
    "axes.edgecolor": "#bbbbbb",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.solid_capstyle": "round",
}


def smoothed(values: list[float], window: int) -> list[float]:
    """Return centred means over ``window`` values (fewer at the ends), so that the curve does not lag."""
    before, after = (window - 1) // 2, window // 2 + 1
    return [math.fsum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - before) : i + after])]


def draw_curves(axes: Axes, runs: list[Run], name: str, window: int) -> bool:
    """Draw a metric of every run, with the unsmoothed values in the background; return whether there was a value."""
    drawn = False
    for run, colour in zip(runs, RUN_COLOURS * len(runs), strict=False):
        x, y = run.series(name)
        if not x:
            continue
        if window > 1:
            axes.plot(x, y, color=colour, alpha=0.25, linewidth=1)
        marker = "o" if len(x) == 1 else None
        axes.plot(x, smoothed(y, window), color=colour, linewidth=1.8, marker=marker, label=run.label)
        drawn = True
    return drawn


def draw_reward(axes: Axes, runs: list[Run], window: int) -> bool:
    """Draw the training reward as a line, and the greedy accuracy on held-out prompts as points on a dashed line."""
    drawn = draw_curves(axes, runs, "reward/mean", window)
    for run, colour in zip(runs, RUN_COLOURS * len(runs), strict=False):
        x, y = run.series("eval/greedy_accuracy")
        if x:
            axes.plot(
                x, y, color=colour, linestyle=(0, (3, 2)), linewidth=1.2, marker="o", markersize=4.5, clip_on=False
            )
            drawn = True
    if any(run.series("eval/greedy_accuracy")[0] for run in runs):
        axes.plot([], [], color="#666666", linewidth=1.8, label="training reward")
        axes.plot([], [], color="#666666", linestyle=(0, (3, 2)), marker="o", markersize=4.5, label="held-out accuracy")
        handles, names = axes.get_legend_handles_labels()
        axes.legend(handles[-2:], names[-2:], loc="lower right")
    return drawn


def draw_phases(axes: Axes, run: Run) -> bool:
    """Draw the seconds of each phase, stacked; return whether there was a value."""
    x = [row["iteration"] for row in run.rows if "time/step" in row]
    stack = {
        phase: [row.get(f"time/{phase}") or 0.0 for row in run.rows if "time/step" in row]
        for phase in PHASES
        if any(run.series(f"time/{phase}")[1])
    }
    if not x or not stack:
        return False
    axes.stackplot(x, *stack.values(), colors=[PHASES[phase] for phase in stack], labels=list(stack), linewidth=0)
    axes.set_ylim(0, 1.5 * max(map(math.fsum, zip(*stack.values(), strict=True))))  # room for the legend
    axes.legend(loc="upper center", ncols=3, handlelength=1, columnspacing=1)
    return True


def draw(runs: list[Run], window: int = 1) -> Figure:
    """Draw the six panels."""
    with plt.rc_context(STYLE):
        margins = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
        figure, grid = plt.subplots(2, 3, figsize=(12, 6.6), layout=margins)
        panels = list(grid.flat)
        contents = [("Reward and held-out accuracy", draw_reward(panels[0], runs, window))]
        if any(any(run.series("kl")[1]) for run in runs):
            contents.append(("KL to the reference (nats/token)", draw_curves(panels[1], runs, "kl", window)))
        else:  # without a KL term (--beta 0) show the difference between trainer and engine instead
            drawn = draw_curves(panels[1], runs, "mismatch/mean_abs", window)
            contents.append(("Trainer/engine log-prob gap (nats)", drawn))
        if any(run.series("environment/turns")[1] for run in runs):
            contents.append(("Turns of an episode", draw_curves(panels[2], runs, "environment/turns", window)))
        else:
            drawn = draw_curves(panels[2], runs, "completion/length_mean", window)
            contents.append(("Completion length (tokens)", drawn))
        contents += [
            ("Entropy (nats/token)", draw_curves(panels[3], runs, "entropy", window)),
            ("Gradient norm", draw_curves(panels[4], runs, "grad_norm", window)),
        ]
        if len(runs) == 1:
            contents.append(("Seconds by phase", draw_phases(panels[5], runs[0])))
        else:
            contents.append(("Tokens per second", draw_curves(panels[5], runs, "perf/tokens_per_second", window)))
        last = max(row["iteration"] for run in runs for row in run.rows)
        for axes, (title, drawn) in zip(panels, contents, strict=True):
            axes.set_title(title)
            axes.set_xlim(0, max(last, 1))
            if drawn:
                if axes not in (
                    panels[0],
                    panels[2],
                ):  # changes of reward and length are small relative to their values
                    axes.set_ylim(bottom=0)
                axes.yaxis.set_major_formatter("{x:,.5g}")
            else:
                axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="#999999")
                axes.set_xticks([])
                axes.set_yticks([])
        for axes in grid[1]:
            axes.set_xlabel("update")
        if len(runs) > 1:
            handles = [plt.Line2D([], [], color=c, linewidth=3) for c in (RUN_COLOURS * len(runs))[: len(runs)]]
            figure.legend(handles, [run.label for run in runs], loc="outside upper center", ncols=min(len(runs), 4))
    return figure


def main(argv: list[str] | None = None) -> int:
    """Read the runs, draw and write the picture, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="a run's --save directory")
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="file of the picture; its suffix determines the format",
    )
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="mean over N rows [1, none]")
    args = parser.parse_args(argv)
    try:
        if args.smooth < 1:
            raise GrpoError(f"--smooth {args.smooth} must be at least 1")
        figure = draw([read_run(path, label) for path, label in zip(args.runs, labels(args.runs))], args.smooth)
        try:
            figure.savefig(args.output, dpi=150)
        except (OSError, ValueError) as error:  # a missing directory; an unknown suffix
            raise GrpoError(f"--output {args.output} cannot be written: {error}") from error
    except GrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
