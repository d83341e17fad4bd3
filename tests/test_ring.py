"""A trajectory is read whole, by the ticket it was sealed with, or not at all."""

import random
import time
from multiprocessing import get_context

import numpy as np
import pytest
from ring_writer import entry, write_forever, write_once

from minirl.errors import MinirlError
from minirl.shm.ring import NOTHING, TornEntry, TrajectoryRing

SPAWN = get_context("spawn")
NUM_KILLS = 24


def check_whole(ring: TrajectoryRing, cell: int, ticket: int) -> None:
    """Every value of the entry is the one that belongs to its ticket."""
    view = ring.read(cell, ticket)
    prompt, tokens, logprobs, versions = entry(ticket, ring.cell_tokens)
    zeros, ones = [0] * len(prompt), [1] * len(tokens)
    np.testing.assert_array_equal(view.tokens, prompt + tokens)
    np.testing.assert_array_equal(view.mask, zeros + ones)
    np.testing.assert_array_equal(
        view.logprobs, np.array([0.0] * len(prompt) + logprobs, np.float32)
    )
    np.testing.assert_array_equal(view.versions, [NOTHING] * len(prompt) + versions)


def test_what_a_spawned_child_wrote_is_read_in_place() -> None:
    ring = TrajectoryRing(num_cells=2, cell_tokens=50)
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=write_once, args=(ring, 17, theirs))
    child.start()
    assert ours.recv() == "written"
    child.join()
    check_whole(ring, 0, 17)
    assert np.shares_memory(ring.read(0, 17).tokens, ring.read(0, 17).tokens)
    with pytest.raises(TornEntry):
        ring.read(1, 17)


def test_a_fresh_cell_holds_nothing() -> None:
    ring = TrajectoryRing(num_cells=3, cell_tokens=4)
    for cell in range(3):
        with pytest.raises(TornEntry):
            ring.read(cell, 0)


def test_only_the_sealing_ticket_reads() -> None:
    ring = TrajectoryRing(num_cells=1, cell_tokens=8)
    ring.write(0, 5, [1, 2], [3], [-0.5], [0])
    for ticket in (0, 4, 6):
        with pytest.raises(TornEntry, match="sealed for 5"):
            ring.read(0, ticket)
    assert ring.read(0, 5).tokens.tolist() == [1, 2, 3]


def test_a_reused_cell_forgets_its_longer_past() -> None:
    ring = TrajectoryRing(num_cells=2, cell_tokens=8)
    ring.write(0, 1, [9, 9, 9], [8, 8, 8, 8, 8], [-1.0] * 5, [3] * 5)
    ring.write(1, 1, [7], [7], [-7.0], [7])
    ring.write(0, 2, [4], [5, 6], [-0.25, -0.5], [6, 7])
    view = ring.read(0, 2)
    assert view.tokens.tolist() == [4, 5, 6]
    assert view.mask.tolist() == [0, 1, 1]
    assert view.logprobs.tolist() == [0.0, -0.25, -0.5]
    assert view.versions.tolist() == [NOTHING, 6, 7]
    with pytest.raises(TornEntry):
        ring.read(0, 1)
    assert ring.read(1, 1).tokens.tolist() == [7, 7]  # its neighbour is untouched


def test_cells_are_used_round_and_round() -> None:
    ring = TrajectoryRing(num_cells=4, cell_tokens=40)
    for ticket in range(50):
        ring.write(ticket % 4, ticket, *entry(ticket, 40))
        for newest in range(max(0, ticket - 3), ticket + 1):
            check_whole(ring, newest % 4, newest)


def test_a_full_cell_fits_and_touches_no_neighbour() -> None:
    ring = TrajectoryRing(num_cells=3, cell_tokens=6)
    for cell in (0, 2, 1):
        ring.write(cell, cell, [cell] * 2, [10 + cell] * 4, [-1.0 - cell] * 4, [cell] * 4)
    for cell in range(3):
        assert ring.read(cell, cell).tokens.tolist() == [cell] * 2 + [10 + cell] * 4
        assert ring.read(cell, cell).logprobs.tolist() == [0.0] * 2 + [-1.0 - cell] * 4


@pytest.mark.parametrize(("num_prompt", "num_written"), [(7, 1), (6, 1), (5, 2), (0, 7), (6, 9)])
def test_what_cannot_fit_is_a_clear_error_and_writes_nothing(
    num_prompt: int, num_written: int
) -> None:
    ring = TrajectoryRing(num_cells=2, cell_tokens=6)
    ring.write(0, 1, [1], [2], [-1.0], [0])
    ring.write(1, 2, [3], [4], [-2.0], [0])
    with pytest.raises(MinirlError, match=r"does not fit a ring cell of 6, .*max_new_tokens"):
        ring.write(
            0, 3, [0] * num_prompt, [0] * num_written, [0.0] * num_written, [0] * num_written
        )
    assert ring.read(0, 1).tokens.tolist() == [1, 2]
    assert ring.read(1, 2).tokens.tolist() == [3, 4]


def test_columns_of_different_lengths_are_our_mistake() -> None:
    ring = TrajectoryRing(num_cells=1, cell_tokens=6)
    with pytest.raises(AssertionError):
        ring.write(0, 1, [1], [2, 3], [-1.0], [0, 0])  # numpy would repeat the single logprob


def test_a_writer_killed_at_any_moment_leaves_no_torn_entry() -> None:
    ring = TrajectoryRing(num_cells=3, cell_tokens=20_000)
    moment = random.Random(0)
    first_ticket = num_caught = 0
    for _ in range(NUM_KILLS):
        ours, theirs = SPAWN.Pipe()
        writer = SPAWN.Process(target=write_forever, args=(ring, first_ticket, theirs))
        writer.start()
        assert ours.recv() == "writing"
        time.sleep(moment.uniform(0.0, 0.02))
        writer.kill()
        writer.join()
        for cell, ticket in enumerate(ring._seals.tolist()):
            if ticket == NOTHING:
                num_caught += 1
                with pytest.raises(TornEntry):
                    ring.read(cell, first_ticket)
            else:
                check_whole(ring, cell, ticket)
        first_ticket = max(first_ticket, *ring._seals.tolist()) + 1
    assert first_ticket > NUM_KILLS  # they did write
    assert num_caught  # and some were killed in the middle
