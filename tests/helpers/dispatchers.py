"""What a token dispatcher sends to its experts and returns, on one rank, for tests on a CPU and on a GPU."""

from types import SimpleNamespace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
ALONE = SimpleNamespace(ep=ONE, tp=ONE, expt_tp=ONE, tp_ep=ONE)


def results(
    kind: type, hidden: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor, topk: int
) -> list[torch.Tensor]:
    """Return what experts receive, what the layer returns if expert e multiplies by e + 2, and gradients."""
    experts = probs.shape[1]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden.shape[-1],
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_pre_softmax=True,
        moe_router_topk=topk,
        moe_ffn_hidden_size=8,
    )
    dispatcher = kind(experts, list(range(experts)), config=config, pg_collection=ALONE)
    leaves = hidden.clone().requires_grad_(), probs.clone().requires_grad_()
    tokens, weights = dispatcher.dispatch_preprocess(leaves[0], chosen, leaves[1])
    tokens, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(tokens, weights))
    factors = torch.repeat_interleave(torch.arange(2, experts + 2), counts.cpu()).to(hidden)
    output = dispatcher.token_combine(dispatcher.combine_preprocess(tokens * (factors * weights)[:, None]))
    output = dispatcher.combine_postprocess(output)
    return [tokens, counts, weights, output, *torch.autograd.grad(output.square().sum(), leaves)]
