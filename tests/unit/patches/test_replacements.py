"""Entries of patches/: all fit what is installed, a name that is missing or changed is refused, nothing is silent."""

import ast
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_grpo.patches import cpu_backend, megatron_core, vllm
from megatron_grpo.patches.replacement import ALWAYS, Replacement, check_all
from megatron_grpo.utils.errors import GrpoError

REPO = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("generate_replacements_doc", REPO / "tools/generate_replacements_doc.py")
generate_replacements_doc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate_replacements_doc)

ENTRIES = list(dict.fromkeys([*megatron_core.ENTRIES, *vllm.ENTRIES, *cpu_backend.ENTRIES]))
GPU_VLLM = os.environ.get("GPU_VLLM")  # directory with the unpacked wheel of requirements-gpu.txt's vLLM

SOURCE = """
import json
from .kernels import rotate
try:
    from nowhere import fast
except ImportError:
    fast = None

def scale(x, factor=1.0, *, where=None):
    return x * factor

class Model:
    def forward(self, tokens):
        return tokens
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A made-up package "madeup" that is installed; its modules are "layers" and "kernels"."""
    folder = tmp_path / "madeup"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "layers.py").write_text(SOURCE)
    (folder / "kernels.py").write_text("def rotate(x, angle): ...")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in "madeup", "madeup.layers", "madeup.kernels":
        sys.modules.pop(name, None)


def entry(target: str, parameters: str | None = None) -> Replacement:
    return Replacement(f"madeup.layers:{target}", parameters, "Scale once.", by="a/file.py", proof="a figure")


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one.target)
def test_an_entry_fits_the_installed_version(one):
    if one.package == "torch":
        one.original()
    else:
        one.check()


@pytest.mark.parametrize("one", vllm.ENTRIES, ids=lambda one: one.target)
def test_an_entry_fits_the_vllm_for_gpus(one):
    if GPU_VLLM is None:
        pytest.skip("GPU_VLLM names no directory with the vLLM for GPUs")
    one.check(Path(GPU_VLLM))


@pytest.mark.parametrize(
    "target, parameters",
    [("scale", "x, factor, where"), ("Model.forward", "self, tokens"), ("Model", None), ("fast", None), ("json", None)]
    + [("rotate", "x, angle")],
)
def test_a_name_is_found(package, target, parameters):
    entry(target, parameters).check()
    entry(target, parameters).check(package.parent)


@pytest.mark.parametrize(
    "target, parameters, problem",
    [
        ("scales", "x", r"madeup\.layers\.scales, which is missing there"),
        ("Model.backward", "self", r"madeup\.layers\.Model\.backward, which is missing there"),
        ("scale.x", None, r"madeup\.layers\.scale\.x, which is missing there"),
        ("scale", "x, factor", r"which has the parameters \(x, factor, where\) there, and not \(x, factor\)"),
        ("fast", "x", r"which has the parameters \(None\) there"),
        ("rotate", "x", r"which has the parameters \(x, angle\) there, and not \(x\)"),
    ],
)
def test_another_name_or_signature_is_refused(package, target, parameters, problem):
    one = entry(target, parameters)
    instance = SimpleNamespace(backward=len, x=1)
    for use in one.check, lambda: one.install(1), lambda: one.install_on(instance, len), one.replaced(1).__enter__:
        with pytest.raises(GrpoError, match=problem) as error:
            use()
        assert "replacement: Scale once. Install the version of madeup" in str(error.value)
    assert vars(instance) == {"backward": len, "x": 1}


def test_another_module_is_refused(package):
    with pytest.raises(GrpoError, match="missing there"):
        replace(entry("scale"), target="madeup.norms:scale").check()
    with pytest.raises(GrpoError, match="missing there"):
        replace(entry("scale"), target="not_installed:scale").check()


def test_a_name_that_only_the_source_has_is_refused(package):
    import madeup.layers

    del madeup.layers.scale
    with pytest.raises(GrpoError, match=r"scale, which is missing there \(module .* has no attribute 'scale'\)"):
        entry("scale", "x, factor, where").install(None)
    assert not hasattr(madeup.layers, "scale")


def test_a_name_is_replaced_for_good_or_within_a_context(package):
    from madeup import layers

    own, one = layers.scale, entry("scale", "x, factor, where")
    with pytest.raises(ZeroDivisionError), one.replaced(len):
        assert layers.scale is len
        _ = 1 / 0
    assert layers.scale is own is one.original()
    one.install(max)
    assert layers.scale is max


def test_a_method_of_one_object_is_replaced(package):
    from madeup.layers import Model

    one, first, second = entry("Model.forward", "self, tokens"), Model(), Model()
    with one.replaced_on(first, lambda tokens: -tokens):
        assert (first.forward(2), second.forward(2)) == (-2, 2)
    assert first.forward(2) == 2 and not vars(first)
    own = one.install_on(first, lambda tokens: 10 * own(tokens))
    assert (first.forward(2), second.forward(2)) == (20, 2)
    one.install_class(second, type("Other", (Model,), {"forward": lambda self, tokens: 0}))
    assert second.forward(2) == 0


def test_only_what_every_run_replaces_is_checked_at_the_start(package):
    missing = replace(entry("scales"), needed="--a-flag")
    check_all([missing, entry("scale", "x, factor, where")])
    with pytest.raises(GrpoError, match="scales"):
        check_all([replace(missing, needed=ALWAYS)])


def test_the_flags_check_refuses_a_renamed_name(tmp_path):
    """megatron-core with one function renamed, in front of the installed one."""
    installed = Path(importlib.util.find_spec("megatron.core").origin).parent
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for part in installed.iterdir():
        (core / part.name).symlink_to(part)
    for folder in "optimizer", "models", "dist_checkpointing":
        assert (core / folder).is_symlink()
    (core / "optimizer").unlink()
    (core / "optimizer").mkdir()
    for part in (installed / "optimizer").iterdir():
        (core / "optimizer" / part.name).symlink_to(part)
    renamed = (installed / "optimizer" / "optimizer.py").read_text()
    renamed = renamed.replace("def _multi_tensor_copy_this_to_that(", "def _multi_tensor_copy(")
    (core / "optimizer" / "optimizer.py").unlink()
    (core / "optimizer" / "optimizer.py").write_text(renamed)
    words = "from megatron_grpo.training.command_line import check_flags; check_flags([])"
    environment = {"PYTHONPATH": f"{tmp_path}:{REPO}", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "_multi_tensor_copy_this_to_that, which is missing there" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one.target)
def test_an_entry_names_where_it_is_installed_and_what_proves_it(one):
    assert one.why.endswith(".") and one.scope in ("install", "context", "object")
    text = (REPO / one.by).read_text()
    if one not in cpu_backend.ENTRIES:
        constants = vars(megatron_core) | vars(vllm)
        name = next(name for name, value in constants.items() if value == one)
        assert ("replaced_parallel_state" if name == "PARALLEL_STATE" else f".{name}.") in text, "not installed there"
    file, _, name = one.proof.partition("::")
    if name:
        functions = {node.name for node in ast.parse((REPO / file).read_text()).body if hasattr(node, "name")}
        assert name in functions
    else:
        assert any(character.isdigit() for character in one.proof), "neither a test nor a figure"


def test_the_page_is_up_to_date():
    document = (REPO / "docs" / "replacements.md").read_text()
    assert document == generate_replacements_doc.document(), "run python tools/generate_replacements_doc.py"
    assert all(one.name in document for one in ENTRIES)
