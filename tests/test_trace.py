"""The timeline: what a worker says on its board becomes tracks, slices and arrows."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

from minirl.shm.board import Board, BoardWriter, State
from minirl.view import trace
from minirl.view.trace import Reader, Sequence, Slice, Tracer


def traced_writer(path: Path, session: str = "s") -> BoardWriter:
    writer = Board(1).writer(0)
    writer.tracer = Tracer(path, session)
    return writer


def merged(run_dir: Path) -> list[dict[str, Any]]:
    path = trace.merge(run_dir)
    assert path == run_dir / "trace.json.gz"
    found = json.loads(gzip.decompress(path.read_bytes()))
    return found["traceEvents"]


def one_of_each(run_dir: Path) -> None:
    engine = traced_writer(run_dir / "trace" / "rollout-0.jsonl")
    rank = traced_writer(run_dir / "trace" / "train-0.jsonl")
    verifier = traced_writer(run_dir / "trace" / "verify-0.jsonl")
    assert engine.tracer and rank.tracer
    rank.enter(State.WAITING_FOR_BATCH)
    engine.enter(State.GENERATING)
    engine.serving(version=3, running=2)
    for key in (0, 1):
        engine.tracer.begin_sequence(key)
        engine.tracer.first_token(key)
    engine.enter(State.GENERATING)  # a beat, no new slice
    engine.tracer.end_sequence(0, {"group": 7, "place": 0})
    engine.tracer.begin_sequence(2)  # in the lane that came free
    engine.tracer.end_sequence(1, {"group": 8, "place": 0})
    engine.tracer.end_sequence(2, {"group": 7, "place": 1})
    engine.enter(State.RELOADING)
    verifier.enter(State.GRADING, anew=True, group=7, place=0)
    verifier.enter(State.GRADING, anew=True, group=7, place=1)
    verifier.enter(State.WAITING_FOR_ANSWERS)
    rank.tracer.step(4, 3, [7])
    rank.enter(State.TRAINING, phase="prox forward")
    rank.enter(State.TRAINING, phase="forward and backward")
    rank.enter(State.PUBLISHING, version=4)
    rank.enter(State.WAITING_FOR_BATCH)


def test_states_phases_and_reward_calls_become_slices_on_a_track_each(tmp_path: Path) -> None:
    one_of_each(tmp_path)
    events = merged(tmp_path)
    tracks = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(tracks) == ["rollout-0", "train-0", "verify-0"]

    def slices(worker: str) -> list[str]:
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == tracks[worker] and not e["tid"]]
        return [e["name"] for e in sorted(mine, key=lambda e: (e["ts"], -e["dur"]))]

    assert slices("rollout-0") == ["generating", "reloading"]
    assert slices("train-0") == [
        "waiting for batch",
        "step 4",
        "training: prox forward",
        "training: forward and backward",
        "publishing",
        "waiting for batch",
    ]
    assert slices("verify-0") == ["grading", "grading", "waiting for answers"]
    waits = [e for e in events if e.get("cat") == "wait"]
    assert {e["name"] for e in waits} == {"waiting for batch", "waiting for answers"}
    assert {e["name"] for e in events if e["ph"] == "C"} == {"running sequences", "version"}


def test_arrows_go_from_each_trajectory_to_the_step_that_trained_it(tmp_path: Path) -> None:
    one_of_each(tmp_path)
    events = merged(tmp_path)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 2, "group 8 was not trained"
    step = next(e for e in events if e["name"] == "step 4")
    for number, start in starts.items():
        around = [e for e in events if e["ph"] == "X" and holds(e, start)]
        assert "group 7" in {e["name"] for e in around}
        assert holds(step, ends[number]) and ends[number]["ts"] >= start["ts"]


def holds(slice: dict[str, Any], event: dict[str, Any]) -> bool:
    is_there = (slice["pid"], slice["tid"]) == (event["pid"], event["tid"])
    return is_there and slice["ts"] <= event["ts"] <= slice["ts"] + slice["dur"] + 1.2


def test_two_sequences_never_share_a_lane_at_once(tmp_path: Path) -> None:
    one_of_each(tmp_path)
    found = [e for e in Reader(tmp_path).events("rollout-0") if isinstance(e, Sequence)]
    assert [e.lane for e in found] == [0, 1, 0]
    by_lane = [e for e in found if e.lane == 0]
    assert by_lane[0].end <= by_lane[1].start


def test_a_killed_worker_and_its_successor_and_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "verify-0.jsonl"
    traced_writer(path).enter(State.GRADING, group=1)
    time.sleep(0.02)
    traced_writer(path).enter(State.WAITING_FOR_ANSWERS)  # replaced in the same run
    with path.open("a") as file:
        file.write('["state",12')
    found = list(Reader(tmp_path).states("verify-0"))
    assert [s.name for s in found] == ["grading", "waiting for answers"]
    assert found[0].facts == {"group": 1, "cut": True}
    assert found[0].end - found[0].start >= 0.02, "it hung until it was replaced"
    assert trace.merge(tmp_path) is not None


def test_a_resumed_run_has_one_clock_over_boots_and_no_arrows_between_sessions(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    begin = {"session": "a", "boot": "x", "wall": 1000.0}
    sequence = ["sequence", 51.0, 0, 50.0, 50.5, {"group": 7}]
    lines = [["begin", 50.0, begin], ["state", 50.0, "generating", {}], sequence]
    later = {"session": "b", "boot": "y", "wall": 1100.0}  # the clock began anew
    lines += [["begin", 5.0, later], ["state", 6.0, "generating", {}]]
    (folder / "rollout-0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    lines = [["begin", 5.0, later], ["step", 7.0, 1, 0, [7]], ["state", 8.0, "training", {}]]
    (folder / "train-0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    first, second = Reader(tmp_path).states("rollout-0")
    assert first == Slice("generating", 0.0, 1.0, {"cut": True})
    assert second.start == 101.0
    assert [e for e in merged(tmp_path) if e["ph"] in "sf"] == []


def test_a_run_without_trace_merges_to_nothing_and_a_board_without_tracer_writes_nothing(
    tmp_path: Path,
) -> None:
    Board(1).writer(0).enter(State.TRAINING, phase="pack")
    assert trace.merge(tmp_path) is None and list(tmp_path.iterdir()) == []
