"""A file of JSON lines that only grows, on a disk that may be full.

Takes lines, gives a file. A line that cannot be written waits in memory and goes out, in its place,
with a later one: a full disk costs nothing but the wait. What was cut by a crash is left out by the
reader, and the next line begins a new one.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from minirl.errors import MinirlError

BROKEN = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What readers raise at a file that is not what it should be."""


class Lines:
    def __init__(self, path: Path):
        self.path = path
        self.error = ""  # why the last line is not in the file yet
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        is_cut = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._waiting = b"\n" if is_cut else b""

    def write(self, line: str) -> None:
        self._waiting += line.encode() + b"\n"
        self._try()

    def _try(self) -> None:
        try:
            while self._waiting:  # a disk that fills up takes a part of what it is given
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
            self.error = ""
        except OSError as error:
            self.error = error.strerror or type(error).__name__

    def sync(self) -> None:
        """On the disk, as far as it takes it."""
        self._try()
        with suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        """Tries once more; `error` says whether anything is missing."""
        self._try()
        os.close(self._fd)


class Patient:
    """A stream that may go to such a disk: what it does not take is lost, and nobody fails."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line that is a JSON object. No file is no lines."""
    return [value for _, value in _read_raw(path)]


def _read_raw(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    if not path.is_file():
        return []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MinirlError(f"{path} cannot be read ({error.strerror})") from None
    found = []
    for raw in data.split(b"\n"):
        try:
            value = json.loads(raw.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append((raw, value))
    return found


def keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Takes all other lines away, and what was torn. Gives those that are left, as they were.
    Whole or not at all; on a full disk in place, since what is less needs no room."""
    kept = [(raw, value) for raw, value in _read_raw(path) if is_kept(value)]
    data = b"".join(raw + b"\n" for raw, _ in kept)
    before = path.read_bytes() if path.is_file() else data
    if before.startswith(data):
        if len(data) < len(before):
            os.truncate(path, len(data))
    else:
        try:
            _replace(path, data)
        except OSError:
            with path.open("r+b") as file:
                file.write(data)
                file.truncate()
    return [value for _, value in kept]


def replace_text(path: Path, text: str) -> None:
    """A whole file, or the one that was there: written aside and renamed."""
    _replace(path, text.encode())


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_suffix(".tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
