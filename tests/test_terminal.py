"""The dashboard in a real terminal, around a real loop whose workers only sleep: keys, sizes, and
that the terminal comes back whatever happens."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minirl.bench.terminal import Terminal
from minirl.dashboard.screen import ENTER, LEAVE


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    arguments = ["-m", "minirl.bench.dashboard", str(tmp_path), "400", "1", "1"]
    terminal = Terminal([sys.executable, *arguments], 80, 24)
    yield terminal
    terminal.close()


def status(folder: Path) -> dict:
    try:
        return json.loads((folder / "status.json").read_text())
    except FileNotFoundError:
        return {}


def assert_restored(terminal: Terminal) -> bytes:
    """Gives what stands on the normal screen afterwards."""
    assert terminal.is_as_before
    drawn, _, after = terminal.seen.rpartition(LEAVE.encode())
    assert drawn.count(ENTER.encode()) == drawn.count(LEAVE.encode()) + 1
    assert ENTER.encode() not in after
    return after


def test_keys_sizes_and_the_end(terminal: Terminal, tmp_path: Path) -> None:
    terminal.read_until(lambda: b"sample of step" in terminal.seen)
    assert not terminal.is_as_before
    terminal.press("p")
    terminal.read_until(lambda: b" 2/" in terminal.seen)
    terminal.resize(40, 10)  # too small: plain lines
    terminal.read_until(lambda: b"too small" in terminal.seen)
    terminal.read_until(lambda: b"reward" in terminal.seen.rpartition(b"too small")[2])
    assert terminal.is_as_before
    terminal.resize(100, 30)
    terminal.read_until(lambda: terminal.seen.count(ENTER.encode()) == 2)
    terminal.press("s")
    terminal.read_until(lambda: b"checkpoints/step-" in terminal.seen)
    terminal.press("q")
    assert terminal.wait() == 0
    after = assert_restored(terminal).decode()
    assert "q: finishing the step and saving" in after and "the run has ended" in after
    shown = status(tmp_path)
    assert shown["state"] == "stopped" and 0 < shown["step"] < 400
    assert 0 < shown["cost"] < 0.2
    assert not list(tmp_path.glob(".*tmp"))


def test_two_signals_end_it_now_and_give_the_terminal_back(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.read_until(lambda: b"rollout-0" in terminal.seen)
    terminal.send(signal.SIGTERM)
    terminal.read_until(lambda: b"again to end now" in terminal.seen)
    terminal.send(signal.SIGINT)
    assert terminal.wait() != 0
    assert_restored(terminal)
    assert status(tmp_path)["state"] == "stopped"
