"""Updates with the optimizer state on the way back are those without offloads, to the last bit."""

import pytest
import torch
from launch import TE, torchrun

from megatron_grpo.utils import page_locked

MODEL = """--model-family qwen3 --num-layers 4 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 8
    --group-query-attention --num-query-groups 2 --kv-channels 64 --qk-layernorm --normalization RMSNorm --swiglu
    --disable-bias-linear --vocab-size 65536 --max-position-embeddings 512 --bf16 --max-prompt-length 64
    --max-completion-length 256 --max-tokens-per-microbatch 1024 --beta 0 --use-distributed-optimizer""".split()
AWARE = "--transformer-impl transformer_engine --use-precision-aware-optimizer --exp-avg-dtype bf16"


@pytest.mark.alone  # it reads the free memory of the GPU
@pytest.mark.parametrize("flags", ["", pytest.param(AWARE, marks=TE)], ids=["local", "precision-aware"])
@pytest.mark.parametrize("connections", ["1", "8"])  # 1: copies of all streams wait in one queue
def test_updates_do_not_notice_the_return(flags, connections):
    output = torchrun(
        1, "tests/gpu/offload_gpu_worker.py", *MODEL, *flags.split(), env={"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    )
    assert output.count("equal: ") == 2, output


def test_a_refused_page_lock_ends_no_later_launch():
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    torch.zeros(1, device="cuda")
    assert page_locked.register(data) and not page_locked.register(data)  # it is registered already
    assert (torch.ones(1, device="cuda") + 1).item() == 2
    page_locked.unregister(data.data_ptr())
