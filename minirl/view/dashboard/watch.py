"""`minirl watch`: the dashboard of a run that was started elsewhere, from its files alone.

Takes a run directory, gives the same picture as the run's own terminal shows. A run that is over is
shown as it ended; one that is silent is said to be, and where its process should be on this machine
and is not, that too. Without a terminal: one plain line a step, until the run is over.
"""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from minirl.view.dashboard import snapshot as status
from minirl.view.dashboard.files import snapshot_from_files
from minirl.view.dashboard.frame import SILENT_S, Options, render
from minirl.view.dashboard.lines import step_text
from minirl.view.dashboard.parts import clock
from minirl.view.dashboard.screen import Screen, is_possible
from minirl.view.dashboard.snapshot import Snapshot

TICK_S, LOOK_S = 0.2, 1.0
KEYS = (("q", "leave (the run goes on)"), ("p", "another sample"))
GONE = "and its process is gone"


def look(run_dir: Path) -> Snapshot:
    found = status.read(run_dir)
    if found is None:
        return snapshot_from_files(run_dir)
    is_silent = not found.is_over and time.time() - found.time >= SILENT_S
    if is_silent and is_gone(found):
        return replace(found, reason=GONE)
    return found


def is_gone(snapshot: Snapshot) -> bool:
    """Known for certain only on the machine where it ran."""
    if not snapshot.pid or snapshot.host != socket.gethostname():
        return False
    try:
        os.kill(snapshot.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def watch(run_dir: Path, once: bool = False) -> None:
    console = Console(highlight=False)
    if once:
        show_once(run_dir, console)
    elif is_possible(console):
        show(run_dir, Screen(console))
    else:
        follow(run_dir, console)


def show_once(run_dir: Path, console: Console) -> None:
    width, height = console.size
    frame = render(look(run_dir), width, max(height, 24), time.time())
    console.print(frame, soft_wrap=True)


def show(run_dir: Path, screen: Screen) -> None:
    which, next_look, drawn = 0, 0.0, (0, 0)
    snapshot = look(run_dir)
    with screen.suspendable():
        try:
            screen.enter()
            while True:
                now, size = time.time(), screen.size
                if now >= next_look:
                    snapshot, next_look, drawn = look(run_dir), now + LOOK_S, (0, 0)
                if size != drawn:
                    frame = render(snapshot, *size, now, Options(which, KEYS))
                    screen.draw(frame, *size)
                    drawn = size
                for key in screen.keys(TICK_S):
                    if key in "qQ":
                        return
                    if key in "pP":
                        which, drawn = which + 1, (0, 0)
        except KeyboardInterrupt:
            pass
        finally:
            screen.close()


def follow(run_dir: Path, console: Console) -> None:
    """One line a step, from the next one on, and one about the end."""
    told, was_silent = -1, False
    while True:
        snapshot = look(run_dir)
        age = time.time() - snapshot.time
        if snapshot.step != told:
            told = snapshot.step
            text = step_text(snapshot.last) if snapshot.last else snapshot.doing or snapshot.state
            eta = f"  ETA {clock(snapshot.eta_s)}" if snapshot.eta_s is not None else ""
            line = f"step {snapshot.step}/{snapshot.steps}  {text}{eta}"
            console.print(line, soft_wrap=True, markup=False)
        if snapshot.is_over:
            why = f": {snapshot.reason}" if snapshot.reason else ""
            console.print(f"ended: {snapshot.state}{why}", soft_wrap=True, markup=False)
            return
        is_silent = age >= SILENT_S
        if is_silent and not was_silent:
            told_why = f"no news for {age:.0f} s {snapshot.reason}".rstrip()
            console.print(told_why, soft_wrap=True, markup=False)
        if is_silent and snapshot.reason == GONE:
            return
        was_silent = is_silent
        time.sleep(LOOK_S)
