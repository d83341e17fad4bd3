"""Each group goes to the engine with the least to do, and a dead engine's groups are known."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.rollout.dispatch import Dispatcher


def test_an_aborted_group_frees_all_it_still_held() -> None:
    dispatcher = Dispatcher(2, max_new_tokens=10)
    dispatcher.assign(0, 8)
    dispatcher.assign(1, 1)
    dispatcher.trajectory_done(0, 10)
    dispatcher.forget(0)
    dispatcher.forget(0)  # it may come twice
    assert dispatcher.assign(2, 1) == 0


@settings(deadline=None)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_group_goes_to_the_worker_with_the_least_outstanding(
    num_workers: int, random: Random
) -> None:
    dispatcher = Dispatcher(num_workers, max_new_tokens=10)
    left: dict[int, tuple[int, int]] = {}  # group: (worker, trajectories to come)
    for group_id in range(60):
        load = [sum(n for w, n in left.values() if w == i) for i in range(num_workers)]
        size = random.randint(1, 5)
        worker = dispatcher.assign(group_id, size)
        assert load[worker] == min(load)
        left[group_id] = (worker, size)
        for _ in range(random.randint(0, 6)):
            if left:
                done = random.choice(list(left))
                worker, n = left.pop(done)
                dispatcher.trajectory_done(done, 10)
                if n > 1:
                    left[done] = (worker, n - 1)
        if random.random() < 0.05:
            dead = random.randrange(num_workers)
            assert set(dispatcher.lost(dead)) == {g for g, (w, _) in left.items() if w == dead}
            left = {g: entry for g, entry in left.items() if entry[0] != dead}
            for each in range(num_workers):  # speeds are another test's business
                dispatcher.measured(each, 1.0)
    workers = {group_id: dispatcher.worker_of(group_id) for group_id in range(60)}
    assert workers == {g: left[g][0] if g in left else None for g in workers}


def test_workers_of_different_speed_get_groups_in_proportion() -> None:
    dispatcher = Dispatcher(2, max_new_tokens=100)
    for worker, tokens_per_s in enumerate((100.0, 300.0)):
        dispatcher.measured(worker, tokens_per_s)
    given = [dispatcher.assign(group_id, 4) for group_id in range(40)]
    assert 9 <= given.count(0) <= 11


def test_a_restarted_worker_gets_less_until_it_proves_itself() -> None:
    dispatcher = Dispatcher(2, max_new_tokens=100)
    for worker in (0, 1):
        dispatcher.measured(worker, 1000.0)
    dispatcher.lost(0)
    first = [dispatcher.assign(group_id, 4) for group_id in range(10)]
    assert first.count(0) == 2
    dispatcher.measured(0, 1000.0)
    later = [dispatcher.assign(group_id, 4) for group_id in range(10, 30)]
    assert later.count(0) >= 10
