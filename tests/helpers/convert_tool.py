"""tools/checkpoint/convert.py as a module, and the comparison of its output with the input."""

import importlib.util
from pathlib import Path
from types import ModuleType

from toy_checkpoints import same_bits, tensors_of

TOOL = Path(__file__).resolve().parents[2] / "tools" / "checkpoint" / "convert.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def check_same(directory, other):
    before, after = tensors_of(directory), tensors_of(other)
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
