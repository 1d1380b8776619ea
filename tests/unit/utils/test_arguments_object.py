"""Arguments do not change: neither by an assignment, nor by a step that resolves them, nor anywhere in the code."""

import ast
import copy
import pickle
import re
from functools import cache
from pathlib import Path

import pytest
from good_args import MODEL, MOE, RUN

from megatron_grpo.training.arguments import DERIVED, parse_args
from megatron_grpo.training.resolve import FLAGS, resolve_args
from megatron_grpo.training.resolve import MODEL as OF_MODEL
from megatron_grpo.utils.arguments import Arguments, replaced, resolved

REPO = Path(__file__).resolve().parents[3]
NAMES = {"args", "own", "flags", "ref_args", "teach_args", "teacher_args"}  # of arguments in the code
# Modules that read which flags were given: those with rules, those that parse and resolve, and the record of a run.
READ_GIVEN = re.compile(
    r"megatron_grpo/((\w+/)*(arguments|core_rules|rules|batch_sizes)|lora/(base|files)|training/\w+)\.py"
)


def test_an_assignment_names_the_attribute_and_the_way_to_a_changed_copy():
    args = parse_args(["--lr", "1e-6"])
    with pytest.raises(AttributeError, match=r"^args\.lr cannot be set: .*replaced\(args, lr=\.\.\.\)"):
        args.lr = 1e-5
    with pytest.raises(AttributeError, match=r"^args\.lr cannot be deleted"):
        del args.lr
    with pytest.raises(AttributeError, match=r"^args\.lr cannot be set"):
        setattr(args, "lr", 1e-5)  # noqa: B010
    with pytest.raises(AttributeError):
        args.learning_rate = 1e-5  # no flag


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args)), replaced])
def test_copies_are_equal_and_do_not_change_either(copied):
    args = parse_args(["--lr", "1e-6", "--reward-funcs", "a", "b"])
    again = copied(args)
    assert again == args and again is not args and type(again) is Arguments
    with pytest.raises(AttributeError):
        again.lr = 1e-5


def test_a_changed_copy_leaves_the_original():
    args = parse_args(["--lr", "1e-6"])
    assert (replaced(args, lr=1e-5, seed=3).lr, args.lr, args.seed) == (1e-5, 1e-6, 1234)
    counted = resolved(args, lambda a: {"seed": a.seed + 1}, lambda a: None, lambda a: {"num_epochs": a.seed})
    assert (counted.seed, counted.num_epochs, args.num_epochs) == (1235, 1235, None)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        MOE + " --moe-layer-recompute --moe-ffn-hidden-size 32",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto --recompute-granularity full",
        "--lora-rank 4 --save run --rollout-engine megatron",
        "--agent program.py:run --agent-python python --temperature 0.7 --top-p 0.9",
        "--loss-type gspo --rollout-importance-sampling-mode icepop --reward-funcs exact_match format",
        "--rollout-ranks 4 --global-batch-size 32 --max-staleness 1 --save run"
        " --rollout-importance-sampling-mode token_truncate",
    ],
)
def test_no_step_changes_the_values_of_the_arguments(flags):
    """Lists and dictionaries among the values could change, although the object does not."""
    args = parse_args(f"{MODEL} {RUN} {flags}".split())
    world_size = 8 - args.rollout_ranks
    args = replaced(args, world_size=world_size)
    for step in (*FLAGS, *OF_MODEL):
        before = copy.deepcopy(vars(args))
        found = step(args)
        assert vars(args) == before
        name = getattr(step, "func", step).__name__
        assert (found is None) == name.lstrip("_").startswith("check_"), name
        args = replaced(args, **(found or {}))
    assert resolve_args(args, world_size) == args  # resolved arguments say the same when they are resolved again


def nodes(source: str) -> list[ast.Attribute | ast.Call]:
    """Return the attributes and calls in a source."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute | ast.Call)]


@cache
def sources() -> dict[str, list[ast.Attribute | ast.Call]]:
    """Return the nodes of each file of the project; one walk serves all tests."""
    paths = [path for folder in ("megatron_grpo", "tools") for path in sorted((REPO / folder).rglob("*.py"))]
    return {str(path.relative_to(REPO)): nodes(path.read_text()) for path in paths}


def written(nodes: list[ast.Attribute | ast.Call]):
    """Yield the lines that write into an object with a name of ``NAMES``."""
    for node in nodes:
        match node:
            case ast.Attribute(value=value, ctx=ast.Store()):
                found = of_arguments(value)
            case ast.Call(func=ast.Name("setattr"), args=[first, *_]):
                found = of_arguments(first)
            case ast.Attribute(value=ast.Call(func=ast.Name("vars"), args=[first])):
                found = of_arguments(first) and node.attr in ("update", "pop", "setdefault", "clear")
            case _:
                found = False
        if found:
            yield node.lineno


def of_arguments(node: ast.AST, names=NAMES) -> bool:
    name = getattr(node, "attr", None) or getattr(node, "id", "")
    return name.lstrip("_") in names


WRITES = "args.a = 1", "self.args.a, x = 1, 2", "own.a |= 1", 'setattr(flags, "a", 1)', "vars(args).update(a=1)"


def test_nothing_writes_into_arguments():
    assert [list(written(nodes(line))) for line in WRITES] == [[1]] * len(WRITES)
    assert [f"{path}:{line}" for path, found in sources().items() for line in written(found)] == []


def test_every_attribute_that_the_code_reads_is_a_flag_or_derived():
    known = vars(parse_args([])).keys() | set(DERIVED) | set(dir(Arguments))
    found = [
        f"{path}:{node.lineno}: {node.attr}"
        for path, nodes in sources().items()
        for node in nodes
        if isinstance(node, ast.Attribute) and of_arguments(node.value, ["args"]) and node.attr not in known
    ]
    assert [line for line in found if line.startswith("megatron_grpo/")] == []  # tools have flags of their own


def test_what_was_given_is_read_where_arguments_are_resolved():
    readers = [
        path
        for path, nodes in sources().items()
        if any(isinstance(node, ast.Attribute) and node.attr == "explicit" for node in nodes)
    ]
    assert [path for path in readers if path.startswith("megatron_grpo/") and not READ_GIVEN.fullmatch(path)] == []
