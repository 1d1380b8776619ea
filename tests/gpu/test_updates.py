"""Two updates in bf16 with real kernels: TransformerEngine beside our layers, and layouts beside one GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch
from launch import FLASH_4, TE, program

from megatron_grpo.training import fused_adam
from megatron_grpo.training.offload import optimizer_tensors

MODEL = """--model-family qwen3 --num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8
    --group-query-attention --num-query-groups 2 --kv-channels 64 --qk-layernorm --normalization RMSNorm --swiglu
    --disable-bias-linear --vocab-size 4096 --max-position-embeddings 512 --bf16 --max-prompt-length 64
    --max-completion-length 256""".split()
# Losses that are equal for all packs and layouts.
BALANCING = """--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2
    --moe-router-dtype fp32""".split()
EXPERTS = "--model-family qwen3_moe --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256".split()
SOFT_CAPS = """--model-family gemma2 --no-qk-layernorm --no-swiglu --geglu --apply-layernorm-1p --sandwich-norm
    --scale-embeddings --attn-logit-softcapping 5 --final-logit-softcapping 3 --softmax-scale 0.125 --window-size 31,0
    --window-attn-skip-freq 2""".split()
WITH_TE = "--transformer-impl transformer_engine"


def check(*layouts: str, flags=()) -> None:
    """tools/check_parallel.py, which compares every layout with the first."""
    print(program(sys.executable, "tools/check_parallel.py", *MODEL, *flags, "--layouts", *layouts))


def test_one_gpu():
    """Packs of another size, the distributed optimizer, recomputation, shared prompts."""
    more = "TP1: --use-distributed-optimizer --max-tokens-per-microbatch 1024"
    recompute = "TP1: --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    check("TP1", more, recompute, "TP1: --max-tokens-per-microbatch 1024 --no-share-prompts")


def test_soft_caps_share_prompts():
    packs = "TP1: --max-tokens-per-microbatch 1024"
    check("TP1", packs, f"{packs} --no-share-prompts", flags=SOFT_CAPS)


@FLASH_4
def test_flash_attention_4():
    """In packs of several sizes, with recomputation, and in graphs."""
    flash = "TP1: --attention-backend flash"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    packs = "--max-tokens-per-microbatch 512"
    check(
        f"TP1: {packs}",
        flash,
        f"{flash} {packs}",
        f"{flash} {recompute}",
        f"{flash} {packs} --cuda-graphs",
        f"{flash} {packs} --no-share-prompts",
    )


def test_cuda_graphs():
    """All weights and adapters, with packs of several sizes. The first layer of adapters needs no gradient."""
    packs = "--max-tokens-per-microbatch 512"
    check(f"TP1: {packs}", f"TP1: {packs} --cuda-graphs", f"TP1: {packs} --cuda-graphs --gradient-accumulation-fusion")
    check(f"TP1: {packs}", f"TP1: {packs} --cuda-graphs", flags=["--lora-rank", "8"])


@TE
def test_transformer_engine():
    fused = "--bias-activation-fusion --bias-dropout-fusion --apply-rope-fusion"
    check("TP1", f"TP1: {WITH_TE}", f"TP1: {WITH_TE} {fused}")


@pytest.mark.gpus(2)
def test_two_gpus():
    check(
        "TP1",
        "TP2",
        "TP2 SP",
        "TP2 SP: --max-tokens-per-microbatch 1024",
        "PP2",
        "CP2",
        "CP2: --max-tokens-per-microbatch 1024",
        "DP2: --use-distributed-optimizer --overlap-grad-reduce",
    )


@pytest.mark.gpus(2)
@FLASH_4
def test_flash_attention_4_with_context_parallelism():
    check("TP1", "CP2: --attention-backend flash")


@TE
def test_experts_with_transformer_engine():
    grouped = f"{WITH_TE} --moe-grouped-gemm"
    allgather = "--moe-token-dispatcher-type allgather"
    check(
        "TP1", f"TP1: {grouped}", f"TP1: {grouped} {allgather} --moe-permute-fusion", f"TP1: {WITH_TE}", flags=EXPERTS
    )


@pytest.mark.gpus(2)
@TE
def test_two_gpus_with_transformer_engine():
    check("TP1", f"TP2 SP: {WITH_TE}", f"PP2: {WITH_TE}", f"CP2: {WITH_TE}")
    grouped = f"{WITH_TE} --moe-grouped-gemm --moe-permute-fusion"
    check("TP1", f"EP2: {grouped}", f"EP2: {grouped} --moe-token-dispatcher-type allgather", flags=EXPERTS)


@pytest.mark.gpus(2)
def test_experts_on_two_gpus():
    allgather = "--moe-token-dispatcher-type allgather"
    check("TP1", f"TP1: {allgather}", "EP2", f"EP2: {allgather}", "TP2 SP EP2 ETP1", flags=EXPERTS)


def test_balancing_losses():
    """Per sequence of a pack, and over the whole update."""
    check("TP1", "TP1: --max-tokens-per-microbatch 512", flags=[*EXPERTS, *BALANCING])


@pytest.mark.gpus(2)
def test_balancing_losses_on_two_gpus():
    check("TP1", "EP2", "TP2 SP EP2 ETP1", "CP2", flags=[*EXPERTS, *BALANCING])


@TE
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.uint8])  # uint8: FP8
def test_adam_in_parts_has_the_same_numbers_and_a_smaller_peak(moments, monkeypatch):
    from transformer_engine.pytorch.optimizers import FusedAdam

    size, count = 2**24, 8
    monkeypatch.setattr(fused_adam, "PART", 2 * size)

    def trained(kind) -> tuple[list[torch.Tensor], list[int], int]:
        draws = torch.Generator("cuda").manual_seed(0)
        made = [torch.randn(size, generator=draws, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        params = [torch.nn.Parameter(tensor) for tensor in made]
        optimizer = kind(
            params, lr=1e-2, master_weights=True, use_decoupled_grad=True, exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments, store_param_remainders=True,
        )  # fmt: skip
        for step in range(3):
            for param in params:
                param.decoupled_grad = torch.randn(size, generator=draws, device="cuda", dtype=torch.bfloat16)
            if step == 2:  # the state exists
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            optimizer.step()
        held = optimizer_tensors(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer)]))
        sizes = [tensor.untyped_storage().nbytes() for tensor in held]
        return [param.detach() for param in params], sizes, torch.cuda.max_memory_allocated() - before

    whole, _, peak = trained(FusedAdam)
    parts, sizes, small_peak = trained(fused_adam.in_parts(FusedAdam))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert peak >= count * size * 8 and small_peak < 0.4 * peak
    # a parameter, its remainder, two moments (those in FP8 with their transposes), 2 bytes each
    assert sum(sizes) == count * size * 8
