"""Arguments do not change: neither by an assignment, nor by a step that resolves them, nor anywhere in the code."""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest
from good_args import MODEL, MOE, RUN

from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.resolve import FLAGS, resolve_args
from megatron_grpo.training.resolve import MODEL as OF_MODEL
from megatron_grpo.utils.arguments import Arguments, replaced, resolved

REPO = Path(__file__).resolve().parents[3]
NAMES = {"args", "own", "flags", "ref_args", "teach_args", "teacher_args"}  # of arguments in the code
# Modules that read which flags were given: those with rules, those that parse and resolve, and the record of a run.
READ_GIVEN = re.compile(
    r"(\w+/)*arguments\.py|utils/(core_rules|rules|batch_sizes)\.py|lora/(base|files)\.py|training/\w+\.py"
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


def written(tree: ast.AST):
    """Yield the lines that write into an object with a name of ``NAMES``."""
    for node in ast.walk(tree):
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


def of_arguments(node: ast.AST) -> bool:
    name = getattr(node, "attr", None) or getattr(node, "id", None)
    return name is not None and name.lstrip("_") in NAMES


WRITES = "args.a = 1", "self.args.a, x = 1, 2", "own.a |= 1", 'setattr(flags, "a", 1)', "vars(args).update(a=1)"


def test_nothing_writes_into_arguments():
    assert [list(written(ast.parse(line))) for line in WRITES] == [[1]] * len(WRITES)
    found = [
        f"{path.relative_to(REPO)}:{line}"
        for folder in ("megatron_grpo", "tools")
        for path in sorted((REPO / folder).rglob("*.py"))
        for line in written(ast.parse(path.read_text()))
    ]
    assert found == []


def test_what_was_given_is_read_where_arguments_are_resolved():
    root = REPO / "megatron_grpo"
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "explicit"
    }
    assert [name for name in sorted(readers) if not READ_GIVEN.fullmatch(name)] == []
