"""A teacher's server, against its double: whose log-probabilities come back, and what faults do."""

import re
import threading

import numpy as np
import pytest
import torch
from server_double import VOCABULARY, Double, called, tiny_model

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.reference import teacher_server
from megatron_grpo.reference.teacher import Teachers
from megatron_grpo.reference.teacher_server import LEAST_TAIL, TeacherServer
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

GATEWAY = {"/v1/completions": "<html>Bad gateway</html>"}.get


@pytest.fixture(autouse=True)
def alone(one_process, monkeypatch):
    """Pauses between attempts are short."""
    monkeypatch.setattr(teacher_server, "PAUSES", (0.05, 0.1))


@pytest.fixture
def double():
    double = Double(key="secret")
    yield double
    double.stop()


@pytest.fixture
def ask(double, monkeypatch):
    """Log-probabilities of a rollout from the double; with ``k`` those of its likely tokens, and their tokens."""
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    args = parse_args(f"--teacher-server {double.url} --teacher-server-timeout 5 --vllm-max-num-seqs 3".split())
    args = replaced(args, max_prompt_length=8, max_completion_length=8)

    def of(batch, k=None):
        own = args if k is None else replaced(args, gkd_beta=1.0, gkd_logits_topk=k)
        batch = Teachers(own, [TeacherServer(own, double.url)], [None], None).add_to(batch, None, None)
        return batch.teacher_log_probs if k is None else (batch.teacher_token_log_probs, batch.teacher_token_ids)

    return of


def rollout() -> RolloutBatch:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, 1 + n % 4).tolist() for n in range(8)]
    completions = [rng.integers(2, VOCABULARY, 1 + n % 5).tolist() for n in range(8)]
    groups = np.arange(8) // 4
    reasons = [FinishReason.STOP] * 8
    return RolloutBatch.from_completions(prompts, completions, [None] * 8, 0, groups, groups, np.arange(8), reasons)


def test_log_probabilities_are_the_models_of_the_completions_tokens(double, ask):
    batch, model = rollout(), tiny_model(99)
    found = ask(batch)
    assert found.dtype == np.float32 and (np.isfinite(found) == (batch.response_mask == 1)).all()
    for start, end, prompt in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.prompt_lengths, strict=True):
        ids = batch.tokens[start:end].tolist()
        for position in range(prompt, len(ids)):  # token by token, as it would be sampled
            with torch.no_grad():
                log_p = torch.log_softmax(model(torch.tensor([ids[:position]])).logits[0, -1], -1)
            assert found[start + position] == pytest.approx(float(log_p[ids[position]]), abs=1e-5)
    assert called(double, "/v1/completions") == 8 and double.most_running <= 3


@pytest.mark.parametrize("k", [1, 5, VOCABULARY])
def test_likely_tokens_are_the_models_and_the_tail_is_what_is_left(double, ask, k):
    batch, model = rollout(), tiny_model(99)
    log_probs, ids = ask(batch, k)
    assert (np.isfinite(log_probs).all(1) == (batch.response_mask == 1)).all() and log_probs.shape[1] == k + 1
    for start, end, prompt in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.prompt_lengths, strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end].astype(np.int64))[None]
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens).logits[0, prompt - 1 : -1].double(), -1)
        best = log_p.topk(k, -1)
        own = slice(start + prompt, end)
        np.testing.assert_allclose(log_probs[own, :k], best.values, atol=1e-5)
        np.testing.assert_allclose(log_p.gather(1, torch.from_numpy(ids[own]).long()), best.values, atol=1e-5)
        tail = np.maximum(1 - best.values.exp().sum(-1).numpy(), LEAST_TAIL)
        np.testing.assert_allclose(np.exp(log_probs[own, k]), tail, atol=1e-5)


def test_a_server_with_too_few_likely_tokens_is_refused(double, ask):
    double.fault = "fewer likely"
    with pytest.raises(GrpoError, match=r"returned \d likely tokens, fewer than --gkd-logits-topk 5"):
        ask(rollout(), 5)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("no prompt logprobs", r"returned no log-probabilities for the \d+ tokens of a prompt: is it a vLLM server"),
        ("too few", "returned no log-probabilities for the"),
        ("other token", r"returned no log-probability for token \d+: does its model have the policy's vocabulary"),
        ("infinite", "returned log-probabilities that are not finite"),
        ("500 generating", "answered 500: .*out of memory"),
        ("die generating", "/v1/completions: "),
    ],
)
def test_faults_end_the_run_with_cause_and_cure(double, ask, fault, message):
    double.fault = fault
    with pytest.raises(GrpoError, match=f"--teacher-server {double.url}: .*{message}.*newest checkpoint with --load"):
        ask(rollout())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize("answer", ["<html>Bad gateway</html>", {"message": "starting"}, {"data": [], "choices": []}])
def test_an_answer_of_another_program_is_shown(double, ask, path, answer):
    double.instead = {path: answer}.get
    shown = re.escape(str(answer))
    with pytest.raises(GrpoError, match=f"^--teacher-server .*: {path} answered {shown}, not as an inference server"):
        ask(rollout())


@pytest.mark.parametrize(
    "name, fault, cured", [("fault", "500 generating", ""), ("instead", GATEWAY, lambda path: None)]
)
def test_a_fault_that_passes_is_waited_out(double, ask, monkeypatch, name, fault, cured):
    monkeypatch.setattr(teacher_server, "PAUSES", (0.1,) * 100)
    setattr(double, name, fault)
    threading.Timer(0.5, setattr, (double, name, cured)).start()
    batch = rollout()
    assert np.isfinite(ask(batch)[batch.response_mask == 1]).all()
    assert called(double, "/v1/completions") > 8


def test_a_wrong_key_and_a_short_server_are_refused(double, ask, monkeypatch):
    double.config["max_model_len"] = 16
    with pytest.raises(GrpoError, match=r"--max-model-len is 16, but .* \+ 1 are 17: start the server with at least"):
        ask(rollout())
    double.key = "other"
    with pytest.raises(GrpoError, match=r"refuses the API key: give the key .* TEACHER_API_KEY"):
        ask(rollout())
