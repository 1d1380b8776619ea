"""Adapters in servers, against doubles: what they load and complete with, what is proven, what is refused."""

from pathlib import Path

import pytest
import torch
from server_double import VOCABULARY, Double, called, tiny_model
from test_servers import GENERATIONS, PROMPTS, REQUESTS, arguments

from megatron_grpo.lora import table
from megatron_grpo.rollout.engine import generate
from megatron_grpo.rollout.vllm.server import build_vllm_servers
from megatron_grpo.rollout.weight_sync.adapter_sync import probe_adapter
from megatron_grpo.utils.errors import GrpoError

KINDS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()


@pytest.fixture
def start():
    doubles = []

    def start_one(**config) -> Double:
        doubles.append(Double(max_lora_rank=8, **config))
        return doubles[-1]

    yield start_one
    for double in doubles:
        double.stop()


def settings(doubles, tmp_path, **more):
    shape = {"num_query_groups": 1, "num_attention_heads": 2, "ffn_hidden_size": 48, "kv_channels": 16}
    shape |= {"model_family": "llama", "padded_vocab_size": VOCABULARY, "group_query_attention": True}
    lora = {"lora_rank": 4, "lora_target_modules": ["all-linear"], "lora_weight_sync": "adapter", "load_hf": "toy"}
    urls = [double.url for double in doubles]
    return arguments(
        **{
            "vllm_server_base_url": urls,
            "vllm_mode": "server",
            "weight_sync_dir": str(tmp_path),
            "vllm_server_timeout": 60.0,
            **shape,
            **lora,
            **more,
        }
    )


def adapter(args, seed: int) -> dict[str, torch.Tensor]:
    """An adapter of all layers, as it is sent; with seed 0 B is zero, as at the start of a run."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for weight in table.adapter_table(args) for name, shape in weight.hf.items()}
    made = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 0 * tensor if "lora_B" in name and not seed else tensor for name, tensor in made.items()}


def with_adapter(matrices: dict[str, torch.Tensor]):
    model = tiny_model(99)  # the doubles'
    for name, up in matrices.items():
        if "lora_B" in name:
            down = matrices[name.replace("lora_B", "lora_A")]
            model.get_submodule(name.removesuffix(".lora_B.weight")).weight.data += up @ down
    return model


def check_completions(engine, matrices: dict[str, torch.Tensor], version: int) -> None:
    """The log-probabilities are those of the model with the adapter merged."""
    with engine.rollout(seed=3):
        done = generate(engine, REQUESTS)
    assert {v for completion in done for v in completion.weight_versions} == {version}
    model = with_adapter(matrices)
    for completion in done:
        prompt = PROMPTS[completion.id // GENERATIONS]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (chosen - torch.tensor(completion.log_probs)).abs().max() < 1e-5


def test_servers_complete_with_the_newest_adapter(one_process, start, tmp_path):
    """Of every version, also after the restart of one of two servers; one adapter a server, one directory are left."""
    doubles = [start(), start()]
    args = settings(doubles, tmp_path)
    engine = build_vllm_servers(args)
    for version in range(3):
        engine.wake_weights()
        engine.update_adapter(adapter(args, version), version)
        assert engine.compare_adapter({}) == []
        if version == 1:
            doubles[0].restart()
            engine.wake_weights()
            assert not engine.has_weights and engine.has_base
            engine.update_adapter(adapter(args, version), version)
            assert engine.compare_adapter({}) == []
        check_completions(engine, adapter(args, version), version)
        assert [len(double.adapters) for double in doubles] == [1, 1]
        (directory,) = tmp_path.iterdir()
        assert len(list(directory.iterdir())) == 1
    engine.close()
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_has_no_effect_is_found(one_process, start, tmp_path):
    """At the sync in which a server ignores it; the same adapter sent again, and a B of zeros, change nothing."""
    doubles = [start(), start()]
    args = settings(doubles, tmp_path)
    engine = build_vllm_servers(args)
    for version, seed in enumerate((0, 1, 1)):
        engine.update_adapter(adapter(args, seed), version)
        assert engine.compare_adapter({}) == []
    doubles[1].fault = "ignored adapter"
    engine.update_adapter(adapter(args, 2), 3)
    assert engine.compare_adapter({}) == []  # it computes without any adapter now, and not with the last one
    engine.update_adapter(adapter(args, 3), 4)
    assert engine.compare_adapter({}) == [
        f"{doubles[1].url} returns the log-probabilities of the last adapter, bit for bit"
    ]
    engine.close()


def test_the_probe_finds_layers_without_adapters(one_process, start, tmp_path):
    doubles = [start(), start(without_slot="o_proj")]
    args = settings(doubles, tmp_path)
    engine = build_vllm_servers(args)
    engine.update_adapter(adapter(args, 1), 7)
    with pytest.raises(GrpoError, match=rf"all layers o_proj of {doubles[1].url} changes no log-probability") as error:
        probe_adapter(engine)
    assert not [kind for kind in KINDS if kind in str(error.value) and kind != "o_proj"]
    assert doubles[0].url not in str(error.value)
    doubles[1].config.pop("without_slot")
    probe_adapter(engine)
    check_completions(engine, adapter(args, 1), 7)  # the adapter is the run's again
    engine.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_lora_rank": None}, "it takes no adapters: start it with --enable-lora --max-lora-rank 8"),
        ({"max_lora_rank": 2}, "its --max-lora-rank is 2, but --lora-rank is 4"),
        ({"updating": False}, "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_servers_that_cannot_load_adapters_are_refused(one_process, start, tmp_path, config, message):
    double = start()
    double.config |= config
    with pytest.raises(GrpoError, match=message):
        build_vllm_servers(settings([double], tmp_path))
    assert not called(double, "/v1/load_lora_adapter")


def test_a_directory_that_cannot_be_written(one_process, start, tmp_path):
    args = settings([start()], tmp_path / "absent")
    engine = build_vllm_servers(args)
    with pytest.raises(GrpoError, match=r"--weight-sync-dir .* the adapter cannot be written"):
        engine.update_adapter(adapter(args, 1), 1)
    engine.close()
    assert not Path(tmp_path / "absent").exists()
