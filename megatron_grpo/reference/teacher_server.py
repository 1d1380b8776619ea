"""Client of a teacher on a stock vLLM server, which returns log-probabilities of prompts with their completions.

Start the server with: vllm serve DIR --max-model-len N, with N at least --max-prompt-length + --max-completion-length
+ 1, because the server samples one more token; for --gkd-logits-topk k with --max-logprobs k, too.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.share import first_holders, spread
from megatron_grpo.models.forward import NOT_FINITE
from megatron_grpo.parallel.initialize import all_finish, host_group, led_by_rank_0
from megatron_grpo.utils.batch_sizes import longest_sequence
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.http_client import PROBE_TIMEOUT, Client, Fault, reads_answers

PAUSES = (1.0, 4.0, 16.0)  # seconds before each retry of a request


LEAST_TAIL = 1e-6  # probability of all other tokens than the likely ones: a server's numbers are float32's


class TeacherServer(Client):
    """Client of a server of --teacher-server; each completion is sent by one rank that holds it."""

    key_flag = "--api-key: TEACHER_API_KEY in the environment"

    def __init__(self, args, url: str):
        super().__init__(url, os.environ.get("TEACHER_API_KEY"))
        self._args, self._model = args, ""
        self._k = args.gkd_logits_topk if args.gkd_beta is not None else 0
        with led_by_rank_0():
            if dist.get_rank() == 0:
                self._run(self._with_retries(self._check))
        names = [self._model]
        dist.broadcast_object_list(names, src=0, group=host_group())
        self._model = names[0]

    def rows(self, batch: RolloutBatch, completions: np.ndarray, nothing: np.ndarray) -> np.ndarray:
        """Return what the teacher says of the tokens of these completions that this rank holds. Collective.

        ``nothing`` ``[total, columns]`` has the values of other tokens. The first column is the log-probability of the
        token; with --gkd-logits-topk k the columns are k + 1 log-probabilities and k tokens of `TopK`. Raises GrpoError
        when the server does not answer after all retries, or sends an invalid answer.
        """
        found, chosen = nothing.copy(), np.zeros(batch.num_completions, bool)
        chosen[completions] = True
        senders = first_holders(batch)
        mine = chosen & (senders == dist.get_rank())
        with all_finish():
            if mine.any():
                slots = max(1, self._args.vllm_max_num_seqs // len(np.unique(senders)))
                values = self._run(self._of_batch(batch, np.flatnonzero(mine), slots))
                values = np.where(np.isnan(values), np.float32(NOT_FINITE), values)
                found[batch.token_positions(np.flatnonzero(mine)), : values.shape[1]] = values
        found[batch.response_mask == 0] = nothing[batch.response_mask == 0]
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

    @reads_answers
    async def _check(self) -> None:
        args = self._args
        card = (await self.call("GET", "/v1/models", timeout=PROBE_TIMEOUT))["data"][0]
        self._model, longest = card["id"], longest_sequence(args) + 1
        if (card.get("max_model_len") or longest) < longest:
            raise Fault(
                f"its --max-model-len is {card['max_model_len']}, but --max-prompt-length + --max-completion-length + "
                f"1 are {longest}: start the server with at least this length"
            )

    async def _of_batch(self, batch: RolloutBatch, completions: np.ndarray, slots: int) -> np.ndarray:
        """Return the values ``[tokens, columns]`` of the tokens of ``completions``, by ``slots`` requests at a time."""
        semaphore = asyncio.Semaphore(slots)

        async def one(start: int, end: int) -> np.ndarray:
            async with semaphore:
                return await self._with_retries(partial(self._of_sequence, batch.tokens[start:end].tolist()))

        spans = zip(batch.cu_seqlens[completions].tolist(), batch.cu_seqlens[completions + 1].tolist(), strict=True)
        return np.concatenate(await asyncio.gather(*(one(*span) for span in spans)), dtype=np.float32)

    @reads_answers
    async def _of_sequence(self, tokens: list[int]) -> np.ndarray:
        """Return the values of the tokens of one sequence, ``[tokens, columns]``; those of the first are NaN."""
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self._k}
        answer = await self.call("POST", "/v1/completions", body, self._args.teacher_server_timeout)
        return _parse_top_k(answer, tokens, self._k) if self._k else _parse_log_probs(answer, tokens)[:, None]

    async def _with_retries[R](self, ask: Callable[[], Awaitable[R]]) -> R:
        """Return what ``ask`` returns; call it again after each retryable fault."""
        for pause in PAUSES:
            try:
                return await ask()
            except Fault as fault:
                if not fault.retryable:
                    raise
            await asyncio.sleep(pause)
        return await ask()


def _entries(answer: dict[str, Any], tokens: list[int]) -> tuple[list[dict[str, Any]], list[float]]:
    """Return (log-probabilities by token, that of the token itself) of each of ``tokens`` but the first.

    Raise Fault unless the answer is of these tokens.
    """
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
    return entries[1:], values


def _parse_log_probs(answer: dict[str, Any], tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities [tokens] in a server's answer; the first is NaN."""
    return np.array([float("nan"), *_entries(answer, tokens)[1]])


def _parse_top_k(answer: dict[str, Any], tokens: list[int], k: int) -> np.ndarray:
    """Return the log-probabilities of the k likely tokens and of all others, and these tokens: [tokens, 2 k + 1].

    An answer also has the token of the sequence itself, which need not be among the k. The others' probability is 1
    minus the sum, at least LEAST_TAIL.
    """
    rows = [[float("nan")] * (2 * k + 1)]
    for entry in _entries(answer, tokens)[0]:
        best = sorted(entry.items(), key=lambda item: (-item[1]["logprob"], int(item[0])))[:k]
        if len(best) < k:
            raise Fault(f"it returned {len(best)} likely tokens, fewer than --gkd-logits-topk {k}")
        log_probs = [value["logprob"] for _, value in best]
        tail = max(1 - math.fsum(map(math.exp, log_probs)), LEAST_TAIL)
        rows.append([*log_probs, math.log(tail), *(int(token) for token, _ in best)])
    return np.array(rows)
