"""Each group goes to the engine with the least to do, for its speed."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.rollout.dispatch import Assignment, Dispatcher


def test_an_aborted_group_frees_all_it_still_held() -> None:
    dispatcher = Dispatcher(2, max_new_tokens=10)
    first = dispatcher.assign(8)
    assert (first.engine, dispatcher.assign(1).engine) == (0, 1)
    dispatcher.trajectory_done(first, 10)
    dispatcher.release(first, 7)
    assert dispatcher.assign(1).engine == 0


@settings(deadline=None)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_group_goes_to_the_engine_with_the_least_outstanding(num: int, random: Random) -> None:
    dispatcher = Dispatcher(num, max_new_tokens=10)
    left: list[tuple[Assignment, int]] = []  # with the trajectories to come
    for _ in range(60):
        load = [sum(n for a, n in left if a.engine == i) for i in range(num)]
        size = random.randint(1, 5)
        assignment = dispatcher.assign(size)
        assert load[assignment.engine] == min(load)
        left.append((assignment, size))
        for _ in range(random.randint(0, 6)):
            if left:
                assignment, n = left.pop(random.randrange(len(left)))
                if random.random() < 0.1:
                    dispatcher.release(assignment, n)
                    continue
                dispatcher.trajectory_done(assignment, 10)
                left += [(assignment, n - 1)] if n > 1 else []


def test_engines_of_different_speed_get_groups_in_proportion() -> None:
    dispatcher = Dispatcher(2, max_new_tokens=100)
    for engine, tokens_per_s in enumerate((100.0, 300.0)):
        dispatcher.measured(engine, tokens_per_s)
    given = [dispatcher.assign(4).engine for _ in range(40)]
    assert 9 <= given.count(0) <= 11


def test_a_restarted_engine_gets_less_until_it_proves_itself() -> None:
    dispatcher = Dispatcher(2, max_new_tokens=100)
    for engine in (0, 1):
        dispatcher.measured(engine, 1000.0)
    dispatcher.restarted(0)
    first = [dispatcher.assign(4).engine for _ in range(10)]
    assert first.count(0) == 2
    dispatcher.measured(0, 1000.0)
    later = [dispatcher.assign(4).engine for _ in range(20)]
    assert later.count(0) >= 10
