"""Processes: whatever happens to one is heard, and nothing is left of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleet_bodies
import pytest
from crew import LIMIT_S, wait_until
from fleet_bodies import place

from minirl import workers as fleet_module
from minirl.shm.board import State
from minirl.workers import LAST_WORDS_LINES, Died, Fleet, Role, Worker


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, num_workers=3)
    yield fleet
    fleet.kill()


def start(fleet: Fleet, body: str, setup: Any = None, **env: str) -> Worker:
    rank = len(fleet.workers)
    return fleet.spawn(Role.VERIFY, rank, f"fleet_bodies:{body}", setup, place(**env))


def hear(fleet: Fleet, count: int) -> list[tuple[Worker, Any]]:
    """The next messages, at least so many."""
    heard: list[tuple[Worker, Any]] = []
    deadline = time.monotonic() + LIMIT_S
    while len(heard) < count:
        assert time.monotonic() < deadline, heard
        heard += fleet.hear(1.0)
    return heard


def messages(fleet: Fleet, count: int) -> list[Any]:
    return [message for _, message in hear(fleet, count)]


def is_there(pid: int) -> bool:
    """A zombie is gone: its parent only has not asked yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_messages_go_both_ways_and_placement_reaches_the_worker(fleet: Fleet) -> None:
    worker, other = start(fleet, "echo", {"a": 1}, FLEET_TEST="yes"), start(fleet, "echo", "b")
    heard = {sender.name: message for sender, message in hear(fleet, 2)}
    mine, others = ({"a": 1}, worker.pid, "yes"), ("b", other.pid, None)
    assert heard == {"verify-0": mine, "verify-1": others}
    assert "FLEET_TEST" not in os.environ
    assert fleet.of(Role.VERIFY) == [worker, other] and fleet.of(Role.TRAIN) == []
    assert fleet.board.row(worker.row).state is State.GENERATING
    worker.send([1, "two"])
    worker.send(3)
    assert messages(fleet, 2) == [[1, "two"], 3]
    assert list(fleet.hear(0.05)) == [], "silence is no message"


@pytest.mark.parametrize(
    ("body", "setup", "before", "how", "words"),
    [
        ("die_by_signal", 200, [*range(200)], "was killed by SIGKILL", ""),
        ("die_in_a_message", None, ["before"], "was killed by SIGKILL", ""),
        ("leave", 3, ["leaving"], "ended with exit code 3", ""),
        (
            "divide_by_zero",
            None,
            ["before"],
            "ZeroDivisionError: nothing goes into this",
            "verify-0 | line 29\n",
        ),
        ("give_up", "the recipe cannot work", [], "the recipe cannot work", ""),
        ("missing", None, [], "AttributeError: module 'fleet_bodies' has no attribute", ""),
    ],
)
def test_a_death_is_heard_after_all_messages_with_its_reason(
    body: str, setup: Any, before: list[Any], how: str, words: str, fleet: Fleet
) -> None:
    worker = start(fleet, body, setup)
    *heard, died = messages(fleet, len(before) + 1)
    assert heard == before and died.how.startswith(how)
    assert died.is_final == (body == "give_up"), "only our own error is final"
    log = fleet.last_words(worker)
    assert words in log and ("Traceback" in log) == (body in ("divide_by_zero", "missing"))
    assert len(log.splitlines()) <= LAST_WORDS_LINES
    worker.send("to a dead one")  # not an error: `hear` says so


def test_a_replaced_worker_is_new_and_inherits_no_failure(fleet: Fleet) -> None:
    worker = start(fleet, "give_up", "no")
    assert messages(fleet, 1) == [Died("no", is_final=True)]
    first = worker.pid
    worker.body, worker.setup = "fleet_bodies:echo", "mine"
    fleet.replace(worker)
    assert fleet.board.row(worker.row).state in (State.STARTING, State.GENERATING)
    assert messages(fleet, 1) == [("mine", worker.pid, None)]
    assert worker.num_starts == 2 and worker.pid != first
    os.kill(worker.pid, signal.SIGKILL)
    assert hear(fleet, 1) == [(worker, Died("was killed by SIGKILL", is_final=False))]


def test_a_living_worker_is_replaced_or_retired_with_all_its_children(fleet: Fleet) -> None:
    worker = start(fleet, "with_children")
    ((one, two),) = messages(fleet, 1)
    gone = [worker.pid, one, two]
    worker.body = "fleet_bodies:echo"
    fleet.replace(worker)
    assert messages(fleet, 1) == [(None, worker.pid, None)]
    gone.append(worker.pid)
    fleet.retire(worker)
    wait_until(lambda: not any(is_there(pid) for pid in gone))
    assert list(fleet.hear(0.05)) == []


@pytest.mark.parametrize("is_polite", [True, False])
def test_stop_and_kill_leave_no_process(
    is_polite: bool, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "STOP_GRACE_S", 2.0)
    for body in ("echo", "deaf", "with_children"):
        start(fleet, body)
    heard = {worker.name: message for worker, message in hear(fleet, 3)}
    pids = [worker.pid for worker in fleet.workers] + list(heard["verify-2"])
    assert len(pids) == 5 and all(is_there(pid) for pid in pids)
    if is_polite:
        fleet.stop(goodbye=None)
    else:
        fleet.kill()
    wait_until(lambda: not any(is_there(pid) for pid in pids))
    fleet.kill()  # once more is no error


def test_stop_lets_workers_end_by_themselves(fleet: Fleet) -> None:
    start(fleet, "echo")
    hear(fleet, 1)
    process = fleet.workers[0].process
    fleet.stop(goodbye=None)
    assert process is not None and process.exitcode == 0


def test_workers_die_with_a_killed_controller(tmp_path: Path) -> None:
    program = Path(fleet_bodies.__file__)
    path = os.pathsep.join([str(program.parent), str(program.parent.parent)])
    controller = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert controller.stdout is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 3 and all(is_there(pid) for pid in pids)
    controller.kill()
    controller.wait()
    controller.stdout.close()
    wait_until(lambda: not any(is_there(pid) for pid in pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_are_the_controllers_business(
    fleet: Fleet, number: signal.Signals
) -> None:
    """From a worker's first moment on: a signal to the whole group may come at any."""
    worker = start(fleet, "echo")
    os.kill(worker.pid, number)
    assert messages(fleet, 1) == [(None, worker.pid, None)]
    os.kill(worker.pid, number)
    worker.send("still there?")
    assert messages(fleet, 1) == ["still there?"]


def test_a_signal_that_comes_while_a_worker_starts_waits_until_it_has(fleet: Fleet) -> None:
    class Stopped(Exception):
        pass

    def handle(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(Stopped):
            start(fleet, "echo", fleet_bodies.Late())
    finally:
        signal.signal(signal.SIGTERM, before)
    (worker,) = fleet.workers
    assert messages(fleet, 1)[0][1] == worker.pid, "it is there, and can be ended"


def test_stacks_name_the_function_that_a_worker_is_stuck_in(fleet: Fleet) -> None:
    start(fleet, "deaf")
    gone = start(fleet, "leave", 3)
    hear(fleet, 3)
    parts = dict(part.split("\n", 1) for part in fleet.stacks().split("--- ") if part)
    assert "in deaf" in parts["verify-0"] and "in deaf_in_a_thread" in parts["verify-0"]
    assert "no answer" in parts[gone.name]
