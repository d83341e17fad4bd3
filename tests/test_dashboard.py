"""The dashboard's picture: a pure function of a snapshot, exactly as large as the terminal."""

import dataclasses
import json
import math
import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from snapshots import example
from test_cli import minirl

from minirl.view.dashboard import parts, plots, snapshot
from minirl.view.dashboard.files import snapshot_from_files
from minirl.view.dashboard.frame import STYLES, Options, render
from minirl.view.dashboard.snapshot import Curve, Lane, Note, Sample, Snapshot, thinned
from minirl.view.dashboard.watch import look

NOW = 1_700_000_000.0
KEYS = (("q", "finish and save"), ("p", "another sample"))
SIZES = [(80, 24), (100, 30), (160, 50), (130, 24), (60, 16), (50, 14), (200, 60), (20, 5), (1, 1)]


def lines_of(shown: Snapshot, width: int, height: int, which: int = 0) -> list[str]:
    frame = render(shown, width, height, shown.time, Options(which, KEYS))
    assert all(style in STYLES for line in frame.lines for _, style in line)
    return frame.plain().split("\n")


def assert_fits(lines: list[str], width: int, height: int) -> None:
    assert len(lines) == height
    assert {cell_len(line) for line in lines} == {width}


@pytest.mark.parametrize("width, height", SIZES)
@pytest.mark.parametrize("num_engines", [1, 2, 15])
def test_a_frame_is_exactly_as_large_as_the_terminal(
    width: int, height: int, num_engines: int
) -> None:
    assert_fits(lines_of(example(num_engines), width, height), width, height)
    assert_fits(lines_of(Snapshot(time=NOW), width, height), width, height)


numbers = st.one_of(st.floats(), st.integers(-5, 10**9).map(float))
text = st.text(st.characters(codec="utf-8"), max_size=60)
curves = st.lists(st.tuples(numbers, numbers), max_size=20).map(
    lambda points: Curve([x for x, _ in points], [y for _, y in points])
)
lanes = st.builds(
    Lane, text, text, numbers, numbers, st.integers(-1, 99), st.integers(0, 999), numbers, text,
    st.integers(0, 10**13),
)  # fmt: skip
samples = st.builds(
    Sample, st.integers(0, 999), text, text, text, numbers, st.lists(st.integers(-1, 9)), text
)
snapshots = st.builds(
    Snapshot,
    name=text,
    time=st.just(NOW),
    state=st.sampled_from(["starting", "running", "finished", "stopped", "failed", "?"]),
    reason=text,
    doing=text,
    step=st.integers(0, 10**6),
    steps=st.integers(0, 10**6),
    seconds=numbers.filter(math.isfinite),
    eta_s=st.none() | numbers,
    verdict=text,
    lanes=st.lists(lanes, max_size=5),
    slots=st.dictionaries(st.sampled_from(list(parts.SLOTS)), st.integers(0, 10**6)),
    staleness=st.lists(st.integers(0, 10**6), max_size=12),
    tokens_per_s=numbers,
    curves=st.dictionaries(st.sampled_from(["reward/mean", "train/logprob_gap"]), curves),
    last=st.dictionaries(st.sampled_from(["train/logprob_gap", "rollout/length_mean"]), numbers),
    accuracies=curves,
    samples=st.lists(samples, max_size=3),
    notes=st.lists(st.builds(Note, numbers, text), max_size=4),
)


@settings(deadline=None, max_examples=150)
@given(snapshots, st.integers(1, 180), st.integers(1, 60), st.integers(0, 9))
def test_whatever_a_snapshot_holds_it_fits_and_obeys_nobody(
    shown: Snapshot, width: int, height: int, which: int
) -> None:
    lines = lines_of(shown, width, height, which)
    assert_fits(lines, width, height)
    assert "\x1b" not in "".join(lines)


def test_at_80_by_24_everything_is_there() -> None:
    told = "\n".join(lines_of(example(1), 80, 24))
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
        assert words in told, f"{words}\n{told}"


def test_p_shows_another_sample() -> None:
    titles = {lines_of(example(), 80, 24, which)[16] for which in range(6)}
    assert len(titles) == 6
    assert lines_of(example(), 80, 24, 6) == lines_of(example(), 80, 24, 0)


def test_without_colours_states_still_differ() -> None:
    glyphs = [parts.GLYPHS[letter][0] for letter in ".gr"]
    assert len(set(glyphs)) == 3
    console = Console(no_color=True, force_terminal=True, color_system="256")
    with console.capture() as captured:
        console.print(render(example(), 80, 24, NOW), soft_wrap=True)
    assert "\x1b[3" not in captured.get() and "░" in captured.get()


def test_it_says_when_a_run_is_silent_or_over() -> None:
    shown = example(time=NOW)
    assert "no news for 12 s" in render(shown, 80, 24, NOW + 12).plain()
    assert "no news" not in render(shown, 80, 24, NOW + 2).plain()
    failed = dataclasses.replace(shown, state="failed", reason="train-0 was killed by SIGKILL")
    second = render(failed, 80, 24, NOW + 90).plain().split("\n")[1]
    assert "ended 1:30 ago, failed: train-0 was killed by SIGKILL" in second


def test_a_silent_worker_is_named() -> None:
    lane = Lane("rollout-0", "generating", 95.0, 95.0, 3, 8, 0.0, "g" * 120)
    assert "generating, silent 1:35" in "\n".join(lines_of(example(lanes=[lane]), 100, 30))


# -- plots


def test_a_curve_rises_from_the_lower_left_to_the_upper_right() -> None:
    rows = plots.braille([i / 19 for i in range(20)], 10, 3, 0.0, 1.0)
    assert [len(row) for row in rows] == [10, 10, 10]
    assert rows[0][0] == "⠀" != rows[0][-1] and rows[2][-1] == "⠀" != rows[2][0]


def test_resample_draws_lines_between_points_and_means_of_many() -> None:
    assert plots.resample([0, 10], [0.0, 1.0], 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert plots.resample([0, 1, 2, 3], [0.0, 2.0, 4.0, 6.0], 2) == [1.0, 5.0]
    assert plots.resample([], [], 3) == [None] * 3
    assert plots.resample([4], [2.0], 3) == [None, None, 2.0]


def test_a_bar_shows_little_as_more_than_nothing() -> None:
    assert plots.bar(0.0, 4) == "    "
    assert plots.bar(1e-6, 4) == "▏   "
    assert plots.bar(1.0, 4) == "████" == plots.bar(9.0, 4)


def test_a_strip_shows_what_was_most_and_what_is_rare() -> None:
    assert plots.strip("gggg....", 2, 8, "r") == "g."
    assert plots.strip("gggr....", 2, 8, "r") == "r."
    assert plots.strip("g", 4, 4, "r") == "   g"


def test_thinning_keeps_the_mean_and_the_ends_near() -> None:
    curve = Curve([float(i) for i in range(10_000)], [float(i) for i in range(10_000)])
    thin = thinned(curve)
    assert len(thin.x) == snapshot.MAX_POINTS
    assert sum(thin.y) / len(thin.y) == pytest.approx(4999.5, rel=1e-3)


# -- the file, and a run directory alone


def test_a_snapshot_comes_back_from_its_file(tmp_path: Path) -> None:
    shown = example()
    snapshot.write(shown, tmp_path)
    assert snapshot.read(tmp_path) == shown
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"step": "7"}', '{"lanes": [3]}', '{"curves": {"a": []}}']
)
def test_a_file_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(text)
    assert snapshot.read(tmp_path) is None
    assert_fits(lines_of(look(tmp_path), 80, 24), 80, 24)


def test_fields_of_another_minirl_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"step": 7, "weather": {"sunny": true}}')
    assert snapshot.read(tmp_path) == Snapshot(step=7)


def run_dir(folder: Path) -> Path:
    """What a run of an older minirl left, cut off in the middle of a line."""
    lines = [
        {"step": step, "version": step, "seconds": 3.0 * step, "reward/mean": step / 10,
         "rollout/idle_frac": 0.0, "train/idle_frac": 0.5}
        for step in range(1, 8)
    ]  # fmt: skip
    (folder / "evals.jsonl").write_text('{"step": 3, "version": 3, "accuracy": 0.25}\n')
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 8, "rew')
    sample = {"step": 7, "prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4",
              "reference": "4", "reward": 1.0, "versions": [6, 6], "stop": "stop"}  # fmt: skip
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n" + '{"step": 8, "pro')
    (folder / "recipe.toml").write_text("[train]\nsteps = 20\n")
    return folder


def test_a_run_without_a_status_is_shown_from_its_other_files(tmp_path: Path) -> None:
    shown = snapshot_from_files(run_dir(tmp_path))
    assert (shown.state, shown.step, shown.steps) == ("running", 7, 20)
    assert shown.eta_s == pytest.approx(3.0 * 13)
    assert shown.accuracies == Curve([3.0], [0.25])
    assert shown.samples[0].prompt == "2 + 2?"
    assert shown.verdict.startswith("generation-bound: trainers idle 50%")
    (tmp_path / "summary.json").write_text('{"finished": true}')
    assert snapshot_from_files(tmp_path).state == "finished"


def test_watch_shows_a_run_that_is_over_and_one_that_is_gone(tmp_path: Path) -> None:
    gone = example(time=time.time() - 12, pid=2**22 + 1, host=socket.gethostname())
    snapshot.write(gone, tmp_path)
    assert look(tmp_path).reason == "and its process is gone"
    done = minirl("watch", str(tmp_path))
    assert done.returncode == 0
    assert "step 40/100  reward 0.700" in done.stdout and "no news for 1" in done.stdout
    snapshot.write(dataclasses.replace(gone, pid=os.getpid()), tmp_path)
    assert look(tmp_path).reason == ""
    snapshot.write(dataclasses.replace(gone, state="stopped", reason="saved"), tmp_path)
    once = minirl("watch", str(tmp_path), "--once")
    assert once.returncode == 0 and "ended" in once.stdout and "stopped: saved" in once.stdout


def test_watch_names_a_run_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, words in (("nowhere", "no such directory"), ("empty", "has no recipe.toml")):
        done = minirl("watch", name, cwd=tmp_path)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert words in done.stderr
    done = minirl("watch", cwd=tmp_path)
    assert done.returncode == 2 and "there is no run in it" in done.stderr
