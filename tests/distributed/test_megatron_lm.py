"""A checkpoint that Megatron-LM's training code wrote is loaded in every layout, and converted to Hugging Face.

tests/data/checkpoint_of_megatron_lm_0_19.tar.xz has the checkpoint of two updates (`save_checkpoint` of Megatron-LM
core_v0.19.0 with megatron-core 0.19.2: TP 2, the distributed optimizer's state with
--dist-ckpt-optim-fully-reshardable), and what Megatron-LM computed after it: logits, and loss and gradient norm of the
next update.
"""

import json
import shutil

import pytest
import torch
from ranks import REPO, run_torchrun
from transformers import AutoConfig, AutoModelForCausalLM

WORKER = "tests/distributed/megatron_lm_worker.py"
SHAPE = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "head_dim": 4}
SHAPE |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
SHAPE |= {"tie_word_embeddings": False, "torch_dtype": "float32"}


@pytest.fixture
def root(tmp_path):
    shutil.unpack_archive(REPO / "tests/data/checkpoint_of_megatron_lm_0_19.tar.xz", tmp_path)
    assert not list(tmp_path.rglob("common.pt"))
    return tmp_path / "run"


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "layouts"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_weights_optimizer_and_schedule_are_loaded_in_every_layout(root, ranks, layouts):
    out = run_torchrun(ranks, WORKER, root).stdout
    assert out.count(": loaded in ") == ranks * layouts, out


@pytest.mark.distributed
def test_transformers_computes_the_logits_of_megatron_lm(root, tmp_path):
    AutoConfig.for_model("qwen3", **SHAPE).save_pretrained(tmp_path / "hf")
    words = "--megatron-to-hf", "--load", root, "--save", tmp_path / "back", "--hf-config", tmp_path / "hf"
    run_torchrun(1, "tools/checkpoint/convert.py", *words, "--verify")
    expected = json.loads((root / "expected.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    with torch.no_grad():
        got = model(torch.tensor(expected["tokens"])).logits
    assert (got - torch.tensor(expected["logits"])).abs().max() < 1e-6
