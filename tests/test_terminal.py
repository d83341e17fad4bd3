"""The dashboard in a real terminal, around a real loop whose workers only sleep: keys, sizes, and
that the terminal comes back whatever happens."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench import Options, run
from tests.bench.terminal import Terminal

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"  # the alternate screen


@contextmanager
def scripted(folder: Path, step_s: float) -> Iterator[Terminal]:
    arguments = ["-m", "tests.bench.dashboard", str(folder), "400", "1", "1", str(step_s)]
    terminal = Terminal([sys.executable, *arguments], 80, 24)
    try:
        yield terminal
    finally:
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


def test_keys_sizes_and_the_end(tmp_path: Path) -> None:
    with scripted(tmp_path, step_s=0.25) as terminal:
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
        terminal.read_until(lambda: b"saved " in terminal.seen)
        terminal.press("q")
        assert terminal.wait() == 0
        after = assert_restored(terminal).decode()
    assert "q: finishing the step and saving" in after and "the run has ended" in after
    shown = status(tmp_path)
    assert shown["state"] == "stopped" and 0 < shown["step"] < 400
    assert shown["cost"] > 0
    assert not list(tmp_path.glob(".*tmp"))


@pytest.mark.slow
def test_two_signals_end_it_now_and_give_the_terminal_back(tmp_path: Path) -> None:
    with scripted(tmp_path, step_s=60.0) as terminal:
        is_training = lambda: status(tmp_path).get("slots", {}).get("training", 0) > 0  # noqa: E731
        terminal.read_until(is_training)
        terminal.process.send_signal(signal.SIGTERM)
        terminal.read_until(lambda: b"saving; Ctrl-C ends it now" in terminal.seen)
        terminal.press("\x03")  # Ctrl-C
        assert terminal.wait(limit_s=50.0) != 0
        assert_restored(terminal)
    assert status(tmp_path)["state"] == "stopped"


@pytest.mark.slow
def test_a_crash_gives_the_terminal_back(tmp_path: Path) -> None:
    with scripted(tmp_path, step_s=60.0) as terminal:
        terminal.read_until(lambda: len(status(tmp_path).get("lanes", [])) == 2)
        terminal.read_until(lambda: status(tmp_path)["state"] == "running")
        children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children")
        names = {int(p): Path(f"/proc/{p}/comm").read_text() for p in children.read_text().split()}
        os.kill(next(pid for pid, name in names.items() if "train-0" in name), signal.SIGKILL)
        assert terminal.wait(limit_s=50.0) == 1
        after = assert_restored(terminal).decode()
    assert "train-0 was killed by SIGKILL" in after
    shown = status(tmp_path)
    assert shown["state"] == "failed" and shown["reason"]


@pytest.mark.slow
def test_the_bench_of_its_cost_runs_through() -> None:
    figures = {figure.name: figure for figure in run("dashboard", Options(is_quick=True)).figures}
    assert figures["dashboard_cost"].goal == 0.01
    assert 0 < figures["status_cost"].value < 0.1
