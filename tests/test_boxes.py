"""Several boxes: `make ray`. Real Ray, each box a node in its own network namespace."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import pytest
from boxes import Boxes, boxes
from processes import Run, assert_accounted, wait_until
from tiny_models import write

from minirl.run_dir import read_lines

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

FIRST_BOX_TRACK = 1001  # of rollout-1 in trace.json
LONG = 600.0
UP = ("generating", "waiting for prompts")
HEAVY = {"hidden_size": 512, "intermediate_size": 2048}  # 32 MB: 3 s at 100 Mbit/s
HEAVY |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


@pytest.fixture
def two() -> Iterator[Boxes]:
    with boxes(2) as made:
        yield made


def lane(run: Run, name: str) -> str:
    """What a worker does now, as the dashboard shows it."""
    try:
        lanes = json.loads((run.dir / "status.json").read_text())["lanes"]
    except (OSError, ValueError):
        return ""
    return next((one["state"] for one in lanes if one["name"] == name), "")


def slices(run: Run, track: int) -> list[dict[str, Any]]:
    lines = (run.dir / "trace.json").read_text().splitlines()[1:]
    # The last line may be half written.
    events = [json.loads(line.rstrip(",")) for line in lines if line.endswith("},")]
    return [event for event in events if event["pid"] == track]


def goes_on(run: Run) -> None:
    run.wait_for_step(len(run.metrics()) + 3)


def workers_in(made: Boxes) -> Iterator[str]:
    for process in (process for box in made.nodes for process in made.pids(box)):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("rl-"):
                yield process.name()


def finish(run: Run, made: Boxes) -> None:
    """Nothing is left of it in any box."""
    run.process.send_signal(signal.SIGINT)
    ended = run.end(LONG)
    assert ended.code == 130, ended
    assert_accounted(run.metrics(), max_staleness=2)
    wait_until(lambda: not list(workers_in(made)))
    assert not list(made.folder.glob("minirl-box-*"))


def test_smoke_learns_to_its_goal_as_a_box_joins_and_one_dies(two: Boxes, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", small=False, boxes=two, devices__nodes=2, log__trace="true")
    run.wait_until(lambda: lane(run, "rollout-1").startswith(UP), LONG)
    two.start()
    run.wait_until(lambda: bool(read_lines(run.dir / "evals.jsonl")), LONG)
    two.kill(1)
    ended = run.end(LONG)
    assert ended.code == 0, ended
    summary = run.summary()
    assert summary["accuracy_after"] >= 0.85, ended
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.40
    assert summary["logprob_gap_max"] < 1e-3
    assert_accounted(run.metrics(), max_staleness=2)
    assert {line["rollout/devices"] for line in run.metrics()} == {2}
    assert run.metrics()[-1]["faults/workers_replaced"] >= 1
    there = [e["dur"] for e in slices(run, FIRST_BOX_TRACK) if e["name"] == "generating"]
    assert sum(there) > 1e6  # a second, of the engine in the other box


def test_doctor_shows_each_box(two: Boxes) -> None:
    def shown(**env: str) -> str:
        command = two.inside(0, [sys.executable, "-m", "minirl.cli", "doctor"])
        return subprocess.run(command, env=two.env | env, capture_output=True, text=True).stdout

    rows = [row for row in shown().splitlines() if "object store" in row]
    assert len(rows) == 2 and all(row.startswith("ok") and "GB/s" in row for row in rows), rows
    assert "\nNOT OK  boxes" in shown(RAY_AUTH_TOKEN=32 * "0f")


def test_boxes_engines_and_the_link_die_and_others_join(tmp_path: Path) -> None:
    with boxes(3) as made:
        run = Run(tmp_path / "run", boxes=made, devices__nodes=3, train__steps=10_000)

        def num(states: str | tuple[str, ...]) -> int:
            return sum(lane(run, f"rollout-{rank}").startswith(states) for rank in (1, 2))

        run.wait_until(lambda: num(UP) == 2, LONG)
        made.kill(1)
        run.wait_until(lambda: num("waiting for box") == 1, LONG)
        goes_on(run)
        run.kill("link-0")
        run.wait_until(lambda: num(UP) == 0, LONG)
        run.wait_until(lambda: num(UP) == 1, LONG)  # the living box does not wait for the other
        (bad := tmp_path / "minirl-0.0.dist-info").mkdir()
        (bad / "METADATA").write_text("Name: minirl\nVersion: 0.0\n")
        made.start(PYTHONPATH=f"{tmp_path}:{made.env['PYTHONPATH']}")
        status = run.dir / "status.json"
        run.wait_until(lambda: "it has minirl 0.0, " in status.read_text(), LONG)
        goes_on(run)
        box = made.start()
        run.wait_until(lambda: num(UP) == 2, LONG)
        num_replaced = run.metrics()[-1]["faults/workers_replaced"]
        next(p for p in made.pids(box) if p.name().startswith("rl-rollout-")).kill()
        run.wait_until(lambda: run.metrics()[-1]["faults/workers_replaced"] > num_replaced, LONG)
        run.wait_until(lambda: num(UP) == 2, LONG)
        goes_on(run)
        finish(run, made)


def test_a_head_that_is_killed_is_resumed(two: Boxes, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"devices__nodes": 2, "train__steps": 10_000, "checkpoint__every": 1}
    for is_last in (False, True):
        run = Run(tmp_path / "run", boxes=two, **changes)
        run.wait_until(lambda run=run: lane(run, "rollout-1").startswith(UP), LONG)
        goes_on(run)
        if not is_last:
            run.process.kill()
            run.process.communicate()
            wait_until(lambda: not list(workers_in(two)))
            (run.dir / "status.json").unlink()
    finish(run, two)


def test_over_a_slow_link_staleness_rises_and_no_engine_waits(two: Boxes, tmp_path: Path) -> None:
    if not two.has_namespaces:
        pytest.skip("the link is slowed by tc, in namespaces")
    changes = {"model__path": write(tmp_path / "model", **HEAVY), "log__trace": "true"}
    run = Run(tmp_path / "run", boxes=two, devices__nodes=2, train__steps=10_000, **changes)
    run.wait_until(lambda: lane(run, "rollout-1").startswith(UP), LONG)

    def reloads() -> list[float]:
        return [e["dur"] for e in slices(run, FIRST_BOX_TRACK) if e["name"] == "reloading"]

    def staleness(first: int) -> list[int]:
        """Of trained groups, from that step on."""
        lines = read_lines(run.dir / "batches.jsonl")[first:]
        groups = [(line["version"], g["versions"]) for line in lines for g in line["groups"]]
        return [version - head for version, spans in groups for head, _ in spans]

    run.wait_until(lambda: len(reloads()) > 5, LONG)
    goes_on(run)
    before, num = staleness(3), len(reloads())
    two.slow(1, "100mbit")
    goes_on(run)
    first = len(run.metrics())
    run.wait_until(lambda: len(reloads()) > num + 7, LONG)
    finish(run, two)
    assert mean(staleness(first)) > mean(before) and max(staleness(first)) >= 2
    assert median(reloads()[num:]) < 1e6


def test_without_enough_boxes_one_line_says_what_to_do(tmp_path: Path) -> None:
    with boxes(1) as made:
        few = Run(tmp_path / "few", boxes=made, devices__nodes=2).end()
        made.env = {**made.env, "RAY_ADDRESS": f"{made.ip(0)}:1"}
        none = Run(tmp_path / "none", boxes=made, devices__nodes=2).end()
    for ended, rule in ((few, "the Ray cluster has 1"), (none, "no Ray cluster answers here")):
        assert ended.code == 2 and ended.err.count("\n") == 1, ended
        assert "devices.nodes = 2" in ended.err and rule in ended.err
        assert "docs/several-boxes.md" in ended.err
