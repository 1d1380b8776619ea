"""Slots of LoRA adapters in vLLM: ranks, shards of tensor-parallel layers, the base model under the wrappers."""

from types import SimpleNamespace

import pytest
import torch

from megatron_grpo.rollout.vllm import adapter
from megatron_grpo.utils.errors import GrpoError


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_a_rank_is_padded_to_one_that_vllm_supports(rank, slot):
    assert adapter.slot_rank(rank) == slot


def test_a_rank_above_vllms_largest_is_refused():
    with pytest.raises(GrpoError, match="largest rank of vLLM's adapters is 512: give --lora-weight-sync merged"):
        adapter.slot_rank(513)


class Wrapper(torch.nn.Module):
    def __init__(self, base_layer: torch.nn.Module):
        super().__init__()
        self.base_layer = base_layer


class Manager:
    """As vLLM's: its length is the number of loaded adapters, so it is false before the first one."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.modules = model, {"0": model[0]}

    def __len__(self) -> int:
        return 0


def test_the_base_model_has_no_wrappers_even_before_the_first_adapter():
    model = torch.nn.Sequential(Wrapper(torch.nn.Linear(2, 2)))
    manager = SimpleNamespace(_adapter_manager=Manager(model))
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager, get_model=lambda: model))
    with adapter.base_model(worker) as base:
        assert [name for name, _ in base.named_parameters()] == ["0.weight", "0.bias"]
    assert [name for name, _ in model.named_parameters()] == ["0.base_layer.weight", "0.base_layer.bias"]


def test_random_adapters_are_zero_outside_their_kind():
    names = [f"model.layers.{layer}.self_attn.{kind}" for layer in range(2) for kind in ("q_proj", "o_proj")]
    like = {f"{name}.lora_A.weight": torch.empty(4, 6, device="meta") for name in names}
    like |= {f"{name}.lora_B.weight": torch.empty(6, 4, device="meta") for name in names}
    assert adapter.kinds(like) == ["q_proj", "o_proj"]
    made = adapter.random_adapter(like, "o_proj", torch.device("cpu"))
    assert {name for name, tensor in made.items() if tensor.any()} == {name for name in like if "o_proj" in name}


# Two tensor-parallel ranks of layers with 8 query heads and 1 or 4 key heads of 2 channels, without a vLLM.
def shards(layer, rows: list[int], rank: int) -> list[list[int]]:
    """Return the rows of B that a rank holds of each part; B's entries are the numbers of its rows."""
    layer.tp_rank, layer.tp_size = rank, 2
    pairs = [(torch.zeros(1, 3), torch.arange(n)[:, None].float()) for n in rows]
    return [b[:, 0].int().tolist() for _, b in adapter._shards(layer, pairs)]


def layer_of(kind: str, **attributes):
    from vllm.model_executor.layers import linear

    layer = object.__new__(getattr(linear, kind))
    layer.__dict__.update(attributes)
    return layer


@pytest.mark.parametrize(("key_heads", "replicas", "keys"), [(4, 1, [4, 5, 6, 7]), (1, 2, [0, 1])])
def test_rows_of_queries_keys_and_values(key_heads, replicas, keys):
    """With one key head for two ranks, both hold it."""
    sizes = {"head_size": 2, "num_heads": 4, "total_num_heads": 8, "total_num_kv_heads": key_heads}
    layer = layer_of("QKVParallelLinear", **sizes, num_kv_heads=max(1, key_heads // 2), num_kv_head_replicas=replicas)
    rows = [16, 2 * key_heads, 2 * key_heads]
    assert shards(layer, rows, 1) == [list(range(8, 16)), keys, keys]


def test_rows_of_fused_layers(monkeypatch):
    layer = layer_of("MergedColumnParallelLinear", output_sizes=[6, 6])
    assert shards(layer, [6, 6], 1) == [[3, 4, 5], [3, 4, 5]]
    assert shards(layer, [12], 1) == [[3, 4, 5, 9, 10, 11]]  # fused in the Hugging Face model, too
