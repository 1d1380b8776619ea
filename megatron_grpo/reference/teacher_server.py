"""A teacher behind HTTP: a stock vLLM server, asked for the log-probabilities of prompts with their completions.

vllm serve DIR --max-model-len N       N: --max-prompt-length + --max-completion-length + 1 (it samples one token)
"""

import asyncio
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.parallel.initialize import host_group, led_by_rank_0
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.http_client import PROBE_TIMEOUT, Client, Fault

PAUSES = (1.0, 4.0, 16.0)  # seconds before a request is made again


class TeacherServer(Client):
    """The server of --teacher-server; rank 0 asks it, the other ranks wait."""

    key_flag = "--api-key: TEACHER_API_KEY in the environment"

    def __init__(self, args):
        super().__init__(args.teacher_server, os.environ.get("TEACHER_API_KEY"))
        self._args, self._model = args, ""
        with led_by_rank_0():
            if dist.get_rank() == 0:
                self._run(self._check())

    def log_probs(self, batch: RolloutBatch) -> np.ndarray:
        """Log-probabilities of the tokens in the loss, ``[total]``, NaN elsewhere; on every rank.

        GrpoError when the server stays away, or answers with something else.
        """
        found = np.full(len(batch.tokens), np.nan, np.float32)
        with led_by_rank_0():
            if dist.get_rank() == 0:
                found = self._run(self._batch_log_probs(batch))
        dist.broadcast(torch.from_numpy(found), src=0, group=host_group())
        return found

    def _run(self, work) -> Any:
        async def and_close() -> Any:
            try:
                return await work
            finally:
                await self.close()

        try:
            return asyncio.run(and_close())
        except Fault as fault:
            raise GrpoError(
                f"--teacher-server {self.url}: {fault}. Start it with the teacher's model, or correct the address; a "
                "run with --save goes on from its newest checkpoint with --load"
            ) from fault

    async def _check(self) -> None:
        args = self._args
        card = (await self._request_with_retries("GET", "/v1/models", timeout=PROBE_TIMEOUT))["data"][0]
        self._model, longest = card["id"], args.max_prompt_length + args.max_completion_length + 1
        if (card.get("max_model_len") or longest) < longest:
            raise Fault(
                f"its --max-model-len is {card['max_model_len']}, but --max-prompt-length + --max-completion-length + "
                f"1 are {longest}: start it with at least that"
            )

    async def _batch_log_probs(self, batch: RolloutBatch) -> np.ndarray:
        room = asyncio.Semaphore(self._args.vllm_max_num_seqs)

        async def one(start: int, end: int) -> list[float]:
            async with room:
                return await self._sequence_log_probs(batch.tokens[start:end].tolist())

        spans = zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
        values = np.concatenate(await asyncio.gather(*(one(*span) for span in spans)), dtype=np.float32)
        return np.where(batch.response_mask == 1, values, np.float32(np.nan))

    async def _sequence_log_probs(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of the tokens of one sequence, the first NaN."""
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        timeout = self._args.teacher_server_timeout
        return _parse_log_probs(
            await self._request_with_retries("POST", "/v1/completions", body, timeout=timeout), tokens
        )

    async def _request_with_retries(self, *request, timeout: float) -> Any:
        """The answer to a request, which is made again while the fault may pass."""
        for pause in PAUSES:
            try:
                return await self.call(*request, timeout=timeout)
            except Fault as fault:
                if not fault.retryable:
                    raise
            await asyncio.sleep(pause)
        return await self.call(*request, timeout=timeout)


def _parse_log_probs(answer: dict[str, Any], tokens: list[int]) -> list[float]:
    """What a server says of the tokens that it was given; Fault when it says it of others."""
    entries = answer["choices"][0].get("prompt_logprobs")
    if entries is None or len(entries) != len(tokens) or entries[0] is not None:
        raise Fault(f"it gave no log-probabilities of the {len(tokens)} tokens of a prompt: is it a vLLM server?")
    missing = [token for entry, token in zip(entries[1:], tokens[1:], strict=True) if str(token) not in entry]
    if missing:
        raise Fault(f"it gave no log-probability of token {missing[0]}: has it the policy's vocabulary?")
    values = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], tokens[1:], strict=True)]
    if not np.isfinite(values).all():
        raise Fault("it gave log-probabilities that are not finite")
    return [float("nan"), *values]
