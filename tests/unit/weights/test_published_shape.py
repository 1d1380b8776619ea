"""tools/benchmark/published_shape.py: its flags give the architecture that --load-hf reads from the same file."""

import subprocess
import sys

import pytest
from ranks import REPO

from megatron_grpo.training.arguments import parse_args
from megatron_grpo.weights import families, hf


@pytest.mark.parametrize("model", ["gpt-oss-20b"])
def test_flags_are_those_of_the_config(model):
    directory = REPO / "tests/data/instruct_models" / model
    command = [sys.executable, REPO / "tools/benchmark/published_shape.py", directory]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    parsed, config = parse_args(words), hf.read_config(directory)
    for dest, value in families.for_hf_config(config).args_from_hf(config).items():
        found = getattr(parsed, dest)
        assert (list(found) if isinstance(found, tuple) else found) == value, dest
