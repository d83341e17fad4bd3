"""A process that writes trajectories, each a function of its ticket, until it is killed.

Apart from test_ring.py so that a spawned writer imports no pytest.
"""

from itertools import count
from multiprocessing.connection import Connection

from minirl.shm.ring import TrajectoryRing


def entry(ticket: int, cell_tokens: int) -> tuple[list[int], list[int], list[float], list[int]]:
    """Prompt, tokens, logprobs and versions; lengths differ from ticket to ticket."""
    start = 1 + ticket * 37 % (cell_tokens // 4)
    num_written = 1 + ticket * 101 % (cell_tokens - start)
    return (
        [ticket] * start,
        [ticket + 1] * num_written,
        [float(-ticket)] * num_written,
        [ticket + 2] * num_written,
    )


def write_forever(ring: TrajectoryRing, first_ticket: int, pipe: Connection) -> None:
    pipe.send("writing")
    for ticket in count(first_ticket):
        ring.write(ticket % ring.num_cells, ticket, *entry(ticket, ring.cell_tokens))


def write_once(ring: TrajectoryRing, ticket: int, pipe: Connection) -> None:
    ring.write(0, ticket, *entry(ticket, ring.cell_tokens))
    pipe.send("written")
