"""tools/make_venv.sh: which interpreter it takes, from stand-ins that only tell their version."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPO
from slow import slow_except

PROGRAMS = "bash cat chmod cp dirname grep head mkdir realpath rm sed sha256sum sleep tail uname".split()
# Answers as `python -c` with the question of `fits`, and as `python -m venv`, which ends the script.
STAND_IN = """#!/bin/bash
case $1 in
    --version) echo "Python {version}" ;;
    -c) [[ $2 != *ensurepip* ]] || exit {without_venv}
        exec {python} -c "import sys
from collections import namedtuple
sys.version_info = namedtuple('V', 'major minor micro')({numbers})
sys.implementation.name = '{implementation}'
exec(sys.argv[1])" "$2" ;;
    -m) echo "$0 -m $2"; exit 9 ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A search path of the programs that the script calls, and a function that adds an interpreter to it."""
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        (found,) = [Path(d, name) for d in ("/usr/bin", "/bin") if Path(d, name).exists()][:1]
        (tmp_path / "bin" / name).symlink_to(found)

    def add(name, version, without_venv=0, implementation="cpython"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        numbers = version.replace(".", ", ")
        file.write_text(STAND_IN.format(python=sys.executable, **locals()))
        file.chmod(0o755)
        return file

    return tmp_path, add


def make(root, **variables):
    environment = {"PATH": str(root / "bin"), "HOME": str(root), "VENV": str(root / "venv"), **variables}
    script = ["bash", str(REPO / "tools/make_venv.sh")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    log = root / "venv/install.log"
    assert done.returncode == 1
    return done.stderr, log.read_text() if log.exists() else ""


def test_a_shim_that_fails_is_no_interpreter_and_pyenv_versions_are_searched(machine):
    root, add = machine
    shim = add("bin/python3.12", "3.12.1")
    shim.write_text("#!/bin/bash\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    add("bin/python3", "3.11.7")
    add(".pyenv/versions/3.11.7/bin/python3", "3.11.7")
    expected = add(".pyenv/versions/3.13.0/bin/python3", "3.13.0")
    assert f"$ {expected} -m venv" in make(root)[1]


@pytest.mark.parametrize("name", slow_except(["python3.13"], ["python3.12", "python3.13", "python3"]))
def test_names_of_the_search_path(machine, name):
    root, add = machine
    add(f"bin/{name}", "3.13.2")
    assert f"$ {name} -m venv" in make(root)[1]


def add_uv(root, add) -> Path:
    """Add a uv that finds an interpreter; return the interpreter."""
    found = add("uv-managed/python3.13", "3.13.2")
    uv = root / "bin/uv"
    uv.write_text(f"#!/bin/bash\n[[ $1 == python && $2 == find ]] && echo {found}\n")
    uv.chmod(0o755)
    return found


def test_uv_finds_an_interpreter(machine):
    root, add = machine
    expected = add_uv(root, add)
    assert f"$ {expected} -m venv" in make(root)[1]


@pytest.mark.parametrize(
    ("version", "settings"),
    [("3.11.7", {}), ("3.14.0", {}), ("3.12.1", {"implementation": "pypy"})],
)
def test_without_an_interpreter_one_line_says_what_to_install(machine, version, settings):
    root, add = machine
    add("bin/python3", version, **settings)
    message, log = make(root)
    assert not log and message.count("\n") == 1
    assert f"python3 is Python {version}" in message
    for cure in (
        "apt install python3.12-venv",
        "python3.13-venv",
        "uv python install 3.12",
        "PYTHON=/path/to/python3.12",
    ):
        assert cure in message


@pytest.mark.slow
def test_without_a_home_uv_is_asked(machine):
    root, add = machine
    expected = add_uv(root, add)
    words = ["bash", "-c", f"unset HOME; exec bash {REPO / 'tools/make_venv.sh'}"]
    subprocess.run(words, env={"PATH": str(root / "bin"), "VENV": str(root / "venv")}, capture_output=True)
    assert f"$ {expected} -m venv" in (root / "venv/install.log").read_text()


@pytest.mark.slow
def test_an_interpreter_without_venv_gives_way_to_another(machine):
    root, add = machine
    add("bin/python3.12", "3.12.3", without_venv=1)
    assert "python3.12 cannot make environments: apt install python3.12-venv" in make(root)[0]
    add("bin/python3.13", "3.13.5")
    assert "$ python3.13 -m venv" in make(root)[1]


def test_a_named_interpreter_must_fit(machine):
    root, add = machine
    add("bin/python3.12", "3.12.3")
    add("bin/python3", "3.11.2")
    assert "PYTHON=python3 is Python 3.11.2, needed is 3.12 or 3.13" in make(root, PYTHON="python3")[0]
    assert "PYTHON=/nowhere is not a program" in make(root, PYTHON="/nowhere")[0]
    assert os.path.exists(root / "bin/python3.12")
