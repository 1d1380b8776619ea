"""Reward models: sequence classifiers in this process or behind vLLM's /classify, and judges behind a chat API.

The input of a classifier is the chat with the completion as the assistant's message, formatted by the classifier's chat
template. If the prompt is a string, or the classifier has no chat template, the input is the plain text of prompt and
completion. The score of a classifier is its logit, without a sigmoid.
"""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.data.row_prompt import parse_prompt
from megatron_grpo.data.text_start import encode_once, text_start
from megatron_grpo.rewards.registry import Sample, known_rewards
from megatron_grpo.rewards.reward_models.arguments import RewardModelSpec
from megatron_grpo.rewards.reward_models.judge import Judge, TemplateJudge, get_judge
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.http_client import Client, Fault, reads_answers
from megatron_grpo.utils.log import log

_MAX_PAUSE = 5.0  # maximum seconds between two retries
_REPORT_AFTER = 1.0  # seconds without an answer before a message: shorter interruptions are not reported


class RewardModel(ABC):
    """A reward model; ``flags`` are the attributes of the parsed arguments."""

    def __init__(self, spec: RewardModelSpec, flags: Mapping[str, Any]):
        self.spec, self.flags = spec, flags
        self._has_template = True

    @abstractmethod
    async def check(self) -> None:
        """Prepare the model; GrpoError with cause and remedy if the model cannot score."""

    @abstractmethod
    async def score(self, sample: Sample) -> float | None:
        """Return the score of a sample, or None for "not scored"; Fault if the model gives no score."""

    def model_input(self, sample: Sample) -> str | list[dict[str, Any]]:
        """Return the input of a classifier: a text, or a chat for the classifier's chat template."""
        prompt = parse_prompt(sample.row, self.flags["prompt_key"], self.flags["system_prompt"])
        if isinstance(prompt, str):
            return prompt + sample.completion
        if not self._has_template:
            return sample.prompt + sample.completion
        return [*prompt, {"role": "assistant", "content": sample.completion}]

    def disable_template(self, reason: str) -> None:
        """Use plain text instead of chats as input from now on, and print the reason."""
        self._has_template = False
        log(f"reward model {self.spec.name} receives chats as plain text: {reason}")


class ServedModel(RewardModel, Client):
    """A model behind HTTP, with at most --reward-model-concurrency concurrent requests.

    A request is retried after a refused connection, a lost connection, or the status 5xx or 429, until the model has
    not answered for --reward-model-timeout seconds. After that, each further request is sent once without retries: a
    server that does not return costs no more time, and a server that returns is used again.
    """

    def __init__(self, spec: RewardModelSpec, flags: Mapping[str, Any]):
        address, _, self._model = spec.place.partition("#")
        Client.__init__(self, address, os.environ.get(spec.key_variable))
        RewardModel.__init__(self, spec, flags)
        self.key_flag = f"--api-key: {spec.key_variable} in the environment"
        self._timeout = flags["reward_model_timeout"]
        self._slots = asyncio.Semaphore(flags["reward_model_concurrency"])
        self._failing_since: float | None = None  # time of the first retryable fault after the last answer
        self._reported = False

    async def check(self) -> None:
        try:
            names = await self._names()
            if not self._model and len(names) != 1:
                raise Fault(
                    f"the server has {len(names)} models ({', '.join(names)[:200]}): choose one with {self.url}#MODEL"
                )
            self._model = self._model or names[0]
            await self.check_kind()
        except Fault as fault:
            cure = ": start it, or correct the address" if fault.retryable else ""
            raise GrpoError(f"--reward-model {self.spec.name}={self.url}: {fault}{cure}") from fault

    @reads_answers
    async def _names(self) -> list[str]:
        """Return the names of the server's models."""
        return [str(card["id"]) for card in (await self._request("GET", "/v1/models"))["data"]]

    @abstractmethod
    async def check_kind(self) -> None:
        """Check the kind of the server's model; Fault if it is another kind."""

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        first = None
        async with self._slots:
            for pause in _pauses():
                try:
                    answer = await self.call(method, path, body, self._timeout)
                except Fault as fault:
                    if not fault.retryable:
                        raise
                    now = time.monotonic()
                    first = first or now
                    self._failing_since = self._failing_since or now
                    if not self._reported and now - self._failing_since > _REPORT_AFTER:
                        self._reported = True
                        self._log(f"{fault}; retrying for {self._timeout:g} s (--reward-model-timeout)")
                    if now - min(first, self._failing_since) >= self._timeout:
                        raise Fault(f"{fault}; retried for {self._timeout:g} s", retryable=True) from fault
                    await asyncio.sleep(min(pause, self._timeout / 4))
                else:
                    if self._reported and self._failing_since:
                        self._log(f"answers again, after {time.monotonic() - self._failing_since:.1f} s")
                    self._failing_since, self._reported = None, False
                    return answer

    def _log(self, what: str) -> None:
        log(f"reward model {self.spec.name} at {self.url}: {what}")


def _pauses() -> Iterator[float]:
    pause = 0.25
    while True:
        yield pause
        pause = min(2 * pause, _MAX_PAUSE)


class ServedClassifier(ServedModel):
    """A sequence classifier behind ``vllm serve DIR --runner pooling``, without its activation function."""

    async def check_kind(self) -> None:
        try:
            _logit(await self.call("POST", "/classify", self._body("a"), self._timeout))
        except Fault as fault:
            raise Fault(
                f"{fault}. Is it a classifier, started by `vllm serve DIR --runner pooling`? For a generative model "
                "add --reward-model-template"
            ) from fault
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            _logit(await self.call("POST", "/classify", self._body(chat), self._timeout))
        except Fault as fault:
            if fault.retryable:
                raise
            self.disable_template(str(fault))

    async def score(self, sample: Sample) -> float:
        return _logit(await self._request("POST", "/classify", self._body(self.model_input(sample))))

    def _body(self, model_input: str | list[dict[str, Any]]) -> dict[str, Any]:
        what = {"input": model_input} if isinstance(model_input, str) else {"messages": model_input}
        return {"model": self._model, "use_activation": False} | what


def _logit(answer: Any) -> float:
    match answer:
        case {"data": [{"probs": [int() | float() as logit]}]}:
            return logit
        case {"data": [{"probs": [*classes]}]}:
            raise Fault(f"the classifier has {len(classes)} classes: serve one with a single score (num_labels 1)")
    raise Fault(f"the answer is not from a classifier: {answer!r:.200}")


class ServedJudge(ServedModel):
    """A generative model behind an OpenAI-compatible /v1/chat/completions."""

    def __init__(self, spec: RewardModelSpec, flags: Mapping[str, Any]):
        super().__init__(spec, flags)
        self._judge = build_judge(spec, flags["reward_model_max_tokens"])

    async def check_kind(self) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        try:
            _text(await self.call("POST", "/v1/chat/completions", body, self._timeout))
        except Fault as fault:
            if self.spec.plugin and fault.status != 404:
                return  # the plug-in's requests may differ from this one
            raise Fault(
                f"{fault}. Is it a generative model with a chat template? For a classifier remove "
                "--reward-model-template and --reward-model-plugin"
            ) from fault

    async def score(self, sample: Sample) -> float | None:
        body = {"model": self._model} | self._judge.request(sample)
        return self._judge.score(sample, _text(await self._request("POST", "/v1/chat/completions", body)))


def _text(answer: Any) -> str:
    match answer:
        case {"choices": [{"message": {"content": str() | None as text}}, *_]}:
            return text or ""  # None: the answer is only reasoning
    raise Fault(f"the answer is not a chat completion: {answer!r:.200}")


class LocalClassifier(RewardModel):
    """A Hugging Face sequence classifier in this process, on the CPU in float32; waiting samples form a batch."""

    def __init__(self, spec: RewardModelSpec, flags: Mapping[str, Any]):
        super().__init__(spec, flags)
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._running: asyncio.Task | None = None

    async def check(self) -> None:
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        directory = self.spec.place
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            self._model, info = AutoModelForSequenceClassification.from_pretrained(
                directory, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # tokenizers, safetensors and torch raise their own exceptions for damaged files
            raise GrpoError(f"--reward-model {self.spec.name}={directory}: cannot be loaded: {error}") from error
        if info["missing_keys"]:
            raise GrpoError(
                f"--reward-model {self.spec.name}={directory}: its files lack {sorted(info['missing_keys'])[0]}, which "
                "would have random weights: give a trained classifier"
            )
        self._model.eval()
        self._max_length = getattr(self._model.config, "max_position_embeddings", None)
        if self._tokenizer.chat_template is None:
            self.disable_template(f"{Path(directory).name} has no chat template")

    async def score(self, sample: Sample) -> float:
        model_input = self.model_input(sample)
        if isinstance(model_input, str):
            ids = encode_once(self._tokenizer, model_input, text_start(self._tokenizer))
        else:
            text = self._tokenizer.apply_chat_template(model_input, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template adds special tokens
        if self._max_length and len(ids) > self._max_length:
            raise Fault(f"the input has {len(ids)} tokens, the classifier's limit is {self._max_length}")
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        # Without a padding token, transformers cannot find the last token of each sequence in a batch.
        size = self.flags["reward_model_concurrency"] if self._model.config.pad_token_id is not None else 1
        await asyncio.sleep(0)  # samples that were submitted together form one batch
        while self._waiting:
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            try:
                scores = await asyncio.to_thread(self._forward, [ids for ids, _ in batch])
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), score in zip(batch, scores, strict=True):
                    future.set_result(score)
        self._running = None

    def _forward(self, sequences: list[list[int]]) -> list[float]:
        import torch

        width, pad = max(map(len, sequences)), self._model.config.pad_token_id or 0
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids in sequences])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
        with torch.inference_mode():
            return self._model(input_ids=ids, attention_mask=mask).logits[:, 0].tolist()


def build_judge(spec: RewardModelSpec, max_tokens: int) -> Judge:
    """Return the judge of a model; GrpoError if its plug-in is unknown."""
    if spec.plugin is not None:
        return get_judge(spec.plugin)
    assert spec.template is not None
    return TemplateJudge(spec.template, spec.pattern, max_tokens)


def check_models(models: Mapping[str, RewardModelSpec], max_tokens: int) -> None:
    """Check reward models; GrpoError if a reward function has the same name, or if a plug-in is unknown."""
    for name, spec in models.items():
        if name in known_rewards():
            raise GrpoError(f"--reward-model {name}: a reward function has this name: choose another name")
        if spec.is_judge:
            build_judge(spec, max_tokens)


def build_model(spec: RewardModelSpec, flags: Mapping[str, Any]) -> RewardModel:
    """Return the reward model of a specification."""
    if not spec.is_served:
        return LocalClassifier(spec, flags)
    return ServedJudge(spec, flags) if spec.is_judge else ServedClassifier(spec, flags)
