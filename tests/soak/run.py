"""The run that is struck: a directory, and at most one living controller in it.

Takes a recipe and a disk, gives lives one after another, and waits for what the run must come to.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from minirl.config import Config
from minirl.recipe import to_toml
from minirl.run_dir import read_lines
from minirl.view.dashboard import snapshot
from tests.soak.disk import Disk
from tests.soak.life import Life, living
from tests.soak.witness import Witness

POLL_S, SHARP_S = 0.05, 0.002  # a checkpoint of a tiny model takes 50 ms
RECOVER_S = 600.0  # an engine of a large model takes its time to come up


def train_command(program: tuple[str, ...], recipe: Path, run_dir: Path) -> tuple[str, ...]:
    return (*program, "train", str(recipe), "--run-dir", str(run_dir), "--plain")


class Run:
    def __init__(self, config: Config, folder: Path, program: tuple[str, ...], disk: Disk):
        self.config, self.folder, self.disk = config, folder, disk
        self._program = program
        self.run_dir = folder / "disk" / "run"
        self.witness = Witness(self.run_dir, config.buffer.max_staleness)
        self.num_lives = 0
        self._life: Life | None = None
        self._steps_before = 0  # this life
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    # -- lives

    @property
    def life(self) -> Life:
        assert self._life is not None, "there is no controller"
        return self._life

    @property
    def is_alive(self) -> bool:
        """It has a controller, which may have ended in the meantime."""
        return self._life is not None

    def start(self) -> None:
        """Always by the same command: a run directory that holds a run goes on."""
        recipe = self.folder / "soak.toml"
        recipe.write_text(to_toml(self.config))
        self.num_lives += 1
        self._steps_before = self.witness.look()
        command = train_command(self._program, recipe, self.run_dir)
        self._life = Life(command, self.folder / "lives" / f"{self.num_lives:03d}.log")

    def over(self) -> None:
        """The controller has ended, and nobody waits for anything of it any more."""
        if self._life is not None:
            self._life.end()
        self._life = None

    @property
    def is_new(self) -> bool:
        """This controller has trained nothing yet."""
        return self.witness.look() == self._steps_before

    # -- waiting

    def wait(
        self, is_so: Callable[[], bool], limit_s: float = RECOVER_S, poll_s: float = POLL_S
    ) -> bool:
        """False: the controller ended first, or it took too long."""
        deadline = time.monotonic() + limit_s
        while not is_so():
            if self.life.code is not None or time.monotonic() > deadline:
                return is_so()
            time.sleep(poll_s)
        return True

    def trains(self) -> bool:
        """Waits for one more step."""
        before = self.witness.look()
        return self.wait(lambda: self.witness.look() > before)

    # -- what it is at

    def pids(self) -> list[int]:
        return living(self.life.pid) if self._life is not None else []

    def checkpoints(self) -> set[tuple[str, int]]:
        """Names and inodes: one that is saved again is another."""
        found = (self.run_dir / "checkpoints").glob("step-*")
        return {(path.name, path.stat().st_ino) for path in found if path.is_dir()}

    @property
    def is_saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".step-*"))

    def last_step_on_disk(self) -> int:
        lines = read_lines(self.run_dir / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def are_up(self, workers: Iterable[str], since: float) -> bool:
        """As the run says, of a moment after `since` (Unix seconds): verifiers have no lane."""
        seen = snapshot.read(self.run_dir)
        if seen is None or seen.time <= since:
            return False
        starting = [lane.name for lane in seen.lanes if lane.state == "starting"]
        return not any(worker in starting for worker in workers)

    def moment(self) -> str:
        """What a controller that was just killed had been at, by the files that it left."""
        if self.is_saving:
            return "save"
        seen = snapshot.read(self.run_dir)
        if seen is None or seen.pid != self.life.pid or seen.state == snapshot.STARTING:
            return "start"
        every = self.config.eval.every
        lines = read_lines(self.run_dir / "metrics.jsonl")
        due = [line["version"] for line in lines if every and line["step"] % every == 0]
        told = [line.get("version") for line in read_lines(self.run_dir / "evals.jsonl")]
        return "evaluation" if due and due[-1] not in told else "other times"
