"""Programs that tests/gpu starts find the modules that they import, which no CPU test would notice."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[2] / "gpu"
REPO = GPU.parents[1]
WORKERS = sorted(GPU.glob("*_worker.py"))
FIND = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n) is None])"


def imported(tree: ast.Module) -> set[str]:
    """The modules that a file imports when it is run, by their first names."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


def paths_of(worker: Path, tree: ast.Module) -> str:
    """The statements by which a worker extends its search path, as a program."""
    lines = worker.read_text().splitlines()
    kept = [node for node in tree.body if "sys.path" in (ast.get_source_segment("\n".join(lines), node) or "")]
    repo = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REPO"]
    body = "\n".join(ast.unparse(node) for node in [*repo, *kept])
    return f"import sys\nfrom pathlib import Path\n__file__ = {str(worker)!r}\n{body}\n"


@pytest.mark.parametrize("worker", WORKERS, ids=lambda path: path.name)
def test_a_worker_finds_what_it_imports(worker, monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    from launch import _environment

    tree = ast.parse(worker.read_text())
    names = sorted(imported(tree))
    assert len(names) > 4
    found = subprocess.run(
        [sys.executable, "-c", paths_of(worker, tree) + FIND, *names],
        env=_environment(), capture_output=True, text=True, check=True, cwd=REPO / "tests",
    )  # fmt: skip
    assert found.stdout.split() == []
