"""Replies, without processes: who goes on, who has come to an end, and what nobody waits for."""

from dataclasses import replace

import pytest

from minirl.config import Config
from minirl.conversations import Conversations
from minirl.records import Example, StopReason, Trajectory
from minirl.rollout.dispatch import Dispatcher
from minirl.rollout.worker import Continue
from minirl.tasks.grading import GradingQueue
from minirl.tasks.verifier import Ask, Grade

BASE = Config()
CONFIG = replace(BASE, rollout=replace(BASE.rollout, max_new_tokens=20, max_turns=3))
EXAMPLE = Example("?", "!")
TURN = Trajectory(0, 14, 4, StopReason.STOP, 0, 0)  # of a prompt of ten


class Desk:
    """The parts of a controller that talk about turns."""

    def __init__(self, in_step: bool = False):
        self.dispatcher, self.grading = Dispatcher(2, 20), GradingQueue()
        self.talk = Conversations(CONFIG, self.dispatcher, self.grading, in_step)

    def asked(self, group_id: int, place: int = 0, turn: Trajectory = TURN) -> Ask:
        self.talk.ask(group_id, place, EXAMPLE, turn)
        ((name, request),) = self.grading.assign(["verify-0"])
        assert self.grading.done(name) is request and isinstance(request, Ask)
        return request

    def sent(self) -> dict[int, Continue]:
        return dict(self.talk.outgoing())


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    for group_id, engine in ((5, 0), (6, 1)):
        assert desk.dispatcher.assign(group_id, 2) == engine
    return desk


def test_a_reply_goes_to_the_engine_that_has_the_turn(desk: Desk) -> None:
    one, other = desk.asked(6, 1), desk.asked(5, 0)
    assert desk.talk.reply(one, (7, 8)) is None and desk.talk.reply(other, (9,)) is None
    assert desk.sent() == {0: Continue(((5, 0, (9,)),)), 1: Continue(((6, 1, (7, 8)),))}
    assert desk.sent() == {} and not desk.talk.is_awaited(one)


@pytest.mark.parametrize(
    ("turn", "reply", "goes_on"),
    [
        (TURN, (), None),
        (TURN, (7,) * 15, True),  # one written token fits after it
        (TURN, (7,) * 16, False),
        (TURN._replace(num_replied=11), (7,) * 4, True),
        (TURN._replace(num_replied=11), (7,) * 5, False),
        (TURN._replace(num_turns=2), (7,), True),
        (TURN._replace(num_turns=3), (7,), False),
        (TURN._replace(num_turns=3), (), None),  # it ends by itself
    ],
)
def test_what_cannot_go_on_is_cut(
    desk: Desk, turn: Trajectory, reply: tuple[int, ...], goes_on: bool | None
) -> None:
    ended = desk.talk.reply(desk.asked(5, 0, turn), reply)
    cut = turn._replace(stop=StopReason.LENGTH)
    assert ended == {True: None, False: cut, None: turn}[goes_on]
    assert desk.sent() == {0: Continue(((5, 0, reply if goes_on else ()),))}


def test_nobody_waits_for_a_reply_to_a_group_that_is_gone(desk: Desk) -> None:
    gone, kept, lost = desk.asked(5, 0), desk.asked(5, 1), desk.asked(6, 0)
    desk.talk.reply(kept, (9,))
    desk.talk.forget(5)
    desk.talk.lost(1)
    assert not any(desk.talk.is_awaited(request) for request in (gone, kept, lost))
    assert desk.sent() == {}
    again = desk.asked(6, 0)  # an evaluation's ids come again, with equal turns
    assert again == lost and desk.talk.is_awaited(again) and not desk.talk.is_awaited(lost)


def test_replies_go_before_rewards() -> None:
    desk = Desk()
    desk.dispatcher.assign(1, 1)
    desk.grading.add(Grade(0, EXAMPLE, (TURN,)))
    desk.talk.ask(1, 0, EXAMPLE, TURN)
    order = [type(request) for _, request in desk.grading.assign(["a", "b"])]
    assert order == [Ask, Grade] and len(desk.grading) == 2


def test_in_step_an_engine_gets_all_its_replies_at_once_in_order() -> None:
    """At η = 0: whatever the order in which they come."""
    desk = Desk(in_step=True)
    assert [desk.dispatcher.assign(group_id, 2) for group_id in (0, 1, 2)] == [0, 1, 0]
    asked = {at: desk.asked(*at) for at in ((2, 1), (0, 1), (2, 0))}
    desk.talk.reply(asked[2, 1], (7,))
    desk.talk.reply(asked[0, 1], (8,))
    assert desk.talk.reply(asked[2, 0], ()) is not None
    desk.dispatcher.trajectory_done(2, 4)
    assert desk.sent() == {}  # (0, 0) still writes, or waits for its reply
    desk.talk.reply(desk.asked(0, 0), (9,))
    replies = ((0, 0, (9,)), (0, 1, (8,)), (2, 0, ()), (2, 1, (7,)))
    assert desk.sent() == {0: Continue(replies)}
    desk.dispatcher.forget(1)  # its engine has given it up
    assert desk.sent() == {}


def test_in_step_ends_are_told_when_nothing_is_left_to_wait_for() -> None:
    desk = Desk(in_step=True)
    desk.dispatcher.assign(0, 1)
    assert desk.talk.reply(desk.asked(0), ()) == TURN
    assert desk.sent() == {}
    desk.dispatcher.trajectory_done(0, 4)
    assert desk.sent() == {0: Continue(((0, 0, ()),))}
