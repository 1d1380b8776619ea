"""Parts that Gemma has and other families have not, against transformers: norms, embeddings, log-probabilities."""

import pytest
from toy_checkpoints import VOCAB, build, make, packed, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from megatron_grpo.data.pack import IGNORED_LABEL
from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.models.norm import RMSNorm, with_post_layernorm
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.weights import hf


def config(**more) -> TransformerConfig:
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "normalization": "RMSNorm"}
    return TransformerConfig(**shape, add_bias_linear=False, cuda_graph_modules=[], **more)


@torch.no_grad()
def test_zero_centred_norms_round_like_gemmas():
    """A weight of 1/512 is lost in bf16 once 1 is added to it."""
    ours = RMSNorm(config(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16), 64, eps=1e-6)
    theirs = Gemma2RMSNorm(64, eps=1e-6).bfloat16()
    assert torch.equal(ours.weight, theirs.weight)  # both begin with 0
    for weight in (ours.weight, theirs.weight):
        weight.copy_(torch.linspace(-0.5, 0.5, 64))
        weight[::2] = 1 / 512
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(ours(x), theirs(x))
    theirs.weight.zero_()
    assert not torch.equal(ours(x)[:, ::2], theirs(x)[:, ::2])


def test_a_norm_behind_a_linear_layer(world):
    settings = config(sequence_parallel=False, layernorm_epsilon=1e-6)
    linear = with_post_layernorm(RowParallelLinear, RMSNorm)(
        12,
        64,
        config=settings,
        init_method=torch.nn.init.ones_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )
    with torch.no_grad():
        linear.post_layernorm.weight.copy_(torch.arange(64.0))
    out, bias = linear(torch.full((3, 1, 12), 5.0))
    # Every output is 12 * 5 before the norm, which makes that 1.
    torch.testing.assert_close(out, torch.arange(64.0).expand(3, 1, 64))
    assert bias is None
    assert sorted(name for name, _ in linear.named_parameters()) == ["post_layernorm.weight", "weight"]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = linear.sharded_state_dict("linear_proj.", (), {"dp_cp_group": group})
    assert sharded["linear_proj.post_layernorm.weight"].global_shape == (64,)


@torch.no_grad()
def test_bf16_embeddings_are_scaled_like_gemmas(world, tmp_path):
    """The square root of 80 is no number of bf16."""
    theirs = make(tmp_path, "gemma2", tied=True, dtype=torch.bfloat16, hidden_size=80)
    args = toy_args(tmp_path, bf16=True)
    (chunk,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    while hasattr(chunk, "module"):
        chunk = chunk.module
    ids = torch.arange(VOCAB)[None]
    ours, *_ = chunk._preprocess(input_ids=ids, position_ids=ids, packed_seq_params=packed(ids[0]))
    expected = theirs.bfloat16().model.embed_tokens(ids)
    assert expected.dtype is torch.bfloat16 and torch.equal(ours.transpose(0, 1), expected)


@torch.no_grad()
def test_log_probabilities_are_of_capped_logits(world, tmp_path):
    theirs = make(tmp_path, "gemma2", tied=True)
    args = toy_args(tmp_path)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(VOCAB, (2, 40), generator=generator)
    labels[:10] = IGNORED_LABEL
    found = model(
        ids[None], torch.arange(40)[None], attention_mask=None, packed_seq_params=packed(ids), labels=labels[None]
    )
    log_p = theirs(ids[None]).logits[0, 10:].log_softmax(-1)
    torch.testing.assert_close(found[0], log_p[torch.arange(30), labels[10:]], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("flags", ["--geglu", "--geglu --bias-activation-fusion"])
def test_geglu_is_the_tanh_approximation(world, flags):

    args = parse_args(
        f"""--num-layers 1 --hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 2 --disable-bias-linear
        --normalization RMSNorm --transformer-impl local {flags}""".split()
    )
    mlp = MLP(
        transformer_config_from_args(args),
        MLPSubmodules(ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ffn_hidden_size=8,
    )
    x = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(3)) * 40
    gate, up = (x @ mlp.linear_fc1.weight.T).chunk(2, -1)
    expected = (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ mlp.linear_fc2.weight.T
    exact = (torch.nn.functional.gelu(gate) * up) @ mlp.linear_fc2.weight.T
    found, _ = mlp(x)
    torch.testing.assert_close(found, expected, atol=2e-7, rtol=1e-6)
    assert (expected - exact).abs().max() > 1e-5
