"""`minirl sft`: supervised learning on a task's worked answers. Takes a recipe, gives a folder:

    model/           an ordinary Hugging Face folder, for `minirl eval` and as `model.path` of RL
    metrics.jsonl    one line per step
    summary.json     loss on held-out examples before and after
    recipe.toml      every value of this run

Ctrl-C once: finish the step, save, end; twice: now.
"""

import json
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from minirl import devices, model
from minirl.config import Config
from minirl.errors import MinirlError
from minirl.launch import INTERRUPTED, spawn_ranks
from minirl.messages import Learned, Role, SftSetup, Stop
from minirl.metrics import metrics_line
from minirl.recipe import check_devices, check_model, check_packages, find_model, to_toml
from minirl.run_dir import JsonLines, make_results_dir, write_text
from minirl.tasks.check import checking
from minirl.view.console import Bar
from minirl.workers import Workers, graceful, signals

START_LIMIT_S = 1800.0  # loading a large model takes its time


def sft(config: Config, run_dir: Path) -> int:
    """Gives the exit code."""
    kind, available = devices.find_devices(config.devices.kind)
    check_devices(config, kind, available, rollout=0)
    check_packages(config)
    with checking(config, find_model(config)) as check:
        check()
    make_results_dir(run_dir, "--run-dir", to_toml(config))
    workers, bar = Workers(run_dir / "logs", config.devices.train), Bar("steps")
    rendezvous, output = run_dir.absolute() / "rendezvous", run_dir / "model"
    try:
        source = model.local_folder(config)
        check_model(config, source)
        places = devices.place(config, kind, available, engines=False)[1]
        setup = SftSetup(
            config=as_training(config),
            folder=str(source),
            placement=places[0],
            rendezvous=str(rendezvous),
            output=str(output),
        )
        spawn_ranks(workers, Role.SFT, setup, places)
        again = "finishing the step and saving; again to end now"
        with graceful(lambda name: bar.note(f"{name}: {again}")) as came:
            last = follow(setup, run_dir, workers, bar, came)
        workers.stop(Stop())
        bar.note(f"the model is in {output}")
        return 0 if last.step == config.sft.steps else INTERRUPTED
    finally:
        with signals(signal.SIG_IGN):
            workers.kill()
            rendezvous.unlink(missing_ok=True)


def as_training(config: Config) -> Config:
    """[train] with the values of [sft]: what an optimizer reads."""
    fixed: dict[str, Any] = {"warmup_steps": 10, "schedule": "linear", "num_minibatches": 1}
    return replace(config, train=replace(config.train, **asdict(config.sft), **fixed))


def follow(setup: SftSetup, run_dir: Path, workers: Workers, bar: Bar, came: list[int]) -> Learned:
    """Writes what the ranks report until the model is saved. Gives the last step's report."""
    config, limit_s = setup.config, START_LIMIT_S
    log, began, losses = JsonLines(run_dir / "metrics.jsonl", bar.note), time.monotonic(), []
    while isinstance(message := workers.next_message(limit_s), Learned):
        learned, limit_s = message, config.log.stall_s
        if (loss := learned.values.get("sft/heldout_loss")) is not None:
            losses.append(loss)
            bar.note(f"held-out loss {loss:.4f} after step {learned.step}")
        if learned.step:
            seconds = round(time.monotonic() - began, 3)
            log.write(metrics_line({"step": learned.step, "seconds": seconds, **learned.values}))
            bar.at(learned.step, config.train.steps, f"loss {learned.values['sft/loss']:.4f}")
        for rank in workers.all if came else []:
            rank.send(Stop())
    log.close()
    summary = {
        "finished": learned.step == config.train.steps,
        "model": setup.output,
        "steps": learned.step,
        "heldout_loss_before": losses[0] if losses else None,
        "heldout_loss_after": losses[-1] if losses else None,
        "examples_too_long": learned.num_too_long,  # and left out
    }
    write_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    if log.problem:
        raise MinirlError(f"the model is in {setup.output}, but {log.problem}")
    return learned
