"""The timeline: what a worker says on its board becomes tracks and slices in one file."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from minirl.shm.board import Board, State
from minirl.shm.tracer import LANES, STATES, Tracer, open_trace


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """As Perfetto reads it: an array that nothing closes, with a comma after its last event."""
    return json.loads((run_dir / "trace.json").read_text().rstrip(",\n") + "]")


def test_states_phases_and_sequences_become_slices_on_a_track_each(tmp_path: Path) -> None:
    engine, rank = Board(1).writer(0), Board(1).writer(0)
    rank.enter(State.TRAINING, phase="not traced")
    for _ in range(2):  # a resumed run appends, and each worker keeps its track
        path = open_trace(tmp_path / "trace.json")
        engine.tracer, rank.tracer = Tracer(path, "rollout-0"), Tracer(path, "train-0")
        engine.enter(State.GENERATING)
        for key in (0, 1):
            engine.tracer.begin_sequence(key)
        engine.enter(State.GENERATING)  # a heartbeat, no new slice
        engine.tracer.end_sequence(0, 7, {"place": 0})
        engine.tracer.begin_sequence(2)  # in the lane that came free
        engine.tracer.end_sequence(1, 8, {"place": 0})
        engine.tracer.end_sequence(2, 7, {"place": 1})
        rank.enter(State.TRAINING, phase="pack step 4", version=3)
        rank.enter(State.TRAINING, phase="forward and backward")
        rank.enter(State.PUBLISHING, anew=True, version=4)
        rank.enter(State.PUBLISHING, anew=True, version=4)
        engine.tracer.close()
        rank.tracer.close()
    found = defaultdict(list)
    for event in events_of(tmp_path):
        name = event["name"] if event["ph"] == "X" else event["args"]["name"]
        found[event["ph"], event["pid"], event["tid"]].append(name)
    training = ["starting", "training: pack step 4", "training: forward and backward"]
    assert found == {
        ("M", 1000, STATES): 2 * ["rollout-0"],
        ("M", 2000, STATES): 2 * ["train-0"],
        ("X", 1000, STATES): 2 * ["starting", "generating"],
        ("X", 1000, LANES): 4 * ["group 7"],
        ("X", 1000, LANES + 1): 2 * ["group 8"],
        ("X", 2000, STATES): 2 * [*training, "publishing", "publishing"],
    }
