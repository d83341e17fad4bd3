"""`minirl sft`: supervised learning on a task's worked answers. Takes a recipe, gives a folder:

    model/           an ordinary Hugging Face folder, for `minirl eval` and as `model.path` of RL
    metrics.jsonl    one line a step
    summary.json     loss on held-out examples before and after
    recipe.toml      every value of this run

The controller tells the ranks each step, so that all stop at the same one. Ctrl-C once: finish the
step, save, end; twice: now.
"""

import json
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

from minirl import devices
from minirl.config import Config
from minirl.errors import Interrupted, MinirlError, Stalled, WorkerDied
from minirl.launch import BODIES, INTERRUPTED, model_folder
from minirl.metrics import metrics_line
from minirl.recipe import to_toml
from minirl.rollout.worker import Stop
from minirl.rules import check_devices, check_model, read_model_config
from minirl.run_dir import JsonLines, write_text
from minirl.tasks.registry import make_task, self_check
from minirl.tools.doctor import find_devices
from minirl.train.lessons import Learn, Learned, SaveModel, SftSetup, Test, Tested
from minirl.train.messages import Ready, Saved
from minirl.view.console import Bar
from minirl.workers import Died, Fleet, Role, Worker

MODEL = "model"
LISTEN_S = 0.2
START_LIMIT_S = 1800.0

Message = TypeVar("Message")


def sft(config: Config, run_dir: Path) -> int:
    """Gives the exit code."""
    kind, available = find_devices(config.devices.kind)
    no_engines = replace(config.devices, rollout=0)
    check_devices(replace(config, devices=no_engines), kind, available)
    self_check(make_task(config), config.tasks.kind)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.toml").write_text(to_toml(config))
    bar = Bar("steps")
    try:
        source = model_folder(config, run_dir / "logs", bar)
        check_model(config, read_model_config(config, source))
        school = School(as_training(config), run_dir, bar)
        school.spawn(source, devices.place_ranks(config, kind, available))
        with _signals(school, bar):
            school.run()
        bar.note(f"the model is in {run_dir / MODEL}")
        return INTERRUPTED if school.is_interrupted else 0
    finally:
        bar.close()
        if "school" in locals():
            school.fleet.kill()
        (run_dir / "rendezvous").unlink(missing_ok=True)


def as_training(config: Config) -> Config:
    """[train] with the values of [sft]: what an optimizer reads."""
    own = config.sft
    train = replace(
        config.train,
        steps=own.steps,
        batch_size=own.batch_size,
        lr=own.lr,
        warmup_steps=own.warmup_steps,
        schedule=own.schedule,
        num_minibatches=1,
    )
    return replace(config, train=train)


class School:
    def __init__(self, config: Config, run_dir: Path, bar: Bar):
        self.config, self.run_dir, self.bar = config, run_dir, bar
        self.fleet = Fleet(run_dir / "logs", config.devices.train)
        self.log = JsonLines(run_dir / "metrics.jsonl")
        self.is_interrupted = False  # set from outside
        self.heard: deque[tuple[Worker, object]] = deque()
        self.losses: list[tuple[int, float]] = []  # on held-out lessons, by step

    @property
    def ranks(self) -> list[Worker]:
        return self.fleet.workers

    def spawn(self, source: Path, places: list[devices.Placement]) -> None:
        rendezvous = self.run_dir.absolute() / "rendezvous"
        rendezvous.unlink(missing_ok=True)
        for rank, place in enumerate(places):
            setup = SftSetup(self.config, str(source), rank, len(places), str(rendezvous), place)
            self.fleet.spawn(Role.SFT, rank, BODIES[Role.SFT], setup, place)

    def run(self) -> None:
        up: set[str] = set()
        while len(up) < len(self.ranks):
            worker, _ = self.hear(Ready, START_LIMIT_S)
            up.add(worker.name)
        began, learned = time.monotonic(), Learned()
        self.bar.total(self.config.train.steps)
        self.test(0)
        done = 0
        for step in range(1, self.config.train.steps + 1):
            if self.is_interrupted:
                break
            learned = self.ask(Learn(step - 1), Learned)
            every = self.config.eval.every
            is_last = step == self.config.train.steps
            tested = self.test(step) if is_last or (every and step % every == 0) else None
            line = {"step": step, "seconds": round(time.monotonic() - began, 3), **learned.values}
            self.log.write(metrics_line({**line, "sft/heldout_loss": tested}))
            done = step
            self.bar.at(step, f"loss {learned.values['sft/loss']:.4f}{self.heldout_text}")
        self.ask(SaveModel(str(self.run_dir / MODEL)), Saved)
        self.log.close()
        self.write_summary(done, time.monotonic() - began, learned.num_too_long)
        self.fleet.stop(Stop())

    @property
    def heldout_text(self) -> str:
        return f"  held-out {self.losses[-1][1]:.4f}" if self.losses else ""

    def test(self, step: int) -> float | None:
        loss = self.ask(Test(), Tested).loss
        if loss is not None:
            self.losses.append((step, loss))
            self.bar.note(f"held-out loss {loss:.4f} after step {step}")
        return loss

    def ask(self, request: object, kind: type[Message]) -> Message:
        """Of every rank; the first one answers."""
        for rank in self.ranks:
            rank.send(request)
        return self.hear(kind, self.config.log.stall_s)[1]

    def hear(self, kind: type[Message], limit_s: float) -> tuple[Worker, Message]:
        """The next message of this kind. What comes with it is kept for the next call."""
        asked = time.monotonic()
        while True:
            while self.heard:
                worker, message = self.heard.popleft()
                if isinstance(message, Died):
                    raise self.ended(worker, message)
                if isinstance(message, kind):
                    return worker, message
            self.heard.extend(self.fleet.hear(LISTEN_S))
            if not self.heard and time.monotonic() - asked > limit_s:
                what = kind.__name__.lower()
                raise Stalled(f"no {what} for {limit_s:.0f} s\n{self.fleet.stacks()}")

    def ended(self, worker: Worker, death: Died) -> MinirlError:
        how = f"{worker.name} {death.how}; its log is in {self.fleet.log_dir}"
        if death.is_final:
            return MinirlError(f"{worker.name}: {death.how}")
        self.bar.note(self.fleet.last_words(worker))
        return WorkerDied(how)

    def write_summary(self, num_steps: int, seconds: float, num_too_long: int) -> None:
        if num_too_long:
            self.bar.note(f"{num_too_long} examples were too long and left out")
        summary = {
            "finished": not self.is_interrupted,
            "model": str(self.run_dir / MODEL),
            "task": self.config.tasks.kind,
            "seed": self.config.seed,
            "steps": num_steps,
            "seconds": round(seconds, 3),
            "heldout_losses": self.losses,
            "heldout_loss_before": self.losses[0][1] if self.losses else None,
            "heldout_loss_after": self.losses[-1][1] if self.losses else None,
            "examples_too_long": num_too_long,
        }
        write_text(self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


@contextmanager
def _signals(school: School, bar: Bar) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        if school.is_interrupted:
            raise Interrupted
        school.is_interrupted = True
        bar.note(f"{signal.Signals(number).name}: finishing the step and saving; again to end now")

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
