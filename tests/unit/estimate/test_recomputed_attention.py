"""The estimate of --recompute-activations against the tensors that autograd saves in a model that is built."""

import pytest
import torch
from dry_run_worker import FAMILIES, TINY, arguments

from megatron_grpo.estimate.memory import Plan
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider, packed_seq_params
from megatron_grpo.parallel import initialize
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed

TOKENS, HEADS = 64, 4
DENSE = FAMILIES["dense"]
LATENT = """--model-family deepseek_v3 --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8
    --qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --num-layers 2 --num-experts 8 --moe-router-topk 2
    --moe-ffn-hidden-size 16 --moe-layer-freq ([0]+[1]) --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 16"""


@pytest.fixture
def process(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def saved_bytes(flags: str) -> int:
    """Return the bytes of the storages that a forward pass over one sequence saves, without parameters."""
    args = arguments(flags, 1)
    initialize_distributed(args)
    set_random_seed(1)
    (model,) = forward.build_model(args, model_provider)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    tokens = torch.arange(TOKENS) % 90
    offsets = torch.tensor([0, TOKENS], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(
            tokens[None],
            torch.arange(TOKENS)[None],
            attention_mask=None,
            labels=torch.arange(TOKENS)[None],
            padding_mask=torch.zeros(1, TOKENS, dtype=torch.bool) if args.num_experts else None,
            packed_seq_params=packed_seq_params(offsets, TOKENS, args.transformer_impl),
        )
    initialize.parallel_state.destroy_model_parallel()
    initialize.dist.destroy_process_group()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("family", "layers"), [(DENSE, 4), (LATENT, 2)])
def test_recomputed_attention_stores_what_the_estimate_says(family, layers, process):
    """Heads store a logarithm each (lse), which the estimate leaves out; one layer at a time is recomputed.

    Queries, keys and values of dense models enter attention as they are stored, so that nothing else is saved.
    """

    def estimate(flags: str) -> float:
        lengths = f"--max-prompt-length {TOKENS // 2} --max-completion-length {TOKENS // 2}"
        return Plan(arguments(f"{TINY} {family} {flags} {lengths}", 1)).memory(0).activations

    measured = saved_bytes(TINY + family) - saved_bytes(f"{TINY} {family} --recompute-activations")
    estimated = (estimate("") - estimate("--recompute-activations")) * layers / (layers - 1)
    logarithms = layers * TOKENS * HEADS * 4
    assert (estimated > 0) == (family == LATENT)
    assert measured == pytest.approx(estimated + logarithms, rel=1e-3, abs=64)
