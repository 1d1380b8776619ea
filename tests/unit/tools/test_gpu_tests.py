"""`tests/run_tests.sh --gpu` with a stand-in for Python, and what cases of tests/gpu that lack something say."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from ranks import REPO

PYTEST = "-m pytest {} --case-report {} -m "
PARTS = "alone and not gpus{} --numprocesses 2", "alone and gpus{}", "not alone{} --numprocesses 10 --dist loadgroup"


@pytest.fixture
def script(tmp_path):
    """`script(pytest="", *arguments)` starts run_tests.sh with a stand-in whose pytest is these lines of bash."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho H200\n")
    python = tmp_path / "python"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)}
    started = []

    def start(pytest_lines: str, *arguments: str) -> subprocess.Popen:
        answers = "case $1 in -c) echo 2; exit;; -) cat >/dev/null; exit;; esac"
        lines = f'{answers}\necho "$*" >>{tmp_path}/calls\n{pytest_lines}\n'
        python.write_text(f"#!/bin/bash\n{lines}")
        for file in (python, tmp_path / "nvidia-smi"):
            file.chmod(0o755)
        command = ["bash", str(REPO / "tests/run_tests.sh"), "--gpu", *arguments]
        own = {"REPORT": str(tmp_path / "new" / "report.txt")}
        started.append(subprocess.Popen(command, env=environment | own, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("words", "files", "expression", "options"),
    [
        ("", "tests/gpu", "", ""),
        ("tests/gpu/test_runs.py -x", "tests/gpu/test_runs.py", "", " -x"),
        ("-k tests -m gpus tests/gpu/test_engine.py::test_a -rs", "tests/gpu/test_engine.py::test_a", " and (gpus)",
         " -k tests -rs"),
    ],
)  # fmt: skip
def test_files_and_options(script, tmp_path, words, files, expression, options):
    run = script("exit 5", *words.split())
    output = run.communicate()[0]
    report = tmp_path / "new" / "report.txt"
    assert run.returncode == 0 and f"== report: {report}\n" in output  # 5: no case
    calls = [(PYTEST + part).format(files, report, expression) + options for part in PARTS]
    assert (tmp_path / "calls").read_text().splitlines() == calls
    assert "== GPUs: 1 H200\n" in report.read_text()


def test_a_failure_of_the_first_part_is_one_of_the_whole(script, tmp_path):
    run = script('[[ $* != *"not alone"* ]]; exit $((1 - $?))')
    run.communicate()
    assert run.returncode == 1 and len((tmp_path / "calls").read_text().splitlines()) == 3


def test_sigterm_reaches_pytest_and_nothing_starts_after_it(script, tmp_path):
    run = script(f"trap 'touch {tmp_path}/ended; exit 2' TERM\ntouch {tmp_path}/ready\nwhile :; do sleep 0.02; done")
    while not (tmp_path / "ready").exists():
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    run.communicate()
    assert run.returncode == 143 and (tmp_path / "ended").exists()
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


class Case:
    """A case with marks, as far as the conftest.py of tests/gpu reads them."""

    def __init__(self, *marks):
        self.marks = marks

    def iter_markers(self, name):
        return (mark.mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)


@pytest.mark.parametrize(
    ("marks", "lacks"),
    [
        ([], None),
        ([pytest.mark.gpus(2), pytest.mark.needs("json", capability=(9, 0))], None),
        ([pytest.mark.gpus(3)], "3 GPUs, found 2"),
        ([pytest.mark.needs("transformer_engine")], "transformer-engine, not installed"),
        ([pytest.mark.needs("json"), pytest.mark.needs("cutlass", "json", "quack")],
         "nvidia-cutlass-dsl and quack-kernels, not installed"),
        ([pytest.mark.needs("json", capability=(10, 0))], "a GPU of compute capability 10.0, found 9.0"),
    ],
)  # fmt: skip
def test_what_a_case_lacks(marks, lacks, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_conftest", REPO / "tests/gpu/conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the file takes it away
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for module in ("transformer_engine", "cutlass", "quack"):
        monkeypatch.setitem(sys.modules, module, None)
    spec.loader.exec_module(conftest)
    assert conftest.lacking(Case(*marks)) == lacks
