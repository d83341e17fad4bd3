"""Packing: each sequence exactly once, within the budget, equally many micro-batches."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.errors import MinirlError
from minirl.train.packing import balanced, cost, micro_batches, split_over_ranks

BUDGET = 100
lengths_lists = st.lists(st.integers(1, BUDGET), max_size=60)


def test_algorithm_1_by_hand() -> None:
    # 6 opens the first; 5 does not fit (11 > 10) and opens the second; 4 fits both: the first has
    # as few as the second and comes first; 3 fits only the second; 2 fits the second (8 + 2).
    assert micro_batches([4, 6, 5, 3, 2], 10) == [[1, 0], [2, 3, 4]]
    # 41 joins 60 (101), 40 opens the second; 9 fits both (110, 49) and goes where there is one.
    assert micro_batches([60, 41, 40, 9], 110) == [[0, 1], [2, 3]]


@given(lengths_lists, st.integers(1, 5))
def test_ranks_have_equal_counts_and_nearly_equal_costs(lengths: list[int], num_ranks: int) -> None:
    split = split_over_ranks(lengths, num_ranks, BUDGET)
    assert len(split) == num_ranks
    assert len({len(batches) for batches in split}) == 1 and split[0]
    flat = list(chain.from_iterable(split))
    assert sorted(chain.from_iterable(flat)) == list(range(len(lengths)))
    for own in ([lengths[index] for index in batch] for batch in flat):
        assert sum(own) <= BUDGET and own == sorted(own, reverse=True)  # longest first
    for batches in split:
        assert sum(not batch for batch in batches) == max(0, len(batches) - sum(map(len, batches)))
    costs = [cost(length) for length in lengths]
    loads = [sum(costs[index] for index in own) for own in balanced(costs, num_ranks)]
    assert max(loads) - min(loads) <= cost(max(lengths, default=0)) + 1e-9


def test_few_sequences_leave_empty_micro_batches_and_a_long_one_names_the_remedy() -> None:
    assert split_over_ranks([5, 7], 3, 10) == [[[1]], [[0]], [[]]]
    with pytest.raises(MinirlError, match=r"train\.max_tokens.*raise it to 101"):
        micro_batches([3, 101], BUDGET)
