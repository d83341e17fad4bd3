"""The clock of the benches: wall time, less what other programs took of this thread's core.

The kernel counts for how long a thread was ready to run and was not let (run-queue wait, in
/proc). Taking that away makes ratios repeatable on a machine that does other things too; what a
thread waits for by itself, such as a lock, a message or a page, still counts. Where the kernel does
not say, it is plain wall time.
"""

import os
import time
from collections.abc import Collection
from contextlib import suppress
from functools import cache


def now() -> float:
    """Seconds. Only differences within one thread mean something. Costs some microseconds."""
    return time.perf_counter() - _kept_waiting()


def _kept_waiting() -> float:
    fd = _schedstat()
    return int(os.pread(fd, 64, 0).split()[1]) / 1e9 if fd is not None else 0.0


@cache
def _schedstat() -> int | None:
    try:
        fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        return fd if os.pread(fd, 64, 0) else None
    except OSError:
        return None


def steady() -> float:
    """As `now`, less what a hypervisor took of this thread's cores, where there is one. For spans
    of a second and more: it is counted in hundredths of a second, and asking takes a while."""
    return now() - stolen(os.sched_getaffinity(0))


def stolen(cores: Collection[int]) -> float:
    """Seconds since the machine started, mean of these cores; 0 where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError), open("/proc/stat") as file:
        fields = {line.split()[0]: line.split() for line in file if line.startswith("cpu")}
        ticks = [int(fields[f"cpu{core}"][8]) for core in cores if f"cpu{core}" in fields]
        return sum(ticks) / max(1, len(ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0
