"""pass@k against all ways of choosing k completions."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.algorithm.pass_at_k import pass_at_k, powers_of_two


def test_by_hand():
    right = np.array([True, False, False, True, True, True, False, False])
    groups = np.array([5, 5, 5, 5, 2, 2, 2, 2])
    assert pass_at_k(right, groups, 1) == 0.5
    assert pass_at_k(right, groups, 2) == pytest.approx(5 / 6)  # of 6 pairs one has two wrong ones
    assert pass_at_k(right, groups, 3) == 1.0
    assert pass_at_k(np.array([True, False, False, False]), np.array([0, 0, 1, 1]), 2) == 0.5


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_it_is_the_share_of_choices_with_a_right_one(right, data):
    k = data.draw(st.integers(1, len(right)))
    expected = np.mean([any(choice) for choice in combinations(right, k)])
    assert pass_at_k(np.array(right), np.zeros(len(right), np.int64), k) == pytest.approx(expected)


def test_too_few_completions():
    with pytest.raises(ValueError, match="group 3 has 1"):
        pass_at_k(np.array([True]), np.array([3]), 2)


def test_powers_of_two():
    assert [powers_of_two(n) for n in (0, 1, 2, 3, 4, 9)] == [[], [1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
