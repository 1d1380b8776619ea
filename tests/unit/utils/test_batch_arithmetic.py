"""Batch arithmetic: the documented identities hold for whatever is accepted; all else is refused plainly."""

from argparse import Namespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.batch_sizes import FORMULAS, batch_arithmetic
from megatron_grpo.utils.errors import GrpoError


def arguments(**given) -> Namespace:
    defaults = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "hybrid_context_parallel": False,
        "micro_batch_size": 1,
        "max_tokens_per_microbatch": None,
        "global_batch_size": None,
        "generation_batch_size": None,
        "steps_per_generation": 1,
        "num_generations": 8,
        "num_iterations": 1,
    }
    return Namespace(**{**defaults, **given}, explicit=frozenset(given))


small = st.integers(1, 6)
size = st.one_of(st.sampled_from([2, 4, 6, 8, 12, 16, 24, 32, 48, 96]), st.integers(-2, 60))
anything = st.fixed_dictionaries(
    {},
    optional={
        "tensor_model_parallel_size": st.integers(1, 4),
        "pipeline_model_parallel_size": st.integers(1, 4),
        "context_parallel_size": st.integers(1, 2),
        "micro_batch_size": st.integers(-1, 8),
        "max_tokens_per_microbatch": st.integers(0, 4096),
        "global_batch_size": size,
        "generation_batch_size": size,
        "steps_per_generation": st.integers(-1, 4),
        "num_generations": st.one_of(st.just(2), st.integers(0, 8)),
        "num_iterations": st.integers(0, 3),
    },
)


@given(anything, size.filter(lambda n: n > 0))
@settings(max_examples=5 * settings.default.max_examples, deadline=None)
def test_identities_hold_or_it_is_refused(given, world_size):
    args = arguments(**given)
    try:
        sizes = batch_arithmetic(args, world_size)
    except GrpoError:
        return
    parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    assert sizes.dp_size * parallel == world_size
    if args.max_tokens_per_microbatch is None:
        assert sizes.global_batch_size == sizes.micro_batch_size * sizes.dp_size * sizes.gradient_accumulation_steps
    else:
        assert sizes.gradient_accumulation_steps is None and sizes.global_batch_size >= sizes.dp_size
    assert sizes.generation_batch_size == sizes.global_batch_size * sizes.steps_per_generation
    assert sizes.num_rollout_prompts * args.num_generations == sizes.generation_batch_size
    assert sizes.num_train_prompts * args.num_generations == sizes.global_batch_size
    assert sizes.num_prompts_per_dp_group * sizes.dp_size == pytest.approx(sizes.num_train_prompts)
    assert sizes.updates_per_rollout == sizes.steps_per_generation * args.num_iterations
    assert min(sizes.num_train_prompts, sizes.updates_per_rollout) >= 1
    for name, value in given.items():  # what was given is what is used
        if not (name == "micro_batch_size" and args.max_tokens_per_microbatch):
            assert getattr(sizes, name, value) == value
    # Arguments with the derived values filled in mean the same.
    names = ("global_batch_size", "generation_batch_size", "steps_per_generation")
    derived = replaced(args, **{name: getattr(sizes, name) for name in names})
    assert batch_arithmetic(derived, world_size) == sizes


@given(tp=small, pp=small, dp=small, micro=small, group=st.integers(2, 6), prompts=small, steps=small, given=st.data())
@settings(deadline=None)
def test_whatever_is_consistent_is_accepted(tp, pp, dp, micro, group, prompts, steps, given):
    global_batch = micro * dp * group * prompts
    sizes = {
        "global_batch_size": global_batch,
        "steps_per_generation": steps,
        "generation_batch_size": global_batch * steps,
    }
    left_out = given.draw(st.sampled_from([None, *sizes]))
    sizes.pop(left_out, None)
    parallel = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    args = arguments(**sizes, **parallel, micro_batch_size=micro, num_generations=group)
    result = batch_arithmetic(args, tp * pp * dp)
    assert result.dp_size == dp
    assert result.gradient_accumulation_steps == group * prompts
    assert (result.num_train_prompts, result.num_rollout_prompts) == (
        micro * dp * prompts,
        micro * dp * prompts * steps,
    )


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8},
            "world_size (16) must be divisible by the product of all model parallel sizes (32): TP 4 x PP 8 x CP 1",
        ),
        (
            {"micro_batch_size": 4, "tensor_model_parallel_size": 8, "global_batch_size": 10},
            "global_batch_size (10) must be divisible by micro_batch_size (4) x dp_size (2) = 8",
        ),
        (
            {"micro_batch_size": 4, "tensor_model_parallel_size": 8, "global_batch_size": 12},
            "global_batch_size (12) must be divisible by micro_batch_size (4) x dp_size (2) = 8",
        ),
        (
            {"global_batch_size": 48, "num_generations": 32},
            "global_batch_size (48) must be divisible by num_generations (32)",
        ),
        ({"micro_batch_size": 0}, "--micro-batch-size (0) must be greater than 0"),
        (
            {"global_batch_size": 32, "generation_batch_size": 48},
            "generation_batch_size (48) must be divisible by global_batch_size (32)",
        ),
        (
            {"generation_batch_size": 48, "steps_per_generation": 5},
            "generation_batch_size (48) must be divisible by steps_per_generation (5)",
        ),
        (
            {"global_batch_size": 32, "generation_batch_size": 96, "steps_per_generation": 2},
            "generation_batch_size (96) must be global_batch_size (32) x steps_per_generation (2) = 64",
        ),
        (
            {"max_tokens_per_microbatch": 64, "global_batch_size": 8},
            "global_batch_size (8) must be at least dp_size (16)",
        ),
    ],
)
def test_refusals_name_the_numbers(given, message):
    with pytest.raises(GrpoError) as error:
        batch_arithmetic(arguments(**given), 16)
    assert message in str(error.value)


def test_a_group_of_one():
    args = arguments(num_generations=1, global_batch_size=6)
    assert batch_arithmetic(args, 2).num_train_prompts == 6


def test_lines_show_all_six_numbers_with_their_formulas():
    args = arguments(micro_batch_size=4, global_batch_size=64, tensor_model_parallel_size=2, steps_per_generation=3)
    text = "\n".join(batch_arithmetic(args, 16).lines())
    assert all(name in text and formula in text for name, formula in FORMULAS.items())
    assert "64      = 4 x 8 x 2" in text and "192     = 64 x 3" in text

    budget = arguments(max_tokens_per_microbatch=4096, global_batch_size=64)
    assert batch_arithmetic(args, 16).lines(width=200) == batch_arithmetic(args, 16).lines()
    assert max(map(len, batch_arithmetic(args, 16).lines(width=80))) <= 80
    assert "gradient accumulation is not fixed" in "\n".join(batch_arithmetic(budget, 16).lines())
