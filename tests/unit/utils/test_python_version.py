"""An older Python ends with one line, before it reads syntax that it does not know."""

import ast
import runpy
import sys

import pytest
from ranks import REPO


def test_an_older_python_is_named(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(SystemExit, match=r"^megatron-grpo needs Python 3\.12 or 3\.13, and .* is 3\.1"):
        runpy.run_path(str(REPO / "megatron_grpo/__init__.py"))


@pytest.mark.parametrize("file", ["pretrain_grpo.py", "megatron_grpo/__init__.py"])
def test_an_older_python_reads_the_files_before_the_check(file):
    ast.parse((REPO / file).read_text(), feature_version=(3, 9))
