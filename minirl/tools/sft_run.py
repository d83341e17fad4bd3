"""`minirl sft`: supervised learning on a task's worked answers. Takes a recipe, gives a folder:

    model/           an ordinary Hugging Face folder, for `minirl eval` and as `model.path` of RL
    metrics.jsonl    one line per step
    summary.json     loss on held-out examples before and after
    recipe.toml      every value of this run

The controller sends the ranks each step, so that all stop at the same one. Ctrl-C once: finish the
step, save, end; twice: now.
"""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from minirl import devices
from minirl.config import Config
from minirl.devices import find_devices
from minirl.launch import INTERRUPTED, model_folder, spawn_ranks
from minirl.metrics import metrics_line
from minirl.recipe import check_devices, check_model, read_model_config, to_toml
from minirl.rollout.worker import Stop
from minirl.run_dir import JsonLines, write_text
from minirl.tasks.registry import make_task, self_check
from minirl.train.messages import Learn, Learned, Saved, SaveModel, SftSetup
from minirl.view.console import Bar
from minirl.workers import Message, Role, Workers, graceful, signals

MODEL = "model"
START_LIMIT_S = 1800.0
WARMUP_STEPS = 10


def sft(config: Config, run_dir: Path) -> int:
    """Gives the exit code."""
    kind, available = find_devices(config.devices.kind)
    check_devices(config, kind, available, rollout=0)
    self_check(make_task(config), config.tasks.kind)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.toml").write_text(to_toml(config))
    workers, bar = Workers(run_dir / "logs", config.devices.train), Bar("steps")
    rendezvous = run_dir.absolute() / "rendezvous"
    try:
        source = model_folder(config, run_dir / "logs", bar.note)
        check_model(config, read_model_config(config, source))
        controller = SftController(as_training(config), run_dir, workers, bar)
        places = devices.place(config, kind, available, engines=False)[1]
        args = (str(source), 0, len(places), str(rendezvous), places[0])
        spawn_ranks(workers, Role.SFT, SftSetup(controller.config, *args), places)
        with graceful(controller.stop) as came:
            controller.run()
        bar.note(f"the model is in {run_dir / MODEL}")
        return INTERRUPTED if came else 0
    finally:
        with signals(signal.SIG_IGN):
            workers.kill()
            rendezvous.unlink(missing_ok=True)


def as_training(config: Config) -> Config:
    """[train] with the values of [sft]: what an optimizer reads."""
    own = {"steps": config.sft.steps, "batch_size": config.sft.batch_size, "lr": config.sft.lr}
    fixed = {"warmup_steps": WARMUP_STEPS, "schedule": "linear", "num_minibatches": 1}
    values: dict[str, Any] = {**own, **fixed}
    return replace(config, train=replace(config.train, **values))


class SftController:
    def __init__(self, config: Config, run_dir: Path, workers: Workers, bar: Bar):
        self.config, self.run_dir, self.workers, self.bar = config, run_dir, workers, bar
        self.is_interrupted = False
        self.losses: list[tuple[int, float]] = []  # on held-out examples, by step

    def stop(self, name: str) -> None:
        self.is_interrupted = True
        self.bar.note(f"{name}: finishing the step and saving; again to end now")

    def run(self) -> None:
        learned = self.workers.wait_for(Learned, START_LIMIT_S)
        steps, every = self.config.train.steps, self.config.eval.every
        log = JsonLines(self.run_dir / "metrics.jsonl")
        began, done = time.monotonic(), 0
        self.note_loss(0, learned)
        while done < steps and not self.is_interrupted:
            is_evaluated = done + 1 == steps or bool(every and (done + 1) % every == 0)
            learned = self.ask(Learn(done, is_evaluated), Learned)
            done += 1
            self.note_loss(done, learned)
            seconds = round(time.monotonic() - began, 3)
            log.write(metrics_line({"step": done, "seconds": seconds, **learned.values}))
            self.bar.at(done, steps, f"loss {learned.values['sft/loss']:.4f}")
        log.close()
        self.ask(SaveModel(str(self.run_dir / MODEL)), Saved)
        self.write_summary(done, learned.num_too_long)
        self.workers.stop(Stop())

    def ask(self, request: Learn | SaveModel, kind: type[Message]) -> Message:
        """Every rank; the first one answers."""
        for rank in self.workers.all:
            rank.send(request)
        return self.workers.wait_for(kind, self.config.log.stall_s)

    def note_loss(self, step: int, learned: Learned) -> None:
        loss = learned.values.get("sft/heldout_loss")
        if loss is not None:
            self.losses.append((step, loss))
            self.bar.note(f"held-out loss {loss:.4f} after step {step}")

    def write_summary(self, num_steps: int, num_too_long: int) -> None:
        summary = {
            "finished": not self.is_interrupted,
            "model": str(self.run_dir / MODEL),
            "steps": num_steps,
            "heldout_loss_before": self.losses[0][1] if self.losses else None,
            "heldout_loss_after": self.losses[-1][1] if self.losses else None,
            "examples_too_long": num_too_long,  # and left out
        }
        write_text(self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
