"""A classifier and a judge on real vLLM servers on the CPU, of which one is killed and started again meanwhile."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from classifiers import by_transformers, make_classifier
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.rewards.reward_models.arguments import check_reward_models, reward_models
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import args_to_json

# tests/unit/rewards/test_reward_models.py has the same with doubles of the servers, and a classifier in process.
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 1e-4
DIGITS = 3  # of a judge's score


class VllmServer:
    """A vLLM server as a user starts it; started again after `kill`, it has the same address."""

    def __init__(self, model: Path, log: Path, *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{self.port}", log
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
        self._command += f"--host 127.0.0.1 --port {self.port} --dtype float32 --max-model-len 400".split()
        self._command += ["--enforce-eager"]
        self.start()

    def start(self) -> None:
        environment = os.environ | {"VLLM_API_KEY": "secret", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with open(self._log, "a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def classifier(tiny_models, tmp_path_factory) -> Path:
    return make_classifier(tiny_models["qwen3"], tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def talker(tiny_models, tmp_path_factory) -> Path:
    """A generative model that says digits and nothing else: only these have rows in its head."""
    directory = tmp_path_factory.mktemp("talker")
    model = AutoModelForCausalLM.from_pretrained(tiny_models["llama"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_models["llama"])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # as random weights come, every question has nearly the same answer
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(list("0123456789"))] = torch.randn(10, 64)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def answers(directory: Path, questions: list[str]) -> list[float]:
    """What the greedy answers to these, by transformers, are as numbers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer, said = AutoTokenizer.from_pretrained(directory), []
    for question in questions:
        inputs = tokenizer(f"user: {question}\nassistant: ", return_tensors="pt")  # make_tiny_model.py's template
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=DIGITS)[0, inputs["input_ids"].shape[1] :]
        said.append(float(tokenizer.decode(ids)))
    return said


def test_scores_are_transformers_and_none_is_lost_with_a_server(classifier, talker, tmp_path, monkeypatch, capfd):
    prompts = [f"{a}+{b}=" for a in range(6) for b in range(5)]
    texts = [Sample(prompt, str(n * n), {"prompt": prompt}) for n, prompt in enumerate(prompts)]
    chats = [
        Sample("", "yes" * (n % 7), {"prompt": [{"role": "user", "content": prompt}]})
        for n, prompt in enumerate(prompts)
    ]
    (tmp_path / "judge.txt").write_text("Rate {{ completion }}")
    for name in ("SERVED", "JUDGE"):
        monkeypatch.setenv(f"{name}_API_KEY", "secret")
    served = VllmServer(classifier, tmp_path / "served.log", "--runner", "pooling")
    judge = VllmServer(talker, tmp_path / "judge.log")
    flags = f"--reward-funcs served judge local --reward-model local={classifier} served={served.url} judge={judge.url}"
    flags += f" --reward-model-template judge={tmp_path}/judge.txt --reward-model-max-tokens {DIGITS}"
    flags += r" --reward-model-pattern judge=(\d+) --reward-model-timeout 240 --reward-model-concurrency 8"
    args = parse_args(flags.split())
    check_reward_models(args)
    pool = None
    try:
        pool = RewardPool(args.reward_funcs, flags=args_to_json(args), models=reward_models(args))  # waits for servers
        for key, sample in enumerate(texts):
            pool.submit(key, sample)
        first = pool.wait(range(len(texts)))
        capfd.readouterr()  # both were asked until they had started
        said = ""
        for key, sample in enumerate(chats, start=len(texts)):
            if key == len(texts) + len(chats) // 2:  # some are on their way, others will find nobody
                served.kill()
            pool.submit(key, sample)
        while "retrying" not in said:
            assert pool.poll(0.1)
            said += capfd.readouterr().err
        served.start()
        values = pool.finish()
    finally:
        for server in (served, judge):
            server.kill()
        if pool is not None:
            pool.close()
    assert not pool.failures and (values[: len(texts)] == first).all()
    assert f"reward model served at {served.url}: answers again, after" in said + capfd.readouterr().err
    written = [f"user: {prompt}\nassistant: {sample.completion}\nassistant: " for prompt, sample in zip(prompts, chats)]
    expected = by_transformers(classifier, [prompt + sample.completion for prompt, sample in zip(prompts, texts)])
    expected += by_transformers(classifier, written)
    for column in (0, 2):
        assert values[:, column] == pytest.approx(expected, abs=TOLERANCE)
    assert values[:, 1].tolist() == answers(talker, [f"Rate {sample.completion}" for sample in texts + chats])
    assert len(set(values[:, 1].tolist())) > 10
