"""tools/checkpoint/convert.py: there and back again bit by bit, every spelling of a checkpoint, and what it refuses."""

import errno
import json
import os
import pickle
import re
import shutil
from argparse import Namespace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
from convert_tool import check_same, load_tool
from lock_holder import Holder
from slow import slow_except
from toy_checkpoints import FAMILIES, MAMBA_MOE, add_mtp, build, make, same_bits, tensors_of, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.utils import _split_tensor_factory
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_grpo.checkpointing import checkpoint, checkpoint_directory, data_files
from megatron_grpo.checkpointing.convert import conversion, torch_dist
from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf


@pytest.fixture(scope="module")
def convert():
    """A function that runs the tool in this process, which then is a process group of one."""
    tool = load_tool()
    initialize_distributed(parse_args([]))
    set_random_seed(1)
    yield lambda *words: tool.convert(tool.build_parser().parse_args([str(word) for word in words]))
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def source(tmp_path):
    make(tmp_path / "hf", "qwen3", tied=False)
    return tmp_path / "hf"


def stored(root):
    """Key -> (global shape, dtype) of the tensors of the newest checkpoint under a directory."""
    _, directory = checkpoint_directory.find(root)
    found = torch_checkpoint.FileSystemReader(directory).read_metadata().state_dict_metadata
    return {key: (value.size, value.properties.dtype) for key, value in found.items() if hasattr(value, "size")}


BOTH_WAYS = [("qwen3", torch.float32), *((family, torch.bfloat16) for family in (*FAMILIES, MAMBA_MOE))]
FEW_BOTH_WAYS = [("qwen3", torch.float32), ("deepseek_v3", torch.bfloat16)]


@pytest.mark.parametrize(("family", "dtype"), slow_except(FEW_BOTH_WAYS, BOTH_WAYS))
def test_there_and_back(convert, tmp_path, capsys, family, dtype):
    source, middle, target = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    make(source, family, tied=family in ("qwen3", "gemma2"), dtype=dtype)
    (source / "tokenizer.json").write_text("{}")
    convert("--hf-to-megatron", "--load", source, "--save", middle, "--verify")
    convert("--megatron-to-hf", "--load", middle, "--save", target, "--verify")
    check_same(source, target)
    out = capsys.readouterr().out
    assert out.count(f"verified: {len(tensors_of(source))} tensors") == 2
    assert out.count("the logits of 16 tokens differ from transformers' by at most") == 2
    for directory in (middle / "hf_assets", target):
        assert {"config.json", "generation_config.json", "tokenizer.json"} <= {p.name for p in directory.iterdir()}
    old, new = (json.loads((path / "config.json").read_text()) for path in (source, target))
    assert new["eos_token_id"] == old["eos_token_id"] == 2
    assert new["torch_dtype"] == str(dtype).removeprefix("torch.")
    if family == "qwen3":  # done again, both replace their own work
        convert("--hf-to-megatron", "--load", source, "--save", middle)
        convert("--megatron-to-hf", "--load", middle, "--save", target)


@pytest.mark.parametrize("family", slow_except(["deepseek_v3"], [*FAMILIES, MAMBA_MOE, "qwen3_moe of equal layers"]))
def test_written_as_a_built_model_saves(convert, tmp_path, family):
    """Keys, shapes and values are those that checkpointing.save_checkpoint writes, and it loads them."""
    name, *equal = family.split(" ", 1)
    hf_dir, converted, saved = tmp_path / "hf", tmp_path / "converted", tmp_path / "saved"
    model = make(hf_dir, name, tied=name == "gemma2", **({"mlp_only_layers": []} if equal else {}))
    if name in ("deepseek_v3", "qwen3_5_moe_text"):
        add_mtp(hf_dir, model)
    mtp = 1 if name == "qwen3_5_moe_text" else None  # its config.json leaves them open
    convert("--hf-to-megatron", "--load", hf_dir, "--save", converted, *(("--mtp-num-layers", "1") if mtp else ()))
    args = toy_args(hf_dir, save=str(saved), padded_vocab_size=128, **({"mtp_num_layers": 1} if mtp else {}))
    chunks = build(args)
    hf.load_hf(chunks, args, hf_dir)
    checkpoint.save_checkpoint(args, 7, chunks, None, None, {})
    assert stored(converted) == stored(saved)
    ours, theirs = (
        dist_checkpointing.load_plain_tensors(str(checkpoint_directory.find(root)[1])) for root in (converted, saved)
    )
    assert all(same_bits(ours[key], theirs[key]) for key in theirs if torch.is_tensor(theirs[key]))
    convert("--megatron-to-hf", "--load", saved, "--save", tmp_path / "back")
    check_same(hf_dir, tmp_path / "back")
    loaded = build(args)
    checkpoint.load_weights(converted, loaded)
    assert all(map(torch.equal, loaded[0].parameters(), chunks[0].parameters()))


class InFp8(torch.nn.Module):
    """A stand-in for a layer of Transformer Engine, which stores its recipe as bytes."""

    loaded = ()

    def get_extra_state(self):
        return torch.frombuffer(bytearray(pickle.dumps("e4m3")), dtype=torch.uint8)

    def set_extra_state(self, state):
        self.loaded = (*self.loaded, state)


def test_stored_recipes_of_fp8_are_not_loaded(convert, source, tmp_path):
    """After a load the recipe is that of the flags. The converter sees weights only."""
    args = toy_args(source, save=str(tmp_path / "saved"), padded_vocab_size=128)

    def build_with_recipes():
        chunks = build(args)
        for layer in chunks[0].decoder.layers:
            layer.in_fp8 = InFp8()
        return chunks

    chunks = build_with_recipes()
    hf.load_hf(chunks, args, source)
    checkpoint.save_checkpoint(args, 7, chunks, None, None, {})
    _, directory = checkpoint_directory.find(tmp_path / "saved")
    keys = torch_checkpoint.FileSystemReader(directory).read_metadata().state_dict_metadata
    assert any("in_fp8._extra_state" in key for key in keys)
    convert("--megatron-to-hf", "--load", tmp_path / "saved", "--save", tmp_path / "back", "--verify")
    check_same(source, tmp_path / "back")
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "without")
    for root in "saved", "without":
        restored = build_with_recipes()
        checkpoint.load_weights(tmp_path / root, restored)
        assert all(map(torch.equal, restored[0].parameters(), chunks[0].parameters()))
        assert [layer.in_fp8.loaded for layer in restored[0].decoder.layers] == [()] * args.num_layers


def megatron_lm(root, hf_dir, fused=True, singleton=False, common_pt=False, **more):
    """What Megatron-LM saves: megatron-core's own model of its local spec, the arguments, and an optimizer's state.

    `common_pt`: as megatron-core saved before 0.19, the values that are not tensors are in a file of their own.
    """
    args = toy_args(hf_dir, padded_vocab_size=128)
    config = transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if not fused:
        for layer in spec.layer_specs:
            layer.submodules.sharded_state_dict_keys_map = {}
    model = GPTModel(
        config,
        spec,
        vocab_size=128,
        max_sequence_length=128,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
    )
    hf.load_hf([model], args, hf_dir)
    sharded = model.sharded_state_dict(metadata={"singleton_local_shards": singleton, "dp_cp_group": None})
    stored_args = {name: value for name, value in vars(args).items() if name not in ("model_family", "explicit")}
    weight = next(value for key, value in sharded.items() if key.endswith("final_layernorm.weight"))
    state = {
        "args": Namespace(**{**stored_args, "model_type": ModelType.encoder_or_decoder, **more}),
        "checkpoint_version": 3.0,
        "iteration": 100,
        "model": sharded,
        "optimizer": {
            "optimizer": {"param_groups": [{"lr": 1e-3, "step": 100}]},
            "state": {"exp_avg": dist_checkpointing.ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.decoder.final_layernorm.weight", weight.data.clone()
            )},
        },
    }  # fmt: skip
    directory = checkpoint_directory.iteration_directory(root, 100)
    directory.mkdir(parents=True)
    if common_pt:
        state, common = extract_sharded_base(state)
        torch.save(common, directory / "common.pt")
    checkpoint.write_state(state, directory)
    (directory / "checksums.json").unlink()
    (root / checkpoint_directory.LATEST).write_text("100")


# Each family and each spelling once; then every pair.
SPELLINGS = [("llama", {}), ("qwen3", {"fused": False}), ("qwen3_moe", {"singleton": True})]
SPELLINGS += [("qwen2", {"common_pt": True})]
PAIRS = [(family, spelling) for family, _ in SPELLINGS for _, spelling in SPELLINGS]


@pytest.mark.parametrize(("family", "spelling"), slow_except(SPELLINGS[1:3], PAIRS), ids=str)
def test_megatron_lms_own_checkpoints(convert, tmp_path, family, spelling):
    make(tmp_path / "hf", family, tied=family == "qwen3")
    megatron_lm(tmp_path / "megatron", tmp_path / "hf", **spelling)
    convert(
        "--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back",
        "--hf-config", tmp_path / "hf", "--verify",
    )  # fmt: skip
    check_same(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("common_pt", [False, True])
def test_megatron_lms_weights_are_loaded_into_a_model(convert, source, tmp_path, common_pt):
    megatron_lm(tmp_path / "megatron", source, common_pt=common_pt)
    args = toy_args(source, padded_vocab_size=128)
    loaded, expected = build(args), build(args)
    checkpoint.load_weights(tmp_path / "megatron", loaded)
    hf.load_hf(expected, args, source)
    assert all(map(torch.equal, loaded[0].parameters(), expected[0].parameters()))


def test_mamba_of_megatron_lms_layer_is_refused(tmp_path):
    key = "decoder.layers.0.mixer.in_proj.weight.z"  # as megatron.core.ssm.mamba_mixer writes it
    with pytest.raises(GrpoError, match=r"holds Mamba-2 of Megatron-LM's own layer, .* Hugging Face directory"):
        checkpoint_directory.check_recurrent_layers(tmp_path, [key])


def test_delta_nets_of_megatron_lms_layer_are_refused(convert, tmp_path):
    """Its layer divides the projection into queries, keys, values, gates and two scalars of each value head."""
    make(tmp_path / "hf", "qwen3_5_text", tied=False)
    args = toy_args(tmp_path / "hf")
    (model,) = chunks = build(args)
    sharded = model.sharded_state_dict(metadata={"dp_cp_group": None})
    keys, values = (
        args.linear_num_key_heads * args.linear_key_head_dim,
        args.linear_num_value_heads * args.linear_value_head_dim,
    )
    lines = keys, keys, values, values, args.linear_num_value_heads, args.linear_num_value_heads
    for key, entry in sharded.items():
        if key.endswith("in_proj.weight"):
            names = ["query", "key", "value", "z", "beta", "alpha"]
            sharded[key] = _split_tensor_factory(entry, lines, names, 0)  # as megatron.core.ssm.gated_delta_net
    directory = checkpoint_directory.iteration_directory(tmp_path / "megatron", 100)
    directory.mkdir(parents=True)
    checkpoint.write_state({"iteration": 100, "checkpoint_version": 3.0, "model": sharded}, directory)
    (directory / "checksums.json").unlink()
    (tmp_path / "megatron" / checkpoint_directory.LATEST).write_text("100")
    refusal = "iter_0000100 holds gated delta nets of Megatron-LM's own layer, .* Hugging Face directory"
    with pytest.raises(GrpoError, match=refusal):
        checkpoint.load_weights(tmp_path / "megatron", chunks)
    command = ["--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back"]
    with pytest.raises(GrpoError, match=refusal):
        convert(*command, "--hf-config", tmp_path / "hf")


class RunsCode:
    """A value that creates a directory when it is unpickled without restrictions."""

    def __init__(self, directory):
        self.directory = directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory),)


@pytest.mark.parametrize("common_pt", [False, True])
def test_a_common_state_that_runs_code_is_refused(convert, source, tmp_path, common_pt):
    """megatron-core would unpickle that of the data files."""
    megatron_lm(tmp_path / "megatron", source, common_pt=common_pt, extra=RunsCode(tmp_path / "ran"))
    chunks = build(toy_args(source, padded_vocab_size=128))
    with pytest.raises(GrpoError, match=r"cannot be read: it holds a posix\.mkdir, which could run code"):
        checkpoint.load_weights(tmp_path / "megatron", chunks)
    assert not (tmp_path / "ran").exists()


def test_without_a_common_state_a_checkpoint_is_incomplete(convert, source, tmp_path):
    megatron_lm(tmp_path / "megatron", source, common_pt=True)
    with mock.patch.object(data_files, "COMMON_STATE_INDEX", MetadataIndex("none")):
        (tmp_path / "megatron/iter_0000100/common.pt").unlink()
        with pytest.raises(GrpoError, match=r"iter_0000100 has no common state: \S+common\.pt is missing"):
            checkpoint.load_weights(tmp_path / "megatron", build(toy_args(source, padded_vocab_size=128)))


def test_megatron_core_loads_what_is_written(convert, source, tmp_path):
    """Megatron-LM reads checkpoints with these functions."""
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "converted")
    args = toy_args(source, save=str(tmp_path / "saved"), padded_vocab_size=128)
    chunks = build(args)
    hf.load_hf(chunks, args, source)
    checkpoint.save_checkpoint(args, 7, chunks, None, None, {"position": 3})
    for root, iteration, extra in (("converted", 0, {}), ("saved", 7, {"position": 3})):
        _, directory = checkpoint_directory.find(tmp_path / root)
        assert not (directory / "common.pt").exists()
        state = dist_checkpointing.load({}, str(directory))
        assert (state["iteration"], state["checkpoint_version"], state["extra_state"]) == (iteration, 3.0, extra)
        loaded = dist_checkpointing.load_plain_tensors(str(directory))
        assert torch.equal(loaded["output_layer.weight"], chunks[0].output_layer.weight)


def test_megatron_lms_arguments_are_compared_and_read_safely(convert, source, tmp_path):
    words = ("--megatron-to-hf", "--save", tmp_path / "back", "--hf-config", source)
    for name, there, here, common_pt in (
        ("num_query_groups", 8, 4, True),
        ("rotary_base", 5, 10000, False),
        ("use_rope_scaling", True, False, True),
    ):
        megatron_lm(tmp_path / name, source, common_pt=common_pt, **{name: there})
        with pytest.raises(GrpoError, match=rf"trained with {name} {there}, but .*hf/config\.json has {here}"):
            convert(*words, "--load", tmp_path / name)
    for common_pt, file in ((True, "common.pt"), (False, "__0_0.distcp")):
        root = tmp_path / file
        megatron_lm(root, source, extra=Fraction(1, 2), common_pt=common_pt)
        with pytest.raises(GrpoError, match=rf"{re.escape(file)} cannot be read: it holds a fractions\.Fraction"):
            convert(*words, "--load", root)
    assert not (tmp_path / "back").exists()


def test_another_dtype(convert, source, tmp_path):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron", "--dtype", "bfloat16", "--verify")
    convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back", "--verify")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert all(same_bits(before[name].to(torch.bfloat16), after[name]) for name in before)


def test_pytorch_bin(convert, source, tmp_path):
    torch.save(tensors_of(source), source / "pytorch_model.bin")
    for file in source.glob("*.safetensors*"):
        file.unlink()
    words = ("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron")
    with pytest.raises(GrpoError, match="--pytorch-bin"):
        convert(*words)
    convert(*words, "--pytorch-bin")
    convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back")
    after = tensors_of(tmp_path / "back")
    before = torch.load(source / "pytorch_model.bin", weights_only=True)
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)


def test_one_parameter_is_held_at_a_time(convert, tmp_path, monkeypatch):
    """The memory of what torch was given to write is free when it is given the next parameter."""
    make(tmp_path / "hf", "qwen3_moe", tied=False)
    given = []

    def save(tensor, stream, save=torch.save):
        if isinstance(tensor, torch.Tensor):
            given.append(StorageWeakRef(tensor.untyped_storage()))
            alive.append(sum(not storage.expired() for storage in given))
        return save(tensor, stream)

    alive = []
    monkeypatch.setattr(torch, "save", save)
    convert("--hf-to-megatron", "--load", tmp_path / "hf", "--save", tmp_path / "megatron")
    assert len(given) > 50 and max(alive) == 1


def test_chunks_are_those_of_the_layout(convert, source, tmp_path):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "auto")
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "tp2", "--tensor-model-parallel-size", 2)
    sizes = {}
    for name in ("auto", "tp2"):
        _, directory = checkpoint_directory.find(tmp_path / name)
        tensors = torch_dist.Checkpoint(directory).tensors
        for part in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1"):
            chunks = tensors[f"decoder.layers.{part}.weight"].chunks
            sizes[name, part.split(".")[1]] = len(chunks), tuple(chunks[0].sizes)
    assert sizes == {
        ("auto", "linear_qkv"): (2, (1, 256, 64)),
        ("auto", "linear_proj"): (2, (1, 64, 128)),
        ("auto", "linear_fc1"): (2, (1, 192, 64)),
        ("tp2", "linear_qkv"): (4, (1, 128, 64)),
        ("tp2", "linear_proj"): (4, (1, 64, 64)),
        ("tp2", "linear_fc1"): (8, (1, 48, 64)),  # a rank's gate rows, and its up rows
    }


def test_dry_run_prints_the_table_and_writes_nothing(convert, source, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron", "--dry-run")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 2 * 8
    assert (
        "decoder.layers.self_attention.linear_qkv.weight[1] [256, 64] [grouped, split over TP by rows, by process "
        "1] - model.layers.1.self_attn.q_proj.weight [128, 64] + model.layers.1.self_attn.k_proj.weight [64, 64] + "
        "model.layers.1.self_attn.v_proj.weight [64, 64]"
    ) in lines
    assert not (tmp_path / "megatron").exists()


def test_refusals(convert, source, tmp_path, monkeypatch):
    into = ("--hf-to-megatron", "--load", source)
    out = ("--save", tmp_path / "out")
    with pytest.raises(GrpoError, match="--save is missing"):
        convert(*into)
    with pytest.raises(GrpoError, match="the same directory"):
        convert(*into, "--save", source)
    with pytest.raises(GrpoError, match=r"linear_qkv\.weight cannot be sharded with tensor-parallel size 3"):
        convert(*into, "--dry-run", "--tensor-model-parallel-size", 3)
    with pytest.raises(GrpoError, match="2 layers cannot be divided into 3 equal pipeline stages"):
        convert(*into, "--dry-run", "--pipeline-model-parallel-size", 3)
    with pytest.raises(GrpoError, match="no experts cannot be divided over 2 ranks"):
        convert(*into, "--dry-run", "--expert-model-parallel-size", 2)
    with pytest.raises(SystemExit):
        convert(*into, *out, "--tensor-model-parallel-size", 0)
    with pytest.raises(GrpoError, match="no checkpoint in"):
        convert("--megatron-to-hf", "--load", source, *out)
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("20\n")
    with pytest.raises(GrpoError, match="holds a training run's checkpoints"):
        convert(*into, "--save", run)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(GrpoError, match=r"out cannot be written: it needs .* GB, 1e-06 GB are free: make room"):
            convert(*into, *out)
    with monkeypatch.context() as patch:

        def full(*arguments):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(torch, "save", full)
        with pytest.raises(GrpoError, match=r"cannot be written .*No space left"):
            convert(*into, *out)
    assert not list((tmp_path / "out").glob("iter_*"))
    convert(*into, "--save", tmp_path / "megatron")
    back = ("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(GrpoError, match=r"back cannot be written: .*No space left"):
            convert(*back)
    assert not [path for path in tmp_path.iterdir() if "back" in path.name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--megatron-to-hf --tensor-model-parallel-size 2", "a Hugging Face directory has no parallel configuration"),
        ("--hf-to-hf --merge-lora a --pipeline-model-parallel-size 2", "has no parallel configuration"),
        ("--hf-to-megatron --expert-tensor-parallel-size 2", "no effect on a model without experts"),
        ("--megatron-to-hf --pytorch-bin", "--pytorch-bin goes with --hf-to-megatron only"),
        ("--hf-to-hf --merge-lora a --pytorch-bin", "--pytorch-bin goes with --hf-to-megatron only"),
        ("--hf-to-megatron --hf-config a", "--hf-config goes with --megatron-to-hf only"),
        ("--hf-to-megatron --verify --dry-run", "leave one of them out"),
    ],
)
def test_flags_without_an_effect_are_refused(convert, source, tmp_path, words, message):
    load = source
    if "--megatron-to-hf" in words:
        load = tmp_path / "megatron"
        convert("--hf-to-megatron", "--load", source, "--save", load)
    with pytest.raises(GrpoError, match=message):
        convert(*words.split(), "--load", load, "--save", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_does_not_replace_what_it_reads(convert, source, tmp_path):
    """The Megatron checkpoint lies in a Hugging Face directory, which an export there would delete with it."""
    convert("--hf-to-megatron", "--load", source, "--save", source / "megatron")
    with pytest.raises(GrpoError, match=r"--save \S*hf contains \S*hf/megatron, which the export would replace"):
        convert("--megatron-to-hf", "--load", source / "megatron", "--save", source)
    assert checkpoint_directory.latest_iteration(source / "megatron") == 0


def test_a_killed_conversion_does_not_take_the_room_of_the_next(convert, source, tmp_path, monkeypatch):
    out, megatron = tmp_path / "out", tmp_path / "megatron"
    for left, words in (
        (megatron / "iter_0000000.tmp", ("--hf-to-megatron", "--load", source, "--save", megatron)),
        (tmp_path / ".out.partial", ("--megatron-to-hf", "--load", megatron, "--save", out)),
    ):
        left.mkdir(parents=True)
        rest = left / "rest"
        rest.touch()
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _, rest=rest: SimpleNamespace(free=2**30 * (not rest.exists()))
        )
        convert(*words)
    check_same(source, out)


def test_another_process_that_writes_to_save_is_named(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "RunLock", partial(conversion.RunLock, patience=0.0))
    words = "--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron"
    with Holder(tmp_path / "megatron") as other:
        with pytest.raises(GrpoError, match=f"is in use by the run of process {other.process.pid} on "):
            convert(*words)
        assert os.listdir(tmp_path / "megatron") == ["run.lock"]
    convert(*words)
    assert not (tmp_path / "megatron" / "run.lock").exists()


def test_an_export_that_was_killed_between_its_renames_is_there_again(convert, source, tmp_path, monkeypatch):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron")
    shutil.copytree(source, tmp_path / ".out.old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(GrpoError, match="No space left"):
        convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "out")
    check_same(source, tmp_path / "out")


def test_an_export_without_a_tokenizer_is_announced(convert, source, tmp_path, capsys):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron")
    shutil.rmtree(tmp_path / "megatron/hf_assets")
    convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "out")
    assert "megatron has no hf_assets: the export has no tokenizer" in capsys.readouterr().out


def forget(directory):
    """Make a checkpoint one that this program did not write: it has no files besides megatron-core's."""
    for name in ("files.json", "args.json", "checksums.json"):
        (directory / name).unlink()


def change_metadata(directory, change):
    """Change what a checkpoint's index says of its tensors; it then is one that this program did not write."""
    forget(directory)
    metadata = torch_checkpoint.FileSystemReader(directory).read_metadata()
    change(metadata.state_dict_metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


NORM = "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: change_metadata(d, lambda t: t.pop(NORM)), rf"lacks {NORM} \(the model's {NORM}\)"),
        (
            lambda d: change_metadata(d, lambda t: t.update(lora=t[NORM])),
            "holds lora, which is not in the model family",
        ),
        (
            lambda d: change_metadata(d, lambda t: setattr(t[NORM], "size", torch.Size([65]))),
            rf"{NORM} has shape \(65,\), but the configuration says \(64,\)",
        ),
        (lambda d: forget(d) or os.truncate(d / "__0_0.distcp", 1000), "damaged: __0_0.distcp has"),
        (lambda d: (d / "__0_0.distcp").unlink(), "damaged: __0_0.distcp is missing"),
        (lambda d: (d / "files.json").unlink(), "damaged: files.json is missing"),
        (lambda d: forget(d) or (d / ".metadata").unlink(), r"incomplete: \.metadata is missing"),
        (
            lambda d: forget(d) or (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "has the format 'zarr'",
        ),
    ],
)
def test_damaged_checkpoints_are_refused(convert, source, tmp_path, damage, message):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron")
    directory = tmp_path / "megatron" / "iter_0000000"
    damage(directory)
    into = "--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back"
    with pytest.raises(GrpoError, match=message):
        convert(*into, "--hf-config", source)
    assert not (tmp_path / "back").exists()


def test_a_damaged_checkpoint_is_named_not_the_export(convert, source, tmp_path):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron")
    data = tmp_path / "megatron/iter_0000000/__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    message = "^checkpoint .*iter_0000000 is damaged: the content of __0_0.distcp has changed .*; to use another"
    with pytest.raises(GrpoError, match=message):
        convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "out")


def test_a_checkpoint_of_megatron_lms_needs_a_configuration(convert, source, tmp_path):
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron")
    forget(tmp_path / "megatron" / "iter_0000000")
    with pytest.raises(GrpoError, match=r"does not store its model family.*--hf-config DIR"):
        convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back")


def test_verify_names_the_tensor_that_changed(convert, source, tmp_path, monkeypatch):
    """The export is spoilt between writing and reading."""
    convert("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron")

    def spoil(partial, out_dir, rename=hf._replace):
        rename(partial, out_dir)
        tensors = load_file(out_dir / "model.safetensors")
        tensors["model.norm.weight"][-1] += 1e-6
        save_file(tensors, out_dir / "model.safetensors")

    monkeypatch.setattr(hf, "_replace", spoil)
    with pytest.raises(GrpoError, match=r"tensor model\.norm\.weight differs from decoder\.final_layernorm\.weight in"):
        convert("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back", "--verify")


def test_verify_compares_logits(convert, source, tmp_path, monkeypatch, capsys):
    """Tensors that are right in a model that is not: another theta than transformers reads in config.json."""
    config = json.loads((source / "config.json").read_text())
    words = ("--hf-to-megatron", "--load", source, "--save", tmp_path / "megatron", "--verify")

    def other_theta(args, *others, theirs=conversion._logits):
        return theirs(replaced(args, rotary_base=2), *others)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_logits", other_theta)
        with pytest.raises(GrpoError, match="the logits of 16 tokens differ from transformers' by at most"):
            convert(*words)
    monkeypatch.setattr(conversion.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    convert(*words)
    assert "logits were not compared: two float32 models need" in capsys.readouterr().out
    assert config["rope_parameters"]["rope_theta"] != 2
