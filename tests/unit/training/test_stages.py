"""Division of layers over pipeline stages: what does not divide is refused with flags that do."""

import re
from itertools import accumulate, combinations, pairwise

import pytest
from good_args import MODEL, RUN, validated
from slow import slow_except

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.estimate.memory import pipeline
from megatron_grpo.parallel.arguments import balanced
from megatron_grpo.utils.errors import GrpoError

LLAMA_405B = (
    MODEL
    + RUN
    + """
    --model-family llama --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128
    --num-query-groups 8 --kv-channels 128 --vocab-size 128256 --max-position-embeddings 131072 --no-qk-layernorm
    --untie-embeddings-and-output-weights --tensor-model-parallel-size 8 --sequence-parallel --dry-run
    """
)


def stages(base: str, flags: str, world_size: int) -> list[list[int]]:
    """Return the number of layers of every chunk, [stage][virtual stage], as megatron-core divides them."""
    return [[len(chunk.layers) for chunk in stage] for stage in pipeline(validated(flags, world_size, base))]


def ways(base: str, flags: str, world_size: int) -> list[str]:
    """Return the flags that the refusal of ``flags`` proposes."""
    with pytest.raises(GrpoError) as error:
        validated(flags, world_size, base)
    assert "; give " in str(error.value), error.value
    return [way.replace("'", "") for way in str(error.value).split("; give ")[1].split(", or ")]


def test_llama_405b_on_16_stages_starts_in_each_way():
    flags = "--pipeline-model-parallel-size 16"
    with pytest.raises(
        GrpoError, match=r"^--num-layers \(126\) must be divisible by pipeline parallel size \(16\); give"
    ):
        validated(flags, 128, LLAMA_405B)
    found = ways(LLAMA_405B, flags, 128)
    assert found == [
        "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        "--pipeline-model-parallel-layout Et*7|(t*8|)*14t*7L",
    ]
    for way in found:
        assert stages(LLAMA_405B, f"{flags} {way}", 128) == [[7]] + [[8]] * 14 + [[7]], way


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("pp", slow_except([2, 4], [2, 4, 8]))
def test_every_proposed_division_has_all_layers(pp, virtual):
    base = f"{MODEL} {RUN} --global-batch-size 512"
    for layers in range(pp * virtual, 6 * pp * virtual, 5):
        if layers % (pp * virtual) == 0:
            continue
        flags = f"--num-layers {layers} --pipeline-model-parallel-size {pp}"
        flags += f" --num-virtual-stages-per-pipeline-rank {virtual}" * (virtual > 1)
        proposed = ways(base, flags, pp)
        assert any("layout" in way for way in proposed)
        for way in proposed:
            found = stages(base, f"{flags} {way}", pp)
            chunks = [chunk for stage in found for chunk in stage]
            assert sum(chunks) == layers and len(chunks) == pp * virtual, (flags, way, found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--decoder-first-pipeline-num-layers 3",
            "first-pipeline-num-layers 3 leaves 17 layers for 3 of 4",
        ),
        (
            "--decoder-first-pipeline-num-layers 10 --decoder-last-pipeline-num-layers 10",
            "leaves 0 layers for 2 of 4 stages",
        ),
        (
            "--num-layers 21 --account-for-loss-in-pipeline-split",
            "(21) + 1 for embedding and loss must be",
        ),
    ],
)
def test_divisions_that_leave_layers_over_are_refused(flags, message):
    with pytest.raises(GrpoError, match=re.escape(message)):
        validated(f"--num-layers 20 --pipeline-model-parallel-size 4 {flags}", 4)


def test_two_stages_that_do_not_have_all_layers_are_refused():
    """megatron-core builds 3 + 2 layers of 6 without an error."""
    ends = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers"
    with pytest.raises(GrpoError, match="leaves 1 layers for 0 of 2 stages; give --decoder-first"):
        validated(f"--num-layers 6 --pipeline-model-parallel-size 2 {ends} 2", 2)
    assert stages(MODEL + RUN, f"--num-layers 6 --pipeline-model-parallel-size 2 {ends} 3", 2) == [[3], [3]]


def compositions(layers: int, stages: int):
    """Yield all divisions of the layers over the stages, one or more each."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in pairwise([0, *cuts, layers])]


def largest(sizes: list[int], costs: list[float], last: float) -> float:
    ends = [0, *accumulate(sizes)]
    sums = [sum(costs[a:b]) for a, b in pairwise(ends)]
    return max([*sums[:-1], sums[-1] + last])


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.integers(0, 30), st.data())
def test_no_division_is_better_balanced(costs, last, data):
    stages = data.draw(st.integers(1, min(4, len(costs))))
    found = balanced(costs, last, stages)
    assert len(found) == stages and sum(found) == len(costs) and min(found) > 0
    assert largest(found, costs, last) == min(largest(sizes, costs, last) for sizes in compositions(len(costs), stages))


QWEN3_4B = (
    MODEL
    + RUN
    + """
    --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --num-query-groups 8
    --kv-channels 128 --vocab-size 151936 --max-position-embeddings 40960 --max-prompt-length 32
    --max-completion-length 512 --pipeline-model-parallel-layout auto --dry-run
    """
)


@pytest.mark.parametrize("virtual", [1, 2])
def test_automatic_stages_count_the_output_layer(virtual):
    """Qwen3-4B's matrices: 100.9 million parameters a layer, 389 million of the output layer, three products each."""
    layer = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728
    attention = 2 * 32 * 128 * 544 / 2  # multiplications of a token with half of the keys
    costs, last = [layer + attention] * 36, 2560 * 151936 * 512 / 544
    flags = "--pipeline-model-parallel-size 4" + f" --num-virtual-stages-per-pipeline-rank {virtual}" * (virtual > 1)
    found = stages(QWEN3_4B, flags, 4)
    sizes = [found[stage][place] for place in range(virtual) for stage in range(4)]
    assert sum(sizes) == 36 and len(sizes) == 4 * virtual
    if virtual == 1:
        assert largest(sizes, costs, last) == min(largest(other, costs, last) for other in compositions(36, 4))
    assert largest(sizes, costs, last) < 0.8 ** (virtual == 1) * largest([9 // virtual] * len(sizes), costs, last)
    assert sizes[-1] < sizes[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decoder-first-pipeline-num-layers 10", "both divide the layers over the stages"),
        ("--account-for-loss-in-pipeline-split", "both divide the layers over the stages"),
        ("--num-layers 3", "3 layers are too few for 4 stages"),
    ],
)
def test_automatic_stages_refused(flags, message):
    with pytest.raises(GrpoError, match=message):
        validated(f"--pipeline-model-parallel-size 4 {flags}", 4, QWEN3_4B)
