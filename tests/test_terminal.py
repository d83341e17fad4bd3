"""What stands in the terminal before a run and after it; and the dashboard in a real terminal,
around a real loop whose workers only sleep."""

import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from minirl.cli import loading
from minirl.view.console import ConsoleView
from minirl.view.dashboard import look
from tests.bench.terminal import Terminal

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen


def running(*arguments: str) -> closing[Terminal]:
    return closing(Terminal([sys.executable, *arguments], 80, 24))


def scripted(folder: Path, step_s: str) -> closing[Terminal]:
    return running("-m", "tests.bench.dashboard", str(folder), "400", "1", "1", step_s)


def assert_restored(terminal: Terminal) -> str:
    assert terminal.is_as_before and terminal.seen.count(ENTER) == terminal.seen.count(LEAVE) == 1
    return terminal.seen.rpartition(LEAVE)[2].decode()


def test_keys_sizes_and_the_end(tmp_path: Path) -> None:
    with scripted(tmp_path, step_s="0.25") as terminal:
        terminal.read_until(lambda: b"sample 1/6" in terminal.seen)
        assert not terminal.is_as_before
        terminal.press("p\x1a")  # Ctrl-Z does nothing
        terminal.read_until(lambda: b"sample 2/6" in terminal.seen)
        terminal.resize(40, 10)
        terminal.press("s")
        terminal.read_until(lambda: "saved " in str(look(tmp_path).notes))
        terminal.resize(100, 30)
        terminal.read_until(lambda: b"\x1b[30;1H" in terminal.seen)  # the cursor in line 30
        terminal.press("q")
        assert terminal.wait() == 0
        after = assert_restored(terminal)
    assert "q: finishing the step and saving" in after and "the run has ended" in after
    shown = look(tmp_path)
    assert 0 < shown.step < 400 and shown.cost > 0 and not shown.reason


@pytest.mark.slow
def test_two_signals_give_the_terminal_back(tmp_path: Path) -> None:
    with scripted(tmp_path, step_s="60") as terminal:
        terminal.read_until(lambda: look(tmp_path).slots.get("training", 0) > 0)
        terminal.process.send_signal(signal.SIGTERM)
        terminal.read_until(lambda: b"saving; Ctrl-C ends it now" in terminal.seen)
        terminal.press("\x03")  # Ctrl-C
        assert terminal.wait(limit_s=50.0) != 0
        assert_restored(terminal)


SUMMARY: dict[str, Any] = {"steps": 30, "seconds": 61.2, "version": 30, "accuracies": []}
BOTH, SINCE = "16.0% at version 0, 89.5% at version 30", "; not evaluated since"
ROWS = [
    ({"accuracies": [(0, 0.16), (30, 0.895)]}, f"held-out accuracy {BOTH}"),
    ({"accuracies": [(0, 0.258)], "version": 7}, f"held-out accuracy 25.8% at version 0{SINCE}"),
    ({"accuracies": [(0, 0.0)], "version": 0}, "held-out accuracy 0.0% at version 0"),
    ({"drops": {"b_error": 3, "equal": 1200}}, "groups dropped 1,200 equal, 3 b error"),
    ({"versions_measured": "28 of 30"}, "versions with a measured gap 28 of 30"),
]


@pytest.mark.parametrize(("changes", "row"), ROWS)
def test_the_summary_says_what_was_measured_and_dropped(
    changes: dict[str, Any], row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ConsoleView(30).finished(SUMMARY | changes | {"try_next": "minirl runs"})
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert row in rows and len(rows) == 3, "what is not known has no row"


def test_loading_is_one_line_or_a_spinner_that_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with loading("a model [1]"):
        assert capsys.readouterr().out == "loading a model [1]\n"
    assert not capsys.readouterr().out
    body = "with loading('engines'):\n    print('meanwhile')\n    input()"
    with running("-c", "from minirl.cli import loading\n" + body) as terminal:
        for text in (b"loading engines", b"meanwhile", b"0:00:01"):
            terminal.read_until(lambda text=text: text in terminal.seen)
        terminal.press("\n")
        assert terminal.wait() == 0
