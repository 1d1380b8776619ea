"""tools/checkpoint/convert.py: there and back again bit by bit, and what it refuses."""

import importlib.util
import json
from pathlib import Path

import pytest
from toy_checkpoints import FAMILIES, make, same_bits, tensors_of

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from megatron_grpo.errors import GrpoError

TOOL = Path(__file__).resolve().parents[1] / "tools" / "checkpoint" / "convert.py"


@pytest.fixture(scope="module")
def convert():
    """A function that runs the tool in this process, which then is a process group of one."""
    spec = importlib.util.spec_from_file_location("convert_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    yield lambda *words: tool.convert(tool.build_parser().parse_args([str(word) for word in words]))
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.fixture
def source(tmp_path):
    make(tmp_path / "hf", "qwen3", tied=False)
    return tmp_path / "hf"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(convert, tmp_path, capsys, family, dtype):
    source, middle, target = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    make(source, family, tied=family in ("qwen3", "gemma2"), dtype=dtype)
    (source / "tokenizer.json").write_text("{}")
    convert("--hf-to-megatron", "--load", source, "--save", middle, "--verify")
    convert("--megatron-to-hf", "--load", middle, "--save", target, "--verify")
    before, after = tensors_of(source), tensors_of(target)
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    assert capsys.readouterr().out.count(f"verified: {len(before)} tensors") == 2
    for directory in (middle / "hf_assets", target):
        assert {"config.json", "generation_config.json", "tokenizer.json"} <= {p.name for p in directory.iterdir()}
    old, new = (json.loads((path / "config.json").read_text()) for path in (source, target))
    assert new["eos_token_id"] == old["eos_token_id"] == 2
    assert new["torch_dtype"] == str(dtype).removeprefix("torch.")
    # Done again, both replace their own work.
    convert("--hf-to-megatron", "--load", source, "--save", middle)
    convert("--megatron-to-hf", "--load", middle, "--save", target)


def test_another_dtype(convert, source, tmp_path):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron", "--dtype", "bfloat16", "--verify")
    convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back", "--verify")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert all(same_bits(before[name].to(torch.bfloat16), after[name]) for name in before)


@pytest.mark.distributed
def test_two_processes_write_what_one_reads(convert, source, tmp_path, torchrun):
    words = ("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron", "--verify")
    torchrun(2, TOOL, *words, "--tensor-model-parallel-size", 2, timeout=120)
    convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back", "--verify")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)


def test_dry_run_prints_the_table_and_writes_nothing(convert, source, tmp_path, capsys):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron", "--dry-run")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 2 * 8
    assert (
        "decoder.layers.1.self_attention.linear_qkv.weight [256, 64] [grouped_qkv, split over TP by rows] <- "
        "model.layers.1.self_attn.q_proj.weight [128, 64] + model.layers.1.self_attn.k_proj.weight [64, 64] + "
        "model.layers.1.self_attn.v_proj.weight [64, 64]"
    ) in lines
    assert not (tmp_path / "megatron").exists()


def test_refusals(convert, source, tmp_path, monkeypatch):
    into = ("--hf-to-megatron", "--load", source)
    with pytest.raises(GrpoError, match="--save is missing"):
        convert(*into)
    with pytest.raises(GrpoError, match="the same directory"):
        convert(*into, "--save", source)
    with pytest.raises(GrpoError, match="1 processes for a tensor x pipeline parallel size of 2"):
        convert(*into, "--save", tmp_path / "out", "--tensor-model-parallel-size", 2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(GrpoError, match=r"linear_qkv\.weight cannot be laid out for tensor-parallel size 3"):
        convert(*into, "--dry-run", "--tensor-model-parallel-size", 3)
    with pytest.raises(GrpoError, match="2 layers cannot be divided into 3 equal pipeline stages"):
        convert(*into, "--dry-run", "--pipeline-model-parallel-size", 3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(GrpoError, match="no checkpoint in"):
        convert("--megatron-to-hf", "--load", source, "--save", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("20\n")
    with pytest.raises(GrpoError, match="holds a training run's checkpoints"):
        convert(*into, "--save", run)


def test_verify_names_the_tensor_that_changed(convert, source, tmp_path, monkeypatch):
    """The export is spoilt between writing and reading."""
    from megatron_grpo.weights import hf

    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron")

    def spoil(partial, out_dir, rename=hf._replace):
        rename(partial, out_dir)
        tensors = load_file(out_dir / "model.safetensors")
        tensors["model.norm.weight"][-1] += 1e-6
        save_file(tensors, out_dir / "model.safetensors")

    monkeypatch.setattr(hf, "_replace", spoil)
    with pytest.raises(GrpoError, match=r"tensor model\.norm\.weight differs from the model's"):
        convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "out", "--verify")
