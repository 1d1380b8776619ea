"""tools/check_export.py refuses what it cannot compare, before it loads anything."""

import importlib
import json
import os
import sys

import pytest


@pytest.mark.parametrize(
    ("config", "adapter", "message"),
    [
        (None, None, "no config.json"),
        ({"vision_config": {}}, None, "is a vision-language model"),
        ({}, {}, "no adapter_config.json"),
        ({}, {"adapter_config.json": {"use_dora": True}}, "has DoRA, which vLLM lacks"),
    ],
)
def test_refusals(config, adapter, message, tmp_path, monkeypatch, capsys):
    words = ["--hf", str(tmp_path), "--data", "none.jsonl"]
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if adapter is not None:
        for name, content in adapter.items():
            (tmp_path / name).write_text(json.dumps(content))
        words += ["--adapter", str(tmp_path)]
    # The tool sets variables for vLLM, which no other test may see.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["check_export.py", *words])
    assert importlib.import_module("tools.check_export").main() == 1
    assert message in capsys.readouterr().err
