"""Each group goes to the engine with the least to do, for its speed."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.rollout.dispatch import Assignment, Dispatcher


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


def test_groups_go_by_speed_and_a_restarted_engine_must_prove_itself_again() -> None:
    dispatcher = Dispatcher(2, max_new_tokens=100)

    def share_of_first(count: int) -> int:
        return [dispatcher.assign(4).engine for _ in range(count)].count(0)

    dispatcher.measured(0, 300.0)
    dispatcher.measured(1, 100.0)
    assert share_of_first(40) == 30
    dispatcher = Dispatcher(2, max_new_tokens=100)
    for engine in (0, 1):
        dispatcher.measured(engine, 1000.0)
    dispatcher.restarted(0)
    assert share_of_first(10) == 2
    dispatcher.measured(0, 1000.0)
    assert share_of_first(20) >= 10
