"""Settings of adapters: what they select, what is refused, how they come back from files."""

import json

import pytest
from toy_checkpoints import build, make, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from good_args import validated
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_grpo.lora import base, files
from megatron_grpo.lora.attach import adapters, attach, trained
from megatron_grpo.lora.layers import scaling
from megatron_grpo.lora.stream import stream_adapter, stream_merged
from megatron_grpo.lora.table import check
from megatron_grpo.lora.targets import saved_weights, targets
from megatron_grpo.reference.reference_model import BaseReference
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf, safetensors_files
from megatron_grpo.weights.stream import stream_hf

LAYERS = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dense")
    make(directory, "qwen3", tied=True)
    return directory


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts")
    make(directory, "qwen3_moe", tied=False)
    return directory


def arguments(directory, *entries, **more):
    return toy_args(directory, **{"lora_rank": 4, "lora_target_modules": list(entries or ["all-linear"]), **more})


def adapted(directory, *entries, **more):
    """The directory's model with adapters, and its arguments."""
    args = arguments(directory, *entries, **more)
    chunks = build(args)
    hf.load_hf(chunks, args, directory)
    attach(args, chunks)
    return args, chunks


def test_entries_select_layers(dense, experts):
    every = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in LAYERS.split()]
    assert targets(arguments(dense)) == every
    assert targets(arguments(dense, "v_proj", r".*1\.mlp\.up_.*")) == [every[2], every[9], every[12]]
    assert targets(arguments(dense, "0.self_attn.v_proj")) == [every[2]]
    routers = targets(arguments(experts, "all-router"))
    assert routers == [f"model.layers.{layer}.mlp.gate" for layer in (0, 1, 3)]
    found = targets(arguments(experts))
    assert not set(routers) & set(found) and sum(".experts.7." in name for name in found) == 3 * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_target_modules": ["qproj"]}, "qproj matches nothing in the model, which has .*q_proj"),
        ({"lora_target_modules": ["lm_head"]}, "lm_head matches nothing"),
        ({"lora_target_modules": ["all-router"]}, "all-router matches nothing"),
        ({"lora_target_modules": ["(q_proj"]}, "is not a regular expression"),
        ({"lora_rank": 65}, r"--lora-rank 65 is larger than the layer \S*q_proj, which has 64 inputs and 128 outputs"),
        ({"lora_modules_to_save": ["embed_tokens"]}, "embed_tokens is also the output layer"),
        ({"lora_modules_to_save": ["q_proj"], "lora_target_modules": ["v_proj"]}, "q_proj is one weight with .*k_proj"),
        ({"lora_modules_to_save": ["o_proj"]}, "o_proj is in --lora-modules-to-save and in --lora-target-modules"),
    ],
)
def test_refusals_name_the_entry(dense, settings, message):
    args = arguments(dense)
    args = replaced(args, **settings)
    with pytest.raises(GrpoError, match=message):
        check(args)


def test_an_expert_cannot_be_saved_whole(experts):
    with pytest.raises(GrpoError, match="is an expert's, which is not trained whole: name it in --lora-target-modules"):
        saved_weights(arguments(experts, "o_proj", lora_modules_to_save=[r".*experts\.0\.(gate|up)_proj"]))


def test_tensors_of_all_experts_have_no_adapters(tmp_path):
    """Qwen3.5's: a name that a shared expert has, too, is that one's; a name that only they have is refused."""
    make(tmp_path, "qwen3_5_moe_text", tied=False)
    found = targets(arguments(tmp_path, "down_proj"))
    assert found == [f"model.layers.{layer}.mlp.shared_expert.down_proj" for layer in range(4)]
    with pytest.raises(GrpoError, match=r"gate_up_proj matches only \S+0\.mlp\.experts\.gate_up_proj, a tensor of all"):
        targets(arguments(tmp_path, "gate_up_proj"))
    with pytest.raises(GrpoError, match=r"shared_expert_gate, the gate of .*: give it in --lora-modules-to-save"):
        targets(arguments(tmp_path, "shared_expert_gate"))
    gates = saved_weights(arguments(tmp_path, "o_proj", lora_modules_to_save=["shared_expert_gate"]))
    assert [weight.name for weight in gates] == [
        f"decoder.layers.{layer}.mlp.shared_experts.gate_weight" for layer in range(4)
    ]
    with pytest.raises(GrpoError, match="gate_up_proj is an expert's, which is not trained whole: leave it out"):
        saved_weights(arguments(tmp_path, "o_proj", lora_modules_to_save=["gate_up_proj"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-alpha 8", "--lora-alpha needs --lora-rank"),
        ("--load-adapter a", "--load-adapter needs --lora-rank"),
        ("--lora-rank 4 --beta 0.1 --ref-load a", "--ref-load and --lora-rank cannot both be given"),
        ("--lora-rank 4 --lora-use-dora --lora-dropout 0.1", "--lora-use-dora and --lora-dropout cannot both be given"),
        ("--lora-rank 4 --reference-adapter a --beta 0", "--reference-adapter needs --beta"),
        ("--lora-rank 4 --lora-weight-sync adapter --lora-use-dora", "vLLM has no DoRA"),
    ],
)
def test_combinations_are_refused(flags, message):
    with pytest.raises(GrpoError, match=message):
        validated(flags)


def test_defaults_of_files():
    args = validated("--lora-rank 4 --save out")
    assert (args.save_adapter, args.save_hf, args.lora_weight_sync) == ("out/adapter", None, "adapter")
    assert validated("--lora-rank 4 --lora-use-dora").lora_weight_sync == "merged"


def test_scale(dense):
    assert scaling(arguments(dense, lora_alpha=6.0)) == 1.5
    assert scaling(arguments(dense, lora_alpha=6.0, lora_use_rslora=True)) == 3.0


def test_initial_values(world, dense):
    """As PEFT: kaiming_uniform with a = sqrt(5) is uniform within 1 / sqrt(in); gaussian has deviation 1 / rank."""
    args, chunks = adapted(dense, lora_init="default")
    found = dict(stream_adapter(chunks, args))
    a, b = (found[f"model.layers.1.mlp.down_proj.lora_{x}.weight"] for x in "AB")
    assert a.shape == (4, 96) and b.shape == (64, 4) and not b.any()
    assert 0.95 < a.abs().max() * 96**0.5 <= 1 and abs(a.std() * (3 * 96) ** 0.5 - 1) < 0.1
    assert not torch.equal(a, found["model.layers.0.mlp.down_proj.lora_A.weight"])
    gaussian = dict(stream_adapter(adapted(dense, lora_init="gaussian")[1], args))
    assert abs(torch.cat([t.flatten() for n, t in gaussian.items() if "_A" in n]).std() * 4 - 1) < 0.05


def test_merged_streams_change_no_bit_of_the_base(world, dense):
    """200 times, with B other than zero; merging into the weights and subtracting again would drift."""
    args, chunks = adapted(dense, bf16=True)
    for adapter in adapters(chunks):
        adapter.initialize(lambda name, shape: 0.1 * torch.randn(shape))
    before = {name: tensor.clone() for name, tensor in stream_hf(chunks, args)}
    first = {name: tensor.clone() for name, tensor in stream_merged(chunks, args)}
    assert sum(not torch.equal(first[name], tensor) for name, tensor in before.items()) == 2 * 7
    for _ in range(200):
        last = dict(stream_merged(chunks, args))
    assert all(torch.equal(tensor, before[name]) for name, tensor in stream_hf(chunks, args))
    assert all(torch.equal(tensor, first[name]) for name, tensor in last.items())


def test_the_base_is_known_by_its_weights(world, dense, experts):
    args, chunks = adapted(dense)
    same = base.checksum(args, chunks)
    assert same == base.checksum(*adapted(dense, "v_proj"))
    with torch.no_grad():
        next(chunks[0].parameters())[3, 5] += 1e-6
    assert base.checksum(args, chunks) != same

    stored = {dest: getattr(args, dest) for dest in base.SHARED}
    stored["lora_base"] = {"path": "a", "dtype": "float32", "checksum": same}
    args, own = replaced(args, load="run"), {**stored["lora_base"], "path": "b"}
    base.check(args, own, stored)
    for change, message in (
        ({"lora_base": {**stored["lora_base"], "checksum": "0"}}, "an adapter of other base weights: those of a"),
        ({"lora_rank": 8}, "holds an adapter with --lora-rank 8, this run has 4"),
        ({"lora_base_dtype": "fp8"}, "with --lora-base-dtype fp8, this run has model"),
        ({"lora_rank": None}, "holds all weights, no adapter"),
    ):
        with pytest.raises(GrpoError, match=message):
            base.check(args, own, stored | change)


def test_an_adapter_that_cannot_be_written(world, dense, tmp_path, monkeypatch):
    args, chunks = adapted(dense, "v_proj")

    def full(tensors, path, metadata):
        path.write_bytes(b"part")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors_files, "save_file", full)
    with pytest.raises(GrpoError, match=r"the adapter cannot be written: .*No space left"):
        files.save_adapter(args, chunks, tmp_path)
    assert not list(tmp_path.iterdir())


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": None}, "has r null, not a number"),
        ({"r": "four"}, 'has r "four", not a number'),
        ({"lora_alpha": None}, "has lora_alpha null, not a number"),
        ({"target_modules": None}, "has target_modules null, not a list of names or a regular expression"),
        ({"target_modules": 5}, "has target_modules 5, not a list"),
        ({"modules_to_save": 7}, "has modules_to_save 7, not a list of names"),
    ],
)
def test_damaged_settings_of_an_adapter(dense, tmp_path, change, message):
    changed = {key: value for key, value in (CONFIG | change).items() if value is not None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(changed))
    with pytest.raises(GrpoError, match=message):
        files.resolve_adapter(toy_args(dense), tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "directory"])
def test_damaged_weights_of_an_adapter(dense, tmp_path, damage):
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    weights = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.zeros(4)}, weights)
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        weights.unlink()
        weights.mkdir()
    args = replaced(toy_args(dense), explicit=frozenset())
    with pytest.raises(GrpoError, match=r"adapter_model\.safetensors is truncated or not a safetensors file"):
        files.resolve_adapter(args, tmp_path)


def test_files_come_back_bit_for_bit_and_others_are_refused(world, dense, experts, tmp_path):
    args, chunks = adapted(dense, "v_proj", "o_proj", lora_alpha=6.0, lora_use_dora=True)
    for adapter in adapters(chunks):
        adapter.initialize(lambda name, shape: torch.randn(shape))
    files.save_adapter(args, chunks, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 6.0, True)
    assert config["target_modules"] == ["o_proj", "v_proj"]

    again = replaced(toy_args(dense), explicit=frozenset({"lora_alpha"}))
    with pytest.raises(GrpoError, match=r"--lora-alpha is 32.0, the adapter in .* has 6.0"):
        files.resolve_adapter(again, tmp_path)
    again = replaced(again, explicit=frozenset())
    again = replaced(again, **files.resolve_adapter(again, tmp_path))
    other = build(again)
    hf.load_hf(other, again, dense)
    attach(again, other)
    files.load_adapter(again, other, tmp_path)
    found = dict(stream_adapter(other, again))
    assert all(torch.equal(found.pop(name), tensor) for name, tensor in stream_adapter(chunks, args)) and not found

    for entries, message in ((["v_proj", "k_proj"], "has no tensor"), (["v_proj"], "whose layer has no adapter")):
        wrong = adapted(dense, *entries, lora_use_dora=True)
        with pytest.raises(GrpoError, match=message):
            files.load_adapter(*wrong, tmp_path)
    with pytest.raises(GrpoError, match=r"has no tensor .*layers.2"):
        files.load_adapter(*adapted(experts, "v_proj", "o_proj", lora_use_dora=True), tmp_path)
    wrong = adapted(dense, "v_proj", "o_proj", lora_use_dora=True, lora_rank=2)
    with pytest.raises(GrpoError, match=r"has shape \(4, 64\), this run's is \(2, 64\)"):
        files.load_adapter(*wrong, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {"v_proj": 8}}))
    with pytest.raises(GrpoError, match=r"has rank_pattern .* which is not supported"):
        files.resolve_adapter(again, tmp_path)


def test_the_reference_is_the_base_and_leaves_no_trace(world, dense, tmp_path):
    """With the adapter switched off, with another adapter, and with a module that is trained whole."""
    args, chunks = adapted(dense, "v_proj", lora_modules_to_save=["model.norm"], reference_adapter=None)
    base_weights = {name: tensor.clone() for name, tensor in stream_hf(chunks, args)}
    reference = BaseReference(args, chunks)
    with torch.no_grad():
        for parameter in trained(chunks):
            parameter.add_(torch.randn(parameter.shape))
    policy = [parameter.clone() for parameter in trained(chunks)]
    with reference.ready(chunks):
        assert not any(adapter.enabled for adapter in adapters(chunks))
        assert all(torch.equal(tensor, base_weights[name]) for name, tensor in stream_hf(chunks, args))
    assert all(adapter.enabled for adapter in adapters(chunks))
    assert all(torch.equal(a, b) for a, b in zip(trained(chunks), policy, strict=True))

    args = replaced(args, reference_adapter="another")
    other = BaseReference(args, chunks)  # of the present values
    with torch.no_grad():
        for parameter in trained(chunks):
            parameter.add_(1)
    changed = [parameter.clone() for parameter in trained(chunks)]
    with other.ready(chunks):
        assert all(adapter.enabled for adapter in adapters(chunks))
        assert all(torch.equal(a, b) for a, b in zip(trained(chunks), policy, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(trained(chunks), changed, strict=True))
