"""What test_router_replay_layouts.py runs: two updates with routing replay after the routers have moved, any layout.

    torchrun --nproc-per-node W tests/distributed/router_replay_worker.py OUT_DIR "NAME:FLAGS" ...

Rank 0 writes OUT_DIR/NAME.json, the metrics of the updates, and OUT_DIR/NAME.npy, the experts that were replayed.
"""

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

import pretrain_grpo
from megatron_grpo.models import forward, router_replay
from megatron_grpo.parallel.initialize import destroy_rank_groups, initialize_distributed
from megatron_grpo.reference.reference_model import BaseReference
from megatron_grpo.training.entry_point import run

MOE = "--recompute-granularity selective --recompute-modules moe"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

EXPERTS, TOPK, MOE_LAYERS = 8, 2, 3
MODEL = f"""--model-family qwen3_moe --num-layers 4 --moe-layer-freq [1,0,1,1] --num-experts {EXPERTS}
    --moe-router-topk {TOPK} --moe-ffn-hidden-size 16 --moe-router-load-balancing-type none --hidden-size 32
    --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 8
    --vocab-size 61 --make-vocab-size-divisible-by 1 --max-position-embeddings 64 --qk-layernorm --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --moe-token-dispatcher-type alltoall""".split()
# Other families with as many layers of experts: flags that come after those of MODEL.
_OF_GEMMA4 = {
    "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0, "partial_rotary_factor": 0.25,
}  # fmt: skip
FAMILIES = {
    "nemotron_h": """--model-family nemotron_h --num-layers 5 --hybrid-layer-pattern EM*EE --moe-layer-freq [1,0,0,1,1]
    --no-qk-layernorm --no-swiglu --squared-relu --position-embedding-type none --mamba-num-heads 4 --mamba-head-dim 6
    --mamba-num-groups 2 --mamba-state-dim 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-shared-expert-intermediate-size 16 --norm-epsilon 1e-5""",
    "gemma4_text": f"""--model-family gemma4_text --num-layers 3 --moe-layer-freq 1 --no-swiglu --geglu --sandwich-norm
    --scale-embeddings --softmax-scale 1 --window-size 3,0 --window-attn-skip-freq 3 --rotary-base-local 100
    --no-untie-embeddings-and-output-weights --gemma4-config {json.dumps(_OF_GEMMA4, separators=(",", ":"))}""",
}


def routers(trainer) -> list[tuple[int, torch.nn.Module]]:
    """This rank's routers, each with its layer's number in the whole model, from 1."""
    layers = [layer for chunk in unwrap_model(trainer.model) for layer in chunk.decoder.layers]
    return [(layer.layer_number, layer.mlp.router) for layer in layers if isinstance(layer.mlp, MoELayer)]


def move_routers(trainer) -> None:
    """Change the routers' weights so much that they choose differently."""
    for number, router in routers(trainer):
        generator = torch.Generator().manual_seed(number)
        router.weight.data += 0.1 * torch.randn(router.weight.shape, generator=generator)


def made_up_experts(batch) -> np.ndarray:
    """[total, layers, topk], as if from an engine: random, and unknown for a fifth of the tokens.

    Tokens after equal beginnings have equal experts; every fifth completion has others from its third token on.
    """
    experts, seeds = np.empty((len(batch.tokens), MOE_LAYERS, TOPK), np.int16), {}
    for number, (begin, end) in enumerate(itertools.pairwise(batch.cu_seqlens)):
        for token in range(begin, end):
            own = number if number % 5 == 4 and token - begin >= 2 else -1
            rng = np.random.default_rng(seeds.setdefault((own, *batch.tokens[begin : token + 1].tolist()), len(seeds)))
            experts[token] = rng.random((MOE_LAYERS, EXPERTS)).argsort(-1)[:, :TOPK]
            experts[token] = experts[token] if rng.random() > 0.2 else -1
    return experts


def prepare(args, trainer):
    """A rollout with the old policy's log-probabilities, whose experts are to be replayed by routers that moved."""
    batch = made_up.rollout(args)
    if args.router_replay_mode == "R3":
        batch.routed_experts = made_up_experts(batch)
    with router_replay.recording(args, trainer.model) as with_experts:
        prepared = made_up.off_policy(args, trainer, batch)
    batch = with_experts(batch)
    if args.router_replay_mode == "R2":  # as in a run, where a rank holds the tokens that it computes
        # The reference of a policy with adapters has the policy's arguments.
        reference = BaseReference(args, trainer.model)
        share = replace(made_up.share(args, batch, halves(batch), reference), routed_experts=None)
        with router_replay.recording(args, trainer.model) as with_experts:
            of_policy = forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, share, halves(batch))
        of_reference = reference.log_probs(share, trainer.model, pretrain_grpo.forward_step)
        np.testing.assert_allclose(of_reference, of_policy, rtol=0, atol=1e-5)  # of the same weights
        share = with_experts(share)
        tokens = batch.token_positions(np.flatnonzero(share.held))
        np.testing.assert_array_equal(share.routed_experts, batch.routed_experts[tokens])
    move_routers(trainer)
    return replace(prepared, routed_experts=batch.routed_experts)


def halves(batch) -> list[np.ndarray]:
    return np.split(np.arange(batch.num_completions), 2)


def main() -> None:
    out, world_size = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    for case in sys.argv[2:]:
        name, _, flags = case.partition(":")
        packing = [] if "--max-tokens-per-microbatch" in flags else ["--micro-batch-size", "2"]
        args = made_up.parse([*MODEL, *packing, *flags.split()], world_size)
        initialize_distributed(args)
        trainer = made_up.trainer(args)
        batch = prepare(args, trainer)
        rows = [pretrain_grpo.update(args, trainer, batch, half) for half in halves(batch)]
        if dist.get_rank() == 0:
            (out / f"{name}.json").write_text(json.dumps(rows))
            if batch.routed_experts is not None:
                np.save(out / f"{name}.npy", batch.routed_experts)
        destroy_rank_groups()


if __name__ == "__main__":
    run(main)
