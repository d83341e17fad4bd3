"""Shared memory is the same bytes in every process, and leaves nothing behind."""

import os
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from minirl.shm.segment import ALIGNMENT, Segment, aligned

SPAWN = get_context("spawn")


def add_one(segment: Segment, pipe: Connection) -> None:
    array = segment.array(np.int64, (segment.num_bytes // 8,))
    pipe.send((int(array.sum()), mapped_files()))
    array += 1
    pipe.send("done")
    pipe.recv()  # lives until it is killed


def mapped_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if len(line.split()) > 5]


def test_spawned_child_sees_and_writes_the_same_bytes_and_nothing_has_a_name() -> None:
    before = os.listdir("/dev/shm")
    segment = Segment(8 * 1000)
    array = segment.array(np.int64, (1000,))
    array[:] = np.arange(1000)
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=add_one, args=(segment, theirs))
    child.start()
    theirs.close()
    total, files = ours.recv()
    assert total == sum(range(1000))
    assert any("memfd:minirl" in name for name in files)
    assert not [name for name in files if name.startswith("/dev/shm")]
    assert ours.recv() == "done"
    assert array.tolist() == list(range(1, 1001))
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert array.tolist() == list(range(1, 1001))
    assert not set(os.listdir("/dev/shm")) - set(before)


def test_a_new_segment_is_zero_and_arrays_lie_where_asked() -> None:
    segment = Segment(256)
    assert not segment.array(np.uint8, (256,)).any()
    segment.array(np.int32, (2, 3), offset=64)[1, 2] = 7
    assert segment.array(np.int32, (64,))[16 + 5] == 7


def test_an_array_keeps_the_memory_after_its_segment_is_gone() -> None:
    array = Segment(4096).array(np.int64, (512,))
    array[:] = 5
    assert int(array.sum()) == 5 * 512


def test_the_path_opens_the_same_bytes() -> None:
    segment = Segment(64)
    other = Segment.open(segment.path, 64)
    other.array(np.int64, (8,))[3] = 42
    assert segment.array(np.int64, (8,)).tolist() == [0, 0, 0, 42, 0, 0, 0, 0]


def test_aligned_rounds_up_to_cache_lines() -> None:
    sizes = [aligned(n) for n in (0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1)]
    assert sizes == [0, ALIGNMENT, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
