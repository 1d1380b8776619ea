"""tools/check_export.py refuses what it cannot compare, before it loads anything."""

import importlib
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file


def main(monkeypatch, *words):
    # The tool sets variables for vLLM, which no other test may see.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["check_export.py", *map(str, words)])
    return importlib.import_module("tools.check_export").main()


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
    words = ["--hf", tmp_path, "--data", "none.jsonl"]
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if adapter is not None:
        for name, content in adapter.items():
            (tmp_path / name).write_text(json.dumps(content))
        words += ["--adapter", tmp_path]
    assert main(monkeypatch, *words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("damaged", ["model.safetensors", "adapter_model.safetensors"])
def test_a_truncated_file_is_named(damaged, tmp_path, monkeypatch, capsys):
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    for name in ("model.safetensors", "adapter_model.safetensors"):
        save_file({"a": torch.zeros(4)}, tmp_path / name)
    os.truncate(tmp_path / damaged, 20)
    assert main(monkeypatch, "--hf", tmp_path, "--adapter", tmp_path, "--data", "none.jsonl") == 1
    assert f"{tmp_path / damaged} is truncated or not a safetensors file" in capsys.readouterr().err


def test_counts_below_one_are_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    for flag in ("--max-prompts", "--max-completion-length"):
        assert main(monkeypatch, "--hf", tmp_path, "--data", "none.jsonl", flag, 0) == 1
        assert f"{flag} (0) must be at least 1" in capsys.readouterr().err


def test_the_gap_of_completions_that_part(monkeypatch):
    """The end of the shorter one counts as a token; a model of 10 tokens whose logits are t + its last input."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    gap = importlib.import_module("tools.check_export").gap
    asked = []

    def model(input_ids):
        asked.append(input_ids.tolist())
        logits = torch.arange(10.0).square() / 10 + input_ids[..., None]
        return SimpleNamespace(logits=logits)

    assert gap(model, [3, 4], [5, 7, 1], [5, 6, 1], eos=0) == pytest.approx((49 - 36) / 10)
    assert gap(model, [3, 4], [5], [5, 6], eos=9) == pytest.approx((81 - 36) / 10)
    assert asked == [[[3, 4, 5]], [[3, 4, 5]]]
