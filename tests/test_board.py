"""The board says what a worker does and since when; idle time adds up by itself."""

import time
from multiprocessing import get_context

import pytest

from minirl.shm.board import IDLE_STATES, Board, BoardWriter, State, Total

SPAWN = get_context("spawn")


def work(board: Board) -> None:
    writer = board.writer(1)
    writer.enter(State.GENERATING)
    writer.serving(version=7, running=3)
    writer.add(Total.TOKENS, 100)
    writer.add(Total.TOKENS, 23)


def aged(board: Board, worker: int) -> tuple[float, float]:
    row = board.row(worker)
    return row.since_s, row.beat_s


def test_a_new_board_has_workers_that_are_starting() -> None:
    board = Board(2)
    for worker in range(2):
        row = board.row(worker)
        assert (row.state, row.version, row.running) == (State.STARTING, -1, 0)
        assert [board.total(worker, column) for column in Total] == [0.0] * len(Total)


def test_what_a_spawned_worker_writes_is_seen_in_its_row_only() -> None:
    board = Board(3)
    child = SPAWN.Process(target=work, args=(board,))
    child.start()
    child.join()
    row = board.row(1)
    assert (row.state, row.version, row.running) == (State.GENERATING, 7, 3)
    assert board.total(1, Total.TOKENS) == 123.0
    for other in (0, 2):
        assert board.row(other).state is State.STARTING
        assert board.total(other, Total.TOKENS) == 0.0


def test_totals_do_not_mix() -> None:
    board = Board(1)
    writer = board.writer(0)
    writer.add(Total.RELOAD_S, 0.5)
    writer.add(Total.RELOADS, 1)
    writer.add(Total.RELOAD_S, 0.25)
    writer.add(Total.RELOADS, 1)
    assert board.total(0, Total.RELOAD_S) == 0.75
    assert board.total(0, Total.RELOADS) == 2
    assert board.total(0, Total.TOKENS) == 0
    assert board.total(0, Total.IDLE_S) == 0


def test_the_same_state_again_is_a_beat_and_keeps_since() -> None:
    board = Board(1)
    writer = board.writer(0)
    writer.enter(State.GENERATING)
    time.sleep(0.02)
    writer.enter(State.GENERATING)
    since_s, beat_s = aged(board, 0)
    assert since_s >= beat_s + 0.02
    writer.enter(State.GENERATING, anew=True)
    since_s, beat_s = aged(board, 0)
    assert since_s == beat_s
    time.sleep(0.02)
    writer.enter(State.TRAINING)
    since_s, beat_s = aged(board, 0)
    assert since_s == beat_s


@pytest.mark.parametrize("state", IDLE_STATES)
def test_idle_time_counts_while_waiting_and_stops_with_it(state: State) -> None:
    board = Board(1)
    writer = board.writer(0)
    writer.enter(state)
    time.sleep(0.02)
    during = board.total(0, Total.IDLE_S)
    assert during >= 0.02  # no beat yet: it counts up to now
    writer.enter(state)
    time.sleep(0.02)
    assert board.total(0, Total.IDLE_S) >= during + 0.02
    writer.enter(State.GENERATING)
    after = board.total(0, Total.IDLE_S)
    time.sleep(0.02)
    assert board.total(0, Total.IDLE_S) == after >= 0.04


@pytest.mark.parametrize("state", [state for state in State if state not in IDLE_STATES])
def test_work_is_not_idle(state: State) -> None:
    board = Board(1)
    writer = board.writer(0)
    writer.enter(state)
    time.sleep(0.005)
    writer.enter(State.GENERATING)
    assert board.total(0, Total.IDLE_S) == 0.0


def test_reset_gives_the_row_to_a_new_process_and_keeps_the_totals() -> None:
    board = Board(2)
    writers: list[BoardWriter] = [board.writer(0), board.writer(1)]
    for writer in writers:
        writer.enter(State.GENERATING)
        writer.serving(version=5, running=2)
        writer.add(Total.TOKENS, 10)
    time.sleep(0.02)
    before = time.monotonic()
    board.reset(0)
    row = board.row(0)
    assert (row.state, row.version, row.running) == (State.STARTING, -1, 0)
    assert row.since_s == row.beat_s
    assert time.monotonic() - row.beat_s >= before  # it beat at the reset
    assert board.total(0, Total.TOKENS) == 10
    assert (board.row(1).state, board.row(1).version) == (State.GENERATING, 5)
