"""Client of a teacher on a stock vLLM server, which returns log-probabilities of prompts with their completions.

Start the server with: vllm serve DIR --max-model-len N, with N at least --max-prompt-length + --max-completion-length
+ 1, because the server samples one more token.
"""

import asyncio
import os
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.share import first_holders, spread
from megatron_grpo.parallel.initialize import all_finish, host_group, led_by_rank_0
from megatron_grpo.utils.batch_sizes import longest_sequence
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.http_client import PROBE_TIMEOUT, Client, Fault

PAUSES = (1.0, 4.0, 16.0)  # seconds before each retry of a request


class TeacherServer(Client):
    """Client of --teacher-server; each completion is sent by one rank that holds it."""

    key_flag = "--api-key: TEACHER_API_KEY in the environment"

    def __init__(self, args):
        super().__init__(args.teacher_server, os.environ.get("TEACHER_API_KEY"))
        self._args, self._model = args, ""
        with led_by_rank_0():
            if dist.get_rank() == 0:
                self._run(self._check())
        names = [self._model]
        dist.broadcast_object_list(names, src=0, group=host_group())
        self._model = names[0]

    def own_completions(self, batch: RolloutBatch) -> np.ndarray:
        """Return no completions: the server computes their log-probabilities."""
        return np.zeros(0, np.int64)

    def log_probs(self, batch: RolloutBatch, policy: Any = None, forward_step: Any = None) -> np.ndarray:
        """Return the teacher's log-probabilities ``[total]`` of the tokens that this rank holds. Collective.

        ``policy`` and ``forward_step`` are not used. NaN where the response mask is 0. Raises GrpoError when the server
        does not answer after all retries, or sends an invalid answer.
        """
        found = np.full(len(batch.tokens), np.nan, np.float32)
        senders = first_holders(batch)
        mine = senders == dist.get_rank()
        with all_finish():
            if mine.any():
                slots = max(1, self._args.vllm_max_num_seqs // len(np.unique(senders)))
                values = self._run(self._batch_log_probs(batch, np.flatnonzero(mine), slots))
                found[batch.token_positions(np.flatnonzero(mine))] = values
        found[batch.response_mask == 0] = np.nan
        return spread(batch, [found], mine)[0]

    def _run(self, work) -> Any:
        async def run_and_close() -> Any:
            try:
                return await work
            finally:
                await self.close()

        try:
            return asyncio.run(run_and_close())
        except Fault as fault:
            raise GrpoError(
                f"--teacher-server {self.url}: {fault}. Start the server with the teacher's model, or correct the "
                "address; then resume a run with --save from its newest checkpoint with --load"
            ) from fault

    async def _check(self) -> None:
        args = self._args
        card = (await self._request_with_retries("GET", "/v1/models", timeout=PROBE_TIMEOUT))["data"][0]
        self._model, longest = card["id"], longest_sequence(args) + 1
        if (card.get("max_model_len") or longest) < longest:
            raise Fault(
                f"its --max-model-len is {card['max_model_len']}, but --max-prompt-length + --max-completion-length + "
                f"1 are {longest}: start the server with at least this length"
            )

    async def _batch_log_probs(self, batch: RolloutBatch, completions: np.ndarray, slots: int) -> np.ndarray:
        """Return the log-probabilities of the tokens of ``completions``, by ``slots`` requests at a time."""
        semaphore = asyncio.Semaphore(slots)

        async def one(start: int, end: int) -> list[float]:
            async with semaphore:
                return await self._sequence_log_probs(batch.tokens[start:end].tolist())

        spans = zip(batch.cu_seqlens[completions].tolist(), batch.cu_seqlens[completions + 1].tolist(), strict=True)
        return np.concatenate(await asyncio.gather(*(one(*span) for span in spans)), dtype=np.float32)

    async def _sequence_log_probs(self, tokens: list[int]) -> list[float]:
        """Return the log-probabilities of the tokens of one sequence; the first is NaN."""
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        timeout = self._args.teacher_server_timeout
        return _parse_log_probs(
            await self._request_with_retries("POST", "/v1/completions", body, timeout=timeout), tokens
        )

    async def _request_with_retries(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
    ) -> Any:
        """Send a request and return the answer; retry after each retryable fault."""
        for pause in PAUSES:
            try:
                return await self.call(method, path, body, timeout=timeout)
            except Fault as fault:
                if not fault.retryable:
                    raise
            await asyncio.sleep(pause)
        return await self.call(method, path, body, timeout=timeout)


def _parse_log_probs(answer: dict[str, Any], tokens: list[int]) -> list[float]:
    """Return the log-probabilities in a server's answer; raise Fault unless they belong to ``tokens``."""
    entries = answer["choices"][0].get("prompt_logprobs")
    if entries is None or len(entries) != len(tokens) or entries[0] is not None:
        raise Fault(f"it returned no log-probabilities for the {len(tokens)} tokens of a prompt: is it a vLLM server?")
    missing = [token for entry, token in zip(entries[1:], tokens[1:], strict=True) if str(token) not in entry]
    if missing:
        raise Fault(
            f"it returned no log-probability for token {missing[0]}: does its model have the policy's vocabulary?"
        )
    values = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], tokens[1:], strict=True)]
    if not np.isfinite(values).all():
        raise Fault("it returned log-probabilities that are not finite")
    return [float("nan"), *values]
