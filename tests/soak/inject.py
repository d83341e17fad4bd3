"""How each fault is done, and when the run has survived it. Takes a Draw, gives Events.

a box           is killed, and another one joins. Survived: its engines are up, and the run trains
a worker        is killed, frozen or paused. Survived: it was replaced (or works again), it is up,
                and the run trains. Ranks must also have trained further than ever or have saved:
                that resets their restart back-off
the disk        is full until a checkpoint could not be written. Survived: afterwards one is
                written and a step is trained
the controller  is ended. It must leave the right exit code, and all its processes and shared
                memory must be gone within seconds. Survived: the next controller trains
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator

from tests.soak import run_files
from tests.soak.events import Event
from tests.soak.run import SHARP_S, Run
from tests.soak.schedule import BOX, TEAR, Draw

ROLES = {"engine": "rollout-", "verifier": "verify-", "rank": "train-"}
INTERRUPTED, STALLED = 130, 3
PAUSE_S = (0.3, 2.5)
FULL_S = (1.0, 6.0)  # at least
START_S = 5.0  # the fault comes within this of a start's first worker
EVAL_S = 0.5
BOX_S = 10.0  # until another joins
REFUSED = "no checkpoint of step"  # as the run notes it
END_S = 120.0  # a controller that was asked to end finishes its step and saves


def inject(run: Run, draw: Draw) -> Iterator[Event]:
    verb, _, what = draw.fault.partition("-")
    if draw.fault == BOX.name:
        yield kill_box(run, draw)
    elif draw.fault == "kill-two":
        yield kill_two(run, draw)
    elif draw.fault == "freeze-rank":
        yield from freeze_rank(run, draw)
    elif what in ROLES:
        signals = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
        yield stop(run, draw, what, signals[verb]) if verb in signals else pause(run, draw, what)
    elif draw.fault == "fill-disk":
        yield fill_disk(run, draw)
    else:
        yield from end_controller(run, draw)


def begun(run: Run, draw: Draw, target: str) -> Event:
    return Event(draw.fault, target, round(run.seconds, 1), run.follower.last_step)


# -- workers


def choose(run: Run, role: str, pick: float, but: str = "") -> tuple[str, int]:
    """A worker of that role, or any, and its process. Waits for one: a new one has no name yet."""
    prefix = ROLES.get(role, "")

    def found() -> list[tuple[str, int]]:
        here = run.controller.workers().items()
        return sorted((n, pid) for n, pid in here if n.startswith(prefix) and n != but)

    run.wait(lambda: bool(found()), END_S)
    there = found()
    return there[int(pick * len(there))] if there else (f"{prefix}0", 0)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)


def stop(run: Run, draw: Draw, role: str, by: signal.Signals) -> Event:
    """Killed or frozen: it does nothing more, and must be replaced."""
    name, pid = choose(run, role, draw.pick)
    event = begun(run, draw, name)
    done = recovery_of(run, {name: pid})
    send(pid, by)
    return recovered(run, event, done)


def kill_box(run: Run, draw: Draw) -> Event:
    assert run.boxes is not None
    box = max(run.boxes.nodes)
    event = begun(run, draw, f"box {box}")
    run.wait(lambda: run.far_states() > set(), END_S)
    run.boxes.kill(box)
    event.survived = run.wait(lambda: "waiting for box" in run.far_states())
    time.sleep(draw.moment * BOX_S)
    run.boxes.start()
    return recovered(run, event, lambda: not run.far_states() & {"waiting for box", "starting"})


def kill_two(run: Run, draw: Draw) -> Event:
    one, first = choose(run, "", draw.pick)
    two, second = choose(run, "", draw.other, but=one)
    event = begun(run, draw, f"{one}, {two}")
    done = recovery_of(run, {one: first, two: second})
    send(first, signal.SIGKILL)
    time.sleep(draw.moment * 0.9)
    send(run.controller.workers().get(two, 0), signal.SIGKILL)  # ranks go together: it may be new
    return recovered(run, event, done)


def pause(run: Run, draw: Draw, role: str) -> Event:
    name, pid = choose(run, role, draw.pick)
    event = begun(run, draw, name)
    seconds = PAUSE_S[0] + draw.moment * (PAUSE_S[1] - PAUSE_S[0])
    send(pid, signal.SIGSTOP)
    time.sleep(seconds)
    send(pid, signal.SIGCONT)
    event.detail = f"for {seconds:.1f} s"
    return recovered(run, event, lambda: True)


def recovery_of(run: Run, hit: dict[str, int]) -> Callable[[], bool]:
    """Polled after the fault: are the workers replaced, up, and is their back-off reset?"""
    saved, furthest = run.checkpoints(), run.follower.furthest
    has_rank = any(name.startswith(ROLES["rank"]) for name in hit)
    replaced_at: float | None = None

    def is_done() -> bool:
        nonlocal replaced_at
        now = run.controller.workers()
        if any(now.get(name, pid) == pid for name, pid in hit.items()):
            return False
        replaced_at = replaced_at or time.time()
        run.follower.look()
        is_reset = run.follower.furthest > furthest or bool(run.checkpoints() - saved)
        return (is_reset or not has_rank) and run.are_up(hit, since=replaced_at)

    return is_done


def recovered(run: Run, event: Event, is_done: Callable[[], bool]) -> Event:
    began = time.monotonic()
    event.survived = run.wait(is_done) and run.trains()
    if event.survived:
        event.recovered_s = round(time.monotonic() - began, 2)
    else:
        event.lost(failure(run))
    return event


def failure(run: Run) -> str:
    """Why nothing more came; the controller is ended if it still runs."""
    code, words = run.controller.code, run.controller.last_line()
    run.over()
    return f"the controller {'hangs' if code is None else f'ended with code {code}'}: {words}"


# -- the disk


def fill_disk(run: Run, draw: Draw) -> Event:
    event = begun(run, draw, "disk")
    num_before, began = run.controller.count(REFUSED), time.monotonic()
    try:
        keep_full(run, FULL_S[0] + draw.moment * (FULL_S[1] - FULL_S[0]))
    finally:
        run.disk.free(run.pids())
    saved, num_refused = run.checkpoints(), run.controller.count(REFUSED) - num_before
    seconds = time.monotonic() - began
    event.detail = f"for {seconds:.1f} s, {num_refused} checkpoints not written"
    return recovered(run, event, lambda: bool(run.checkpoints() - saved))


def keep_full(run: Run, seconds: float) -> None:
    """So long, and until a checkpoint could not be written."""
    num_before, began = run.controller.count(REFUSED), time.monotonic()

    def is_enough() -> bool:
        run.disk.fill(run.pids())  # again and again: what the run takes away makes room
        is_long = time.monotonic() > began + seconds
        return is_long and run.controller.count(REFUSED) > num_before

    run.wait(is_enough, END_S)


# -- the controller


def end_controller(run: Run, draw: Draw) -> Iterator[Event]:
    is_term, is_at_start = draw.fault.startswith("term"), draw.fault.endswith("at-start")
    if is_at_start:  # there must be a start first
        first = Event("kill-controller", "controller", *_now(run))
        yield from ended(run, first, draw, -signal.SIGKILL)
        run.start()
        run.wait(lambda: bool(run.controller.workers()), END_S)
        run.wait(lambda: not run.is_new, draw.moment * START_S)
    elif draw.fault == "kill-at-save":
        wait_for_save(run)
    elif draw.fault == "kill-at-eval":
        wait_for_evaluation(run, draw)
    elif draw.fault == "kill-at-full":
        keep_full(run, 0.0)
    event = begun(run, draw, "controller")
    code = INTERRUPTED if is_term else -signal.SIGKILL
    yield from ended(run, event, draw, code, to_all=is_term and is_at_start)


def _now(run: Run) -> tuple[float, int]:
    return round(run.seconds, 1), run.follower.last_step


def wait_for_save(run: Run) -> None:
    """Holds the ranks up in the middle of it: a tiny checkpoint is written in no time."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and run.wait(lambda: run.is_saving, END_S, SHARP_S):
        workers = run.controller.workers()
        ranks = [pid for name, pid in workers.items() if name.startswith(ROLES["rank"])]
        for pid in ranks:
            send(pid, signal.SIGSTOP)
        if run.is_saving:
            return
        for pid in ranks:
            send(pid, signal.SIGCONT)


def wait_for_evaluation(run: Run, draw: Draw) -> None:
    every = run.config.eval.every
    begun_at = run.follower.look()

    def is_due() -> bool:
        return run.follower.look() > begun_at and run.follower.last_step % every == 0

    run.wait(is_due, END_S)
    time.sleep(draw.moment * EVAL_S)


def ended(run: Run, event: Event, draw: Draw, code: int, to_all: bool = False) -> Iterator[Event]:
    """The controller is ended now, by SIGKILL or SIGTERM as the code says."""
    number = signal.SIGKILL if code == -signal.SIGKILL else signal.SIGTERM
    if to_all:
        run.controller.signal_all(number)
    else:
        run.controller.signal(number)
    yield as_it_should(run, event, code)
    if number == signal.SIGKILL and draw.is_torn and event.survived is None:
        torn = run_files.tear(run.run_dir, random.Random(draw.seed))
        if torn:
            yield Event(TEAR.name, ", ".join(torn), *_now(run))


def freeze_rank(run: Run, draw: Draw) -> Iterator[Event]:
    name, pid = choose(run, "rank", draw.pick)
    event = begun(run, draw, name)
    send(pid, signal.SIGSTOP)
    yield as_it_should(run, event, STALLED)


def as_it_should(run: Run, event: Event, code: int) -> Event:
    """Ended with that code, and nothing left: whether it is survived, the next controller says."""
    found = run.controller.ends(END_S)
    if found is None:
        return event.lost(failure(run))
    event.gone_s, left = run.controller.gone_after()
    event.gone_s = round(event.gone_s, 2)
    words = run.controller.last_line()
    if code == -signal.SIGKILL:
        event.moment = "full disk" if event.fault == "kill-at-full" else run.moment()
    run.over()
    run.disk.free([])
    if found != code:
        return event.lost(f"code {found}, not {code}: {words}")
    if left:
        return event.lost(f"left behind: {', '.join(left)}")
    if event.fault == "term-controller" and (unsaved := unsaved_steps(run)):
        return event.lost(unsaved)
    return event


def unsaved_steps(run: Run) -> str:
    """After SIGTERM, every step in the metrics is in the checkpoint."""
    run.follower.look()
    step, last = run_files.saved(run.run_dir).step, run_files.last_step(run.run_dir)
    return "" if step == last else f"it saved step {step}, and its metrics go to step {last}"
