"""The default of --vllm-max-num-seqs: what an engine replica or a server has of a rollout, from 256 to 512."""

import pytest
from good_args import validated

BATCH = "--num-generations 8 --global-batch-size"
SERVER = "--vllm-mode server --weight-sync-dir sync --vllm-server-base-url"
STALE = "--rollout-importance-sampling-mode token_truncate --max-staleness"


@pytest.mark.parametrize(
    "flags, ranks, expected",
    [
        (f"{BATCH} 512", 1, 512),  # one wave
        (f"{BATCH} 320", 1, 320),
        (f"{BATCH} 264", 1, 272),  # vLLM has graphs for multiples of 16
        (f"{BATCH} 64", 1, 256),  # evaluations have more prompts
        (f"{BATCH} 4096", 1, 512),  # several waves: vLLM has no larger graph
        (f"{BATCH} 1024", 4, 256),
        (f"{BATCH} 1536 --vllm-tensor-parallel-size 2", 8, 384),  # four replicas
        (f"{BATCH} 512 --steps-per-generation 2", 4, 256),
        (f"{BATCH} 96 --steps-per-generation 4", 1, 384),  # four updates share a rollout
        (f"{BATCH} 256 --over-sampling-ratio 1.25", 1, 320),
        ("--num-generations 16 --global-batch-size 1152", 3, 384),
        ("--num-generations 16 --global-batch-size 1200", 3, 400),  # 75 prompts: 25 each
        ("--num-generations 16 --global-batch-size 1104", 3, 368),  # 69 prompts: 23 each
        ("--num-generations 48 --global-batch-size 1104", 3, 384),  # 23 prompts: 8, 8 and 7
        (f'{BATCH} 512 --vllm-engine-kwargs {{"max_num_batched_tokens":300}}', 1, 300),
        (f"{BATCH} 512 --rollout-balancing dynamic", 1, 256),  # half of it waits for the first free replica
        (f"{BATCH} 400 --rollout-ranks 1", 2, 400),
        (f"{BATCH} 200 --rollout-ranks 1 {STALE} 1", 2, 400),  # the next batch begins while the last completions run
        (f"{BATCH} 800 --rollout-ranks 4 {STALE} 1", 8, 400),
        (f"{BATCH} 400 --partial-rollouts {STALE} 1", 1, 400),
        (f"{BATCH} 640 {SERVER} http://a:1 http://b:1", 8, 320),  # of a server, however many trainers
        (f"{BATCH} 512 --vllm-max-num-seqs 7", 1, 7),
    ],
)
def test_default(flags, ranks, expected):
    assert validated(flags, ranks).vllm_max_num_seqs == expected
