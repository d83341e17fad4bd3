"""Several turns through one real engine: the test plays controller, task and trainer."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crew import ENGINE_PLACE, crew
from test_rollout_worker import CONFIG, MAX_NEW, NUM_CELLS, PROMPT, Station
from versions import EXACT, Versions

from minirl.records import StopReason, Trajectory
from minirl.rollout.worker import (
    Abort,
    Continue,
    GroupRequest,
    RolloutSetup,
    Started,
    TurnEnded,
)
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.turns import Dialogue, runs
from minirl.workers import Role

pytestmark = pytest.mark.vllm

LETTERS = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
REPLY = (300, 301, 302, 20, 303)


@pytest.fixture(scope="module")
def station(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    versions = Versions(tied_folder)
    ring = TrajectoryRing(NUM_CELLS, CONFIG.max_tokens_per_trajectory)
    versions.publish_next()
    dialogue = Dialogue(stop=LETTERS)
    setup = RolloutSetup(CONFIG, str(tied_folder), "cpu", 1, ring, versions.store, dialogue)
    with crew(tmp_path_factory.mktemp("turns"), 1) as inbox:
        body = "minirl.rollout.worker:run"
        worker = inbox.fleet.spawn(Role.ROLLOUT, 0, body, setup, ENGINE_PLACE)
        inbox.take(worker, Started)
        yield Station(inbox, worker, versions, ring)


class Talk:
    """A group, and which of its trajectories wait for a reply, by place."""

    def __init__(self, station: Station, size: int = 4, is_eval: bool = False):
        self.station = station
        self.group = station.request(size=size, is_eval=is_eval)
        self.waiting: dict[int, Trajectory] = {}
        self.ended: dict[int, Trajectory] = {}
        station.submit(self.group)

    def listen(self) -> dict[int, Trajectory]:
        """Until each is done or waits; gives those that wait."""
        self.station.inbox.wait_until(self._is_quiet)
        return dict(self.waiting)

    def _is_quiet(self) -> bool:
        left = []
        for worker, message in self.station.inbox.messages:
            if isinstance(message, TurnEnded):
                for group_id, place, turn in message.trajectories:
                    assert group_id == self.group.group_id and place not in self.waiting
                    self.waiting[place] = turn
            else:
                left.append((worker, message))
        self.station.inbox.messages = left
        self.station.read()
        self.ended |= self.station.done[self.group.group_id]
        return len(self.waiting) + len(self.ended) == len(self.group.cells)

    def reply(self, tokens: tuple[int, ...], *places: int) -> None:
        replies = tuple((self.group.group_id, place, tokens) for place in places)
        for place in places:
            turn = self.waiting.pop(place)
            if not tokens:
                self.ended[place] = turn
        self.station.worker.send(Continue(replies))


def test_turns_are_one_flat_record_and_every_logprob_is_exact_across_updates(
    station: Station,
) -> None:
    """The updates come while turns wait and while they run."""
    first = station.versions.store.latest
    talk = Talk(station, size=8)
    so_far = {place: list(PROMPT) for place in range(8)}
    for number in (1, 2, 3):
        for place, turn in talk.listen().items():
            said = station.ring.read(turn.cell, talk.group.group_id).tokens.tolist()
            before = so_far[place]
            assert said[: len(before)] == before, "what was said stays, token by token"
            assert len(said) > len(before) and turn.num_turns == number
            so_far[place] = [*said, *REPLY]
        if number < 3:
            station.versions.publish_next()
            station.wait_version()
            talk.reply(REPLY, *talk.waiting)
            station.wait_tokens(4)
            station.versions.publish_next()
    talk.reply((), *talk.waiting)
    station.wait_idle()
    assert len(talk.ended) == 8
    for said in talk.ended.values():
        check_record(station, talk.group, said, first)
    assert [said.num_turns for said in talk.ended.values()].count(3) >= 4, "most get to the end"
    assert max(said.tail_version for said in talk.ended.values()) >= first + 3


def check_record(station: Station, group: GroupRequest, said: Trajectory, first: int) -> None:
    view = station.ring.read(said.cell, group.group_id)
    spans = runs(view.mask)
    assert spans[0].start == len(PROMPT) and spans[-1].stop == said.length == len(view.tokens)
    assert len(spans) == 2 * said.num_turns - 1
    for span in spans[1::2]:
        assert tuple(view.tokens[span]) == REPLY
        assert (view.logprobs[span] == 0).all() and (view.versions[span] == -1).all()
    assert said.num_replied == len(REPLY) * (said.num_turns - 1)
    assert said.num_written == (view.mask == 1).sum() and said.num_new <= MAX_NEW
    stamps = view.versions[view.mask == 1]
    assert (said.head_version, said.tail_version) == (stamps[0], stamps[-1])
    assert stamps[0] == first and (np.diff(stamps) >= 0).all()
    temperature = CONFIG.rollout.temperature
    exact = station.versions.exact(view.tokens.tolist(), view.versions.tolist(), temperature)
    assert np.abs(exact - view.logprobs)[view.mask == 1].max() < EXACT


def test_all_turns_and_replies_together_stay_within_the_limit(station: Station) -> None:
    talk = Talk(station, size=8)
    room = {place: MAX_NEW - turn.num_new for place, turn in talk.listen().items()}
    for place in room:
        talk.reply(REPLY[:1] * (room[place] - 1), place)  # one token is left to write
    for place in talk.listen():  # it was a letter, by chance
        talk.reply((), place)
    for place in room:
        said = talk.ended[place]
        assert said.num_new == MAX_NEW and said.num_turns == 2
        assert said.num_replied == room[place] - 1
    assert StopReason.LENGTH in {talk.ended[place].stop for place in room}
    station.wait_idle()


def test_an_aborted_group_is_not_continued(station: Station) -> None:
    talk = Talk(station)
    turns = talk.listen()
    station.worker.send(Abort(talk.group.group_id))
    talk.reply(REPLY, *turns)
    station.inbox.wait_until(lambda: station.is_gone(talk.group))
    other = Talk(station)  # it listens to nothing but its own
    other.reply((), *other.listen())
    station.wait_idle()
    for turn in turns.values():
        assert len(station.ring.read(turn.cell, talk.group.group_id).tokens) == turn.length


def test_an_evaluation_that_waits_for_a_reply_keeps_its_version(station: Station) -> None:
    pinned = station.versions.publish_next(eos_scale=8.0)  # greedy, it would hardly ever end
    station.wait_idle()
    talk = Talk(station, size=2, is_eval=True)
    turns = talk.listen()
    assert turns
    station.versions.publish_next()
    talk.reply(REPLY, *turns)
    for place, turn in talk.listen().items():
        assert (turn.head_version, turn.tail_version) == (pinned, pinned)
        talk.reply((), place)
    assert {said.tail_version for said in talk.ended.values()} == {pinned}
    station.wait_idle()  # under the new one
