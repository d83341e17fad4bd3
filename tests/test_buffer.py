"""The buffer: no trained token staler than η, every group accounted for, no slot lost, no deadlock.

Each rule by example; test_buffer_histories.py drives it through random ones.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.buffer import Buffer, Drop, History, Ledger, OnStale, Ticket, republished_as
from minirl.pace import Pace
from minirl.records import Group, StopReason, Trajectory


def trajectory(head: int, tail: int) -> Trajectory:
    return Trajectory(0, 10, 5, StopReason.STOP, head, tail)


def done(ticket: Ticket, head: int | None = None, tail: int | None = None) -> Group:
    head = ticket.head_bound if head is None else head
    tail = head if tail is None else tail
    return Group(ticket.group_id, ticket.prompt_index, (trajectory(head, tail),), (1.0,))


def fill(buffer: Buffer, count: int) -> list[Ticket]:
    return [buffer.admit(i, buffer.version) for i in range(count)]


def train(buffer: Buffer) -> list[int]:
    """One step; the ids that it trained."""
    batch = buffer.next_batch(1)
    assert batch is not None
    buffer.published()
    return [group.id for group in batch.groups]


@pytest.mark.parametrize("on_stale", OnStale)
def test_slots_come_back_only_at_publication(on_stale: OnStale) -> None:
    buffer = Buffer(2, 1, on_stale)
    tickets = fill(buffer, 4)
    assert buffer.num_free == 0 and {t.slot for t in tickets} == {0, 1, 2, 3}
    for ticket in tickets[:2]:
        buffer.finish(done(ticket))
    assert (buffer.num_free, buffer.num_ready, buffer.num_running) == (0, 2, 2)
    assert buffer.next_batch(1) is not None
    assert (buffer.num_free, buffer.num_ready, buffer.num_running) == (0, 0, 2)
    assert buffer.published() == tickets[:2]
    assert buffer.num_free == 2 and buffer.version == 1


@pytest.mark.parametrize("on_stale", OnStale)
def test_at_eta_0_nothing_runs_beside_the_batch_in_training(on_stale: OnStale) -> None:
    buffer = Buffer(3, 0, on_stale)
    for version in range(4):
        tickets = fill(buffer, buffer.num_free)
        assert len(tickets) == 3
        for ticket in tickets:
            assert buffer.next_batch(1) is None
            buffer.finish(done(ticket))
        batch = buffer.next_batch(version + 1)
        assert batch is not None and batch.version == version
        assert (buffer.num_free, buffer.num_running, buffer.num_ready) == (0, 0, 0)
        buffer.published()


def test_a_batch_takes_the_oldest_heads_first_and_lists_them_by_id() -> None:
    buffer = Buffer(2, 3)
    tickets = fill(buffer, 5)
    for ticket, head in zip(tickets, (3, 1, 2, 1, 0), strict=True):
        buffer.finish(done(ticket, head, 3))
    batch = buffer.next_batch(1)
    assert batch is not None and [g.id for g in batch.groups] == [1, 4]
    buffer.published()
    assert train(buffer) == [2, 3]


def test_one_batch_trains_at_a_time() -> None:
    buffer = Buffer(1, 1)
    for ticket in fill(buffer, 2):
        buffer.finish(done(ticket))
    assert buffer.next_batch(1) is not None
    assert buffer.next_batch(2) is None
    buffer.published()
    assert buffer.next_batch(2) is not None


def test_a_group_is_as_old_as_its_oldest_trajectory() -> None:
    buffer = Buffer(1, 1, OnStale.DROP)
    ticket = buffer.admit(0, 0)
    buffer.version = 2
    trajectories = (trajectory(2, 2), trajectory(0, 2), trajectory(1, 2))
    buffer.finish(Group(ticket.group_id, 0, trajectories, (0.0, 1.0, 0.0)))
    assert buffer.next_batch(1) is None
    assert buffer.take_untrainable() == [ticket]


def straggling(on_stale: OnStale) -> tuple[Buffer, Ticket]:
    """B = 1, η = 1: one group has been running since version 0, at version 2 by now."""
    buffer = Buffer(1, 1, on_stale)
    straggler = buffer.admit(0, 0)
    for _ in range(2):
        buffer.finish(done(buffer.admit(1, buffer.version)))
        train(buffer)
    return buffer, straggler


def test_mask_trains_a_straggler_that_ends_under_newer_weights() -> None:
    buffer, straggler = straggling(OnStale.MASK)
    assert buffer.expired() == []
    buffer.finish(done(straggler, head=0, tail=1))  # 1 is within η of version 2
    assert buffer.take_untrainable() == []
    assert train(buffer) == [straggler.group_id]


def test_mask_drops_a_group_with_no_token_left_to_train() -> None:
    buffer, straggler = straggling(OnStale.MASK)
    buffer.finish(done(straggler, head=0, tail=0))
    assert buffer.next_batch(1) is None
    assert buffer.take_untrainable() == [straggler]
    assert buffer.drops == {Drop.STALE: 1}
    assert buffer.num_free == 2


def test_drop_gives_a_straggler_up_while_it_runs() -> None:
    buffer, straggler = straggling(OnStale.DROP)
    assert buffer.expired() == [straggler.group_id]
    assert buffer.drop(straggler.group_id, Drop.STALE) == straggler
    assert buffer.expired() == [] and buffer.drops == {Drop.STALE: 1}
    assert buffer.num_free == 2


def test_drop_leaves_a_straggler_out_that_is_done_too_late() -> None:
    buffer, straggler = straggling(OnStale.DROP)
    buffer.finish(done(straggler, head=0, tail=2))  # mask would train it
    assert buffer.next_batch(1) is None
    assert buffer.take_untrainable() == [straggler]


def test_drop_keeps_a_group_that_began_later_than_it_might_have() -> None:
    buffer, straggler = straggling(OnStale.DROP)
    buffer.finish(done(straggler, head=1, tail=2))  # it had waited at its engine
    assert buffer.take_untrainable() == []
    assert train(buffer) == [straggler.group_id]


def test_wait_holds_the_step_back_for_a_straggler() -> None:
    buffer = Buffer(1, 1, OnStale.WAIT)
    straggler = buffer.admit(0, 0)
    buffer.finish(done(buffer.admit(1, 0)))
    assert train(buffer) == [1]  # version 1: the straggler may still be trained from it
    buffer.finish(done(buffer.admit(2, 1)))
    assert buffer.next_batch(1) is None  # from version 2 it could not
    buffer.finish(done(straggler, 0, 1))
    assert train(buffer) == [straggler.group_id]
    assert train(buffer) == [2]


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


def test_wait_admits_no_group_that_could_not_be_trained_in_time() -> None:
    # An evaluation pins version 0, so a group that begins now is due by version 1, as is the one
    # that is left: only one of them could be trained. Admitted, it would block the run for good.
    buffer = Buffer(1, 1, OnStale.WAIT)
    first, second = fill(buffer, 2)
    buffer.finish(done(first))
    assert train(buffer) == [first.group_id]
    assert buffer.num_free == 1
    assert not buffer.can_admit(0) and buffer.can_admit(1)
    buffer.finish(done(second))
    assert not buffer.can_admit(0)
    assert train(buffer) == [second.group_id]
    assert not buffer.can_admit(0) and buffer.can_admit(1)


@pytest.mark.parametrize("on_stale", [OnStale.MASK, OnStale.DROP])
def test_without_wait_a_free_slot_admits_anything(on_stale: OnStale) -> None:
    buffer = Buffer(1, 1, on_stale)
    buffer.version = 10
    assert buffer.can_admit(0)
    fill(buffer, 2)
    assert not buffer.can_admit(10)


def test_the_ledger_balances_with_every_event() -> None:
    buffer = Buffer(1, 2)
    a, b, c = fill(buffer, 3)
    assert buffer.ledger == Ledger(submitted=3, trained=0, dropped=0, in_flight=3)
    buffer.finish(done(a))
    buffer.drop(b.group_id, Drop.REWARD_TIMEOUT)
    assert buffer.ledger == Ledger(3, 0, 1, 2)
    assert buffer.next_batch(1) is not None
    assert buffer.ledger == Ledger(3, 0, 1, 2)
    buffer.published()
    assert buffer.ledger == Ledger(3, 1, 1, 1)
    buffer.drop(c.group_id, Drop.WORKER_DIED)
    assert buffer.ledger == Ledger(3, 1, 2, 0)
    assert buffer.drops == {Drop.REWARD_TIMEOUT: 1, Drop.WORKER_DIED: 1}
    assert buffer.ledger.is_balanced
    assert not Ledger(3, 1, 1, 0).is_balanced


def test_a_lost_batch_is_counted_and_its_slots_come_back() -> None:
    buffer = Buffer(2, 0)
    tickets = fill(buffer, 2)
    for ticket in tickets:
        buffer.finish(done(ticket))
    assert buffer.next_batch(1) is not None
    assert buffer.training_failed() == tickets
    assert buffer.ledger == Ledger(2, 0, 2, 0)
    assert (buffer.num_free, buffer.version) == (2, 0)
    for ticket in fill(buffer, 2):
        buffer.finish(done(ticket))
    assert train(buffer) == [2, 3]


@pytest.mark.parametrize("on_stale", OnStale)
def test_going_back_gives_up_what_is_too_old_and_counts_what_was_trained(on_stale: OnStale) -> None:
    buffer = Buffer(1, 2, on_stale)
    first, second = fill(buffer, 2)
    for ticket in (first, second):
        buffer.finish(done(ticket))
        assert train(buffer) == [ticket.group_id]  # versions 1 and 2
    ready, running = fill(buffer, 2)
    buffer.finish(done(ready))
    again = republished_as(base=1, latest=2)  # the checkpoint is version 1's
    assert again == 3 and buffer.rolled_back(again, num_untrained=1) == []
    assert buffer.is_ready(ready.group_id) and not buffer.is_ready(running.group_id)
    assert buffer.ledger == Ledger(submitted=4, trained=1, dropped=1, in_flight=2)
    assert train(buffer) == [ready.group_id]  # written by 2, trained from 3
    far = republished_as(base=again, latest=again + 4)
    assert far >= again + 8 and (far - again) % 2
    assert buffer.rolled_back(far, num_untrained=1) == [running.group_id]


@given(st.integers(0, 50), st.integers(0, 50))
def test_republished_weights_seem_no_nearer_than_they_are(base: int, since: int) -> None:
    latest = base + since
    again = republished_as(base, latest)
    assert again > latest and (again - latest) % 2, "into the slot that nobody reads"
    assert all(again - v >= v - base for v in range(base, latest + 1))


def test_a_group_cannot_end_twice() -> None:
    buffer = Buffer(1, 1)
    ticket = buffer.admit(0, 0)
    buffer.drop(ticket.group_id, Drop.STALE)
    with pytest.raises(KeyError):
        buffer.drop(ticket.group_id, Drop.STALE)
    with pytest.raises(KeyError):
        buffer.finish(done(ticket))
    assert buffer.num_free == 2


def test_history_goes_on_with_ids_counts_and_version_and_forgets_what_was_in_flight() -> None:
    buffer = Buffer(1, 2)
    a, b, _ = fill(buffer, 3)
    buffer.finish(done(a))
    train(buffer)
    buffer.drop(b.group_id, Drop.REFUSED)
    history = buffer.history
    assert history == History(version=1, next_group_id=3, trained=1, drops={"refused": 1})
    resumed = Buffer(1, 2, history=history)
    assert resumed.ledger == Ledger(submitted=2, trained=1, dropped=1, in_flight=0)
    assert (resumed.num_free, resumed.version, resumed.next_id) == (3, 1, 3)
    assert resumed.admit(7, 1).group_id == 3


def test_a_masked_trajectory_makes_a_group_neither_older_nor_younger() -> None:
    trajectories = (trajectory(0, 0), trajectory(2, 3), trajectory(1, 5))
    group = Group(0, 0, trajectories, (0.0, 1.0, 0.0), masked=frozenset({0, 2}))
    assert (group.head_version, group.newest_version) == (2, 3)
    assert group.trained == trajectories[1:2]


def test_the_pace_holds_admission_back_and_slots_stay_what_they_are() -> None:
    buffer = Buffer(2, 8, pace=Pace(2, 18, target_staleness=1))
    assert (buffer.num_free, buffer.room) == (18, 4)
    tickets = fill(buffer, 4)
    assert (buffer.num_free, buffer.room) == (14, 0)
    buffer.drop(tickets[0].group_id, Drop.EQUAL_REWARDS)
    assert buffer.room == 1


def test_the_pace_is_told_turn_arounds_steps_and_starvation() -> None:
    told: list[tuple[str, float]] = []

    class Told(Pace):
        def group_took(self, seconds: float) -> None:
            told.append(("group", seconds))

        def step_took(self, seconds: float) -> None:
            told.append(("step", seconds))

        def batch_taken(self, starved_s: float, num_left: int) -> None:
            told.append(("starved", starved_s))

    buffer = Buffer(1, 1, pace=Told(1, 2))
    ticket = buffer.admit(0, 0, now=1.0)
    assert buffer.next_batch(1, now=2.0) is None and buffer.next_batch(1, now=3.0) is None
    buffer.finish(done(ticket), now=5.0)
    assert buffer.next_batch(1, now=6.0) is not None
    buffer.published(now=9.0)
    assert told == [("group", 4.0), ("starved", 4.0), ("step", 3.0)]
