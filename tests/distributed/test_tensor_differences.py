"""`check_engine.py --layers`: the first tensor that differs is the one that a changed weight reaches first."""

import json

import pytest
from ranks import run_torchrun

from tools.make_tiny_model import build_parser, make

OF = {
    "input_layernorm": "input norm",
    "self_attention.linear_qkv": "query, key, value",
    "self_attention.linear_proj": "attention's projection",
    "pre_mlp_layernorm": "norm before the MLP",
    "mlp.linear_fc1": "gate and up",
    "mlp.linear_fc2": "down",
}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_tensor_is_that_of_the_changed_weight(tmp_path, ranks):
    """On one rank, and on two tensor-parallel ones of engine and trainer."""
    sizes = f"--save {tmp_path}/model --shape qwen2 --steps 0 --quiet --num-layers 2 --hidden-size 128"
    make(build_parser().parse_args(sizes.split()))
    flags = ["--load-hf", tmp_path / "model", "--transformer-impl", "local", "--max-completion-length", "16"]
    flags += ["--tensor-model-parallel-size", ranks, "--vllm-tensor-parallel-size", ranks]
    done = run_torchrun(ranks, "tests/distributed/tensor_differences_worker.py", *flags)
    found, *others = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(others) == ranks - 1 and found.pop("") is None
    layers = 0
    for name, first in found.items():
        kind = next((words for part, words in OF.items() if f".{part}." in name), None)
        if kind is not None:
            assert first == f"layer {name.split('.')[2]}: {kind}", name
            layers += 1
        elif "final_layernorm" in name:
            assert first == "final norm"
    assert layers == 2 * 7  # of which one is a bias
