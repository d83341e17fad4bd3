"""The dashboard's picture as a function of a Status, status.json, and `minirl watch`."""

import json
import math
import signal
import sys
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from minirl.buffer import Buffer
from minirl.cli import loading
from minirl.errors import RecipeError
from minirl.run_dir import hold
from minirl.shm.board import Row, State
from minirl.view import dashboard
from minirl.view.console import ConsoleView, Reporter, lane_state
from minirl.view.dashboard import TRENDS, Lane, Sample, Status, look
from tests.bench.terminal import Terminal
from tests.cases import DATA, each_case
from tests.run_dirs import log_of, make_config
from tests.test_cli import ran

PICTURE = DATA / "dashboard.txt"
GIVEN = json.loads((DATA / "status.json").read_text())
NOW = GIVEN["time"]


def example(**changes: Any) -> Status:
    engine = Lane("rollout-0", "generating 31 at v40", [(0.0, 0.0)] * 6 + [(0.97, 0.03)] * 54)
    rewards = [(float(step), 1 - math.exp(-step / 15)) for step in range(1, 41)]
    values: dict[str, Any] = {
        **GIVEN,
        "lanes": [engine, Lane("train-0", "waiting for batch", [(0.2, 0.8)])],
        "curves": {"reward/mean": rewards, **dict.fromkeys(TRENDS, rewards)},
        "samples": [Sample(f"of step {step}", "How many?", "7 + 12\n= 19") for step in range(6)],
        **changes,
    }
    return Status(**values)


def lines_of(shown: Status, width: int, height: int, which: int = 0, now: float = NOW) -> list[str]:
    """Exactly as large as the terminal, or it would scroll."""
    drawn = dashboard.picture(shown, now, (width, height), which, dashboard.KEYS)
    lines = "".join(segment.text for segment in drawn.segments).split("\n")[:-1]
    assert len(lines) == height and {cell_len(line) for line in lines} == {width}
    return lines


numbers = st.one_of(st.floats(-1e300, 1e300), st.integers(-5, 10**9).map(float))
shares = st.floats(0, 1)
counts = st.integers(0, 10**6)
text = st.text(st.characters(codec="utf-8"), max_size=60)
curves = st.dictionaries(
    st.sampled_from(["reward/mean", *TRENDS, dashboard.SPEED[0][0]]),
    st.lists(st.tuples(numbers, numbers), max_size=20),
)
statuses = st.builds(
    example, name=text, state=st.sampled_from(["running", "failed"]), doing=text, reason=text,
    step=counts, steps=counts, seconds=numbers, verdict=text,
    curves=curves, evaluations=st.lists(st.tuples(counts, numbers, numbers, numbers), max_size=5),
    lanes=st.lists(st.builds(Lane, text, text, st.lists(st.tuples(shares, shares))), max_size=20),
    drops=st.dictionaries(text, counts),
    slots=st.dictionaries(st.sampled_from(["sampling", "ready"]), counts),
    staleness=st.lists(counts, max_size=12),
    last=st.dictionaries(st.sampled_from([row[0] for row in dashboard.SPEED]), numbers),
    samples=st.lists(st.builds(Sample, text, text, text), max_size=3),
    notes=st.lists(st.tuples(numbers, text), max_size=4),
)  # fmt: skip


@settings(max_examples=100)
@given(statuses, st.integers(50, 180), st.integers(14, 60), st.integers(0, 9))
def test_any_status_fits(shown: Status, width: int, height: int, which: int) -> None:
    assert "\x1b" not in "".join(lines_of(shown, width, height, which))


def as_text() -> str:
    pictures = [lines_of(example(), *size) for size in ((80, 24), (120, 40))]
    return "\n".join(line.rstrip() for lines in pictures for line in lines) + "\n"


def test_the_picture_is_the_one_that_was_looked_at() -> None:
    """`python -m tests.test_dashboard` draws it anew."""
    assert as_text() == PICTURE.read_text()


def test_of_eight_boxes_those_without_room_are_counted() -> None:
    lanes = [Lane(f"rollout-{i}", "generating", [], box=i) for i in range(8)]
    shown = "\n".join(lines_of(example(lanes=lanes), 120, 40))
    assert [f"box {i}: 1 devices" in shown for i in range(8)] == [True] * 5 + [False] * 3
    assert "rollout-4" in shown and "and 3 more boxes" in shown
    assert "more boxes" not in "\n".join(lines_of(example(lanes=lanes[:5]), 120, 40))


def test_another_sample_silence_and_the_end() -> None:
    pictures = ["\n".join(lines_of(example(), 80, 24, which)) for which in range(7)]
    assert len(set(pictures)) == 6 and pictures[6] == pictures[0]
    failed, one = {"state": "failed", "reason": "it was killed"}, [(0, 0.0, 0.0, 0.1)]
    for changes, age, words in (
        ({}, 12, "no news for 12 s"),
        (failed, 90, "ended 1:30 ago, failed: it was killed"),
        ({"evaluations": one, "step": 0}, 0, "held-out 0.0% (0–10), at version 0"),
        ({"evaluations": []}, 0, "not evaluated yet"),
    ):
        assert words in "\n".join(lines_of(example(**changes), 80, 24, now=NOW + age))
    assert lane_state(Row(State.GENERATING, 95.0, 95.0, 3, 8)) == "generating, silent 1:35"
    assert lane_state(Row(State.STARTING, 95.0, 95.0, 3, 8)) == "starting"


def test_what_starts_is_not_at_work_and_what_is_held_back_is_said(tmp_path: Path) -> None:
    workers, buffer = log_of(tmp_path, make_config())._workers, Buffer(2, 3, target_staleness=0.0)
    engine, rank = workers.all
    loop: Any = SimpleNamespace(workers=workers, engines=[engine], ranks=[rank], buffer=buffer)
    loop.groups, loop.is_interrupted = SimpleNamespace(evaluation=None), False
    reporter = Reporter(loop, deque(), None)
    board = workers.board.writer(engine.row)
    board.enter(State.RELOADING)  # its first weights
    assert [reporter._lane(engine).seconds for _ in range(3)] == [[], [], []]
    assert reporter._doing() == "starting rollout-0, train-0"
    engine.is_ready = rank.is_ready = True
    board.enter(State.GENERATING)
    assert reporter._lane(engine).seconds == [(1.0, 0.0)]
    board.enter(State.WAITING_FOR_PROMPTS)
    assert reporter._doing() == ""
    for prompt in range(2):
        buffer.admit(prompt, 0)
    held_back = "engines wait: admission control holds them back (2 of 8 slots)"
    assert reporter._doing() == held_back and buffer.holds_back
    board.enter(State.GENERATING)
    assert reporter._doing() == ""


def test_a_status_comes_back_whatever_else_is_in_its_file(tmp_path: Path) -> None:
    shown = example()
    shown.save(tmp_path)
    assert dashboard.look(tmp_path) == shown.model_copy(update={"state": "failed"})
    file, *others = tmp_path.iterdir()
    assert file.name == "status.json" and not others
    file.write_text('{"step": 7, "weather": {"sunny": true}}')
    assert dashboard.look(tmp_path) == Status(step=7, state="failed")
    for broken in ("", "{", "[]", '{"step": "x"}', '{"lanes": [3]}', '{"curves": {"a": 1}}'):
        file.write_text(broken)
        assert "no status.json" in lines_of(dashboard.look(tmp_path), 120, 24)[1]


def test_watch_shows_a_run_that_is_over_and_one_that_is_gone(tmp_path: Path) -> None:
    example(time=time.time() - 12).save(tmp_path)
    with hold(tmp_path):
        assert dashboard.look(tmp_path).state == "running"
    assert "failed: its process is gone" in "\n".join(ran("watch", tmp_path))
    (tmp_path / "summary.json").write_text('{"finished": false}')
    shown = "\n".join(ran("watch", tmp_path))
    assert "ago, stopped: " in shown and "sample 1/6 of step 5" in shown
    with pytest.raises(RecipeError, match="has no status"):
        ran("watch", tmp_path / "none")


if __name__ == "__main__":
    PICTURE.write_text(as_text())


# In a terminal: before a run, after it, and the dashboard around a loop whose workers only sleep --

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen


def running(*arguments: str) -> closing[Terminal]:
    return closing(Terminal([sys.executable, *arguments], 80, 24))


def scripted(folder: Path, step_s: str) -> closing[Terminal]:
    return running("-m", "tests.bench.dashboard", str(folder), "4000", "1", "1", step_s)


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
    assert 0 < shown.step < 4000 and shown.cost > 0 and not shown.reason


@pytest.mark.slow
def test_two_signals_give_the_terminal_back(tmp_path: Path) -> None:
    with scripted(tmp_path, step_s="600") as terminal:
        terminal.read_until(lambda: look(tmp_path).slots.get("training", 0) > 0)
        terminal.process.send_signal(signal.SIGTERM)
        terminal.read_until(lambda: b"saving; Ctrl-C ends it now" in terminal.seen)
        terminal.press("\x03")  # Ctrl-C
        assert terminal.wait() != 0
        assert_restored(terminal)


SUMMARY: dict[str, Any] = {"steps": 30, "seconds": 61.2, "version": 30, "accuracies": []}


@each_case("summaries")
def test_the_summary_says_what_was_measured_and_dropped(
    case: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ConsoleView(30).finished(SUMMARY | case["changes"] | {"try_next": "minirl runs"})
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert case["row"] in rows and len(rows) == 3, "what is not known has no row"


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
