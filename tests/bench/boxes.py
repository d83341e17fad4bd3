"""The boxes bench: the real loop around scripted engines in several boxes, on real Ray. Each box is
a node in its own network namespace (tests/boxes.py), so that links have counters.

    boxes_over_one     trained tokens/s of two boxes' engines, against as many on one box
    efficiency         share of their time that 8 boxes of 8 engines were at work, while training
                       could be twice as fast. 1 is what the engines could do alone
    bytes_over_needed  bytes over the link of a box, against its rows (12 bytes a token) and one
                       copy of each version that it took

An engine writes real rows into its box's ring, and begins groups under the version of its box's
store. Leaves out: real engines, whose speed does not depend on where they are.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from minirl.config import Config
from minirl.devices import Placement
from minirl.messages import GroupRequest, Role, Started
from minirl.records import Trajectory
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import BoardWriter, Total
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import TensorSpec, WeightStore
from minirl.workers import Workers
from tests.bench import Figure, Options, at_least, at_most
from tests.bench.loop_harness import Silent, run_loop
from tests.bench.scripted import EngineScript, ScriptedEngine, TrainerScript, serve_training
from tests.boxes import Boxes, boxes

LIMIT_S = 1200.0
TABLE = (TensorSpec("weights", (2_000_000,)),)  # 8 MB a version
MAX_TOKENS = 2048
SIGMA = 0.6  # of the logarithm of an answer's time
HERE = "tests.bench.boxes:{}".format


@dataclass(frozen=True)
class Shape:
    num_boxes: int
    num_engines: int  # of each box
    num_places: int
    batch_size: int
    group_size: int = 8
    answer_s: float = 3.0
    eta: int = 4
    num_warm: int = 3
    num_counted: int = 8

    @property
    def num_steps(self) -> int:
        return self.num_warm + self.num_counted + self.eta + 2

    @property
    def generation_s(self) -> float:
        """For one batch, by the engines alone."""
        places = self.num_boxes * self.num_engines * self.num_places
        return self.batch_size * self.group_size * self.answer_s / places


ONE, TWO, MANY = Shape(1, 8, 16, 32), Shape(2, 4, 16, 32), Shape(8, 8, 16, 256)
QUICK = {"eta": 2, "num_warm": 2, "num_counted": 2, "answer_s": 1.0}


class BoxEngine(ScriptedEngine):
    setup: RolloutSetup

    @property
    def version(self) -> int:
        assert self.setup.store is not None
        newest = max(0, self.setup.store.latest)
        if newest != getattr(self, "loaded", -1):
            self.loaded = newest
            self.board.add(Total.RELOADS, 1)
        return newest

    def sealed(
        self, group: GroupRequest, place: int, num_tokens: int, versions: tuple[int, int]
    ) -> Trajectory:
        made = super().sealed(group, place, min(num_tokens, MAX_TOKENS), versions)
        written = np.arange(made.num_written)
        if not group.is_eval:
            self.board.add(Total.STEPS, 1)
            stamps = np.full(len(written), versions[0])
            self.setup.ring.write(
                group.cells[place], group.group_id, group.prompt, written, -0.1 * written, stamps
            )
        return made._replace(cell=group.cells[place], length=len(group.prompt) + len(written))


def engine(setup: RolloutSetup, board: BoardWriter, pipe: Connection) -> None:
    shape = Shape(**setup.config.tasks.options)
    script = EngineScript(shape.num_places, shape.answer_s, SIGMA, setup.seed, trainer_row=0)
    BoxEngine.setup = setup
    pipe.send(Started())
    BoxEngine(script, board, pipe).loop()


def trainer(setup: tuple[WeightStore, float], board: BoardWriter, pipe: Connection) -> None:
    store, step_s = setup

    def publish() -> None:
        with store.publishing(store.latest + 1) as slot:
            store.content(slot.slot)[:] = (store.latest + 1) % 256

    publish()
    serve_training(TrainerScript(step_s), board, pipe, publish)


def recipe(shape: Shape) -> Config:
    base = Config()
    return replace(
        base,
        model=replace(base.model, path="tiny", dtype="float32"),
        devices=replace(base.devices, rollout=shape.num_engines, nodes=shape.num_boxes, kind="cpu"),
        rollout=replace(base.rollout, group_size=shape.group_size, max_new_tokens=MAX_TOKENS),
        buffer=replace(base.buffer, max_staleness=shape.eta, target_staleness=float(shape.eta - 1)),
        train=replace(base.train, steps=shape.num_steps, batch_size=shape.batch_size),
        tasks=replace(base.tasks, options=asdict(shape)),
        eval=replace(base.eval, every=0, num_prompts=1),
        log=replace(base.log, samples=0),
    )


def play(shape: Shape, folder: Path) -> dict[str, Any]:
    """A run, on the head."""
    config, cpu = recipe(shape), Placement("cpu", env={"OMP_NUM_THREADS": "1"})
    num_engines = shape.num_boxes * shape.num_engines
    workers = Workers(folder / "logs", num_engines + 3)
    workers.log_dir.mkdir()
    num_cells = config.num_slots * shape.group_size + 1
    ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
    store = WeightStore(TABLE, "float32")
    try:
        step_s = 0.5 * shape.generation_s
        workers.spawn(Role.TRAIN, 0, HERE("trainer"), (store, step_s), cpu)
        setup = RolloutSetup(config, "", "cpu", 0, ring, store, None)
        for rank in range(shape.num_engines):
            workers.spawn(Role.ROLLOUT, rank, HERE("engine"), replace(setup, seed=rank), cpu)
        if shape.num_boxes > 1:
            from minirl import outpost

            outpost.spawn_boxes(workers, setup, shape.num_engines, HERE("engine"))
        workers.spawn(Role.VERIFY, 0, "tests.bench.scripted:verifier", "", cpu)
        run = run_loop(config, workers, folder, Silent())
        far = [w.row for w in workers.all if w.box == 1]
        written, answers = (
            sum(workers.board.total(row, column) for row in far)
            for column in (Total.TOKENS, Total.STEPS)
        )
        num_taken = workers.board.total(far[0], Total.RELOADS) if far else 0
    finally:
        workers.kill()
    lines = run.lines[shape.num_warm : shape.num_warm + shape.num_counted]
    seconds = lines[-1]["seconds"] - run.lines[shape.num_warm - 1]["seconds"]
    return {
        "efficiency": 1 - fmean(line["rollout/idle_frac"] for line in lines),
        "groups_per_s": shape.batch_size * len(lines) / seconds,
        "needed_bytes": 12 * (written + 3 * answers) + num_taken * store.slot_bytes,
    }


def play_in(made: Boxes, shape: Shape, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.bench.boxes", json.dumps(asdict(shape)), str(folder)]
    done = subprocess.run(
        made.inside(0, command), env=made.env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def bytes_to(made: Boxes, box: int) -> int:
    """Both ways, over its link so far."""
    counters = f"cat /sys/class/net/eth0/statistics/{'{rx,tx}'}_bytes"
    shown = subprocess.check_output(made.inside(box, ["bash", "-c", counters]), text=True)
    return sum(map(int, shown.split()))


def measure(options: Options) -> list[Figure]:
    quick: dict[str, Any] = QUICK if options.is_quick else {}
    one, two, many = (replace(shape, **quick) for shape in (ONE, TWO, MANY))
    if options.is_quick:
        many = replace(many, num_boxes=2, num_engines=2, batch_size=16)
    with tempfile.TemporaryDirectory() as name:
        with boxes(2) as made:
            alone = play_in(made, one, Path(name) / "one")
            before = bytes_to(made, 1) if made.has_namespaces else 0
            both = play_in(made, two, Path(name) / "two")
            crossed = bytes_to(made, 1) - before if made.has_namespaces else 0
        with boxes(many.num_boxes) as made:
            all_boxes = play_in(made, many, Path(name) / "many")
    ratio = both["groups_per_s"] / alone["groups_per_s"]
    about = f"{many.num_boxes} boxes of {many.num_engines} engines; 1 is alone"
    return [
        at_least("boxes_over_one", ratio, 0.95, "trained groups/s, as many engines"),
        at_least("efficiency", all_boxes["efficiency"], 0.95, about),
        at_most("bytes_over_needed", crossed / both["needed_bytes"], 1.1, "rows and weights"),
        Figure("efficiency_of_two", both["efficiency"], note="2 boxes of 4 engines"),
        Figure("efficiency_of_one", alone["efficiency"], note="8 engines here"),
    ]


if __name__ == "__main__":
    print(json.dumps(play(Shape(**json.loads(sys.argv[1])), Path(sys.argv[2]))))
