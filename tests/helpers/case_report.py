"""pytest plug-in: a report that is written as the cases go, so that a run which is cut off leaves its failures.

    pytest --case-report FILE ...      appends to FILE; with pytest-xdist, too

A line for each case that starts or has ended, and under it the text of its failure:

    started          tests/gpu/test_runs.py::test_one_gpu
    failed    31.2 s tests/gpu/test_runs.py::test_one_gpu
        ...

At the end, and after SIGTERM, a summary with the cases that have not ended.
"""

import signal
import time
from pathlib import Path
from types import FrameType

import pytest


def add_option(parser: pytest.Parser) -> None:
    """Add --case-report to pytest's options; for `pytest_addoption` of a conftest.py."""
    text = "append a line for each case to FILE as soon as it has ended, with the text of a failure"
    parser.addoption("--case-report", type=Path, metavar="FILE", help=text)


def start(config: pytest.Config) -> None:
    """Begin the report if the option is given; for `pytest_configure` of a conftest.py."""
    path = config.getoption("--case-report")
    if path is None:
        return
    signal.signal(signal.SIGTERM, _end_session)
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist sends its reports to the first process
        config.pluginmanager.register(CaseReport(path), "case report")


def _end_session(number: int, frame: FrameType | None) -> None:
    """End the tests as Ctrl-C does: fixtures and processes end, too, and pytest prints its summary of the failures."""
    signal.signal(number, signal.SIG_IGN)  # timeout(1) sends it to this process, then to the process group
    pytest.exit(f"ended by {signal.Signals(number).name}", returncode=pytest.ExitCode.INTERRUPTED)


class CaseReport:
    """Hooks of pytest that write the report. Each line is flushed."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._start = time.monotonic()
        self._running: dict[str, float] = {}  # seconds of the phases that have ended, by case
        self._ended: dict[str, list[str]] = {}  # cases by outcome

    def _write(self, line: str, text: str = "") -> None:
        self._file.write(f"{line}\n" + "".join(f"    {row}\n" for row in text.splitlines()))
        self._file.flush()

    def _end(self, outcome: str, case: str, seconds: float, text: str = "") -> None:
        self._ended.setdefault(outcome, []).append(case)
        self._write(f"{outcome:8} {seconds:6.1f} s {case}", text)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note a case that starts."""
        self._running[nodeid] = 0.0
        self._write(f"{'started':18}{nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the end of a phase. A failure ends a case in the report; its teardown follows, and may fail, too."""
        case = report.nodeid
        seconds = self._running.get(case, 0.0) + report.duration
        if case in self._running:
            self._running[case] = seconds
        if report.failed:
            self._running.pop(case, None)
            texts = [report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)]
            self._end("failed" if report.when == "call" else "error", case, seconds, "\n".join(texts))
        elif report.skipped and case in self._running:
            del self._running[case]
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._end("skipped", case, seconds, why)
        elif report.when == "teardown" and case in self._running:
            del self._running[case]
            self._end("passed", case, seconds)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self._end("error", report.nodeid, 0.0, report.longreprtext)

    @pytest.hookimpl(tryfirst=True)  # before pytest-xdist waits for its workers
    def pytest_sessionfinish(self) -> None:
        """Write the summary."""
        counts = ", ".join(f"{len(cases)} {outcome}" for outcome, cases in self._ended.items()) or "no case"
        lines = [f"{outcome} {case}" for outcome in ("failed", "error") for case in self._ended.get(outcome, [])]
        lines += [f"not ended {case}" for case in self._running]
        self._write(f"== {counts} in {time.monotonic() - self._start:.0f} s", "\n".join(lines))
        self._file.close()
