"""Shared memory is the same bytes in every process, and leaves nothing behind."""

from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from minirl.shm.segment import ALIGNMENT, Segment, aligned


def add_one(segment: Segment, pipe: Connection) -> None:
    array = segment.array(np.int64, (1000,))
    pipe.send((int(array.sum()), Path("/proc/self/maps").read_text()))
    array += 1
    pipe.send("done")
    pipe.recv()  # lives until it is killed


def test_a_spawned_child_sees_and_writes_the_same_bytes_and_nothing_has_a_name() -> None:
    spawn, segment = get_context("spawn"), Segment(8 * 1000)
    array = segment.array(np.int64, (1000,))
    assert not array.any()
    array[:] = np.arange(1000)
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=add_one, args=(segment, theirs))
    child.start()
    theirs.close()
    total, maps = ours.recv()
    assert total == sum(range(1000))
    assert "memfd:minirl" in maps and "/dev/shm" not in maps
    assert ours.recv() == "done"
    child.kill()
    child.join()
    del segment  # the array keeps the memory
    assert array.tolist() == list(range(1, 1001))


def test_arrays_lie_where_asked_and_the_path_opens_the_same_bytes() -> None:
    segment = Segment(256)
    Segment(256, segment.path).array(np.int32, (2, 3), offset=64)[1, 2] = 7
    assert segment.array(np.int32, (64,))[16 + 5] == 7
    sizes = [aligned(n) for n in (0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1)]
    assert sizes == [0, ALIGNMENT, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
