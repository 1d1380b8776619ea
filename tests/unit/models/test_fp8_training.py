"""Rules of --fp8-format, and the padding of its packs."""

import re

import numpy as np
import pytest
from good_args import MODEL, RUN, validated

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import IGNORED_LABEL
from megatron_grpo.models import forward
from megatron_grpo.models.fp8_training import check_fp8_device
from megatron_grpo.utils.errors import GrpoError

# A dry run: this machine has no Transformer Engine.
TE = MODEL + RUN + " --transformer-impl transformer_engine --bf16 --dry-run --hidden-size 128 --fp8-format e4m3"
MOE = "--model-family qwen3_moe --num-experts 8"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
SHORT = "--max-prompt-length 8 --max-completion-length 200"

REFUSED = {
    "--transformer-impl local": "--fp8-format e4m3 needs --transformer-impl transformer_engine",
    "--fp16": "--fp8-format e4m3 needs --bf16",
    "--fp8-recipe delayed": "--fp8-recipe is delayed: delayed takes its scales from earlier passes",
    "--fp8-recipe mxfp8": "mxfp8 needs a Blackwell GPU",
    "--fp4-format e2m1": "--fp4-format is e2m1: it needs a Blackwell GPU",
    "--fp8-param-gather": "--fp8-param-gather is True: import, export, weight sync",
    f"{MOE} --moe-router-padding-for-fp8": "Transformer Engine pads each expert's tokens itself",
    "--rollout-engine megatron": "cannot be used with --rollout-engine megatron",
    "--cpu-offloading --cpu-offloading-num-layers 1": "with --cpu-offloading has not been checked",
    "--hidden-size 136": "needs --hidden-size (136) to be a multiple of 16: the kernels take no other size",
    f"{SP} --hidden-size 192": "needs --hidden-size (192) to be a multiple of 128: the kernels",
    f"{SP} --ffn-hidden-size 176": "--ffn-hidden-size (176) to be a multiple of 16 on each of 2 tensor-parallel ranks",
    "--kv-channels 8 --num-query-groups 2 --tensor-model-parallel-size 2": (
        "--num-query-groups x --kv-channels (16) to be a multiple of 16 on each of 2 tensor-parallel ranks"
    ),
    f"{MOE} --moe-ffn-hidden-size 72": "--moe-ffn-hidden-size (72) to be a multiple of 16: the kernels",
    "--num-layers-at-start-in-bf16 2": "--num-layers-at-start-in-bf16 has no effect without --first-last-layers-bf16",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_work_is_refused(flags):
    base = TE.replace("--bf16", "") if "--fp16" in flags else TE
    with pytest.raises(GrpoError, match=re.escape(REFUSED[flags])):
        validated(flags, base=base)


@pytest.mark.parametrize(
    "flags",
    ["", "--fp8-format hybrid --fp8-recipe tensorwise", SP, MOE + " --moe-ffn-hidden-size 96 --ffn-hidden-size 200",
     "--first-last-layers-bf16 --num-layers-at-end-in-bf16 2", "--lora-rank 8"],
)  # fmt: skip
def test_what_works_is_accepted(flags):
    args = validated(flags, base=TE)
    assert args.fp8_format and args.fp8_recipe == ("tensorwise" if "tensorwise" in flags else "blockwise")


def test_the_recipe_needs_the_format():
    with pytest.raises(GrpoError, match="--fp8-recipe has no effect without --fp8-format"):
        validated("--fp8-recipe tensorwise")


@pytest.mark.parametrize("capability, cuda, error", [
    ((9, 0), "13.0", None),
    ((9, 0), "12.8", "--fp8-recipe blockwise needs CUDA 12.9 or later, and torch was built for 12.8"),
    ((8, 0), "13.0", r"needs a GPU of compute capability 9.0 \(Hopper\), and this one has 8.0"),
    ((10, 0), "13.0", r"this one has 10.0: leave the flag out"),
])  # fmt: skip
def test_the_device(capability, cuda, error, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.version.cuda", cuda)
    args = validated("", base=TE)
    if error is None:
        check_fp8_device(args)
        return
    with pytest.raises(GrpoError, match=error):
        check_fp8_device(args)


def rollout(lengths) -> RolloutBatch:
    n = len(lengths)
    return RolloutBatch.from_completions(
        [[5]] * n, [[7] * (length - 1) for length in lengths], [[-1.0] * (length - 1) for length in lengths],
        0, range(n), range(n), range(n), [FinishReason.LENGTH] * n,
    )  # fmt: skip


@pytest.mark.parametrize("flags, ranks, multiple", [
    ("", {}, 16),
    ("--fp8-recipe tensorwise", {}, 16),
    (SP, {"tensor": 2}, 256),  # each of two ranks gathers whole blocks of 128 tokens
    (SP + " --fp8-recipe tensorwise", {"tensor": 2}, 32),
    ("--context-parallel-size 2", {"context": 2}, 16),
    (SP + " --context-parallel-size 2", {"tensor": 2, "context": 2}, 256),
    (MOE + " --moe-token-dispatcher-type allgather", {}, 16),
])  # fmt: skip
def test_packs_are_padded_for_the_kernels(flags, ranks, multiple, monkeypatch):
    """Also the pack of a rank that has no completion in a micro-batch; padding has no label."""
    args = validated(f"{flags} --max-tokens-per-microbatch 300 {SHORT}", base=TE)
    dp, cp = 3, ranks.get("context", 1)
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_world_size", lambda: dp)
    monkeypatch.setattr("megatron.core.parallel_state.get_context_parallel_world_size", lambda: cp)
    batch = rollout([37, 150, 91, 5])
    labels, sizes = 0, []
    for rank in range(dp):
        for cp_rank in range(cp):
            monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_rank", lambda rank=rank: rank)
            monkeypatch.setattr("megatron.core.parallel_state.get_context_parallel_rank", lambda r=cp_rank: r)
            for pack in forward.micro_batches(args, batch, np.arange(4)):
                sizes.append(len(pack.tokens))
                labels += np.count_nonzero(pack.labels != IGNORED_LABEL)
                assert (pack.labels[pack.padding] == IGNORED_LABEL).sum() == pack.padding.sum()
                assert pack.cu_seqlens[-1] == len(pack.tokens) * cp
    assert all(size > 0 and size % multiple == 0 for size in sizes), sizes
    assert labels == batch.response_lengths.sum()


def test_an_empty_pack_is_one_row_of_padding(monkeypatch):
    args = validated("", base=TE)
    monkeypatch.setattr(forward, "_assignment", lambda *_: ([1], [[np.arange(0)]]))
    monkeypatch.setattr(forward, "_own_place", lambda: 0)
    monkeypatch.setattr("megatron.core.parallel_state.get_context_parallel_rank", lambda: 0)
    (pack,) = forward.micro_batches(args, rollout([5]), np.arange(1))
    assert len(pack.tokens) == 16 and pack.padding.all() and pack.num_labels == 0
