"""Training of multi-token-prediction layers: it leaves the policy's update as it is, and has a clip of its own."""

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from slow import slow_except

import pretrain_grpo
from megatron_grpo.parallel import initialize
from tools import made_up

MODEL = """--model-family deepseek_v3 --num-layers 2 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16
    --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --rotary-scaling-factor 4
    --original-max-position-embeddings 128 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm --vocab-size 61
    --max-position-embeddings 512 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-dtype fp32 --moe-layer-freq [0,1]
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2
    --moe-router-group-topk 1 --moe-router-topk-scaling-factor 1.5 --moe-shared-expert-intermediate-size 32
    --mtp-num-layers 1 --micro-batch-size 2 --clip-grad 0.01 --lr 50 --adam-eps 100 --weight-decay 0""".split()
CLIP = 0.01
RATE = 50 / 100  # Adam's first step is this multiple of a gradient far below epsilon


def updated(*flags: str):
    """Return the metrics of one update, and the weights before and after it by name."""
    args = made_up.parse([*MODEL, *flags], 1)
    if not parallel_state.is_initialized():
        initialize.initialize_distributed(args)
    trainer = made_up.trainer(args)
    (model,) = unwrap_model(trainer.model)

    def weights():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    before = weights()
    batch = made_up.off_policy(args, trainer, made_up.rollout(args))
    row = pretrain_grpo.update(args, trainer, batch, np.arange(batch.num_completions // 2))
    return row, before, weights()


@pytest.mark.parametrize("flags", slow_except([""], ["", "--use-distributed-optimizer", "--bf16"]))
def test_the_policys_update_is_the_same_bit_for_bit(one_rank, flags):
    alone, _, without = updated("--mtp-loss-scaling-factor", "0", *flags.split())
    row, before, after = updated("--mtp-loss-scaling-factor", "100", *flags.split())
    assert row["grad_norm"] == alone["grad_norm"] > CLIP  # the clip acts
    assert row["loss"] == alone["loss"]
    ours = {name for name in after if name.startswith("mtp.")}
    assert ours and all(torch.equal(after[name], without[name]) for name in after.keys() - ours)
    assert any(not torch.equal(after[name], before[name]) for name in after.keys() - ours)


@pytest.mark.parametrize("flags", slow_except([""], ["", "--use-distributed-optimizer"]))
@pytest.mark.parametrize(("scale", "clipped"), [(100.0, True), (1e-4, False)])
def test_the_step_of_the_layers_is_clipped_by_their_own_norm(one_rank, flags, scale, clipped):
    row, before, after = updated("--mtp-loss-scaling-factor", str(scale), *flags.split())
    steps = [(after[name] - before[name]).double().square().sum() for name in after if name.startswith("mtp.")]
    length = float(torch.stack(steps).sum().sqrt()) / RATE
    assert (row["mtp/grad_norm"] > CLIP) == clipped and row["grad_norm"] > CLIP
    assert length == pytest.approx(CLIP if clipped else row["mtp/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_their_norm_is_known_without_a_clip(one_rank):
    clipped, _, _ = updated("--mtp-loss-scaling-factor", "100")
    row, _, _ = updated("--mtp-loss-scaling-factor", "100", "--clip-grad", "0")
    assert row["mtp/grad_norm"] == clipped["mtp/grad_norm"] > CLIP
