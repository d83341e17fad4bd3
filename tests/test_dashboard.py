"""The dashboard's picture as a function of a Status, status.json, and `minirl watch`."""

import dataclasses
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from test_cli import minirl

from minirl.view import dashboard
from minirl.view.curves import bar, braille, resample, strip
from minirl.view.dashboard import KEYS, Frame, look
from minirl.view.status import Lane, Phase, Sample, Status

NOW = 1_700_000_000.0
SIZES = [(80, 24), (120, 40), (100, 30), (160, 50), (130, 24), (60, 16), (50, 14), (200, 60)]


def example(num_engines: int = 2, **changes: Any) -> Status:
    """As a run in the middle of its work gives it."""
    engine = ("g" * 9 + "r" + "g" * 14 + "." * 3) * 5
    rank = ("t" * 8 + "p" + "." * 7) * 8
    lanes = [
        Lane(f"rollout-{i}", "generating", 3.0, 0.1, 40, 31, 0.12, engine[-120 + i :], 900 << 20)
        for i in range(num_engines)
    ]
    lanes.append(Lane("train-0", "waiting for a batch", 2, 2, -1, 0, 0.41, rank[-120:], 1200 << 20))
    steps = [float(step) for step in range(1, 41)]
    speed = [(x, 7000 + 500 * math.sin(x)) for x in steps]
    prompt = "Tom has 7 apples and buys 12 more. How many apples does Tom have now?"
    answer = "Tom has 7 apples.\n7 + 12 = 19, so Tom has 19 apples.\nThe answer is 19."
    values: dict[str, Any] = {
        "name": "smoke-20260101-120000",
        "time": NOW,
        "state": Phase.RUNNING,
        "step": 40,
        "steps": 100,
        "version": 40,
        "seconds": 321.0,
        "eta_s": 480.0,
        "verdict": "generation-bound: trainers idle 41%, one GPU more for rollout would give +20%",
        "lanes": lanes,
        "slots": {"sampling": 48, "grading": 2, "ready": 12, "training": 32, "free": 2},
        "batch_size": 32,
        "staleness": [71000, 24000, 5000],
        "max_staleness": 2,
        "max_new_tokens": 128,
        "tokens_per_s": 7105.0,
        "curves": {
            "reward/mean": [(x, 1 - math.exp(-x / 15) + 0.05 * math.sin(x * 7)) for x in steps],
            "eval/accuracy": [(0.0, 0.21), (10.0, 0.44), (20.0, 0.7), (30.0, 0.81)],
            "rollout/tokens_per_s": speed,
            "train/tokens_per_s": speed,
            "rollout/length_mean": speed,
            "train/logprob_gap": [(x, 3e-6) for x in steps],
        },
        "last": {
            "train/tokens_per_s": 12033.0,
            "rollout/length_mean": 43.2,
            "rollout/truncated_frac": 0.03,
            "train/logprob_gap": 3.1e-6,
            "reward/mean": 0.7,
        },
        "free_bytes": 9 << 30,
        "samples": [
            Sample(step, prompt, answer, "19", 1.0, [step - 2, step - 1], "stop")
            for step in range(35, 41)
        ],
        "notes": [
            (0.1, "waiting for workers to start"),
            (93.4, "held-out accuracy 81.2% at version 30"),
            (99.0, "rollout-1 was killed by SIGKILL: replaced"),
        ],
        **changes,
    }
    return Status(**values)


def lines_of(shown: Status, width: int, height: int, which: int = 0, now: float = NOW) -> list[str]:
    """Exactly as large as the terminal, or it would scroll."""
    console = Console(width=width, height=height)
    options = console.options.update(width=width, height=height)
    rows = console.render_lines(Frame(shown, now, which, KEYS), options)
    lines = ["".join(segment.text for segment in row) for row in rows]
    assert len(lines) == height and {cell_len(line) for line in lines} == {width}
    return lines


@pytest.mark.parametrize("width, height", SIZES)
@pytest.mark.parametrize("num_engines", [1, 15])
def test_a_frame_fills_the_terminal(width: int, height: int, num_engines: int) -> None:
    lines_of(example(num_engines), width, height)
    lines_of(Status(time=NOW), width, height)


numbers = st.one_of(st.floats(), st.integers(-5, 10**9).map(float))
text = st.text(st.characters(codec="utf-8"), max_size=60)
curves = st.lists(st.tuples(numbers, numbers), max_size=20)
lanes = st.builds(
    Lane, text, text, numbers, numbers, st.integers(-1, 99), st.integers(0, 999), numbers, text,
    st.integers(0, 10**13),
)  # fmt: skip
samples = st.builds(
    Sample, st.integers(0, 999), text, text, text, numbers, st.lists(st.integers(-1, 9)), text
)
statuses = st.builds(
    Status,
    name=text,
    time=st.just(NOW),
    state=st.sampled_from(Phase),
    reason=text,
    doing=text,
    step=st.integers(0, 10**6),
    steps=st.integers(0, 10**6),
    seconds=numbers,
    eta_s=st.none() | numbers,
    verdict=text,
    lanes=st.lists(lanes, max_size=5),
    slots=st.dictionaries(st.sampled_from(list(dashboard.SLOTS)), st.integers(0, 10**6)),
    staleness=st.lists(st.integers(0, 10**6), max_size=12),
    tokens_per_s=numbers,
    curves=st.dictionaries(st.sampled_from([plot[0] for plot in dashboard.PLOTS]), curves),
    last=st.dictionaries(st.sampled_from(["train/logprob_gap", "rollout/length_mean"]), numbers),
    samples=st.lists(samples, max_size=3),
    notes=st.lists(st.tuples(numbers, text), max_size=4),
)


@settings(deadline=None, max_examples=100)
@given(statuses, st.integers(50, 180), st.integers(14, 60), st.integers(0, 9))
def test_whatever_a_status_holds_it_fits_and_obeys_no_text(
    shown: Status, width: int, height: int, which: int
) -> None:
    assert "\x1b" not in "".join(lines_of(shown, width, height, which))


@pytest.mark.parametrize("width, height", [(80, 24), (120, 40)])
def test_everything_is_there(width: int, height: int) -> None:
    shown = "\n".join(lines_of(example(1), width, height))
    for words in (
        "step 40/100",
        "ETA 8:00",
        "generation-bound: trainers idle 41%",
        "rollout-0 generating 31 at v40",
        "train-0   waiting for a batch (12/32)",
        "59% busy",
        "reward 0.911",
        "held-out 81.0% at v30",
        "staleness",
        "96 slots",
        "7,105 tok/s",
        "12,033 tok/s",
        "43 of 128, 3% cut",
        "3.1e-06",
        "GiB free",
        "reward 1, wanted 19",
        "How many apples",
        "> Tom has 7 apples.",
        "was killed by SIGKILL",
        "q finish and save",
    ):
        assert words in shown, f"{words}\n{shown}"


def test_p_shows_another_sample() -> None:
    pictures = ["\n".join(lines_of(example(), 80, 24, which)) for which in range(7)]
    assert len(set(pictures)) == 6 and pictures[6] == pictures[0]


def test_it_says_when_a_run_or_a_worker_is_silent_and_how_a_run_ended() -> None:
    assert "no news for 12 s" in lines_of(example(), 80, 24, now=NOW + 12)[1]
    assert "no news" not in lines_of(example(), 80, 24, now=NOW + 2)[1]
    failed = example(state=Phase.FAILED, reason="train-0 was killed by SIGKILL")
    second = lines_of(failed, 80, 24, now=NOW + 90)[1]
    assert "ended 1:30 ago, failed: train-0 was killed by SIGKILL" in second
    lane = Lane("rollout-0", "generating", 95.0, 95.0, 3, 8, 0.0, "g" * 120)
    assert "generating, silent 1:35" in "\n".join(lines_of(example(lanes=[lane]), 100, 30))


def test_plots() -> None:
    rows, low, high = braille(tuple(i / 19 for i in range(20)), 3)
    assert [len(row) for row in rows] == [10, 10, 10] and (low, high) == (0.0, 1.0)
    assert rows[0][0] == "⠀" != rows[0][-1] and rows[2][-1] == "⠀" != rows[2][0]
    assert resample(((0.0, 0.0), (10.0, 1.0)), 5) == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert resample(((0.0, 0.0), (1.0, 2.0), (2.0, 4.0), (3.0, 6.0)), 2) == (1.0, 5.0)
    assert resample(((1.0, 2.0),), 3) == (2.0,) and resample(((1.0, math.nan),), 3) == ()
    assert bar(0.0, 4) == "    " and bar(1e-6, 4) == "▏   " and bar(9.0, 4) == "████"
    assert strip("g" * 60 + "." * 60, 2) == "g."
    assert strip("g" * 59 + "r" + "." * 60, 2) == "r."  # a reload is seen, however short
    assert strip("g" * 30, 4) == "   g"


def test_a_status_comes_back_from_its_file_whatever_else_is_in_it(tmp_path: Path) -> None:
    shown = example(eta_s=None, tokens_per_s=math.inf)
    shown.save(tmp_path)
    assert Status.read(tmp_path) == shown
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    (tmp_path / "status.json").write_text('{"step": 7, "weather": {"sunny": true}}')
    assert Status.read(tmp_path) == Status(step=7)
    for text in ("", "{", "[]", "null", '{"step": "x"}', '{"lanes": [3]}', '{"curves": {"a": 1}}'):
        (tmp_path / "status.json").write_text(text)
        assert Status.read(tmp_path) is None
        assert "no status.json" in lines_of(look(tmp_path), 120, 24)[1]


def test_watch_shows_a_run_that_is_over_and_one_that_is_gone(tmp_path: Path) -> None:
    gone = example(time=time.time() - 12, pid=2**22 + 1, host=socket.gethostname())
    gone.save(tmp_path)
    assert look(tmp_path).reason == "and its process is gone"
    done = minirl("watch", str(tmp_path))
    assert done.returncode == 0
    assert "step 40/100  reward 0.700" in done.stdout and "no news for 1" in done.stdout
    dataclasses.replace(gone, pid=os.getpid()).save(tmp_path)
    assert look(tmp_path).reason == ""
    dataclasses.replace(gone, state=Phase.STOPPED, reason="saved").save(tmp_path)
    once = minirl("watch", str(tmp_path), "--once")
    assert once.returncode == 0 and "stopped: saved" in once.stdout
    assert len(once.stdout.splitlines()) >= 24 and "sample of step 40" in once.stdout


def test_watch_names_a_run_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for names in (["nowhere"], ["empty"], []):
        done = minirl("watch", *names, cwd=tmp_path)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "has no status.json" in done.stderr
