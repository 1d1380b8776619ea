"""Measure the page of tools/report.py in Chromium: until it is ready, and until it has drawn again.

    python tools/benchmark/report_page.py [--updates 10000] [--metrics 60] [--runs 1] [--repeat 3]

Makes runs with random metrics, of which each panel has a curve, writes the page and opens it in a window of 1600 x 1000
pixels. Prints seconds, the best and the worst of the repetitions: until the scripts are ready; a zoom and another
smoothing, until all panels on the screen are drawn; the enlarged panel; and a click on its PNG and CSV buttons, until
the file is there, with the file's size. The exit code is 1 if a file is not what its name says or the page has reported
an error. Needs Chromium (apt-get install chromium).
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from browser import Browser, chromium

# The panels on the screen have drawn when the browser has painted twice: it paints after the observers of panels.
PAINTED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
PNG = b"\x89PNG\r\n\x1a\n"


def write_run(folder: Path, updates: int, metrics: int) -> Path:
    """Write the files of a run with ``metrics`` random metrics, and return its folder."""
    folder.mkdir()
    noise = random.Random(str(folder))
    names = [f"reward/f{k}/mean" for k in range(metrics)]
    with open(folder / "metrics.jsonl", "w") as file:
        for i in range(1, updates + 1):
            row = {"iteration": i, "tokens/total": 1000 * i, "time/step": 2.0, "time/rollout": 1 + noise.random()}
            file.write(json.dumps(row | {name: noise.random() for name in names}) + "\n")
    (folder / "completions.jsonl").touch()
    (folder / "args.json").write_text(json.dumps({"train_iters": updates}))
    (folder / "environment.json").write_text(json.dumps({"given": []}))
    return folder


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def downloaded(browser: Browser, folder: Path, label: str) -> bytes:
    """Click the button of the enlarged panel with this label; return the file that it writes, and delete it."""
    browser.evaluate(
        f"[...byId('enlarged').querySelectorAll('button')].find((one) => one.textContent === '{label}').click()"
    )
    end = time.monotonic() + browser.patience
    while time.monotonic() < end:
        for file in folder.glob(f"*.{label.lower()}"):  # Chromium writes *.crdownload first
            content = file.read_bytes()
            file.unlink()
            return content
        time.sleep(0.005)
    raise TimeoutError(f"the button {label} wrote no file")


def measure(browser: Browser, page: Path, folder: Path, updates: int, runs: int) -> dict[str, float]:
    """Open the page and return the seconds of each action by its name, and the bytes of the files."""
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    found = {"load, whole": seconds(lambda: browser.open(f"file://{page}"))}
    found["load, until the scripts are ready"] = int(browser.wait("document.documentElement.dataset.ready")) / 1000
    browser.wait("document.querySelector('figure').panel.plot")
    zoom = f"setZoom([{updates // 5}, {updates // 2}])"
    found["zoom"] = seconds(lambda: browser.evaluate(f"{zoom}, {PAINTED}"))
    found["zoom out"] = seconds(lambda: browser.evaluate(f"setZoom(null), {PAINTED}"))
    smooth = "byId('smooth').value = '257', byId('smooth').dispatchEvent(new Event('change'))"
    found["other smoothing"] = seconds(lambda: browser.evaluate(f"{smooth}, {PAINTED}"))
    enlarge = "[...document.querySelectorAll('figcaption button')].find((one) => one.textContent === '⤢').click()"

    def enlarged() -> None:
        browser.evaluate(enlarge)
        browser.wait("byId('enlarged').querySelector('figure').panel.plot")
        browser.evaluate(PAINTED)

    found["enlarged panel"] = seconds(enlarged)
    for label in ("PNG", "CSV"):
        files: list[bytes] = []
        found[label] = seconds(lambda label=label, files=files: files.append(downloaded(browser, folder, label)))  # type: ignore[misc]
        found[f"{label}, bytes"] = len(files[0])
        rows = list(csv.reader(files[0].decode().splitlines())) if label == "CSV" else []
        if files[0][:8] != PNG if label == "PNG" else len(rows) != 1 + updates * runs:
            raise ValueError(f"the button {label} wrote something else: {files[0][:80]!r}")
    browser.evaluate("byId('enlarged').close()")
    if browser.errors:
        raise ValueError(f"the page reported errors: {browser.errors}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("updates", 10_000), ("metrics", 60), ("runs", 1), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"[{default}]")
    args = parser.parse_args()
    path = chromium()
    if path is None:
        sys.exit("no Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        folders = [write_run(root / f"run{k}", args.updates, args.metrics) for k in range(args.runs)]
        page, downloads = root / "report.html", root / "downloads"
        downloads.mkdir()
        command = [sys.executable, ROOT / "tools" / "report.py", *folders, "-o", page]
        written = seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        print(f"{args.runs} runs of {args.updates:,} updates with {args.metrics} metrics; written in {written:.1f} s")
        with Browser(path) as browser:
            try:
                found = [measure(browser, page, downloads, args.updates, args.runs) for _ in range(args.repeat)]
            except (ValueError, TimeoutError, RuntimeError) as error:
                sys.exit(f"error: {error}")
    for name in found[0]:
        values = [one[name] for one in found]
        text = f"{values[0]:,.0f}" if name.endswith("bytes") else f"{min(values):.3f} to {max(values):.3f} s"
        print(f"  {name:34} {text}")


if __name__ == "__main__":
    main()
