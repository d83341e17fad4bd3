"""The buffer by example: what is trained, held back or abandoned, and admission control.

The rules that hold at every moment (staleness, ledger, slots, no deadlock, rollback and resume) are
proved over random histories in test_buffer_histories.py.
"""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.buffer import AUTO, Admission, Buffer, republished_as
from minirl.records import Drop, Group, StopReason, Trajectory
from minirl.rollout.dispatch import Assignment, Dispatcher


@given(st.integers(0, 50), st.integers(0, 50))
def test_republished_weights_seem_no_nearer_than_they_are(base: int, since: int) -> None:
    latest = base + since
    again = republished_as(base, latest)
    assert again > latest and (again - latest) % 2, "into the slot that nobody reads"
    assert all(again - v >= v - base for v in range(base, latest + 1))


# Admission control --------------------------------------------------------------------------------


def test_admission_control_holds_groups_back_and_slots_stay_what_they_are() -> None:
    buffer = Buffer(2, 8, target_staleness=1)
    assert (buffer.num_free, buffer.num_to_admit(99, 0), buffer.num_to_admit(3, 0)) == (18, 4, 3)
    tickets = [buffer.admit(i, 0) for i in range(4)]
    assert (buffer.num_free, buffer.num_to_admit(99, 0)) == (14, 0)
    buffer.drop(tickets[0].group_id, Drop.EQUAL_REWARDS)
    assert buffer.num_to_admit(99, 0) == 1 and buffer.num_to_admit(3, 0) == 0


def test_groups_in_flight_are_a_fixed_number_of_batches_or_cover_the_turn_around() -> None:
    assert [Admission(8, 72, target).limit for target in (0.0, 1.5, 100.0)] == [8, 20, 72]
    admission = Admission(8, 72, AUTO)
    assert admission.limit == 16  # one batch ahead, before anything is measured
    admission.batch_taken(starved_s=100.0, num_left=0)
    assert admission.limit == 16  # the wait for the first batch is not starvation
    for _ in range(8):
        admission.group_took(3.0)
    admission.step_took(1.0)
    assert admission.limit == 8 + 3 * 8  # Little's law
    buffer = Buffer(8, 8, target_staleness=AUTO)  # it measures the same by itself
    starved = list[float]()
    buffer.admission.batch_taken = lambda seconds, num_left: starved.append(seconds)
    tickets = [buffer.admit(i, 0, now=1.0) for i in range(8)]
    assert buffer.next_batch(1, now=2.0) is None and buffer.next_batch(1, now=3.0) is None
    for ticket in tickets:
        written = Trajectory(0, 10, 5, StopReason.STOP, 0, 0)
        buffer.finish(Group(ticket.group_id, ticket.prompt_index, (written,), (1.0,)), now=4.0)
    assert buffer.next_batch(1, now=4.0) is not None and starved == [2.0]
    buffer.published(now=5.0)
    assert buffer.admission.limit == 8 + 3 * 8


def test_a_trainer_that_starves_gets_more_and_unused_stock_is_given_up() -> None:
    """Where generation is the bottleneck nothing is held back."""
    admission = Admission(8, 72)
    admission.step_took(1.0)
    before = admission.limit
    admission.batch_taken(starved_s=0.5, num_left=0)
    assert admission.limit == before + 5
    for _ in range(60):
        admission.batch_taken(starved_s=0.0, num_left=max(0, admission.limit - 16))
    assert before <= admission.limit <= before + 1
    admission = Admission(8, 72)
    for _ in range(20):
        admission.step_took(1.0)
        admission.batch_taken(starved_s=1.0, num_left=0)
    assert admission.limit == 72
    for _ in range(3):  # the margin is clamped to the slots: it reacts soon (no wind-up)
        admission.batch_taken(starved_s=0.0, num_left=50)
    assert admission.limit < 60


# Dispatch: each group goes to the engine with the least to do ------------------------------------


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
