"""The board says what a worker does and since when; idle time adds up by itself."""

from multiprocessing import get_context
from types import SimpleNamespace

import pytest

from minirl.shm import board as board_module
from minirl.shm.board import IDLE_STATES, Board, State, Total


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


@pytest.mark.parametrize("state", State)
def test_idle_time_counts_while_a_worker_waits_and_only_then(
    state: State, clock: SimpleNamespace
) -> None:
    board = Board(1)
    writer = board.writer(0)
    found = []
    for next_state in (state, state, State.GENERATING):
        writer.enter(next_state)
        clock.now += 2
        found.append(board.total(0, Total.IDLE_S))  # up to now, also without a heartbeat
    assert found == ([2, 4, 4] if state in IDLE_STATES else [0, 0, 0])
