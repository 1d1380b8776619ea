"""Nothing outside megatron_grpo/patches assigns to a name of another package, or to a method of its objects."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
FILES = sorted(
    [REPO / "pretrain_grpo.py", *(REPO / "megatron_grpo").rglob("*.py"), *(REPO / "tools").rglob("*.py")],
)
OURS = {"megatron_grpo", "pretrain_grpo", "tools", "tests", "helpers"} | {
    file.stem for file in (REPO / "tools").rglob("*.py")
}
PATCHES = REPO / "megatron_grpo" / "patches"

# (file, what is assigned to): why.
ALLOWED = {
    ("megatron_grpo/algorithm/trial.py", "dist.GroupMember.WORLD"): "in a fork, which ends",
    (
        "megatron_grpo/models/exact/kernels.py",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    ): "torch's setting for this",
    ("megatron_grpo/observability/trackers.py", "threading.excepthook"): "Python's hook for this",
    ("megatron_grpo/rewards/sandbox/sandbox_driver.py", "sys.stdin"): "files of a process that runs a program",
    ("megatron_grpo/rewards/sandbox/sandbox_driver.py", "sys.stdout"): "the same",
    ("megatron_grpo/rewards/sandbox/sandbox_driver.py", "sys.stderr"): "the same",
    ("megatron_grpo/rollout/vllm/loading_shapes.py", "view.__class__"): "of a view that is made there",
    ("tools/benchmark/tools_cost.py", "engine.submit"): "of an engine that is made there: turns have a length",
    ("tools/others_verl.py", "config.get"): "of a namespace that is made there",
}
# Instruments: they count or imitate what is called, in a process of their own.
INSTRUMENTS = {
    "tools/benchmark/operations.py": "counts the operations of an update",
    "tools/benchmark/peers/vllm_plugin/drawn_lengths.py": "a plug-in of vLLM's, for runs of other systems",
    "tools/benchmark/rollout.py": "measures vLLM without our record of log-probabilities",
    "tools/benchmark/scale.py": "imitates torch.distributed for worlds of many ranks",
}
# Fields of megatron-core's that hold functions: of its configuration, an optimizer, and a sharded tensor.
FIELDS = "finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func".split()
FIELDS += ["init_state_fn", "merge_fn"]


def assigned(source: str) -> list[str]:
    """Return the names of other packages, and the methods of objects, that a source assigns to.

    A method is an attribute that is set to a function. Modules and classes of ours are no concern of this test, nor are
    the fields of layer specifications.
    """
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, KINDS)]
    foreign, ours, functions = set(), {"self", "cls"}, set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                (ours if top in OURS else foreign).add(alias.asname or top)
        elif isinstance(node, ast.ImportFrom):
            top = (node.module or "").partition(".")[0]
            (ours if top in OURS else foreign).update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.add(node.name)

    def is_function(value: ast.expr | None) -> bool:
        if isinstance(value, ast.Call):
            return _dotted(value.func).rpartition(".")[2] in ("partial", "staticmethod", "classmethod", "MethodType")
        return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)

    found = []
    for target, value in itertools.chain.from_iterable(map(_assignments, nodes)):
        name = _dotted(target)
        root, _, attribute = name.partition(".")[0], *name.rpartition(".")[1:]
        is_method = attribute == "__class__" or (is_function(value) and attribute not in FIELDS)
        if root in foreign:
            wrong = name != "os.environ"
        else:
            wrong = is_method and name and root not in ours and ".submodules." not in name
        found += [name] if wrong else []
    return found


KINDS = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.Assign, ast.Delete, ast.AugAssign, ast.AnnAssign, ast.Call),
)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Yield the attributes that a node sets, each with its value; "*" is any of the module's."""
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        value = getattr(node, "value", None)
        for target in node.targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                several = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
                pairs += zip(target.elts, value.elts if several else [None] * len(target.elts), strict=True)
            else:
                pairs.append((target, value))
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.Call):
        called = _dotted(node.func)
        if called in ("setattr", "delattr") or called.endswith("patch.object"):
            owner, name, *value = node.args
            name = name.value if isinstance(name, ast.Constant) else "*"
            if called.endswith("patch.object"):
                value = [ast.Lambda()]  # whatever it is
            pairs = [(ast.Attribute(owner, name), value[0] if value else None)]
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "update" and _is_vars(node.func.value):
            pairs = [(ast.Attribute(node.func.value.args[0], "*"), None)]
    for target, value in pairs:
        if isinstance(target, ast.Subscript) and _is_vars(target.value):
            target = ast.Attribute(target.value.args[0], "*")
        if isinstance(target, ast.Attribute):
            yield target, value


def _dotted(node: ast.expr) -> str:
    """Return "a.b.c" for this expression, or "" for one that is no such name."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_vars(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _dotted(value.func) == "vars" and bool(value.args)


def test_only_patches_replaces_names():
    found = {}
    for file in FILES:
        name = str(file.relative_to(REPO))
        if file.parent == PATCHES or name in INSTRUMENTS:
            continue
        wrong = [target for target in assigned(file.read_text()) if (name, target) not in ALLOWED]
        if wrong:
            found[name] = wrong
    assert found == {}, "make an entry of megatron_grpo/patches"


def test_no_exception_is_stale():
    allowed = [(file, target) for file, target in ALLOWED if target not in assigned((REPO / file).read_text())]
    assert allowed == []
    assert [file for file in INSTRUMENTS if not assigned((REPO / file).read_text())] == []


@pytest.mark.parametrize(
    "source, name",
    [
        ("import torch\ntorch.cuda.stream = None", "torch.cuda.stream"),
        ("from megatron.core.optimizer import clip_grads as clip\nclip.x, y = 1, 2", "clip.x"),
        ("def f():\n    from vllm.a import Model\n    Model.forward = 1", "Model.forward"),
        ("import torch.distributed as dist\nsetattr(dist, 'all_gather', 1)", "dist.all_gather"),
        ("from unittest import mock\nimport torch\nmock.patch.object(torch, 'ones', 1)", "torch.ones"),
        ("import torch\ndel torch.x", "torch.x"),
        ("import torch\nvars(torch).update(a=1)", "torch.*"),
        ("import torch\nvars(torch)['a'] = 1", "torch.*"),
        ("from functools import partial\ndef f(layer):\n    layer.forward = partial(max, 1)", "layer.forward"),
        ("def f(optimizer):\n    def step(): ...\n    optimizer.step = step", "optimizer.step"),
        ("def f(optimizer):\n    optimizer.step = lambda: 1", "optimizer.step"),
        ("def f(layer):\n    layer.__class__ = int", "layer.__class__"),
    ],
)
def test_an_assignment_is_found(source, name):
    assert assigned(source) == [name]


@pytest.mark.parametrize(
    "source",
    [
        "from megatron_grpo import models\nmodels.x = 1",
        "import os\nos.environ |= {}\nos.environ['A'] = '1'",
        "import torch\ntensor = torch.zeros(1)\ntensor.data = torch.ones(1)",
        "class A:\n    def f(self):\n        self.g = lambda: 1",
        "def f(config, scale):\n    config.grad_scale_func = lambda: 1",
    ],
)
def test_other_assignments_are_not(source):
    assert assigned(source) == []
