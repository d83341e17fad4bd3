"""Shared memory is the same bytes by path, and has no name; test_board.py hands it to a process."""

from pathlib import Path

import numpy as np

from minirl.shm.segment import ALIGNMENT, Segment, aligned


def test_arrays_lie_where_asked_keep_the_memory_and_the_path_opens_the_same_bytes() -> None:
    segment = Segment(256)
    array = segment.array(np.int32, (64,))
    Segment(256, segment.path).array(np.int32, (2, 3), offset=64)[1, 2] = 7
    del segment
    assert array.tolist() == [0] * 21 + [7] + [0] * 42
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "minirl" in line]
    assert any("memfd:minirl" in line for line in maps)
    assert not any("/dev/shm" in line for line in maps)
    sizes = [aligned(n) for n in (0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1)]
    assert sizes == [0, ALIGNMENT, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
