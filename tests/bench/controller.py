"""The controller bench: the real loop around scripted workers, which only sleep.

    efficiency             share of its time that the bottleneck pool was at work: the smaller of
                           the two below. 1 is what that pool could do alone
    generation_efficiency  of the engines' places, when generation is the bottleneck
    training_efficiency    of the trainers' time, when training is
    …_speed                the same by steps per second; the draw of the answers' lengths, and a
                           machine that wakes sleepers late, count too
    controller_us_a_group  CPU time of the controller for one group, all its trajectories included

The shape is an 8-GPU box: 6 engines of 256 places, 2 ranks, 512 groups of 16 in flight, and answers
with a long tail, in a time lapse: an answer takes 3 s on average, where a real one takes a minute.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from minirl.config import Config
from minirl.devices import Placement
from minirl.messages import Role
from tests.bench import Figure, Options, at_least
from tests.bench.loop_harness import Around, Silent, View, run_loop
from tests.bench.processes import processes
from tests.bench.scripted import EngineScript, TrainerScript

GOAL = 0.97


@dataclass(frozen=True)
class Shape:
    num_engines: int
    num_places: int
    num_ranks: int
    batch_size: int
    eta: int
    group_size: int
    answer_s: float
    num_counted: int
    num_warm: int

    @property
    def num_steps(self) -> int:
        """The last steps do not count: no more groups are begun than the run needs."""
        return self.num_warm + self.num_counted + self.eta + 2

    @property
    def generation_s(self) -> float:
        """For one batch, by the engines alone."""
        answers = self.batch_size * self.group_size
        return answers * self.answer_s / (self.num_engines * self.num_places)


FULL = Shape(6, 256, 2, 128, 3, 16, 3.0, num_counted=8, num_warm=4)
QUICK = Shape(2, 16, 2, 8, 3, 4, 0.3, num_counted=4, num_warm=2)
ANSWER = "Tom has 7 apples and buys 12 more: 7 + 12 = 19. " * 12
SIGMA = 0.6  # of the logarithm of an answer's time: the longest of a step takes 6 times the mean


@dataclass(frozen=True)
class Outcome:
    generation: float  # share of places at work
    training: float  # share of the trainers' time
    speed: float  # steps, against those of the slower pool alone
    us_a_group: float


def recipe(shape: Shape, samples: int = 0) -> Config:
    base = Config()
    eta = shape.eta
    return replace(
        base,
        devices=replace(base.devices, rollout=shape.num_engines, train=shape.num_ranks),
        rollout=replace(base.rollout, group_size=shape.group_size),
        buffer=replace(base.buffer, max_staleness=eta, target_staleness=float(eta)),
        train=replace(base.train, steps=shape.num_steps, batch_size=shape.batch_size),
        eval=replace(base.eval, every=0, num_prompts=1),
        log=replace(base.log, samples=samples),
    )


def play(
    shape: Shape,
    train_s: float,
    folder: Path,
    view: View | None = None,
    around: Sequence[Around] = (),
) -> Outcome:
    """A run of scripted workers. Without a view it keeps no samples."""
    config = recipe(shape, 0 if view is None else 2)
    cpu = Placement("cpu", env={"OMP_NUM_THREADS": "1"})
    body = "tests.bench.scripted:{}".format
    with processes(shape.num_engines + shape.num_ranks + 1, folder) as here:
        for rank in range(shape.num_ranks):
            script = TrainerScript(train_s, is_first=rank == 0)
            here.spawn(Role.TRAIN, body("trainer"), script, cpu)
        for rank in range(shape.num_engines):
            engine = EngineScript(shape.num_places, shape.answer_s, SIGMA, rank, trainer_row=0)
            here.spawn(Role.ROLLOUT, body("engine"), engine, cpu)
        here.spawn(Role.VERIFY, body("verifier"), "" if view is None else ANSWER, cpu)
        run = run_loop(config, here.workers, folder, view or Silent(), around=around)
    lines = run.lines[shape.num_warm : shape.num_warm + shape.num_counted]
    seconds = lines[-1]["seconds"] - run.lines[shape.num_warm - 1]["seconds"]
    return Outcome(
        1 - fmean(line["rollout/idle_frac"] for line in lines),
        1 - fmean(line["train/idle_frac"] for line in lines),
        len(lines) * max(train_s, shape.generation_s) / seconds,
        1e6 * run.cpu_s / run.buffer.ledger.submitted,
    )


def measure(options: Options) -> list[Figure]:
    shape = QUICK if options.is_quick else FULL
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / "generation", Path(name) / "training"]
        for folder in folders:
            folder.mkdir()
        generation = play(shape, 0.5 * shape.generation_s, folders[0])
        training = play(shape, 1.3 * shape.generation_s, folders[1])
    return [
        at_least("efficiency", min(generation.generation, training.training), GOAL, "1 is alone"),
        Figure("generation_efficiency", generation.generation, note="training idles by half"),
        Figure("training_efficiency", training.training, note="generation could do 1.3 ×"),
        Figure("generation_speed", generation.speed, note="steps / those of the engines alone"),
        Figure("training_speed", training.speed, note="steps / those of the trainers alone"),
        Figure("controller_us_a_group", generation.us_a_group, note="CPU time, 16 answers to one"),
    ]
