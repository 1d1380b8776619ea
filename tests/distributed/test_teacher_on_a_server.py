"""A stock vLLM server as the teacher of --loss-type gkd: its likely tokens and the tail are transformers'."""

import numpy as np
import pytest
import torch
from sharp_model import make_sharp_model
from transformers import AutoModelForCausalLM

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.reference import teacher_server
from megatron_grpo.reference.teacher import Teachers
from megatron_grpo.reference.teacher_server import TeacherServer
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from tools.cpu_server import cpu_server

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("k", [1, 20])  # 20: the server's --max-logprobs by default
def test_likely_tokens_and_the_tail(tiny_models, tmp_path, one_process, monkeypatch, k):
    directory = make_sharp_model(tiny_models["qwen3"], tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    monkeypatch.setattr(teacher_server, "PAUSES", (1.0,) * 300)  # it may still be starting
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, 1 + n % 4).tolist() for n in range(6)]
    completions = [rng.integers(3, 90, 1 + n % 5).tolist() for n in range(6)]
    groups = np.arange(6) // 3
    batch = RolloutBatch.from_completions(
        prompts, completions, [None] * 6, 0, groups, groups, np.arange(6), [FinishReason.STOP] * 6
    )
    with cpu_server(directory, tmp_path / "server.log", "--max-model-len 64") as (url, _):
        args = parse_args(f"--teacher-server {url} --teacher-server-timeout 60 --vllm-max-num-seqs 3".split())
        args = replaced(args, max_prompt_length=8, max_completion_length=8, gkd_beta=1.0, gkd_logits_topk=k)
        found = Teachers(args, [TeacherServer(args, url)], [None], None).add_to(batch, None, None)
    log_probs, ids = found.teacher_token_log_probs, found.teacher_token_ids
    assert (np.isfinite(log_probs).all(1) == (batch.response_mask == 1)).all() and log_probs.shape[1] == k + 1
    for start, end, prompt in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.prompt_lengths, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(batch.tokens[start:end].astype(np.int64))[None]).logits
        log_p, own = torch.log_softmax(logits[0, prompt - 1 : -1].double(), -1), slice(start + prompt, end)
        best = log_p.topk(k, -1).values
        np.testing.assert_allclose(log_probs[own, :k], best, atol=2e-5)
        np.testing.assert_allclose(log_p.gather(1, torch.from_numpy(ids[own]).long()), best, atol=2e-5)
        np.testing.assert_allclose(np.exp(log_probs[own, k]), 1 - best.exp().sum(-1).numpy(), atol=2e-5)
