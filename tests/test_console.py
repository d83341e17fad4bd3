"""What stands in the terminal before a run and after it."""

import io
import sys
from typing import Any

import pytest
from rich.console import Console

from minirl.view.console import ConsoleView
from minirl.view.loading import loading
from tests.bench.terminal import Terminal

SUMMARY: dict[str, Any] = {"steps": 30, "seconds": 61.2, "version": 30, "accuracies": []}
BOTH = "16.0% at version 0, 89.5% at version 30"


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"accuracies": [(0, 0.16), (30, 0.895)]}, f"held-out accuracy {BOTH}\n"),
        (
            {"accuracies": [(0, 0.258)], "version": 7},
            "held-out accuracy 25.8% at version 0; not evaluated since\n",
        ),
        (
            {"accuracies": [(0, 0.1), (10, 0.2), (20, 0.3)], "version": 25},
            "held-out accuracy 10.0% at version 0, 30.0% at version 20; not evaluated since\n",
        ),
        ({"accuracies": [(0, 0.0)], "version": 0}, "held-out accuracy 0.0% at version 0\n"),
        (
            {"drops": {"reward_error": 3, "equal_rewards": 1200}},
            "groups dropped 1,200 equal rewards, 3 reward error\n",
        ),
        ({"versions_measured": "28 of 30"}, "versions with a measured gap 28 of 30\n"),
    ],
)
def test_the_summary_says_what_was_measured_and_dropped(
    changes: dict[str, Any], row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ConsoleView(30).finished(SUMMARY | changes, "minirl runs")
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert row.strip() in rows
    assert len(rows) == 3, "what is not known has no row"


def test_loading_is_one_line_or_a_spinner_that_goes() -> None:
    file = io.StringIO()
    with loading("a model [1]", Console(file=file)):
        assert file.getvalue() == "loading a model [1]\n"
    assert file.getvalue() == "loading a model [1]\n"
    body = "from minirl.view.loading import loading\n"
    body += "with loading('engines'):\n    print('meanwhile')\n"
    terminal = Terminal([sys.executable, "-c", body + "    input()"], 80, 24)
    try:
        terminal.read_until(
            lambda: b"loading engines" in terminal.seen and b"0:00:01" in terminal.seen
        )
        terminal.press("\n")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert b"meanwhile" in terminal.seen
