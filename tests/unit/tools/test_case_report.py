"""The report that `tests/run_tests.sh --gpu` writes as its cases go."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from ranks import REPO

CONFTEST = """
import case_report

def pytest_addoption(parser):
    case_report.add_option(parser)

def pytest_configure(config):
    case_report.start(config)
"""
CASES = """
import os, pathlib, signal, subprocess, time
import pytest

def test_good():
    pass

def test_bad():
    print("what it printed")
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="needs quack-kernels, which is not installed")
def test_absent():
    pass

@pytest.fixture
def broken():
    yield
    raise OSError("no end")

def test_teardown(broken):
    pass

def test_long():
    while not pathlib.Path("report.txt").read_text().count("error"):
        time.sleep(0.02)
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("new").write_text(str(child.pid))
    pathlib.Path("new").rename("child")
    try:
        child.wait()
    finally:
        child.kill()
        child.wait()
"""


def started(tmp_path, *options: str) -> subprocess.Popen:
    """Start pytest over the cases; its output goes to a file."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--case-report", "report.txt", *options]
    with (tmp_path / "output").open("w") as output:
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(REPO / "tests" / "helpers")},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


WORKERS = pytest.param(("--numprocesses", "2"), marks=pytest.mark.slow, id="xdist")  # ends its workers after 15 s


@pytest.mark.parametrize("options", [pytest.param((), id="alone"), WORKERS])
def test_a_run_that_is_cut_off_leaves_its_failures(tmp_path, options):
    run = started(tmp_path, *options)
    try:
        while not (tmp_path / "child").exists():
            assert run.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.02)
        before = (tmp_path / "report.txt").read_text()  # as a run leaves it that SIGKILL ends
        assert re.search(
            r"failed +\d+\.\d s test_cases\.py::test_bad\n    .*(\n    .*)*one is not two.*(\n    .*)*what it printed",
            before,
        )
        assert re.search(r"error +\d+\.\d s test_cases\.py::test_teardown\n    .*(\n    .*)*no end", before)
        assert re.search(r"passed +\d+\.\d s test_cases\.py::test_good\n", before)
        assert re.search(r"skipped .*::test_absent\n    .*needs quack-kernels", before)
        assert "started           test_cases.py::test_long\n" in before and "\n== " not in before
        run.send_signal(signal.SIGTERM)
        assert run.wait() == pytest.ExitCode.INTERRUPTED
    finally:
        run.kill()
    _, summary = (tmp_path / "report.txt").read_text().split("\n== ")
    assert re.fullmatch(
        r"(1 passed|1 failed|1 skipped|1 error|, )+ in \d+ s\n    failed test_cases\.py::test_bad\n"
        r"    error test_cases\.py::test_teardown\n    not ended test_cases\.py::test_long\n",
        summary,
    )
    assert "FAILED test_cases.py::test_bad" in (tmp_path / "output").read_text()
    child = (tmp_path / "child").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)


def test_a_run_to_its_end_and_a_file_that_cannot_be_imported(tmp_path):
    (tmp_path / "report.txt").write_text("head\n")
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    started(tmp_path, "-k", "good or bad", "--continue-on-collection-errors").wait()
    report = (tmp_path / "report.txt").read_text()
    assert report.startswith("head\n") and re.search(
        r"error .* test_broken\.py\n(    .*\n)*    .*no_such_module", report
    )
    assert re.search(r"\n== (1 (error|passed|failed)(, )?){3} in \d+ s\n    failed test_cases\.py::test_bad\n", report)
