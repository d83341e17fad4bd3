"""A trajectory is read whole, by the ticket it was sealed with, or not at all."""

import random
import time

import numpy as np
import pytest
from shm_workers import entry, kill, started, write_forever

from minirl.errors import MinirlError
from minirl.shm.ring import NOTHING, TornEntry, TrajectoryRing

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
    with pytest.raises(MinirlError, match=r"does not fit a ring cell of 6, .*max_new_tokens"):
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
