"""One real rollout worker in its own process; the test plays the controller, the task and the
trainer. Its task has several turns: without a reply the first is the whole answer.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plain_script import EXACT, Versions
from processes import ENGINE_PLACE, Inbox, crew
from tiny_models import EOS, POSITIONS, tokenizer

from minirl import messages
from minirl.config import (
    BufferConfig,
    Config,
    DevicesConfig,
    EvalConfig,
    RolloutConfig,
    TasksConfig,
)
from minirl.messages import Died, GroupRequest, Role
from minirl.records import StopReason, Trajectory
from minirl.rollout import worker as rollout_worker
from minirl.rollout.engine import Engine
from minirl.rollout.worker import RolloutSetup, run
from minirl.shm.board import BEAT, STATE, Board, BoardWriter, Row, State, Total
from minirl.shm.ring import TornEntry, TrajectoryRing, TrajectoryView
from minirl.tasks.turns import Dialogue, runs
from minirl.workers import Worker

pytestmark = pytest.mark.vllm

GROUP_SIZE, MAX_NEW, NUM_CELLS = 4, 160, 64
CONFIG = Config(
    tasks=TasksConfig(max_prompt_tokens=96),
    rollout=RolloutConfig(
        temperature=0.9, max_new_tokens=MAX_NEW, max_num_seqs=8, kv_cache_gib=0.125
    ),
    eval=EvalConfig(temperature=0.0),
)
PROMPT = tuple((5 + 37 * i) % 380 + 2 for i in range(70))
REPLY = (300, 301, 302, 20, 303)
STOP_TEXTS = ("Q", "Z")
ENDS = {EOS, *tokenizer(POSITIONS).encode("QZ")}
OFTEN, SELDOM = 6.0, 0.0  # how much likelier the weights make an end


class Station:
    """The worker, what was asked of it and what it has answered."""

    def __init__(self, inbox: Inbox, worker: Worker, versions: Versions, ring: TrajectoryRing):
        self.inbox, self.worker, self.versions, self.ring = inbox, worker, versions, ring
        self.num_groups = self.num_cells = 0
        self.done: dict[int, dict[int, Trajectory]] = defaultdict(dict)
        self.gone: dict[int, str] = {}
        self.waiting: dict[int, dict[int, Trajectory]] = {}  # for a reply, by group and place

    @property
    def row(self) -> Row:
        return self.inbox.workers.board.row(self.worker.row)

    def request(self, size: int = GROUP_SIZE, **options: Any) -> GroupRequest:
        """`options` are a GroupRequest's, and has_replies."""
        self.num_groups += 1
        cells = tuple((self.num_cells + i) % NUM_CELLS for i in range(size))
        self.num_cells += size
        group_id = -self.num_groups if options.get("is_eval") else self.num_groups
        if options.pop("has_replies", False):
            self.waiting[group_id] = {}
        return GroupRequest(group_id, cells=cells, **{"prompt": PROMPT, **options})

    def submit(self, *groups: GroupRequest) -> None:
        self.worker.send(messages.Submit(groups))

    def submit_new(self, size: int = GROUP_SIZE, **options: Any) -> GroupRequest:
        self.submit(group := self.request(size, **options))
        return group

    def reply(self, group: GroupRequest, tokens: tuple[int, ...], *places: int) -> None:
        """No tokens: the turn was the last."""
        for place in places:
            turn = self.waiting[group.group_id].pop(place)
            if not tokens:
                self.done[group.group_id][place] = turn
        replies = tuple((group.group_id, place, tokens) for place in places)
        self.worker.send(messages.Continue(replies))

    def listen(self, group: GroupRequest) -> dict[int, Trajectory]:
        """Until each trajectory of the group is done or waits; gives those that wait."""
        waiting, done = self.waiting[group.group_id], self.done[group.group_id]
        self.wait_until(lambda: len(waiting) + len(done) == len(group.cells))
        return dict(waiting)

    def read(self) -> None:
        received, self.inbox.messages = self.inbox.messages, []
        for worker, message in received:
            if isinstance(message, messages.Finished):
                for each in message.trajectories:
                    self.take(*each, is_last=not message.are_turns)
            elif isinstance(message, messages.Gone):
                assert message.group_id not in self.gone
                self.gone[message.group_id] = message.why
            else:
                assert not isinstance(message, Died), self.inbox.workers.log_tail(worker)

    def take(self, group_id: int, place: int, trajectory: Trajectory, is_last: bool) -> None:
        assert group_id not in self.gone, "a group of which nothing was to come"
        has_reply = not is_last and group_id in self.waiting
        found = (self.waiting if has_reply else self.done)[group_id]
        assert place not in found
        found[place] = trajectory
        if not is_last and not has_reply:
            self.worker.send(messages.Continue(((group_id, place, ()),)))

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        self.inbox.wait_until(lambda: self.read() or is_so(), listen_s=0.001)

    def wait_done(self, *groups: GroupRequest) -> None:
        self.wait_until(lambda: all(len(self.done[g.group_id]) == len(g.cells) for g in groups))

    def abort(self, group: GroupRequest) -> None:
        self.worker.send(messages.Abort(group.group_id))
        self.wait_until(lambda: group.group_id in self.gone)

    def wait_tokens(self, count: int) -> None:
        """Until so many more have been sampled, by whichever group."""
        board, row = self.inbox.workers.board, self.worker.row
        goal = board.total(row, Total.TOKENS) + count
        self.wait_until(lambda: board.total(row, Total.TOKENS) >= goal)

    def serve_next(self, end_scale: float = 1.0) -> int:
        """Publishes a version and waits until it is served."""
        version = self.versions.publish_next(end_scale)
        self.wait_until(lambda: self.row.version == version)
        return version

    def wait_idle(self) -> None:
        """Until all is done, and the newest version served."""
        rest = Row(State.WAITING_FOR_PROMPTS, 0, 0, self.versions.store.latest, running=0)
        self.wait_until(lambda: self.row._replace(since_s=0, beat_s=0) == rest)

    def views(self, group: GroupRequest) -> list[TrajectoryView]:
        """The trajectories, after checking that each is what its descriptor says, that every token
        that no model wrote is masked, and that every logprob is exact."""
        return [self.view(group, said) for _, said in sorted(self.done[group.group_id].items())]

    def view(self, group: GroupRequest, said: Trajectory) -> TrajectoryView:
        view, start = self.ring.read(said.cell, group.group_id), len(group.prompt)
        assert said.cell in group.cells and said.length == len(view.tokens)
        assert view.tokens[:start].tolist() == list(group.prompt)
        spans = runs(view.mask)  # of the model and of replies, by turns
        assert spans[0].start == start and spans[-1].stop == said.length
        assert len(spans) == 2 * said.num_turns - 1
        assert all(tuple(view.tokens[span]) == REPLY for span in spans[1::2])
        assert said.num_replied == len(REPLY) * (said.num_turns - 1)
        assert (view.versions[view.mask == 0] == -1).all()
        assert (view.logprobs[view.mask == 0] == 0).all()
        stamps = view.versions[view.mask == 1]
        assert (said.head_version, said.tail_version) == (stamps[0], stamps[-1])
        assert said.num_written == len(stamps) and (np.diff(stamps) >= 0).all()
        for span in spans[::2]:
            assert not ENDS & {*view.tokens[span][:-1]}
        if said.stop is StopReason.STOP:
            assert view.tokens[-1] in ENDS
        else:
            assert said.num_new == MAX_NEW and view.tokens[-1] not in ENDS
        if group.group_id > 0:  # an evaluation is greedy
            self.check_logprobs(view)
        return view

    def check_logprobs(self, view: TrajectoryView) -> None:
        """Each token's, against a plain forward of the version it is stamped with."""
        temperature = CONFIG.rollout.temperature
        exact = self.versions.exact(view.tokens.tolist(), view.versions.tolist(), temperature)
        assert np.abs(exact - view.logprobs).max() < EXACT


@contextmanager
def started(
    folder: Path, logs: Path, config: Config = CONFIG, body: str = "minirl.rollout.worker:run"
) -> Iterator[Station]:
    versions = Versions(folder, ends=sorted(ENDS))
    ring = TrajectoryRing(NUM_CELLS, config.max_tokens_per_trajectory)
    dialogue = Dialogue(stop=STOP_TEXTS)
    setup = RolloutSetup(config, str(folder), "cpu", 1, ring, versions.store, dialogue)
    with crew(logs, 1) as inbox:
        worker = inbox.workers.spawn(Role.ROLLOUT, 0, body, setup, ENGINE_PLACE)
        row = inbox.workers.board._rows[worker.row]
        inbox.wait_until(lambda: row[STATE] == State.RELOADING)
        last_beat = float(row[BEAT])
        inbox.wait_until(lambda: row[BEAT] > last_beat)  # while it waits for version 0
        versions.publish_next()
        inbox.take(worker, messages.Started)
        yield Station(inbox, worker, versions, ring)


@pytest.fixture(scope="module")
def station(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    with started(tied_folder, tmp_path_factory.mktemp("rollout")) as station:
        yield station


@pytest.fixture(autouse=True)
def idle(station: Station) -> None:
    """Each test begins with a worker that has nothing to do, under weights that end an answer now
    and then."""
    station.serve_next()
    station.wait_idle()


@pytest.mark.parametrize("state", ["waits", "runs", "is parked"])
def test_an_aborted_group_is_gone_and_its_seats_are_free(state: str, station: Station) -> None:
    station.serve_next(OFTEN if state == "is parked" else SELDOM)
    aborted = station.submit_new(size=8, has_replies=True)
    if state == "runs":
        station.wait_tokens(8)
    turns = station.listen(aborted) if state == "is parked" else {}
    station.abort(aborted)
    station.reply(aborted, REPLY, *turns)  # too late: it gets no further turn
    assert station.gone[aborted.group_id] == ""
    done = {**turns, **station.done[aborted.group_id], **station.waiting[aborted.group_id]}
    assert bool(turns) == (state == "is parked")
    other = station.submit_new()
    station.wait_done(other)
    station.views(other)
    station.wait_idle()
    for place, cell in enumerate(aborted.cells):
        if place in done:
            assert len(station.ring.read(cell, aborted.group_id).tokens) == done[place].length
        else:
            with pytest.raises(TornEntry):
                station.ring.read(cell, aborted.group_id)
    station.abort(other)  # the worker no longer has it, and answers too


def test_a_refused_prompt_is_gone_with_a_reason_and_the_worker_lives_on(station: Station) -> None:
    refused, other = station.request(1, prompt=PROMPT * 4, is_eval=True), station.request()
    station.submit(refused, other)
    station.wait_done(other)
    assert re.search(r"280.*longer than the maximum", station.gone[refused.group_id])
    station.views(other)
    station.serve_next()  # nothing pins the old one


def test_an_evaluation_pins_its_version_for_all_that_run_beside_it(station: Station) -> None:
    # Eight seats: the evaluation and one group begin at once, the last group when seats are free.
    pinned = station.serve_next(SELDOM)
    evaluation = [station.request(1, prompt=PROMPT[: 50 + i], is_eval=True) for i in range(4)]
    early, late = station.request(), station.request()
    station.submit(early, late, *evaluation)
    station.wait_tokens(16)
    newer = station.versions.publish_next(SELDOM)
    station.wait_done(early, late, *evaluation)
    for group in evaluation:
        (view,) = station.views(group)
        assert set(view.versions[view.mask == 1]) == {pinned}
        written = view.tokens[view.mask == 1].tolist()
        all_TV = station.versions.distributions(pinned, view.tokens.tolist())
        assert written == all_TV[len(group.prompt) - 1 :].argmax(-1).tolist()  # greedy
    views = station.views(early) + station.views(late)
    stamps = np.concatenate([view.versions[view.mask == 1] for view in views])
    assert set(stamps) == {pinned, newer}
    # What ran beside the evaluation stayed under its version, to the end of it.
    assert (stamps == pinned).sum() > 2 * MAX_NEW


def test_turns_are_one_flat_record_and_exact_across_updates(station: Station) -> None:
    """The updates come while turns wait and while they run."""
    first = station.serve_next(OFTEN)
    group = station.submit_new(size=8, has_replies=True)
    so_far = {place: list(PROMPT) for place in range(8)}
    last_tokens = set()
    for number in (1, 2, 3):
        for place, turn in station.listen(group).items():
            said = station.ring.read(turn.cell, group.group_id).tokens.tolist()
            before = so_far[place]
            assert said[: len(before)] == before, "what was said stays, token by token"
            assert len(said) > len(before) and turn.num_turns == number
            so_far[place] = [*said, *REPLY]
            last_tokens.add(said[-1])
        if number < 3:
            station.serve_next(OFTEN)
            station.reply(group, REPLY, *station.waiting[group.group_id])
            station.wait_tokens(4)
            station.versions.publish_next(OFTEN)
    station.reply(group, (), *station.waiting[group.group_id])
    ended = station.done[group.group_id]
    assert len(ended) == len(station.views(group)) == 8
    assert {said.head_version for said in ended.values()} == {first}
    assert max(said.tail_version for said in ended.values()) >= first + 3
    assert [said.num_turns for said in ended.values()].count(3) >= 4, "most get to the end"
    assert last_tokens & (ENDS - {EOS}), "a stop text of the task ends a turn"


def test_the_older_group_begins_first(station: Station) -> None:
    first = station.serve_next(SELDOM)
    older, newer = station.request(size=8), station.request(size=8)
    station.submit(newer, older)  # eight seats
    station.wait_tokens(8)
    station.serve_next(SELDOM)
    station.abort(newer)
    station.wait_done(older)
    assert {said.head_version for said in station.done[older.group_id].values()} == {first}


def test_an_evaluation_that_waits_for_a_reply_keeps_its_version(station: Station) -> None:
    pinned = station.serve_next(8.0)  # greedy, it would hardly ever end
    group = station.submit_new(size=2, is_eval=True, has_replies=True)
    turns = station.listen(group)
    assert turns
    station.versions.publish_next()
    station.reply(group, REPLY, *turns)
    station.reply(group, (), *station.listen(group))
    ended = station.done[group.group_id].values()
    assert {v for said in ended for v in (said.head_version, said.tail_version)} == {pinned}
    station.wait_idle()  # the new one


# At η = 0 an engine on the trainer's device sleeps -----------------------------------------------


def test_a_restarted_engine_starts_when_the_trainer_has_ended_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board, seen = Board(2), []
    trainer, own = board.writer(0), board.writer(1)

    def sleep(seconds: float) -> None:
        seen.append(board.row(1).state)
        if len(seen) == 3:
            trainer.enter(State.PUBLISHING)

    monkeypatch.setattr(rollout_worker, "time", SimpleNamespace(sleep=sleep))
    trainer.enter(State.TRAINING)
    rollout_worker.wait_for_turn(own)
    assert seen == [State.STARTING] * 3


def run_forgetful(setup: RolloutSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a worker whose engine loses its weights when it sleeps, as on CUDA."""

    def zero(wrapper: Any) -> None:
        for parameter in wrapper.worker.model_runner.model.parameters():
            parameter.data.zero_()

    def sleep(engine: Engine) -> None:
        keeps(engine)
        engine._engine.collective_rpc(zero)

    keeps, Engine.sleep = Engine.sleep, sleep  # type: ignore[method-assign]
    run(setup, board, pipe)


def test_an_engine_sleeps_after_its_work_and_wakes_with_whole_weights(
    tied_folder: Path, tmp_path: Path
) -> None:
    """For a newer version, and for prompts without one; every logprob is exact."""
    shared, in_turns = DevicesConfig(share=True), BufferConfig(max_staleness=0)
    config = replace(CONFIG, devices=shared, buffer=in_turns)
    with started(tied_folder, tmp_path, config, "test_rollout_worker:run_forgetful") as station:
        versions, board, row = station.versions, station.inbox.workers.board, station.worker.row

        def sleeps() -> bool:
            return board.row(row).state is State.SLEEPING

        for wakes_by in ("start", "prompts", "version"):
            if wakes_by == "version":
                versions.publish_next(OFTEN)
                station.wait_until(lambda: not sleeps())
            group = station.submit_new()
            station.wait_done(group)
            station.wait_until(sleeps)
            assert {view.versions[-1] for view in station.views(group)} == {versions.store.latest}
        assert board.total(row, Total.RELOADS) == 2  # beside the first, before it started
        versions.publish_next()  # and no prompts: as after a rollback, with a batch ready
        station.wait_until(lambda: board.row(row).version == versions.store.latest and sleeps())
