"""The reference of an adapter with a module that is saved whole: the base, at the start and after a resume."""

import json
from pathlib import Path

import bad_input_runs
from bad_input_bench import Bench
from bad_input_runs import TRAIN, launch
from run_files import metrics_of
from test_sampling_resume import REWARD, ROWS, SeededEngine

# bad_input_runs installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from safetensors.torch import save_file

FLAGS = """--beta 0.1 --save-interval 1 --no-save-hf --lora-weight-sync merged --steps-per-generation 1"""


def write_adapter(directory, model) -> None:
    """Write PEFT's files of an adapter of v_proj whose B is 0, and of another norm than the model's."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    directory.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["v_proj"],
        "modules_to_save": ["model.norm"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {"model.norm.weight": 2 + torch.rand(hidden)}
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}.self_attn.v_proj."
        tensors |= {f"{path}lora_A.weight": torch.rand(4, hidden), f"{path}lora_B.weight": torch.zeros(heads, 4)}
    tensors = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "adapter_model.safetensors")


def test_a_resume_keeps_the_reference(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr(bad_input_runs, "StubEngine", SeededEngine)
    monkeypatch.setattr(SeededEngine, "sigterm_in", None)
    write_adapter(tmp_path / "adapter", Path(tiny_models["qwen3"]))
    found = {}
    for name in ("alone", "resumed"):
        (tmp_path / name).mkdir()
        bench = Bench(tmp_path / name, tiny_models["qwen3"])
        words = [*bench.good, *bench.data(*map(json.dumps, ROWS), name="rated.jsonl"), *bench.plugin(REWARD)]
        words += [*FLAGS.split(), "--load-adapter", str(tmp_path / "adapter")]
        if name == "resumed":
            assert launch(TRAIN, [*words, "--train-iters", "2", "--exit-interval", "1"]) == 0
            words += ["--load", str(bench.save)]
        assert launch(TRAIN, [*words, "--train-iters", "2"]) == 0
        found[name] = [row["kl"] for row in metrics_of(bench.save)]
    assert len(found["alone"]) == 2 and min(found["alone"]) > 0.01
    assert found["resumed"] == found["alone"]
