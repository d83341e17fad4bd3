"""The timeline: what a worker says on its board becomes tracks, slices and arrows in one file."""

import json
import threading
from pathlib import Path
from typing import Any

from minirl.shm.board import Board, BoardWriter, State
from minirl.shm.tracer import LANES, STATES, STEPS, TraceFile, Tracer
from minirl.view.trace import read_window

Event = dict[str, Any]


def traced_writer(file: TraceFile, name: str) -> BoardWriter:
    writer = Board(1).writer(0)
    writer.tracer = Tracer(file, name)
    return writer


def begun(run_dir: Path) -> TraceFile:
    file = TraceFile(run_dir / "trace.json")
    file.begin()
    return file


def events_of(run_dir: Path) -> list[Event]:
    """As Perfetto reads it: an array that nothing closes, with a comma after its last event."""
    return json.loads((run_dir / "trace.json").read_text().rstrip(",\n") + "]")


def one_of_each(run_dir: Path) -> list[Event]:
    file = begun(run_dir)
    names = ("rollout-0", "train-0", "verify-0")
    engine, rank, verifier = (traced_writer(file, name) for name in names)
    assert engine.tracer and rank.tracer and verifier.tracer
    rank.enter(State.WAITING_FOR_BATCH)
    engine.enter(State.GENERATING)
    engine.serving(version=3, running=2)
    for key in (0, 1):
        engine.tracer.begin_sequence(key)
        engine.tracer.first_token(key)
    engine.enter(State.GENERATING)  # a heartbeat, no new slice
    engine.tracer.end_sequence(0, 7, 14, {"place": 0})
    engine.tracer.begin_sequence(2)  # in the lane that came free
    engine.tracer.end_sequence(1, 8, 16, {"place": 0})
    engine.tracer.end_sequence(2, 7, 15, {"place": 1})
    engine.enter(State.RELOADING)
    verifier.enter(State.GRADING, anew=True, group=7, place=0)
    verifier.enter(State.GRADING, anew=True, group=7, place=1)
    verifier.enter(State.WAITING_FOR_ANSWERS)
    rank.tracer.step(4, 3, [(7, 14), (7, 15)])
    rank.enter(State.TRAINING, phase="prox forward")
    rank.enter(State.TRAINING, phase="forward and backward")
    rank.enter(State.PUBLISHING, version=4)
    rank.enter(State.WAITING_FOR_BATCH)
    for writer in (engine, rank, verifier):
        writer.tracer.close()  # type: ignore[union-attr]
    return events_of(run_dir)


def test_states_phases_and_reward_calls_become_slices_on_a_track_each(tmp_path: Path) -> None:
    events = one_of_each(tmp_path)
    tracks = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(tracks) == ["rollout-0", "train-0", "verify-0"]

    def slices(worker: str, tid: int) -> list[str]:
        track = (tracks[worker], tid)
        return [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track]

    assert slices("rollout-0", STATES) == ["generating", "reloading"]
    assert slices("train-0", STATES) == [
        "waiting for batch",
        "training: prox forward",
        "training: forward and backward",
        "publishing",
        "waiting for batch",
    ]
    assert slices("train-0", STEPS) == ["step 4"]
    assert slices("verify-0", STATES) == ["grading", "grading", "waiting for answers"]
    assert slices("rollout-0", LANES) == ["group 7", "prefill", "group 7", "prefill"]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"running sequences", "version"}


def test_arrows_go_from_each_trajectory_to_the_step_that_trained_it(tmp_path: Path) -> None:
    events = one_of_each(tmp_path)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 3 and len(ends) == 2, "group 8 was not trained"
    step = next(e for e in events if e["name"] == "step 4")
    for number, end in ends.items():
        around = [e for e in events if e["ph"] == "X" and holds(e, starts[number])]
        assert "group 7" in {e["name"] for e in around}
        assert holds(step, end) and end["ts"] >= starts[number]["ts"]
    assert TraceFile(tmp_path, 0).arrow(7, 14) != TraceFile(tmp_path, 10**7).arrow(7, 14)


def holds(slice: Event, event: Event) -> bool:
    is_there = (slice["pid"], slice["tid"]) == (event["pid"], event["tid"])
    return is_there and slice["ts"] <= event["ts"] <= slice["ts"] + slice["dur"] + 1


def test_two_sequences_never_share_a_lane_at_once(tmp_path: Path) -> None:
    found = [e for e in one_of_each(tmp_path) if e["name"].startswith("group")]
    assert [e["tid"] - LANES for e in found] == [0, 1, 0]
    first, _, second = found
    assert first["ts"] + first["dur"] <= second["ts"] + 2


def test_a_resumed_run_appends_after_the_last_whole_line(tmp_path: Path) -> None:
    one_of_each(tmp_path)
    before = len(events_of(tmp_path))
    with (tmp_path / "trace.json").open("a") as file:
        file.write('{"ph":"X","pid":2000,"ti')  # cut by a crash
    events = one_of_each(tmp_path)
    assert len(events) == 2 * before
    assert {e["pid"] for e in events} == {1000, 2000, 3000}, "a worker keeps its track"
    times = [e["ts"] for e in events if e["name"] == "step 4"]
    assert times[0] < times[1]


def test_workers_append_at_once_without_mixing_lines(tmp_path: Path) -> None:
    file = begun(tmp_path)

    def work(name: str) -> None:
        tracer = Tracer(file, name)
        for n in range(200):
            tracer.state("grading", {"group": n, "text": "x" * 200}, anew=True)
        tracer.close()

    threads = [threading.Thread(target=work, args=(f"verify-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(e["ph"] == "X" for e in events_of(tmp_path)) == 800


def test_the_report_reads_the_steps_before_the_last(tmp_path: Path) -> None:
    file = begun(tmp_path)
    rank, engine = Tracer(file, "train-0"), Tracer(file, "rollout-0")
    rank.state("starting", {})
    engine.state("generating", {})
    for step in range(1, 9):
        rank.state("waiting for batch", {})
        rank.step(step, step - 1, [])
        rank.state("training", {"phase": "pack"})
    rank.state("waiting for batch", {})
    rank.close()
    engine.close()
    with (tmp_path / "trace.json").open("a") as out:
        out.write('not json "tid":0,\n["tid":0,]\n{"tid":0,"name":"x"},\n')
    window = read_window(tmp_path)
    assert window is not None
    assert [name for name, _ in window.steps] == [f"step {n}" for n in range(3, 8)]
    assert [worker for worker, _ in window.rows] == ["rollout-0", "train-0"]
    (generating,) = window.rows[0][1]
    assert (generating.start, generating.end) == (0.0, window.seconds)
    assert {s.name for s in window.rows[1][1]} == {"waiting for batch", "training: pack"}


def test_without_a_trace_there_is_no_window_and_a_board_writes_nothing(tmp_path: Path) -> None:
    Board(1).writer(0).enter(State.TRAINING, phase="pack")
    assert read_window(tmp_path) is None and list(tmp_path.iterdir()) == []
    begun(tmp_path)
    assert read_window(tmp_path) is None
