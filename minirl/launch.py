"""`minirl train`: takes a recipe, gives a finished run and an exit code. The only place that picks
classes, devices and processes, and that tears them down: only the run directory is left.
"""

import json
import os
import shutil
import signal
import sys
import time
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from minirl import devices, model
from minirl.buffer import make_buffer
from minirl.config import Config
from minirl.devices import Placement, one_thread, with_own_temp
from minirl.errors import MinirlError, RecipeError
from minirl.loop import Loop
from minirl.messages import RankSetup, Role, Stop, TrainerSetup
from minirl.metrics import measured_balance
from minirl.recipe import Loaded, check_devices, check_memory, check_model, check_packages, to_toml
from minirl.resume import Start, check_changes, check_steps, find_start
from minirl.rollout.worker import RolloutSetup
from minirl.run_dir import RunDir, hold, holds_run, not_writable, write_text
from minirl.run_log import RunLog
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.tasks import has_turns, prompts, registry
from minirl.tasks.turns import Dialogue, dialogue_of
from minirl.tasks.verifier import VerifierSetup
from minirl.train import checkpoint
from minirl.train.bad_batch import BatchSaver
from minirl.view.console import ConsoleView
from minirl.view.loggers import Loggers
from minirl.workers import LossyStream, Workers, graceful, signals

INTERRUPTED = 130
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
BODIES = {
    Role.TRAIN: "minirl.train.trainer:run",
    Role.ROLLOUT: "minirl.rollout.worker:run",
    Role.VERIFY: "minirl.tasks.verifier:run",
    Role.SFT: "minirl.train.sft:run",
}


def train(loaded: Loaded, recipe: Path, run_dir: Path, resume: bool, is_plain: bool = False) -> int:
    """`resume`: the run directory holds a run to continue."""
    try:
        with signals():  # while there is nothing to save yet
            return Job(loaded.config, recipe, run_dir).prepare(resume, is_plain)
    except KeyboardInterrupt:
        text = "stopped before anything was saved"
        if found := checkpoint.found(run_dir):
            again = f"minirl train {recipe} --resume --run-dir {run_dir}"
            text = f"stopped; to go on from {found[-1]}: {again}"
        print(text, file=LossyStream(sys.stdout))
        return INTERRUPTED


class Job:
    """A run on this machine; `recipe` is the file as the user named it."""

    def __init__(self, config: Config, recipe: Path, run_dir: Path):
        self.recipe, self.run_dir = recipe, run_dir
        self.kind, available = devices.find_devices(config.devices.kind)
        config, gpu = check_devices(config, self.kind, available), None
        if config.devices.nodes != 1:
            check_packages(config)
            from minirl import outpost  # one box never imports it

            config = outpost.with_boxes(config, self.kind)
        if self.kind == "cuda":
            from minirl.tools import plan  # the only tool that the train path uses, and only here

            first = devices.gpus()[0]
            gpu = plan.recognise(first.name, first.memory_bytes)
            if gpu and config.devices.split == "auto":  # a resumed run gets the same split
                planned = plan.Plan(config, gpu, plan.usual_lengths(config))
                config = plan.recommended(plan.splits(planned, config.num_devices)).config
            if gpu and config.devices.share:
                plan.check_shared(config, gpu)
        check_memory(config, devices.free_memory_bytes())
        self.config, self.task = config, registry.make_task(config)
        registry.check_functions(config)
        self.engines, self.ranks = devices.place(config, self.kind, available)
        self.peak_flops = gpu and 1e12 * gpu.bf16_tflops  # of one GPU, for train/mfu

    def prepare(self, resume: bool, is_plain: bool) -> int:
        """The run directory and the model."""
        config, run_dir, found = self.config, self.run_dir, RunDir(self.run_dir)
        # Until a step is trained any recipe may take the directory over.
        resume = resume and bool(checkpoint.found(run_dir) or found.metrics)
        changes = check_changes(config, run_dir) if resume else []  # before the recipe is written
        done = found.summary
        if resume and done.get("finished") and done.get("steps") == config.train.steps:
            print(f"all {config.train.steps} steps are done; raise train.steps to go on")
            return 0
        lock = hold(run_dir) if resume else None  # before `find_start` sweeps what a save left
        start = find_start(run_dir) if resume else Start()
        check_steps(config, start.state.step)
        view = ConsoleView(config.train.steps, is_plain=is_plain)
        with closing(view):
            for note in (*(f"changed since it began: {c}" for c in changes), *start.notes):
                view.note(note)
            source = model.local_folder(config)
            check_model(config, source, self.kind)
            model.check_folder(source)
            is_new = not holds_run(run_dir)
            with _make_run_dir(config, run_dir, self.kind, lock):
                try:
                    return self.run(source, start, view)
                except RecipeError:  # a start that is refused leaves nothing behind
                    if is_new and not RunDir(run_dir).metrics:
                        shutil.rmtree(run_dir, ignore_errors=True)
                    raise
                except KeyboardInterrupt:
                    if not (run_dir / "summary.json").exists():
                        write_text(run_dir / "summary.json", '{"finished": false}\n')
                    raise

    def run(self, source: Path, start: Start, view: ConsoleView) -> int:
        config, run_dir, task, state = self.config, self.run_dir, self.task, start.state
        num_engines = len(self.engines) * config.num_nodes
        num_others = len(self.ranks) + config.tasks.verifiers + (config.num_nodes > 1)
        trace = run_dir / "trace.json" if config.log.trace else None
        workers = Workers(run_dir / "logs", num_engines + num_others, trace)
        load = partial(model.tokenizer_of, config, source)
        try:
            # Without turns the tokenizer loads while workers start.
            turns = dialogue_of(task, config.tasks.kind, load()) if has_turns(task) else None
            saver = self.spawn(workers, source, start, turns)
            tokenizer = load()
            consumed = prompts.Consumed(state.consumed_below, state.consumed_above)
            bounded = partial(registry.bounded, config)
            stream = prompts.PromptStream(task, tokenizer, config.seed, consumed, bounded)
            first = [task.train(i) for i in range(min(64, task.num_train))]
            prompts.short_prompts(config, first, tokenizer)
            examples = task.heldout(config.eval.num_prompts)
            heldout = prompts.short_prompts(config, examples, tokenizer)
            log = RunLog(config, run_dir, workers, view, saver, state.step, state.evaluating)
            loop = Loop(config, workers, stream, heldout, make_buffer(config, state.history), log)
            loggers = Loggers(log)
            with closing(log), _signals(loop, view), view.watching(loop):
                loop.run()
            view.note(f"waiting for {' and '.join(['workers', *config.log.to])} to end")
            if loop.has_finished:  # else some are still starting, and read no message
                workers.stop(Stop())
            loggers.close()
            return self.finish(loop, view)
        finally:
            with signals(signal.SIG_IGN):  # what is left takes a moment, and must be done
                workers.kill()
                devices.sweep_temp(run_dir / "tmp")
                checkpoint.sweep(run_dir)
                (run_dir / "rendezvous").unlink(missing_ok=True)

    def spawn(
        self, workers: Workers, source: Path, start: Start, dialogue: Dialogue | None
    ) -> BatchSaver:
        """Trainer ranks first: all workers wait for the first version."""
        config, run_dir, folder = self.config, self.run_dir, start.folder or source
        num_cells = config.num_slots * config.rollout.group_size + config.eval.num_prompts
        ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
        store = WeightStore(model.weight_table(folder), config.model.dtype)
        first = TrainerSetup(
            config=config,
            folder=str(folder),
            tokenizer_folder=str(source),
            rendezvous=str(run_dir.absolute() / "rendezvous"),
            placement=self.ranks[0],
            ring=ring,
            store=store,
            is_resumed=start.folder is not None,
            version=start.state.history.version,
            peak_flops=self.peak_flops,
        )
        spawn_ranks(workers, Role.TRAIN, first, self.ranks)
        seed = config.seed * 1000 + 1 + 1_000_003 * start.state.step  # a resumed run samples anew
        engine = RolloutSetup(config, str(source), self.kind, seed, ring, store, dialogue)
        (run_dir / "tmp").mkdir()
        spawn_engines(workers, engine, self.engines, run_dir / "tmp")
        if config.num_nodes > 1:
            from minirl import outpost

            outpost.spawn_boxes(workers, engine, len(self.engines), BODIES[Role.ROLLOUT])
        spawn_verifiers(workers, VerifierSetup(config, str(source), ring, dialogue))
        return BatchSaver(config, run_dir, ring, store, source)

    def finish(self, loop: Loop, view: ConsoleView) -> int:
        """The summary, and an error where something is not on the disk."""
        config, log = self.config, loop.log
        is_whole = loop.is_whole
        spare = devices.find_devices(self.kind)[1] - config.num_devices
        word = "cores" if self.kind == "cpu" else "GPU" if spare > 0 else ""
        extra = {
            "run_dir": str(self.run_dir),
            "seed": config.seed,
            "drops": dict(loop.buffer.drops),
            "balance": measured_balance(config, log.metrics, word, loop.buffer.holds_back) or None,
            "ended": time.strftime(TIME_FORMAT),
            **devices.describe(self.kind),
        }
        again = f"--resume --run-dir {self.run_dir}"
        then = "--set buffer.max_staleness=0  # the same, synchronous" if is_whole else again
        try_next = f"minirl train {self.recipe} {then}"
        view.finished({**log.summarise(is_whole, extra), "try_next": try_next})
        if why := loop.save_error:
            log.problems.append(f"no checkpoint of the last step: {why}; {log.last_checkpoint}")
        if log.problems:
            raise MinirlError(f"not all could be written: {'; '.join(log.problems)}")
        return 0 if is_whole else INTERRUPTED


def spawn_ranks(
    workers: Workers, role: Role, first: RankSetup, places: list[Placement], body: str = ""
) -> None:
    """`first` is rank 0's set-up."""
    Path(first.rendezvous).unlink(missing_ok=True)
    for rank, place in enumerate(places):
        setup = replace(first, rank=rank, num_ranks=len(places), placement=place)
        workers.spawn(role, rank, body or BODIES[role], setup, place)


def spawn_engines(
    workers: Workers, first: RolloutSetup, places: list[Placement], temp: Path
) -> None:
    """`first` is engine 0's set-up; each has a seed of its own."""
    for rank, place in enumerate(places):
        setup, own = replace(first, seed=(first.seed + rank) % 2**31), with_own_temp(place, temp)
        workers.spawn(Role.ROLLOUT, rank, BODIES[Role.ROLLOUT], setup, own)


def spawn_verifiers(workers: Workers, setup: VerifierSetup) -> None:
    for rank in range(setup.config.tasks.verifiers):
        workers.spawn(Role.VERIFY, rank, BODIES[Role.VERIFY], setup, one_thread())


def _make_run_dir(config: Config, run_dir: Path, kind: str, lock: IO[str] | None) -> IO[str]:
    """Only its owner may write into it, since what is in it is read again. Gives its lock."""
    os.umask(os.umask(0o022) | 0o022)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if run_dir.stat().st_mode & 0o022:
            run_dir.chmod(0o755)
        lock = lock or hold(run_dir)
        devices.sweep_temp(run_dir / "tmp")  # a controller that was killed could not
        write_text(run_dir / "recipe.toml", to_toml(config))
        facts = {**devices.describe(kind), "started": time.strftime(TIME_FORMAT)}
        write_text(run_dir / "machine.json", json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise not_writable(run_dir, error) from None
    return lock


def _signals(loop: Loop, view: ConsoleView) -> AbstractContextManager[list[int]]:
    def stop(name: str) -> None:
        loop.is_interrupted = True
        what = "finishing the step and saving" if loop.is_ready else "ending, while workers start"
        view.note(f"{name}: {what}; again to end now")

    return graceful(stop)
