"""The dashboard bench: the cost of status.json and the dashboard.

    dashboard_cost     CPU seconds per second that the reporter takes of one core: samples of the
                       board, a snapshot, status.json, a frame, and writing it to a terminal of
                       160 × 50. A box has many cores, so it costs throughput still less
    cost_80x24         the same in a small terminal
    status_cost        without a terminal: status.json alone
    status_bytes       of status.json

The run is real but for its workers, which only sleep: 4 engines, 2 ranks, one step per second.

`python -m tests.bench.dashboard FOLDER STEPS ENGINES RANKS STEP_S` is that run, in whatever
terminal it is started.
"""

import json
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from minirl.launch import _signals
from minirl.view.console import ConsoleView
from minirl.view.dashboard import FILE
from tests.bench import Figure, Options, at_most
from tests.bench.controller import Shape, play
from tests.bench.loop_harness import Loop
from tests.bench.terminal import Terminal

GOAL = 0.01
LARGE, SMALL = (160, 50), (80, 24)
STEP_S = 1.0


def shape(steps: int, engines: int, ranks: int) -> Shape:
    base = Shape(engines, 32, ranks, 16, 2, 4, 1.0, num_counted=1, num_warm=1)
    return replace(base, num_counted=max(1, steps - base.num_steps + 1))


def main(folder: Path, steps: int, engines: int, ranks: int, step_s: float) -> None:
    wanted = shape(steps, engines, ranks)
    view = ConsoleView(wanted.num_steps)

    def watching(loop: Loop) -> AbstractContextManager[object]:
        return view.watching(loop)

    def signals(loop: Loop) -> AbstractContextManager[object]:
        return _signals(loop, view)

    play(wanted, step_s, folder, view, (signals, watching))
    print("the run has ended")


def cost(folder: Path, size: tuple[int, int] | None, steps: int, engines: int) -> float:
    folder.mkdir()
    arguments = [str(folder), str(steps), str(engines), "2", str(STEP_S)]
    command = [sys.executable, "-m", "tests.bench.dashboard", *arguments]
    env = {} if size else {"TERM": "dumb"}
    terminal = Terminal(command, *(size or SMALL), env)
    try:
        code = terminal.wait(limit_s=300.0)
    finally:
        terminal.close()
    assert code == 0, terminal.seen[-2000:].decode(errors="replace")
    return json.loads((folder / FILE).read_text())["cost"]


def measure(options: Options) -> list[Figure]:
    steps, engines = (8, 1) if options.is_quick else (25, 4)
    with tempfile.TemporaryDirectory() as name:
        large = cost(Path(name) / "large", LARGE, steps, engines)
        small = cost(Path(name) / "small", SMALL, steps, engines)
        plain = cost(Path(name) / "plain", None, steps, engines)
        num_bytes = os.path.getsize(Path(name) / "large" / FILE)
    return [
        at_most("dashboard_cost", large, GOAL, "CPU seconds per second, 160 × 50"),
        Figure("cost_80x24", small, note="the same in a small terminal"),
        Figure("status_cost", plain, note="status.json alone"),
        Figure("status_bytes", num_bytes),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), float(sys.argv[5]))  # type: ignore[call-arg]
