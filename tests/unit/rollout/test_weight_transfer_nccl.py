"""What can be checked without GPUs of the weight transfer over NCCL: which elements go where."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from interpreted import last_line
from toy_checkpoints import build, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from vision_models import make

from megatron_grpo.rollout.arguments import SPARSE_FAMILIES
from megatron_grpo.rollout.weight_sync import nccl
from megatron_grpo.rollout.weight_sync.nccl import NcclTransfer, SparseTransfer, address_for, runtime_places
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.stream import Described, stream_hf

SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.self_attn.k_proj.bias": (2,),
    "model.layers.0.self_attn.v_proj.bias": (2,),
    "model.layers.0.mlp.gate_proj.weight": (6, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 6),
    "lm_head.weight": (10, 4),
}
DESCRIBED = [Described(name, torch.bfloat16, torch.Size(shape)) for name, shape in SHAPES.items()]


@pytest.fixture
def transfer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = SparseTransfer(SimpleNamespace(weight_sync_method="sparse"))
    monkeypatch.undo()
    return made


def test_patches_rebuild_what_vllm_stacks(transfer):
    """The first sync sends all, the second what has changed; vLLM's parameters are then the stacked weights."""
    torch.manual_seed(0)
    weights = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    places, held = runtime_places(DESCRIBED), {}

    def stacked() -> dict[str, torch.Tensor]:
        layer = "model.layers.0."
        qkv = {
            f"{layer}self_attn.qkv_proj.{kind}": torch.cat(
                [weights[f"{layer}self_attn.{p}_proj.{kind}"] for p in "qkv"]
            )
            for kind in ("weight", "bias")
        }
        both = torch.cat([weights[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        alone = ("model.embed_tokens.weight", f"{layer}mlp.down_proj.weight", "lm_head.weight")
        return qkv | {f"{layer}mlp.gate_up_proj.weight": both} | {name: weights[name] for name in alone}

    def sync() -> int:
        sent = 0
        for name, tensor in weights.items():
            parameter, offset = places[name]
            indices, values = transfer._changed(name, tensor)
            held.setdefault(parameter, torch.zeros(stacked()[parameter].shape, dtype=torch.bfloat16))
            held[parameter].view(-1)[offset + indices.long()] = values
            sent += len(indices)
        assert held.keys() == stacked().keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in stacked().items())
        return sent

    assert sync() == sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert sync() == 0
    weights["model.layers.0.self_attn.k_proj.weight"][1, 2] += 1
    weights["model.layers.0.self_attn.v_proj.bias"][0] *= -1
    weights["model.layers.0.mlp.up_proj.weight"][5] += 1
    assert sync() == 1 + 1 + 4


def test_a_sign_is_a_change(transfer):
    """0.0 and -0.0 are equal as numbers, not as bits."""
    transfer._changed("w", torch.zeros(3))
    indices, values = transfer._changed("w", torch.tensor([0.0, -0.0, 0.0]))
    assert indices.tolist() == [1] and values.signbit().all()


def test_this_hosts_address_as_the_servers_see_it():
    assert address_for(["http://127.0.0.1:8000", "http://localhost:8001"]) == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.vllm
def test_the_families_of_sparse_are_those_whose_tensors_vllm_has():
    """Of vLLM's own models: other names (vision, gemma4), other stacks (delta nets), computed ones (Mamba-2)."""
    found = json.loads(last_line(Path(__file__).with_name("sparse_names_worker.py")))
    assert len(found) > 15
    assert {family for family, fills in found.items() if fills} == set(SPARSE_FAMILIES)


def test_needs_gpus():
    with pytest.raises(GrpoError, match="needs GPUs: on CPUs use checkpoint"):
        SparseTransfer(SimpleNamespace(weight_sync_method="sparse"))


def test_servers_expect_what_the_stream_has(world, tmp_path, monkeypatch):
    """The first sync sends the frozen parts of a vision tower, the second does not, and a restarted server gets all."""
    make(tmp_path)
    args = toy_args(tmp_path, padded_vocab_size=264, freeze_vision_tower=True, weight_sync_method="nccl")
    model, announced = build(args), []
    monkeypatch.setattr(NcclTransfer, "_connect", lambda self, servers: None)
    monkeypatch.setattr(nccl, "_packing_in_init", lambda: False)
    monkeypatch.setattr(nccl, "_update", lambda servers, version, update, broadcast: announced.append(update))
    with monkeypatch.context() as gpus:
        gpus.setattr(torch.cuda, "is_available", lambda: True)
        transfer = NcclTransfer(args)
    sizes = []
    for version, only_trained in enumerate((False, True, False)):
        weights = stream_hf(model, args, only_trained=only_trained)
        transfer.send(weights, version, None)
        update = announced.pop()
        found = zip(update["names"], update["dtype_names"], update["shapes"], strict=True)
        sent = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in weights]
        assert [(name, f"torch.{dtype}", shape) for name, dtype, shape in found] == sent
        sizes.append(len(sent))
    assert sizes[0] == sizes[2] > sizes[1]
