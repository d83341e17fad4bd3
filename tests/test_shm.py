"""A reader gets one whole version, also when a writer laps it, is killed, or starts again."""

import random
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
import torch

from minirl.shm import board as board_module
from minirl.shm.board import BEAT, IDLE_STATES, SINCE, STATE, Board, State, Total
from minirl.shm.ring import NOTHING, TornEntry, TrajectoryRing
from minirl.shm.segment import opened
from minirl.shm.weights import CANARY_TOKENS, TensorSpec, WeightStore, canary_tokens

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["test_shm"])  # torch is imported once: a start takes milliseconds
SHAPES = {"embed": (301, 67), "scalar": (), "empty": (0, 4), "bias": (13,), "head": (700, 33)}
TABLE = tuple(TensorSpec(name, shape) for name, shape in SHAPES.items())


def started(body: Callable[..., None], *args: Any) -> BaseProcess:
    """The process, after it has sent a message."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=body, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    return process


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def entry(ticket: int, cell_tokens: int) -> tuple[list[int], list[int], list[float], list[int]]:
    """Prompt, tokens, logprobs and versions: a function of the ticket, lengths too."""
    start = 1 + ticket * 37 % (cell_tokens // 4)
    size = 1 + ticket * 101 % (cell_tokens - start)
    return [ticket] * start, [ticket + 1] * size, [float(-ticket)] * size, [ticket + 2] * size


def write_forever(ring: TrajectoryRing, first_ticket: int, pipe: Connection) -> None:
    pipe.send("writing")
    for ticket in count(first_ticket):
        ring.write(ticket % ring.num_cells, ticket, *entry(ticket, ring.cell_tokens))


def filled(version: int) -> list[torch.Tensor]:
    """Every tensor holds its version's number, nothing else."""
    return [torch.full(spec.shape, float(version)) for spec in TABLE]


def canary(version: int) -> np.ndarray:
    return np.full(CANARY_TOKENS, -float(version), np.float32)


def publish(store: WeightStore, *versions: int) -> None:
    for version in versions:
        processes.publish(store, version, filled(version), canary(version))


def publish_forever(store: WeightStore, pipe: Connection) -> None:
    """In bursts with short rests: readers are lapped all the time, and get through now and then."""
    torch.set_num_threads(1)
    rest = random.Random(1)
    for version in count(store.latest + 1):
        publish(store, version)
        if version == 1:
            pipe.send("publishing")
        if rest.random() < 0.1:
            time.sleep(0.002)


def publish_half(store: WeightStore, version: int, pipe: Connection) -> None:
    """Writes the first tensors into the slot, says so, and never comes to the end."""
    with store.publishing(version) as slot:
        for (_, shared), tensor in zip(store.views(slot.slot), filled(version)[:2], strict=False):
            shared.copy_(tensor)
        pipe.send("half")
        time.sleep(600)


def read_half(store: WeightStore, pipe: Connection) -> None:
    def load(slot: int) -> None:
        store.views(slot)[0][1].clone()
        pipe.send("half")
        time.sleep(600)

    store.read(load)


LONG_S = 120.0  # only a hang takes this long


def store_with(*versions: int, dtype: str = "float32") -> WeightStore:
    store = WeightStore(TABLE, dtype)
    assert store.latest == -1
    publish(store, *versions)
    return store


def check_version(store: WeightStore, version: int) -> None:
    """What a reader gets at once, where no writer is in its slot."""
    got = store.attempt(store.latest, lambda slot: [*store.views(slot)], is_newest=True)
    assert got is not None and got.version == version
    assert got.canary["logprobs"].tolist() == canary(version).tolist()
    assert [name for name, _ in got.loaded] == [spec.name for spec in TABLE]
    for (_, found), tensor in zip(got.loaded, filled(version), strict=True):
        assert found.dtype == store.torch_dtype and torch.equal(found.float(), tensor)


def check_next(store: WeightStore, *versions: int) -> None:
    for version in versions:
        publish(store, version)
        check_version(store, version)


def test_versions_come_back_whole_also_by_path_and_from_a_resumed_runs_version() -> None:
    store = store_with(41, dtype="bfloat16")
    check_next(store, 42, 43)
    check_version(WeightStore(TABLE, "bfloat16", opened(store.path)), 43)  # as another process does
    # A reader that loses the processor right after it looked at the version gets nothing.
    gone = store_with(0, 1, 2)
    assert gone.attempt(0, gone.views, is_newest=True) is None
    for vocab_size in (2, 151_936):
        tokens = canary_tokens(vocab_size)
        assert len(tokens) == CANARY_TOKENS and all(0 <= t < vocab_size for t in tokens)
        assert canary_tokens(vocab_size, [1, 0, 1])[:6] == [1, 0, 1, 1, 0, 1]


def test_a_fast_writer_in_another_process_never_gives_a_torn_copy() -> None:
    store = WeightStore(TABLE, "float32")
    writer = started(publish_forever, store)
    copies = [(spec.name, torch.empty(spec.shape)) for spec in TABLE]
    versions: list[int] = []
    num_attempts = 0

    def load(slot: int) -> None:
        nonlocal num_attempts
        num_attempts += 1
        for (_, copy), (_, shared) in zip(copies, store.views(slot), strict=True):
            copy.copy_(shared)

    deadline = time.monotonic() + LONG_S
    while len(set(versions)) < 50 or num_attempts == len(versions):  # until it was lapped, too
        assert time.monotonic() < deadline
        got = store.read(load)
        versions.append(got.version)
        assert got.canary["logprobs"].tolist() == canary(got.version).tolist()
        for name, copy in copies:
            assert (copy == got.version).all(), (name, got.version, copy.unique())
    kill(writer)
    assert versions == sorted(versions)


def test_a_reader_killed_blocks_no_writer_and_a_killed_writer_leaves_a_usable_slot() -> None:
    store = store_with(5)
    kill(started(read_half, store))
    check_next(store, 6, 7)
    writer = started(publish_half, store, 8)
    check_version(store, 7)  # while it writes
    kill(writer)
    check_version(store, 7)
    check_next(store, 8, 9, 10)


# The board ----------------------------------------------------------------------------------------


@pytest.fixture()
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only when a test says so."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(board_module, "time", clock)
    return clock


def work(board: Board) -> None:
    writer = board.writer(1)
    writer.enter(State.GENERATING)
    writer.serving(version=7, running=3)
    for column, amount in ((Total.TOKENS, 100), (Total.RELOAD_S, 0.5), (Total.TOKENS, 23)):
        writer.add(column, amount)


def test_a_spawned_worker_writes_its_own_row_and_a_reset_keeps_its_totals() -> None:
    board = Board(3)
    child = get_context("spawn").Process(target=work, args=(board,))
    child.start()
    child.join()
    row = board.row(1)
    assert (row.state, row.version, row.running) == (State.GENERATING, 7, 3)
    board.reset(1)  # a new process takes the row over
    for worker, totals in enumerate(([0.0] * 5, [123.0, 0.0, 0.5, 0.0, 0.0], [0.0] * 5)):
        row = board.row(worker)
        assert (row.state, row.version, row.running) == (State.STARTING, -1, 0)
        assert [board.total(worker, column) for column in Total] == totals


def test_the_same_state_again_is_a_heartbeat_and_keeps_since(clock: SimpleNamespace) -> None:
    board = Board(1)
    writer, found = board.writer(0), []
    generating, again = (State.GENERATING, False), (State.GENERATING, True)
    for state, anew in (generating, generating, again, (State.TRAINING, False)):
        clock.now += 3
        writer.enter(state, anew)
        found.append((board.row(0).since_s, board.row(0).beat_s))
    assert found == [(0, 0), (3, 0), (0, 0), (0, 0)]
    clock.now += 3
    assert board.row(0).beat_s == 3
    board.reset(0)
    assert board.row(0).beat_s == board.row(0).since_s == 0


def test_a_new_state_never_shows_with_an_old_time(clock: SimpleNamespace) -> None:
    writer = Board(1).writer(0)
    writer.enter(State.SAVING)
    clock.now += 400

    class Watched(list[float]):
        def __setitem__(self, column: Any, value: float) -> None:
            super().__setitem__(column, value)
            assert self[STATE] == State.SAVING or self[SINCE] == self[BEAT] == clock.now

    writer._row = Watched(writer._row)
    writer.enter(State.WAITING_FOR_BATCH)


def test_a_row_of_another_box_counts_where_it_is_of_the_same_start() -> None:
    ours, theirs, none = Board(1), Board(1), np.zeros(board_module.NUM_COLUMNS)
    for start, version in ((1, -1), (2, 7)):
        theirs.reset(0, start)
        theirs.writer(0).serving(version=7, running=3)
        theirs.writer(0).add(Total.TOKENS, 5.0)
        ours.reset(0, 2)
        ours.take(0, theirs.ages()[0], none)
        assert ours.row(0).version == version
    assert ours.total(0, Total.TOKENS) == 15.0  # totals are the place's, of any start


@pytest.mark.parametrize("state", State)
def test_idle_time_counts_while_a_worker_waits(state: State, clock: SimpleNamespace) -> None:
    board = Board(1)
    writer = board.writer(0)
    found = []
    for next_state in (state, state, State.GENERATING):
        writer.enter(next_state)
        clock.now += 2
        found.append(board.total(0, Total.IDLE_S))  # up to now, also without a heartbeat
    assert found == ([2, 4, 4] if state in IDLE_STATES else [0, 0, 0])


# The ring: a trajectory is read whole, by the ticket it was sealed with, or not at all ------------

NUM_KILLS, MOST_KILLS = 24, 1000


def check_whole(ring: TrajectoryRing, cell: int, ticket: int) -> None:
    """Every value of the entry is the one that belongs to its ticket."""
    view = ring.read(cell, ticket)
    prompt, tokens, logprobs, versions = entry(ticket, ring.cell_tokens)
    zeros, nothing = [0] * len(prompt), [NOTHING] * len(prompt)
    np.testing.assert_array_equal(view.tokens, prompt + tokens)
    np.testing.assert_array_equal(view.mask, zeros + [1] * len(tokens))
    np.testing.assert_array_equal(view.logprobs, np.array(zeros + logprobs, np.float32))
    np.testing.assert_array_equal(view.versions, nothing + versions)


def test_a_cell_is_read_by_the_ticket_that_sealed_it_last_and_by_no_other() -> None:
    """Longer entries follow shorter ones and the other way round, in each of four cells."""
    ring = TrajectoryRing(num_cells=4, cell_tokens=40)
    with pytest.raises(TornEntry):
        ring.read(0, 0)
    for ticket in range(50):
        ring.write(ticket % 4, ticket, *entry(ticket, 40))
        for newest in range(max(0, ticket - 3), ticket + 1):
            check_whole(ring, newest % 4, newest)
    for ticket in (0, 44, 52):
        with pytest.raises(TornEntry, match="sealed for 48"):
            ring.read(0, ticket)
    assert np.shares_memory(ring.read(0, 48).tokens, ring.read(0, 48).tokens)


def test_a_full_cell_touches_no_neighbour_and_what_does_not_fit_is_refused() -> None:
    ring = TrajectoryRing(num_cells=3, cell_tokens=6)
    for cell in (0, 2, 1):
        ring.write(cell, cell, [cell] * 2, [10 + cell] * 4, [-1.0 - cell] * 4, [cell] * 4)
    with pytest.raises(AssertionError, match="7 tokens in a ring cell of 6"):
        ring.write(0, 3, [0] * 5, [0, 0], [0.0, 0.0], [0, 0])
    with pytest.raises(AssertionError):
        ring.write(0, 3, [1], [2, 3], [-1.0], [0, 0])  # numpy would repeat the single logprob
    for cell in range(3):
        assert ring.read(cell, cell).tokens.tolist() == [cell] * 2 + [10 + cell] * 4
        assert ring.read(cell, cell).logprobs.tolist() == [0.0] * 2 + [-1.0 - cell] * 4


def test_a_writer_killed_at_any_moment_leaves_no_torn_entry() -> None:
    ring = TrajectoryRing(num_cells=3, cell_tokens=20_000)
    moment = random.Random(0)
    first_ticket = num_kills = num_caught = 0
    while num_kills < NUM_KILLS or not num_caught:
        assert num_kills < MOST_KILLS, "no writer was killed in the middle of an entry"
        writer = started(write_forever, ring, first_ticket)
        time.sleep(moment.uniform(0.0, 0.02))
        kill(writer)
        num_kills += 1
        for cell, ticket in enumerate(ring._cells["seal"].tolist()):
            if ticket == NOTHING:
                num_caught += 1
                with pytest.raises(TornEntry):
                    ring.read(cell, first_ticket)
            else:
                check_whole(ring, cell, ticket)
        first_ticket = max(first_ticket, *ring._cells["seal"].tolist()) + 1
