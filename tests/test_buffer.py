"""The buffer by example: what is trained, held back or abandoned, and admission control.

The rules that hold at every moment (staleness, ledger, slots, no deadlock, rollback and resume) are
proved over random histories in test_groups.py.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.buffer import AUTO, Admission, Buffer, OnStale, Ticket, republished_as
from minirl.records import Group, StopReason, Trajectory


def done(ticket: Ticket, head: int | None = None, tail: int | None = None) -> Group:
    head = ticket.head_bound if head is None else head
    tail = head if tail is None else tail
    written = Trajectory(0, 10, 5, StopReason.STOP, head, tail)
    return Group(ticket.group_id, ticket.prompt_index, (written,), (1.0,))


def fill(buffer: Buffer, count: int) -> list[Ticket]:
    return [buffer.admit(i, buffer.version) for i in range(count)]


def train(buffer: Buffer) -> list[int]:
    """One step; the ids that it trained."""
    batch = buffer.next_batch(1)
    assert batch is not None
    buffer.release(buffer.published())
    return [group.id for group in batch.groups]


def test_wait_looks_ahead_further_than_the_next_step() -> None:
    # B = 1, η = 2: all three began under version 0 and are due by version 2. Two were left by the
    # first step; if both were still running at the second, one of them would be too late.
    buffer = Buffer(1, 2, OnStale.WAIT)
    slow, slower, quick = fill(buffer, 3)
    buffer.finish(done(quick))
    assert train(buffer) == [quick.group_id]
    buffer.finish(done(buffer.admit(3, 1)))
    assert buffer.next_batch(1) is None
    buffer.finish(done(slow, 0, 1))
    assert train(buffer) == [slow.group_id]
    buffer.finish(done(slower, 0, 2))
    assert train(buffer) == [slower.group_id]


@given(st.integers(0, 50), st.integers(0, 50))
def test_republished_weights_seem_no_nearer_than_they_are(base: int, since: int) -> None:
    latest = base + since
    again = republished_as(base, latest)
    assert again > latest and (again - latest) % 2, "into the slot that nobody reads"
    assert all(again - v >= v - base for v in range(base, latest + 1))


# Admission control --------------------------------------------------------------------------------


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


def test_where_generation_is_the_bottleneck_nothing_is_held_back() -> None:
    admission = Admission(8, 72)
    for _ in range(20):
        admission.step_took(1.0)
        admission.batch_taken(starved_s=1.0, num_left=0)
    assert admission.limit == 72
    for _ in range(3):  # the margin is clamped to the slots: it reacts soon (no wind-up)
        admission.batch_taken(starved_s=0.0, num_left=50)
    assert admission.limit < 60


@pytest.mark.parametrize("seed", range(10))
def test_the_limit_is_always_between_a_batch_and_the_slots(seed: int) -> None:
    dice = random.Random(seed)
    size, eta = dice.randint(1, 20), dice.randint(0, 9)
    admission = Admission(size, size * (eta + 1), dice.choice([AUTO, 0.0, 0.3, 2.0, 50.0]))
    for _ in range(300):
        dice.choice([admission.group_took, admission.step_took])(dice.lognormvariate(0, 3))
        admission.batch_taken(dice.choice([0.0, dice.lognormvariate(0, 3)]), dice.randint(0, 100))
        assert size <= admission.limit <= size * (eta + 1)
