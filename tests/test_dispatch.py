"""Each group goes to the engine with the least to do, and a dead engine's groups are known."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.rollout.dispatch import Dispatcher


def test_a_group_goes_to_the_worker_with_the_fewest_trajectories() -> None:
    dispatcher = Dispatcher(3)
    assert [dispatcher.assign(i, size) for i, size in enumerate((4, 1, 2, 2, 1, 1))] == [
        0,
        1,
        2,
        1,
        2,
        1,
    ]


def test_done_trajectories_make_room() -> None:
    dispatcher = Dispatcher(2)
    assert [dispatcher.assign(0, 3), dispatcher.assign(1, 2)] == [0, 1]
    dispatcher.trajectory_done(0)
    dispatcher.trajectory_done(0)
    assert dispatcher.assign(2, 1) == 0  # 1 against 2


def test_a_group_is_forgotten_with_its_last_trajectory() -> None:
    dispatcher = Dispatcher(1)
    dispatcher.assign(7, 2)
    dispatcher.trajectory_done(7)
    assert dispatcher.worker_of(7) == 0
    dispatcher.trajectory_done(7)
    assert dispatcher.worker_of(7) is None
    assert dispatcher.lost(0) == []


def test_an_aborted_group_frees_all_it_still_held() -> None:
    dispatcher = Dispatcher(2)
    dispatcher.assign(0, 8)
    dispatcher.assign(1, 1)
    dispatcher.trajectory_done(0)
    dispatcher.forget(0)
    dispatcher.forget(0)  # it may be told twice
    assert dispatcher.assign(2, 1) == 0


def test_the_groups_of_a_dead_worker_are_nobodys_and_the_others_stay() -> None:
    dispatcher = Dispatcher(2)
    places = {group_id: dispatcher.assign(group_id, 2) for group_id in range(6)}
    dispatcher.trajectory_done(0)
    lost = dispatcher.lost(0)
    assert lost == [group_id for group_id, worker in places.items() if worker == 0]
    assert all(dispatcher.worker_of(group_id) is None for group_id in lost)
    assert all(dispatcher.worker_of(g) == 1 for g in places if g not in lost)
    assert dispatcher.lost(0) == []
    assert dispatcher.assign(9, 1) == 0


@settings(deadline=None)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_load_is_what_is_outstanding(num_workers: int, random: Random) -> None:
    dispatcher = Dispatcher(num_workers)
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
                dispatcher.trajectory_done(done)
                if n > 1:
                    left[done] = (worker, n - 1)
        if random.random() < 0.05:
            dead = random.randrange(num_workers)
            assert set(dispatcher.lost(dead)) == {g for g, (w, _) in left.items() if w == dead}
            left = {g: entry for g, entry in left.items() if entry[0] != dead}
    assert all(dispatcher.worker_of(g) == w for g, (w, _) in left.items())
