"""A small disk that can be filled and emptied again. Takes a folder, gives one of

    tmpfs    of its own size, mounted on the folder in a mount namespace of this process: no
             other process sees it, and it is gone with the last process in it. As root, or where
             users may have namespaces. What it holds must be copied away before the end
    limit    where nothing can be mounted: a limit of 0 bytes on the size of files (RLIMIT_FSIZE),
             put on the processes of the run for a while. Writes then fail with "File too large"

Must be asked for before this process has a second thread: only then may it change its namespace.
"""

import contextlib
import ctypes
import os
import resource
from pathlib import Path
from typing import Protocol

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
FILLER = "filler"


class Disk(Protocol):
    what: str
    is_apart: bool  # what is in its folder is gone when this process ends

    def fill(self, pids: list[int]) -> None: ...

    def free(self, pids: list[int]) -> None: ...


class Tmpfs:
    is_apart = True

    def __init__(self, folder: Path, num_bytes: int):
        self._folder = folder
        self.what = f"a tmpfs of {num_bytes >> 20} MiB in a mount namespace of its own"

    def fill(self, pids: list[int]) -> None:
        """To the last byte: the run may free some and write meanwhile."""
        with (self._folder / FILLER).open("ab", buffering=0) as file:
            for size in (2**20, 2**12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        if file.write(bytes(size)) < size:
                            break

    def free(self, pids: list[int]) -> None:
        (self._folder / FILLER).unlink(missing_ok=True)


class Limit:
    """On processes that are there; those that they start meanwhile inherit it."""

    is_apart = False
    what = "a limit on the size of files (RLIMIT_FSIZE): nothing can be mounted here"

    def fill(self, pids: list[int]) -> None:
        self._set(pids, 0)

    def free(self, pids: list[int]) -> None:
        self._set(pids, None)

    def _set(self, pids: list[int], size: int | None) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                soft = hard if size is None else size
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def small_disk(folder: Path, num_bytes: int) -> Disk:
    folder.mkdir(parents=True, exist_ok=True)
    if not _can_mount(folder):
        return Limit()
    _mount(folder, num_bytes)
    return Tmpfs(folder, num_bytes)


def _can_mount(folder: Path) -> bool:
    """Tried in a child process: a half-done attempt would leave this process unusable."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    try:
        _mount(folder, 2**16)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _mount(folder: Path, num_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USER))
    if user != 0:  # the same user and group ids inside
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    private, flags = ctypes.c_ulong(MS_REC | MS_PRIVATE), ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    check(libc.mount(b"none", b"/", None, private, None))
    size = f"size={num_bytes},mode=700".encode()
    check(libc.mount(b"none", os.fsencode(folder), b"tmpfs", flags, size))
