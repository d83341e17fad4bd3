"""One real rollout worker in its own process; the test plays the controller and the trainer."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crew import ENGINE_PLACE, Inbox, crew
from tiny_models import EOS
from versions import EXACT, Versions

from minirl.config import Config, EvalConfig, RolloutConfig, TasksConfig
from minirl.records import StopReason, Trajectory
from minirl.rollout.worker import (
    Abort,
    Finished,
    Gone,
    GroupRequest,
    RolloutSetup,
    Started,
    Stop,
    Submit,
)
from minirl.shm.board import State, Total
from minirl.shm.ring import TornEntry, TrajectoryRing, TrajectoryView
from minirl.workers import Died, Role, Worker

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
TOO_LONG = PROMPT * 4


class Station:
    """The worker, what was asked of it and what it has answered."""

    def __init__(self, inbox: Inbox, worker: Worker, versions: Versions, ring: TrajectoryRing):
        self.inbox, self.worker, self.versions, self.ring = inbox, worker, versions, ring
        self.num_groups = self.num_cells = 0
        self.requests: dict[int, GroupRequest] = {}
        self.done: dict[int, dict[int, Trajectory]] = defaultdict(dict)
        self.gone: dict[int, str] = {}

    def request(
        self, prompt: tuple[int, ...] = PROMPT, size: int = GROUP_SIZE, is_eval: bool = False
    ) -> GroupRequest:
        self.num_groups += 1
        cells = tuple((self.num_cells + i) % NUM_CELLS for i in range(size))
        self.num_cells += size
        group_id = -self.num_groups if is_eval else self.num_groups
        self.requests[group_id] = GroupRequest(group_id, prompt, cells, is_eval)
        return self.requests[group_id]

    def submit(self, *groups: GroupRequest) -> None:
        self.worker.send(Submit(groups))

    def is_done(self, *groups: GroupRequest) -> bool:
        self.read()
        return all(len(self.done[g.group_id]) == len(g.cells) for g in groups)

    def is_gone(self, group: GroupRequest) -> bool:
        self.read()
        return group.group_id in self.gone

    def read(self) -> None:
        left = []
        for worker, message in self.inbox.messages:
            if isinstance(message, Finished):
                for group_id, index, trajectory in message.trajectories:
                    assert group_id not in self.gone, "a group of which nothing was to come"
                    assert index not in self.done[group_id]
                    self.done[group_id][index] = trajectory
            elif isinstance(message, Gone):
                assert message.group_id not in self.gone
                self.gone[message.group_id] = message.why
            else:
                assert not isinstance(message, Died), self.inbox.fleet.last_words(worker)
                left.append((worker, message))
        self.inbox.messages = left

    def wait_done(self, *groups: GroupRequest) -> None:
        self.inbox.wait_until(lambda: self.is_done(*groups))

    def wait_tokens(self, count: int) -> None:
        """Until so many more have been sampled, by whichever group."""
        goal = self.num_sampled + count
        self.inbox.wait_until(lambda: self.num_sampled >= goal, listen_s=0.001)

    def wait_idle(self) -> None:
        """With nothing to sample, and nothing newer to load."""

        def is_idle() -> bool:
            row = self.inbox.fleet.board.row(self.worker.row)
            is_new = row.version == self.versions.store.latest
            return row.state is State.WAITING_FOR_PROMPTS and row.running == 0 and is_new

        self.inbox.wait_until(is_idle, listen_s=0.01)

    def wait_version(self) -> None:
        """Until it serves the newest."""
        board, latest = self.inbox.fleet.board, self.versions.store.latest
        row = self.worker.row
        self.inbox.wait_until(lambda: board.row(row).version == latest, listen_s=0.001)

    @property
    def num_sampled(self) -> float:
        return self.inbox.fleet.board.total(self.worker.row, Total.TOKENS)

    def views(self, group: GroupRequest) -> list[TrajectoryView]:
        """The group's trajectories, after checking that each is what its descriptor says."""
        views = []
        for index, cell in enumerate(group.cells):
            said, view = self.done[group.group_id][index], self.ring.read(cell, group.group_id)
            num_written = said.num_written
            assert said.cell == cell
            assert said.length == len(view.tokens) == len(group.prompt) + num_written
            assert view.tokens[: len(group.prompt)].tolist() == list(group.prompt)
            assert view.mask.tolist() == [0] * len(group.prompt) + [1] * num_written
            versions = view.versions[len(group.prompt) :]
            assert (view.versions[: len(group.prompt)] == -1).all()
            assert (np.diff(versions) >= 0).all()
            assert (said.head_version, said.tail_version) == (versions[0], versions[-1])
            if said.stop is StopReason.STOP:
                assert view.tokens[-1] == EOS
            else:
                assert num_written == MAX_NEW and view.tokens[-1] != EOS
            assert EOS not in view.tokens[len(group.prompt) : -1]
            views.append(view)
        return views

    def check_logprobs(self, view: TrajectoryView) -> None:
        """Each token's, against a plain forward of the version it is stamped with."""
        temperature = CONFIG.rollout.temperature
        exact = self.versions.exact(view.tokens.tolist(), view.versions.tolist(), temperature)
        assert np.abs(exact - view.logprobs).max() < EXACT


@pytest.fixture(scope="module")
def station(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    versions = Versions(tied_folder)
    ring = TrajectoryRing(NUM_CELLS, CONFIG.max_tokens_per_trajectory)
    versions.publish_next()
    setup = RolloutSetup(CONFIG, str(tied_folder), "cpu", 1, ring, versions.store)
    with crew(tmp_path_factory.mktemp("rollout"), 1) as inbox:
        body = "minirl.rollout.worker:run"
        worker = inbox.fleet.spawn(Role.ROLLOUT, 0, body, setup, ENGINE_PLACE)
        inbox.take(worker, Started)
        yield Station(inbox, worker, versions, ring)


@pytest.fixture(autouse=True)
def idle(station: Station) -> None:
    """Each test begins with a worker that has nothing to do."""
    station.wait_idle()


def test_groups_run_through_new_versions_and_every_token_is_stamped_right(station: Station) -> None:
    """Also those that wait: there are more trajectories than sequences at once."""
    groups = [station.request(PROMPT[: 70 - 9 * i]) for i in range(4)]
    first = station.versions.store.latest
    station.submit(*groups)
    for _ in range(4):
        station.wait_tokens(60)  # of at most 16 · 160
        station.versions.publish_next()
    station.wait_done(*groups)
    views = [view for group in groups for view in station.views(group)]
    stamps = [view.versions[view.mask == 1] for view in views]
    assert max(len(np.unique(versions)) for versions in stamps) >= 3
    assert min(versions[0] for versions in stamps) == first
    for view in views:
        station.check_logprobs(view)
    assert len({tuple(view.tokens) for view in views}) == len(views)


@pytest.mark.parametrize("is_running", [False, True])
def test_an_aborted_group_is_gone_and_its_seats_are_free(
    is_running: bool, station: Station
) -> None:
    aborted, other = station.request(size=8), station.request()
    station.submit(aborted)
    if is_running:
        station.wait_tokens(8)
    station.worker.send(Abort(aborted.group_id))
    station.inbox.wait_until(lambda: station.is_gone(aborted))
    assert station.gone[aborted.group_id] == ""
    assert not station.is_done(aborted)
    unfinished = set(range(8)) - set(station.done[aborted.group_id])
    for index in unfinished:
        with pytest.raises(TornEntry):
            station.ring.read(aborted.cells[index], aborted.group_id)
    station.submit(other)
    station.wait_done(other)
    station.views(other)
    station.wait_idle()
    assert set(station.done[aborted.group_id]) == set(range(8)) - unfinished
    station.worker.send(Abort(other.group_id))  # which it has no longer: answered too
    station.inbox.wait_until(lambda: station.is_gone(other))


@pytest.mark.parametrize("is_eval", [False, True])
def test_a_refused_prompt_is_gone_with_a_reason_and_the_worker_lives_on(
    is_eval: bool, station: Station
) -> None:
    size = 1 if is_eval else GROUP_SIZE
    refused, other = station.request(TOO_LONG, size, is_eval), station.request()
    station.submit(refused, other)
    station.wait_done(other)
    assert station.is_gone(refused)
    assert re.search(r"280.*longer than the maximum", station.gone[refused.group_id])
    station.versions.publish_next()
    station.wait_idle()  # under the new version: nothing pins the old one


def test_an_evaluation_pins_its_version_while_training_groups_go_on(station: Station) -> None:
    # Eight seats: the evaluation and one group begin at once, the last group when seats are free.
    station.versions.publish_next(eos_scale=0.0)
    station.wait_idle()
    pinned = station.versions.store.latest
    evaluation = [station.request(PROMPT[: 50 + i], 1, is_eval=True) for i in range(4)]
    early, late = station.request(), station.request()
    station.submit(early, late, *evaluation)
    station.wait_tokens(16)
    newer = station.versions.publish_next(eos_scale=0.0)
    station.wait_done(early, late, *evaluation)
    for group in evaluation:
        (view,) = station.views(group)
        assert set(view.versions[view.mask == 1]) == {pinned}
        written = view.tokens[view.mask == 1].tolist()
        all_TV = station.versions.distributions(pinned, view.tokens.tolist())
        assert written == all_TV[len(group.prompt) - 1 :].argmax(-1).tolist()  # greedy
    views = station.views(early) + station.views(late)
    for view in views:
        station.check_logprobs(view)
    stamps = np.concatenate([view.versions[view.mask == 1] for view in views])
    assert set(stamps) == {pinned, newer}
    # What ran beside the evaluation continued under its version, to the end of it.
    assert (stamps == pinned).sum() > 2 * MAX_NEW


def test_stop_ends_it(station: Station) -> None:
    station.submit(station.request())
    station.wait_tokens(4)
    station.worker.send(Stop())
    assert station.inbox.take(station.worker, Died).how == "ended with exit code 0"
