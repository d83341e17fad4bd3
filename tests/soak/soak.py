"""The soak: faults are injected into a run, and a controller that ended is started again, until the
time is over; then the run finishes without faults, and everything is counted.

    takes    a recipe, a seed, minutes
    gives    an Outcome: every fault with what became of it, and a Finding for each property

Faults come one after another (one of them is two at once), each when the run has recovered from
the last. The last controller has no fault: it trains a few steps more, evaluates and ends by
itself. Then the recipe is run once more, for as many steps and without faults, for the accuracy.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from minirl.config import Config
from minirl.errors import MinirlError
from minirl.recipe import to_toml
from tests.boxes import Boxes
from tests.soak import task
from tests.soak.accuracy import compare
from tests.soak.controller_process import ControllerProcess
from tests.soak.disk import Disk
from tests.soak.events import Event, Outcome
from tests.soak.inject import inject
from tests.soak.ledger import Finding, prove
from tests.soak.run import RECOVER_S, Run, train_command
from tests.soak.run_files import last_evaluation, saved
from tests.soak.schedule import Draw, Schedule

ENDLESS = 10**6  # steps: the soak ends by its clock
TIMEOUT_S, STALL_S = 8.0, 20.0  # soon, yet not so soon that a busy machine looks like a fault
LAST_STEPS = 3  # that the last controller trains
MAX_LOST = 3  # faults that were not survived: enough has been seen
PROGRAM = (sys.executable, "-m", "minirl.cli")


@dataclass(frozen=True)
class Options:
    minutes: float
    seed: int = 0
    faults: tuple[str, ...] = ()  # none: all of the schedule
    most: int = 10**6  # faults
    share: float = 0.06  # of training prompts whose reward has a kind
    problems: int = 1024  # held out, for the accuracy
    has_reference: bool = True
    program: tuple[str, ...] = PROGRAM


def soak_config(config: Config, options: Options) -> Config:
    """The recipe as the soak runs it: endless, watched closely, saved often, with bad rewards."""
    tasks = replace(
        task.options(config.tasks, options.seed, options.share),
        timeout_s=min(config.tasks.timeout_s, TIMEOUT_S),
        verifiers=max(config.tasks.verifiers, 2),
    )
    # Of every trained group one answer with all its tokens, for the proof of their staleness.
    log = replace(
        config.log, stall_s=min(config.log.stall_s, STALL_S), samples=config.train.batch_size
    )
    return replace(
        config,
        tasks=tasks,
        log=log,
        train=replace(config.train, steps=ENDLESS, schedule="constant"),
        eval=replace(config.eval, every=config.eval.every or 10),
        checkpoint=replace(config.checkpoint, every=config.checkpoint.every or 5),
    )


def last_config(config: Config, steps: int, problems: int) -> Config:
    """So many steps, and a large evaluation after them."""
    return replace(
        config,
        train=replace(config.train, steps=steps, schedule="constant"),
        eval=replace(config.eval, every=0, num_prompts=problems),
    )


class Soak:
    def __init__(
        self,
        config: Config,
        options: Options,
        folder: Path,
        disk: Disk,
        say: Callable[[str], None],
        boxes: Boxes | None = None,
    ):
        self.plain, self.options, self.folder, self.say = config, options, folder, say
        self.run = Run(soak_config(config, options), folder, options.program, disk, boxes)
        self.schedule = Schedule(options.seed, options.faults)
        self.outcome = Outcome(disk.what)

    def go(self) -> Outcome:
        run, outcome = self.run, self.outcome
        try:
            self._inject_until_the_end()
            self._finish()
        except MinirlError as error:
            if not outcome.events:
                raise
            outcome.findings.append(Finding("ended", False, str(error)))
        finally:
            run.over()
            run.disk.free([])
            self._bring_home()
        outcome.seconds, outcome.controllers = round(run.seconds, 1), run.num_controllers
        outcome.steps_trained = run.follower.look()
        outcome.findings += [*self._of_faults(), *prove(run.run_dir, self._num_verifier_faults)]
        if self.options.has_reference and outcome.steps:
            outcome.findings.append(self._accuracy())
        return outcome

    # -- faults

    def _inject_until_the_end(self) -> None:
        deadline = self.run.began + 60 * self.options.minutes
        while time.monotonic() < deadline and len(self.outcome.events) < self.options.most:
            if not self.run.is_alive:
                self.run.start()
            draw = self.schedule.draw()
            if self._settles():
                time.sleep(draw.wait_s)
                self._inject(draw)
            if sum(event.survived is False for event in self.outcome.events) >= MAX_LOST:
                return

    def _settles(self) -> bool:
        """A controller that is new must train a step: that proves the faults before it."""
        run, pending = self.run, self.outcome.pending
        if not run.is_new:
            return True
        trains = run.trains()
        seconds = round(time.monotonic() - run.controller.began, 2)
        code, words = run.controller.code, run.controller.last_line()
        if not trains:
            run.over()
            if not pending:
                raise MinirlError(f"the run does not train (exit code {code}): {words}")
        for event in pending:
            event.survived, event.recovered_s = trains, seconds if trains else None
            if not trains:
                event.lost(f"the next controller does not train (exit code {code}): {words}")
            self._tell(event)
        return trains

    def _inject(self, draw: Draw) -> None:
        for event in inject(self.run, draw):
            self.outcome.events.append(event)
            if event.survived is not None:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(asdict(event)) + "\n")
        how = f"survived, {event.recovered_s} s" if event.survived else "NOT SURVIVED"
        more = "; ".join(part for part in (event.moment, event.detail) if part)
        self.say(
            f"{event.at_s:7.1f} s  step {event.step:<5} {event.fault:<16} {event.target:<12} {how}"
            f"{'; ' + more if more else ''}"
        )

    # -- the end

    def _finish(self) -> None:
        """SIGTERM, unless there is no controller; then the last one, which ends by itself."""
        run = self.run
        if run.is_alive and self._settles():
            self._inject(replace(self.schedule.draw(), fault="term-controller"))
        steps = saved(run.run_dir).step + LAST_STEPS
        run.config = last_config(run.config, steps, self.options.problems)
        self.say(f"{run.seconds:7.1f} s  the last controller, left alone until step {steps}")
        run.start()
        if not self._settles():
            return
        code, words = run.controller.ends(RECOVER_S), run.controller.last_line()
        _, left = run.controller.gone_after()
        is_good = code == 0 and not left
        detail = f"exit code {code}" + (f", left behind: {', '.join(left)}" if left else "")
        self.outcome.findings.append(
            Finding("ended", is_good, detail + ("" if code == 0 else f": {words}"))
        )
        self.outcome.steps = steps if code == 0 else 0

    def _bring_home(self) -> None:
        """Out of the small disk, which is gone with this process."""
        if self.run.disk.is_apart and self.run.run_dir.is_dir():
            shutil.copytree(self.run.run_dir, self.folder / "run")
            self.run.run_dir = self.folder / "run"

    @property
    def _num_verifier_faults(self) -> int:
        """Each may cost a group its reward."""
        return sum(event.target.count("verify-") for event in self.outcome.events)

    def _of_faults(self) -> list[Finding]:
        events, seen = self.outcome.events, self.run.follower
        lost = [
            f"{event.fault} of {event.target} at step {event.step}: {event.detail}"
            for event in events
            if not event.survived
        ]
        every = f"{len(events)} of {len(events)} faults, {self.outcome.controllers} controllers"
        again = self.outcome.steps_trained - self.outcome.steps
        watched = (
            f"{self.outcome.steps_trained} steps and {seen.num_tokens} tokens, as they were "
            f"trained; {again} of the steps were rolled back later"
        )
        return [
            Finding("survived", not lost, "; ".join(lost) or every),
            Finding("watched", not seen.violations, "; ".join(seen.violations) or watched),
        ]

    def _accuracy(self) -> Finding:
        steps, problems = self.outcome.steps, self.options.problems
        recipe, run_dir = self.folder / "undisturbed.toml", self.folder / "undisturbed"
        recipe.write_text(to_toml(last_config(self.plain, steps, problems)))
        self.say(f"{self.run.seconds:7.1f} s  the same {steps} steps, undisturbed")
        command = train_command(self.options.program, recipe, run_dir)
        controller = ControllerProcess(command, self.folder / "controllers" / "undisturbed.log")
        try:
            code = controller.process.wait()
        finally:
            controller.end()
        if code != 0:
            detail = f"the undisturbed run ended with code {code}: {controller.last_line()}"
            return Finding("accuracy", False, detail)
        return compare(last_evaluation(self.run.run_dir), last_evaluation(run_dir))
