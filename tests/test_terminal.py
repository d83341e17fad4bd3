"""The dashboard in a real terminal, around a real loop whose workers only sleep."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minirl.view.dashboard import Status
from tests.bench.terminal import Terminal

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen


@contextmanager
def scripted(folder: Path, step_s: float) -> Iterator[Terminal]:
    arguments = ["-m", "tests.bench.dashboard", str(folder), "400", "1", "1", str(step_s)]
    terminal = Terminal([sys.executable, *arguments], 80, 24)
    try:
        yield terminal
    finally:
        terminal.close()


def assert_restored(terminal: Terminal) -> str:
    assert terminal.is_as_before and terminal.seen.count(ENTER) == terminal.seen.count(LEAVE) == 1
    return terminal.seen.rpartition(LEAVE)[2].decode()


def test_keys_sizes_and_the_end(tmp_path: Path) -> None:
    with scripted(tmp_path, step_s=0.25) as terminal:
        terminal.read_until(lambda: b"sample 1/6" in terminal.seen)
        assert not terminal.is_as_before
        terminal.press("p\x1a")  # Ctrl-Z does nothing
        terminal.read_until(lambda: b"sample 2/6" in terminal.seen)
        terminal.resize(40, 10)
        terminal.press("s")
        terminal.read_until(lambda: "saved " in str(Status.read(tmp_path).notes))
        terminal.resize(100, 30)
        terminal.read_until(lambda: b"\x1b[30;1H" in terminal.seen)  # the cursor in line 30
        terminal.press("q")
        assert terminal.wait() == 0
        after = assert_restored(terminal)
    assert "q: finishing the step and saving" in after and "the run has ended" in after
    shown = Status.read(tmp_path)
    assert shown.state == "stopped" and 0 < shown.step < 400 and shown.cost > 0


@pytest.mark.slow
def test_two_signals_give_the_terminal_back(tmp_path: Path) -> None:
    with scripted(tmp_path, step_s=60.0) as terminal:
        terminal.read_until(lambda: Status.read(tmp_path).slots.get("training", 0) > 0)
        terminal.process.send_signal(signal.SIGTERM)
        terminal.read_until(lambda: b"saving; Ctrl-C ends it now" in terminal.seen)
        terminal.press("\x03")  # Ctrl-C
        assert terminal.wait(limit_s=50.0) != 0
        assert_restored(terminal)
    assert Status.read(tmp_path).state == "stopped"
