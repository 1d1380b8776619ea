"""Weights that reach an engine on GPUs: a colocated one by the plan, servers in vLLM's packed form over NCCL."""

import models
import pytest
import torch
from differing_pairs import wrong_answers
from launch import found, torchrun

from megatron_grpo.rollout.weight_sync import planned

FLAT = 0.3  # standard deviation of logits


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_a_colocated_engine_is_written_in_place(family, tmp_path, capsys):
    """Dense, tied, experts, latent attention: no loader of vLLM runs, and every parameter has the trainer's bits.

    Log-probabilities depend on what vLLM derives from parameters, too.
    """
    model = models.make(tmp_path / family, family, FLAT)
    (facts,) = found(tmp_path / "out", 1, "planned", model, "--vllm-enforce-eager")
    facts = facts["planned"]
    with capsys.disabled():
        print(f"\n{family}: {facts}")
    assert facts["first"] == facts["second"] == [] == facts["loaders"]
    assert facts["stale"][0] > 0.9 * facts["tensors"]
    assert facts["before"] < 0.05 and facts["after"] < 0.05 < facts["stale"][1]
    assert "the weights of update 7 reached the engine with other bytes" in facts["flipped"]
    assert "on rank 0 model.embed_tokens.weight" in facts["flipped"]


@pytest.mark.parametrize("sizes", [[1], [3, 4096, 1, 2], [1] * 700])
def test_checksums_are_those_of_a_cpu(sizes):
    """The kernels' sums against those of torch's operations, which a unit test compares with Python's integers."""
    ends = torch.tensor([1, *sizes]).cumsum(0)  # the first row belongs to no piece
    words = torch.randint(-(2**63), 2**63 - 1, (sum(sizes) + 1, planned.ROW_BYTES // 8))
    whole, rows = words.view(torch.uint8).view(-1), torch.stack([ends[:-1], ends[1:]])
    assert torch.equal(planned.checksums(whole.cuda(), rows.cuda()).cpu(), planned.checksums(whole, rows))


def test_one_other_bit_is_found():
    assert wrong_answers(planned.differing, "cuda") == []


@pytest.mark.gpus(2)
def test_packed_weights_arrive():
    """The worker asserts; here it must have come to the end, three times."""
    output = torchrun(2, "tests/gpu/nccl_worker.py", env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    assert output.count("received ") == 3, output
