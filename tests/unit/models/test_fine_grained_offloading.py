"""Fine-grained offloading of activations on a CPU: updates are unchanged, also after passes without gradients."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading
from slow import slow_except

import pretrain_grpo
from megatron_grpo.parallel import arguments, initialize
from tools import made_up

MODEL = """--model-family qwen3 --num-layers 3 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 16 --qk-layernorm --normalization RMSNorm --swiglu
    --disable-bias-linear --vocab-size 61 --max-position-embeddings 512 --make-vocab-size-divisible-by 1
    --micro-batch-size 4""".split()
OFFLOAD = """--fine-grained-activation-offloading --offload-modules qkv_linear core_attn
    --min-offloaded-tensor-size 1""".split()
LAYERS, MODULES = 3, 2


class Calls(Counter):
    """Numbers of calls by name, on a CPU that looks to megatron-core like a GPU with Transformer Engine."""

    def __init__(self, monkeypatch):
        super().__init__()
        monkeypatch.setattr(arguments, "NEED_TRANSFORMER_ENGINE", [])
        monkeypatch.setattr(transformer_engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False), raising=False)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        handler = offloading.ChunkOffloadHandler
        manageable = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
        monkeypatch.setattr(handler, "_can_manage_tensor_for_offload", manageable)
        self._count(monkeypatch, handler, "offload", "reload")
        self._count(monkeypatch, torch.cuda.current_stream().__class__, "wait_event")
        offloading.PipelineOffloadManager.reset_instance()

    def _count(self, monkeypatch, owner, *names):
        for name in names:
            method = getattr(owner, name)

            def counted(*args, name=name, method=method, **kwargs):
                self[name] += 1
                return method(*args, **kwargs)

            monkeypatch.setattr(owner, name, counted)


def updates(*flags: str, passes_between: bool) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of three updates of different sizes."""
    args = made_up.parse([*MODEL, *flags], 1)
    if not parallel_state.is_initialized():
        initialize.initialize_distributed(args)
    trainer, rows = made_up.trainer(args), []
    made_up.fill(trainer.model, args)
    batch = made_up.off_policy(args, trainer, made_up.rollout(args))
    for size in 16, 8, 32:
        row = pretrain_grpo.update(args, trainer, batch, np.arange(size))
        rows.append((row["loss"], row["grad_norm"]))
        if passes_between:
            made_up.off_policy(args, trainer, batch)
    return rows


@pytest.mark.parametrize("passes_between", slow_except([True], [False, True]))
def test_updates_are_those_without_offloading(one_rank, monkeypatch, passes_between):
    expected = updates(passes_between=False)
    calls = Calls(monkeypatch)
    assert updates(*OFFLOAD, passes_between=passes_between) == expected
    assert calls["offload"] == calls["reload"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1])
def test_the_compute_stream_waits_for_all_but_the_latest_offloads(one_rank, monkeypatch, limit):
    calls = Calls(monkeypatch)
    updates(*OFFLOAD, passes_between=False)
    without = calls.pop("wait_event")
    offloading.PipelineOffloadManager.reset_instance()
    updates(*OFFLOAD, "--fine-grained-offloading-max-inflight-offloads", str(limit), passes_between=False)
    # 32 completions without gradients, then 16, 8 and 32 with gradients, whose last layer is not offloaded.
    without_gradients, with_gradients = 32 // 4, (16 + 8 + 32) // 4
    waits = without_gradients * (LAYERS - limit) + with_gradients * (LAYERS - 1 - limit)
    assert calls["wait_event"] - without == MODULES * waits
