"""The pace: no more ahead than keeps the trainer fed, and nothing held back where it would cost."""

import random

import pytest

from minirl.pace import AUTO, Pace


def test_a_fixed_target_is_a_fixed_number_of_batches() -> None:
    assert [Pace(8, 72, target).limit for target in (0.0, 1.5, 100.0)] == [8, 20, 72]


def test_groups_in_flight_cover_the_turn_around() -> None:
    pace = Pace(8, 72, AUTO)
    assert pace.limit == 16  # one batch ahead, before anything is measured
    pace.batch_taken(starved_s=100.0, num_left=0)
    assert pace.limit == 16  # the wait for the first batch is not starvation
    for _ in range(8):
        pace.group_took(3.0)
    pace.step_took(1.0)
    assert pace.limit == 8 + 3 * 8  # Little's law


def test_a_trainer_that_starves_gets_more_and_unused_stock_is_given_up() -> None:
    pace = Pace(8, 72)
    pace.step_took(1.0)
    before = pace.limit
    pace.batch_taken(starved_s=0.5, num_left=0)
    assert pace.limit == before + 5
    for _ in range(60):
        pace.batch_taken(starved_s=0.0, num_left=max(0, pace.limit - 16))
    assert before <= pace.limit <= before + 1


def test_where_generation_is_the_bottleneck_nothing_is_held_back() -> None:
    pace = Pace(8, 72)
    for _ in range(20):
        pace.step_took(1.0)
        pace.batch_taken(starved_s=1.0, num_left=0)
    assert pace.limit == 72
    for _ in range(3):  # the margin is clamped to the slots: it reacts soon (no wind-up)
        pace.batch_taken(starved_s=0.0, num_left=50)
    assert pace.limit < 60


@pytest.mark.parametrize("seed", range(10))
def test_the_limit_is_always_between_a_batch_and_the_slots(seed: int) -> None:
    dice = random.Random(seed)
    size, eta = dice.randint(1, 20), dice.randint(0, 9)
    pace = Pace(size, size * (eta + 1), dice.choice([AUTO, 0.0, 0.3, 2.0, 50.0]))
    for _ in range(300):
        dice.choice([pace.group_took, pace.step_took])(dice.lognormvariate(0, 3))
        pace.batch_taken(dice.choice([0.0, dice.lognormvariate(0, 3)]), dice.randint(0, 100))
        assert size <= pace.limit <= size * (eta + 1)
