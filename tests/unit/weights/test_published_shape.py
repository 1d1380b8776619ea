"""tools/benchmark/published_shape.py: its flags give the architecture that --load-hf reads from the same file."""

import sys

import pytest
from ranks import REPO

from megatron_grpo.training.arguments import parse_args
from megatron_grpo.weights import families, hf
from tools.benchmark import published_shape


@pytest.mark.parametrize("model", ["gpt-oss-20b"])
def test_flags_are_those_of_the_config(model, monkeypatch, capsys):
    directory = REPO / "tests/data/instruct_models" / model
    monkeypatch.setattr(sys, "argv", ["published_shape.py", str(directory)])
    published_shape.main()
    parsed, config = parse_args(capsys.readouterr().out.splitlines()), hf.read_config(directory)
    for dest, value in families.for_hf_config(config).args_from_hf(config).items():
        found = getattr(parsed, dest)
        assert (list(found) if isinstance(found, tuple) else found) == value, dest
