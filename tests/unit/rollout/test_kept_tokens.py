"""The tokens that truncation keeps: from vLLM's answers into the batch."""

from types import SimpleNamespace

import numpy as np
import pytest
from selection_engine import prompts

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rewards.pool import GroupMember
from megatron_grpo.rollout.collect import to_batch
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.vllm.colocate import _log_probs
from megatron_grpo.rollout.vllm.kept_tokens import kept_token_ids
from megatron_grpo.rollout.vllm.server import VllmServer
from megatron_grpo.utils.errors import GrpoError

OUT = float("-inf")
# Of the sampled token, then of the 3 likeliest.
IDS = [[7, 7, 2, 5], [5, 7, 5, 2], [2, 2, 9, 9], [4, 7, 2, 5]]
LOG_PROBS = [[-0.7, -0.7, -1.1, -1.8], [-1, -0.5, -1, OUT], [0.0, 0.0, OUT, OUT], [-1.5, -1, -1.2, -1.5]]
# The fourth token ties with the third of the likeliest, 5: the sampled token takes its place.
KEPT = [[7, 2, 5], [5, 7, -1], [2, -1, -1], [4, 7, 2]]


def test_the_kept_tokens_are_those_with_a_probability():
    kept = kept_token_ids(np.array(IDS), np.array(LOG_PROBS))
    assert kept.tolist() == KEPT and kept.dtype == np.int32
    assert kept_token_ids(np.array([[3, 3]]), np.zeros((1, 2))).tolist() == [[3]]


def test_a_sampled_token_that_is_not_kept_is_an_error():
    with pytest.raises(GrpoError, match="vLLM sampled token 5, which its own truncation excludes"):
        kept_token_ids(np.array([[7, 7], [5, 7]]), np.array([[0.0, 0.0], [OUT, 0.0]]))


@pytest.mark.vllm
def test_they_are_read_from_vllms_log_probabilities():
    from vllm.logprobs import FlatLogprobs

    flat = FlatLogprobs()
    for ids, log_probs in zip(IDS, LOG_PROBS, strict=True):
        flat.append_fast(ids, log_probs, range(4), [None] * 4)
    log_probs, kept = _log_probs(flat, 4)
    assert log_probs == [-0.7, -1, 0, -1.5] and kept.tolist() == KEPT
    flat = FlatLogprobs()
    flat.append_fast([7], [-0.7], [1], [None])
    assert _log_probs(flat, 1) == ([-0.7], None) and _log_probs(None, 1) == (None, None)


def test_they_are_read_from_a_servers_answer():
    """The sampled token comes first, again among the likeliest or not; -9999 is JSON's log of 0."""
    likeliest = [{f"token_id:{i}": max(p, -9999.0) for i, p in zip(*row)} for row in zip(IDS, LOG_PROBS, strict=True)]
    ids, log_probs = [row[0] for row in IDS], [row[0] for row in LOG_PROBS]
    answer = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": log_probs, "top_logprobs": likeliest}
    choice = {"token_ids": ids, "finish_reason": "length", "prompt_token_ids": [1], "logprobs": answer}
    args = SimpleNamespace(vllm_server_api_key="key", vocab_size=10, router_replay_mode="disabled")
    server = VllmServer("http://localhost:1", args)
    sampling = Sampling(4, 0.6, top_k=3, log_probs=True, kept_token_ids=True)
    completion = server._completion(Request(0, [1], sampling), choice, [1], 3)
    assert completion.log_probs == log_probs and completion.kept_token_ids.tolist() == KEPT


MEMBERS = {number: GroupMember(0, number, 2) for number in range(2)}


def test_a_row_with_a_constraint_has_the_whole_vocabulary():
    kept = np.array(KEPT, np.int32)
    completions = [Completion(0, [7, 5, 2, 4], [-1.0] * 4, "length", [0] * 4, kept_token_ids=kept)]
    completions += [Completion(1, [3, 6], None, "length", [0, 0])]
    batch = to_batch(prompts(1), completions, MEMBERS, [0], num_kept=3)
    begin, middle = batch.prompt_lengths[0], batch.cu_seqlens[1]
    assert batch.kept_token_ids[begin:middle].tolist() == KEPT
    assert (batch.kept_token_ids[:begin] == -1).all() and (batch.kept_token_ids[middle:] == -1).all()
    only = to_batch(prompts(1), completions[1:], MEMBERS, [0], num_kept=3)  # of a replica without any set
    assert only.kept_token_ids.shape == (len(only.tokens), 3)
    assert to_batch(prompts(1), completions[1:], MEMBERS, [0], num_kept=0).kept_token_ids is None
