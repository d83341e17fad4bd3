"""The run under test: a directory, and at most one living controller in it.

Takes a recipe and a disk, gives one controller after another, and waits for what the run must do.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from minirl.config import Config
from minirl.recipe import to_toml
from tests.boxes import Boxes
from tests.soak import run_files
from tests.soak.controller_process import ControllerProcess, living
from tests.soak.disk import Disk
from tests.soak.follower import RunFollower

POLL_S, SHARP_S = 0.05, 0.002  # a checkpoint of a tiny model takes 50 ms
RECOVER_S = 600.0  # an engine of a large model takes its time to come up


def train_command(program: tuple[str, ...], recipe: Path, run_dir: Path) -> tuple[str, ...]:
    return (*program, "train", str(recipe), "--run-dir", str(run_dir), "--plain")


class Run:
    def __init__(
        self,
        config: Config,
        folder: Path,
        program: tuple[str, ...],
        disk: Disk,
        boxes: Boxes | None = None,
    ):
        self.config, self.folder, self.disk, self.boxes = config, folder, disk, boxes
        self._program = program
        self.run_dir = folder / "disk" / "run"
        self.follower = RunFollower(self.run_dir, config.buffer.max_staleness)
        self.num_controllers = 0
        self._controller: ControllerProcess | None = None
        self._steps_before = 0  # this controller
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    # -- controllers

    @property
    def controller(self) -> ControllerProcess:
        assert self._controller is not None, "there is no controller"
        return self._controller

    @property
    def is_alive(self) -> bool:
        """It has a controller, which may have ended in the meantime."""
        return self._controller is not None

    def start(self) -> None:
        """Always by the same command: a run directory that holds a run is resumed."""
        recipe = self.folder / "soak.toml"
        recipe.write_text(to_toml(self.config))
        self.num_controllers += 1
        self._steps_before = self.follower.look()
        command = train_command(self._program, recipe, self.run_dir)
        log = self.folder / "controllers" / f"{self.num_controllers:03d}.log"
        self._controller = ControllerProcess(command, log)

    def over(self) -> None:
        """Ends what is left of the controller, and forgets it."""
        if self._controller is not None:
            self._controller.end()
        self._controller = None

    @property
    def is_new(self) -> bool:
        """This controller has trained nothing yet."""
        return self.follower.look() == self._steps_before

    # -- waiting

    def wait(
        self, is_so: Callable[[], bool], limit_s: float = RECOVER_S, poll_s: float = POLL_S
    ) -> bool:
        """False: the controller ended first, or it took too long."""
        deadline = time.monotonic() + limit_s
        while not is_so():
            if self.controller.code is not None or time.monotonic() > deadline:
                return is_so()
            time.sleep(poll_s)
        return True

    def trains(self) -> bool:
        """Waits for one more step."""
        before = self.follower.look()
        return self.wait(lambda: self.follower.look() > before)

    # -- what it is at

    def pids(self) -> list[int]:
        return living(self.controller.pid) if self._controller is not None else []

    def checkpoints(self) -> set[tuple[str, int]]:
        """Names and inodes: one that is saved again is another."""
        found = (self.run_dir / "checkpoints").glob("step-*")
        return {(path.name, path.stat().st_ino) for path in found if path.is_dir()}

    @property
    def is_saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".step-*"))

    def are_up(self, workers: Iterable[str], since: float) -> bool:
        """As the run says, of a moment after `since` (Unix seconds): verifiers have no lane."""
        seen = run_files.status(self.run_dir)
        if seen is None or seen["time"] <= since:
            return False
        starting = [lane["name"] for lane in seen["lanes"] if lane["state"] == "starting"]
        return not any(worker in starting for worker in workers)

    def far_states(self) -> set[str]:
        """Of the engines in further boxes, as the dashboard shows them."""
        seen = run_files.status(self.run_dir)
        return {lane["state"] for lane in seen["lanes"] if lane.get("box")} if seen else set()

    def moment(self) -> str:
        """What a controller that was just killed had been at, by the files that it left."""
        if self.is_saving:
            return "save"
        seen = run_files.status(self.run_dir)
        is_older = seen is not None and seen["time"] < self.controller.began_at
        if seen is None or is_older or seen["doing"].startswith("starting"):
            return "start"
        every = self.config.eval.every
        lines = run_files.lines(self.run_dir, run_files.METRICS)
        due = [line["version"] for line in lines if every and line["step"] % every == 0]
        done = [line.get("version") for line in run_files.lines(self.run_dir, run_files.EVALS)]
        return "evaluation" if due and due[-1] not in done else "other times"
