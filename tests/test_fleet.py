"""Processes: whatever happens to one is heard, and nothing is left of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fleet_bodies
import pytest
from fleet_bodies import place

from minirl import workers as fleet_module
from minirl.shm.board import State
from minirl.workers import LAST_WORDS_LINES, Died, Fleet, Role, Worker

LONG_S = 60.0  # far more than anything here takes: only a hang comes to it


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
    deadline = time.monotonic() + LONG_S
    while len(heard) < count:
        assert time.monotonic() < deadline, heard
        heard += fleet.hear(1.0)
    return heard


def messages(fleet: Fleet, count: int) -> list[Any]:
    return [message for _, message in hear(fleet, count)]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """A zombie is gone: its parent only has not asked yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_messages_go_both_ways_and_placement_reaches_the_worker(fleet: Fleet) -> None:
    worker = start(fleet, "echo", {"a": 1}, FLEET_TEST="yes")
    assert messages(fleet, 1) == [({"a": 1}, worker.pid, "yes")]
    assert "FLEET_TEST" not in os.environ
    assert fleet.board.row(worker.row).state is State.GENERATING
    worker.send([1, "two"])
    worker.send(3)
    assert messages(fleet, 2) == [[1, "two"], 3]


def test_each_message_comes_with_its_worker(fleet: Fleet) -> None:
    workers = [start(fleet, "echo", name) for name in "abc"]
    assert {w.name: m[0] for w, m in hear(fleet, 3)} == {
        "verify-0": "a",
        "verify-1": "b",
        "verify-2": "c",
    }
    assert fleet.of(Role.VERIFY) == workers and fleet.of(Role.TRAIN) == []


def test_silence_is_no_message(fleet: Fleet) -> None:
    start(fleet, "deaf")
    assert messages(fleet, 1) == ["deaf"]
    assert list(fleet.hear(0.05)) == []


def test_death_by_a_signal_is_heard_after_all_messages(fleet: Fleet) -> None:
    worker = start(fleet, "die_by_signal", 200)
    heard = messages(fleet, 201)
    assert heard == [*range(200), Died("was killed by SIGKILL", is_final=False)]
    worker.send("nobody is there")  # not an error: `hear` says so


def test_death_in_the_middle_of_a_message_is_a_death(fleet: Fleet) -> None:
    start(fleet, "die_in_a_message")
    assert messages(fleet, 2) == ["before", Died("was killed by SIGKILL", is_final=False)]


def test_an_exit_code_is_reported(fleet: Fleet) -> None:
    start(fleet, "leave", 3)
    assert messages(fleet, 2) == ["leaving", Died("ended with exit code 3", is_final=False)]


def test_an_exception_is_reported_with_its_message(fleet: Fleet) -> None:
    worker = start(fleet, "divide_by_zero")
    how = "ZeroDivisionError: nothing goes into this"
    assert messages(fleet, 2) == ["before", Died(how, is_final=False)]
    words = fleet.last_words(worker)
    assert "verify-0 | some last words" in words
    assert "in divide_by_zero" in words


def test_our_own_error_is_final(fleet: Fleet) -> None:
    worker = start(fleet, "give_up", "the recipe cannot work")
    assert messages(fleet, 1) == [Died("the recipe cannot work", is_final=True)]
    assert "Traceback" not in fleet.last_words(worker)


def test_a_body_that_cannot_be_imported_is_reported(fleet: Fleet) -> None:
    fleet.spawn(Role.VERIFY, 0, "no_such_module:run", None, place())
    (died,) = messages(fleet, 1)
    assert died == Died("ModuleNotFoundError: No module named 'no_such_module'", is_final=False)


def test_a_replaced_worker_is_new_and_its_row_too(fleet: Fleet) -> None:
    start(fleet, "echo", "other")
    worker = start(fleet, "echo", "mine")
    first = {w.name: m[1] for w, m in hear(fleet, 2)}
    os.kill(worker.pid, signal.SIGKILL)
    ((dead, died),) = hear(fleet, 1)
    assert dead is worker and died == Died("was killed by SIGKILL", is_final=False)
    fleet.replace(worker)
    assert fleet.board.row(worker.row).state in (State.STARTING, State.GENERATING)
    ((_, (setup, pid, _)),) = hear(fleet, 1)
    assert setup == "mine" and pid == worker.pid != first["verify-1"]
    assert worker.num_starts == 2
    worker.send("hello")
    assert messages(fleet, 1) == ["hello"]


def test_a_failure_is_not_inherited_by_the_successor(fleet: Fleet) -> None:
    worker = start(fleet, "give_up", "no")
    assert messages(fleet, 1) == [Died("no", is_final=True)]
    worker.body = "fleet_bodies:die_by_signal"
    worker.setup = 0
    fleet.replace(worker)
    assert messages(fleet, 1) == [Died("was killed by SIGKILL", is_final=False)]


def test_a_living_worker_is_replaced_with_all_its_children(fleet: Fleet) -> None:
    worker = start(fleet, "with_children")
    (children,) = messages(fleet, 1)
    old = worker.pid
    worker.body = "fleet_bodies:echo"
    fleet.replace(worker)
    assert messages(fleet, 1) == [(None, worker.pid, None)]
    wait_until(lambda: not any(is_there(pid) for pid in (old, *children)))


def test_a_retired_worker_is_gone_and_silent(fleet: Fleet) -> None:
    worker = start(fleet, "deaf")
    assert messages(fleet, 1) == ["deaf"]
    pid = worker.pid
    fleet.retire(worker)
    assert not is_there(pid)
    assert list(fleet.hear(0.05)) == []


def test_stop_lets_workers_end_by_themselves_and_leaves_no_process(fleet: Fleet) -> None:
    polite = start(fleet, "echo")
    hear(fleet, 1)
    process, pid = polite.process, polite.pid
    fleet.stop(goodbye=None)
    assert process.exitcode == 0  # it heard the goodbye; nobody had to kill it
    assert not is_there(pid)


def test_stop_ends_those_who_do_not_listen(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "STOP_GRACE_S", 0.2)
    for body in ("echo", "deaf", "with_children"):
        start(fleet, body)
    heard = {worker.name: message for worker, message in hear(fleet, 3)}
    pids = [worker.pid for worker in fleet.workers] + list(heard["verify-2"])
    fleet.stop(goodbye=None)
    wait_until(lambda: not any(is_there(pid) for pid in pids))


def test_kill_leaves_no_process(fleet: Fleet) -> None:
    for body in ("echo", "deaf", "with_children"):
        start(fleet, body)
    heard = {worker.name: message for worker, message in hear(fleet, 3)}
    pids = [worker.pid for worker in fleet.workers] + list(heard["verify-2"])
    assert len(pids) == 5 and all(is_there(pid) for pid in pids)
    fleet.kill()
    wait_until(lambda: not any(is_there(pid) for pid in pids))
    fleet.kill()  # once more is no error


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


def test_last_words_are_the_end_of_the_workers_log(fleet: Fleet) -> None:
    worker = start(fleet, "print_lines", 30)
    assert messages(fleet, 1) == ["printed"]
    lines = fleet.last_words(worker).splitlines()
    assert len(lines) == LAST_WORDS_LINES
    assert lines[-2:] == ["  verify-0 | line 29", "  verify-0 | to stderr"]
    silent = start(fleet, "echo")
    hear(fleet, 1)
    assert fleet.last_words(silent) == ""


def test_stacks_name_the_function_that_a_worker_is_stuck_in(fleet: Fleet) -> None:
    start(fleet, "stuck_in_a_reward")
    assert messages(fleet, 1) == ["stuck"]
    gone = start(fleet, "die_by_signal", 0)
    assert messages(fleet, 1) == [Died("was killed by SIGKILL", is_final=False)]
    parts = dict(part.split("\n", 1) for part in fleet.stacks().split("--- ") if part)
    assert "in stuck_in_a_reward" in parts["verify-0"]
    assert "in stuck_in_a_thread" in parts["verify-0"]
    assert "no answer" in parts[gone.name]
