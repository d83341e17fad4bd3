"""Anonymous shared memory. Takes a size, gives arrays over the same bytes in every process.

A memfd has no name, so no kill can leave it in /dev/shm, and the size of /dev/shm (64 MB in a
default container) does not limit it. The kernel frees it with the last process that holds it.
Leaves out: any locking; ring, weights and board say which process may write which byte.
"""

import mmap
import os
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64  # a cache line: rows of different writers never share one


class Segment:
    def __init__(self, num_bytes: int, fd: int | None = None):
        """A new one, or the one behind `fd`."""
        self.num_bytes = num_bytes
        self._fd = os.memfd_create("minirl", os.MFD_CLOEXEC) if fd is None else fd
        os.ftruncate(self._fd, num_bytes)
        self._map = mmap.mmap(self._fd, num_bytes)

    @property
    def path(self) -> str:
        """Opens this segment for as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def array(self, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """A view of the bytes from `offset` on. It keeps the segment alive."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)

    def __reduce__(self) -> tuple[Any, ...]:  # only as an argument of a process that is spawned
        return _received, (self.num_bytes, reduction.DupFd(self._fd))


def _received(num_bytes: int, fd: Any) -> Segment:
    return Segment(num_bytes, fd.detach())


def opened(path: str) -> Segment:
    """Another process's, in a process that minirl did not spawn itself."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return Segment(os.fstat(fd).st_size, fd)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
