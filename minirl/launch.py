"""Who starts what. Takes a recipe, gives a finished run and an exit code.

The only place that picks classes, devices and processes, and that tears them down. However a run
ends, nothing of it is left but its run directory.
"""

import json
import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from minirl import devices, model
from minirl.balance import balance
from minirl.buffer import Buffer, History, OnStale
from minirl.config import TINY, Config
from minirl.errors import MinirlError, RecipeError
from minirl.loop import Loop
from minirl.pace import Pace
from minirl.recipe import (
    Loaded,
    check_devices,
    check_memory,
    check_model,
    read_model_config,
    to_toml,
)
from minirl.records import Prompt
from minirl.resume import Start, check_changes, check_steps, find_start, is_finished
from minirl.rollout.worker import RolloutSetup, Stop
from minirl.run_dir import hold, write_text
from minirl.run_log import RunLog
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.tasks import Task
from minirl.tasks.prompts import PromptStream, encode
from minirl.tasks.registry import make_task, self_check
from minirl.tasks.turns import Dialogue, dialogue_of, has_turns
from minirl.tasks.verifier import VerifierSetup
from minirl.train import checkpoint
from minirl.train.bad_batch import BatchSaver
from minirl.train.messages import RankSetup, TrainerSetup
from minirl.train.tiny import tiny_model_folder
from minirl.view.console import ConsoleView
from minirl.view.loggers import Loggers
from minirl.workers import Died, Fleet, LossyStream, Role, graceful, signals

INTERRUPTED = 130
BODIES = {
    Role.TRAIN: "minirl.train.trainer:run",
    Role.ROLLOUT: "minirl.rollout.worker:run",
    Role.VERIFY: "minirl.tasks.verifier:run",
    Role.WARMUP: "minirl.train.tiny:run",
    Role.SFT: "minirl.train.sft:run",
}


class Notes(Protocol):
    def note(self, text: str) -> None: ...


def train(loaded: Loaded, recipe: Path, run_dir: Path, resume: bool, is_plain: bool = False) -> int:
    """`resume`: the run directory holds a run to go on with."""
    try:
        with signals():  # while there is nothing to save yet
            return _train(loaded, recipe, run_dir, resume, is_plain)
    except KeyboardInterrupt:
        print(_stopped(recipe, run_dir), file=LossyStream(sys.stdout))
        return INTERRUPTED


def _train(loaded: Loaded, recipe: Path, run_dir: Path, resume: bool, is_plain: bool) -> int:
    config = loaded.config
    kind, available = devices.find_devices(config.devices.kind)
    if config.devices.split == "auto":
        config = _with_auto_split(config, kind, run_dir if resume else None)
    check_devices(config, kind, available)
    if (free := devices.free_memory_bytes()) is not None:
        check_memory(config, free)
    task = make_task(config)
    self_check(task, config.tasks.kind)
    changes = check_changes(config, run_dir) if resume else []
    if resume and is_finished(run_dir, config):
        print(f"all {config.train.steps} steps are done; raise train.steps to go on")
        return 0
    job = Job(task, run_dir, recipe, kind, available)
    return _prepare(config, job, changes, resume, is_plain)


def _with_auto_split(config: Config, kind: str, resumed: Path | None) -> Config:
    from minirl.tools import plan  # the only tool that the train path uses, and only here

    found = devices.gpus() if kind == "cuda" else []
    gpu = plan.recognise(found[0].name, found[0].memory_bytes) if found else None
    return plan.with_auto_split(config, gpu, resumed)


@dataclass(frozen=True)
class Job:
    """What to train, where, and on what."""

    task: Task
    run_dir: Path
    recipe: Path  # as the user named it
    kind: str
    available: int


def _prepare(config: Config, job: Job, changes: list[str], resume: bool, is_plain: bool) -> int:
    run_dir = job.run_dir
    start = find_start(Path(), run_dir, resume)  # before the recipe of the run is touched
    check_steps(config, start)
    logs, lock = _make_run_dir(config, run_dir, job.kind)
    view = ConsoleView(config.train.steps, is_plain=is_plain)
    try:
        for note in (*(f"changed since it began: {c}" for c in changes), *start.notes):
            view.note(note)
        if config.model.trust_remote_code:
            view.note(f"warning: model.trust_remote_code: code of {config.model.path} is run here")
        source = model_folder(config, logs, view)
        check_model(config, read_model_config(config, source))
        model.check_folder(source)
        start = start if start.state else replace(start, folder=source)
        return _run(config, job, source, start, view)
    finally:
        devices.sweep_temp(run_dir / "tmp")
        view.close()
        lock.close()


def _run(config: Config, job: Job, source: Path, start: Start, view: ConsoleView) -> int:
    """From the first process to the last; gives an exit code."""
    run_dir, kind, task = job.run_dir, job.kind, job.task
    places = devices.place(config, kind, job.available)
    num_workers = len(places[0]) + len(places[1]) + config.tasks.verifiers
    trace = run_dir / "trace.json" if config.log.trace else None
    fleet = Fleet(run_dir / "logs", num_workers, trace)
    try:
        dialogue = None
        if has_turns(task):  # else the tokenizer loads while workers start
            tokenizer = model.load_tokenizer(source, config.model.trust_remote_code)
            dialogue = dialogue_of(task, config.tasks.kind, tokenizer)
        ring, store = _spawn(fleet, config, places, source, start, run_dir, dialogue)
        tokenizer = model.load_tokenizer(source, config.model.trust_remote_code)
        stream = PromptStream(task, tokenizer, config.seed, start.consumed)
        heldout = heldout_prompts(config, task, tokenizer)
        _check_prompt_lengths(config, task, tokenizer)
        buffer = make_buffer(config, start.history)
        threads = len(places[1][0].cores)
        saver = BatchSaver(config, run_dir, ring, store, source, threads)
        totals = start.state.totals if start.state else None
        under_way = start.state.evaluating if start.state else None
        log = RunLog(config, run_dir, fleet, view, start.step, totals, saver, under_way)
        loop = Loop(config, fleet, stream, heldout, buffer, log)
        loggers = Loggers(config, run_dir, start.step, view.note)
        try:
            with _signals(loop, view), view.watching(loop, run_dir):
                loop.run()
        except BaseException:
            log.close()  # what was written until now is kept
            raise
        if loop.has_finished:  # else they have not all started, and would not listen
            fleet.stop(Stop())
        loggers.close()
        is_whole = loop.step == config.train.steps
        extra = {"run_dir": str(run_dir), "seed": config.seed, "drops": dict(buffer.drops)}
        found = balance(log.metrics, config.devices.rollout, config.devices.train)
        word = "GPU" if kind == "cuda" else "process"
        extra["balance"] = found.sentence(word, config.is_synchronous) if found else None
        extra["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        summary = log.summarise(is_whole, {**extra, **devices.describe(kind)})
        log.close()
        view.finished(summary, _try_next(job.recipe, run_dir, is_whole))
        if loop.unsaved:
            kept = log.last_checkpoint
            log.problems.append(f"no checkpoint of the last step: {loop.unsaved}; {kept}")
        if log.problems:
            raise MinirlError(f"not all could be written: {'; '.join(log.problems)}")
        return 0 if is_whole else INTERRUPTED
    finally:
        with signals(signal.SIG_IGN):  # what is left takes a moment, and must be done
            fleet.kill()
            devices.sweep_temp(run_dir / "tmp")
            checkpoint.sweep(run_dir)
            (run_dir / "rendezvous").unlink(missing_ok=True)


def make_buffer(config: Config, history: History | None = None) -> Buffer:
    size, eta = config.train.batch_size, config.buffer.max_staleness
    pace = None
    if not config.is_synchronous:
        pace = Pace(size, config.num_slots, config.buffer.target_staleness)
    return Buffer(size, eta, OnStale(config.buffer.on_stale), history, pace)


def _spawn(
    fleet: Fleet,
    config: Config,
    places: tuple[list[devices.Placement], list[devices.Placement]],
    source: Path,
    start: Start,
    run_dir: Path,
    dialogue: Dialogue | None,
) -> tuple[TrajectoryRing, WeightStore]:
    """Trainer ranks first: everybody waits for the first version."""
    engines, ranks = places
    num_cells = config.num_slots * config.rollout.group_size + config.eval.num_prompts
    ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
    store = WeightStore(model.weight_table(start.folder), config.model.dtype)
    first = TrainerSetup(
        config=config,
        folder=str(start.folder),
        tokenizer_folder=str(source),
        rank=0,
        num_ranks=len(ranks),
        rendezvous=str(run_dir.absolute() / "rendezvous"),
        placement=ranks[0],
        ring=ring,
        store=store,
        is_resumed=start.state is not None,
        version=start.history.version,
    )
    spawn_ranks(fleet, Role.TRAIN, first, ranks)
    seed = config.seed * 1000 + 1 + 1_000_003 * start.step  # not as they did when the run began
    engine = RolloutSetup(config, str(source), engines[0].kind, seed, ring, store, dialogue)
    spawn_engines(fleet, engine, engines, run_dir / "tmp")
    spawn_verifiers(fleet, VerifierSetup(config, str(source), ring, dialogue))
    return ring, store


def spawn_ranks(
    fleet: Fleet, role: Role, first: RankSetup, places: list[devices.Placement]
) -> None:
    """`first` is rank 0's set-up."""
    Path(first.rendezvous).unlink(missing_ok=True)
    for rank, place in enumerate(places):
        setup = replace(first, rank=rank, placement=place)
        fleet.spawn(role, rank, BODIES[role], setup, place)


def spawn_engines(
    fleet: Fleet, first: RolloutSetup, places: list[devices.Placement], temp: Path
) -> None:
    """`first` is the first one's set-up; the seeds of the others differ, so that engines do not
    sample alike."""
    for rank, place in enumerate(places):
        setup = replace(first, seed=(first.seed + rank) % 2**31)
        own = devices.with_own_temp(place, temp)
        fleet.spawn(Role.ROLLOUT, rank, BODIES[Role.ROLLOUT], setup, own)


def spawn_verifiers(fleet: Fleet, setup: VerifierSetup) -> None:
    place = devices.Placement("cpu", env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    for rank in range(setup.config.tasks.verifiers):
        fleet.spawn(Role.VERIFY, rank, BODIES[Role.VERIFY], setup, place)


def _make_run_dir(config: Config, run_dir: Path, kind: str) -> tuple[Path, IO[str]]:
    """Nobody else may write into it, whatever the umask: what is in it is read again."""
    os.umask(os.umask(0o022) | 0o022)
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        if run_dir.stat().st_mode & 0o022:
            run_dir.chmod(0o755)
        lock = hold(run_dir)
        devices.sweep_temp(run_dir / "tmp")  # a controller that was killed could not
        (run_dir / "tmp").mkdir()
        write_text(run_dir / "recipe.toml", to_toml(config))
        facts = {**devices.describe(kind), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_text(run_dir / "machine.json", json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        rule = f"cannot be written to ({error.strerror})"
        raise RecipeError("--run-dir", str(run_dir), rule, "name another, or make room") from None
    return logs, lock


def model_folder(config: Config, logs: Path, view: Notes) -> Path:
    """The recipe's model on this machine; the tiny one is built the first time, in a process."""
    if config.model.path != TINY:
        return model.local_folder(config)
    folder = tiny_model_folder(config.seed)
    if folder.is_dir():
        return folder
    view.note(f"building the tiny model of seed {config.seed}, once: about a minute and a half")
    place = devices.Placement("cpu", env={"OMP_NUM_THREADS": "1"})  # more threads are slower
    fleet = Fleet(logs, 1)
    try:
        builder = fleet.spawn(Role.WARMUP, 0, BODIES[Role.WARMUP], config.seed, place)
        while True:
            for _, message in fleet.hear(1.0):
                if isinstance(message, str):
                    view.note(message)
                elif isinstance(message, Died) and folder.is_dir():
                    return folder
                elif isinstance(message, Died):
                    view.note(fleet.last_words(builder))
                    raise MinirlError(f"the warm-up {message.how}; its log is in {logs}")
    finally:
        fleet.kill()


def heldout_prompts(config: Config, task: Task, tokenizer: Any) -> list[Prompt]:
    examples = task.heldout(config.eval.num_prompts)
    prompts = [Prompt(i, e, encode(e, tokenizer)) for i, e in enumerate(examples)]
    limit = config.tasks.max_prompt_tokens
    short = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
    if not short:
        rule = f"none of {len(prompts)} held-out prompts is as short as that"
        remedy = "raise it" if prompts else "the task must give held-out examples"
        raise RecipeError("tasks.max_prompt_tokens", limit, rule, remedy)
    return short


def _check_prompt_lengths(config: Config, task: Task, tokenizer: Any) -> None:
    """Single prompts that are too long are dropped and counted; all of them is a wrong recipe."""
    count = min(64, task.num_train)
    lengths = [len(encode(task.train(i), tokenizer)) for i in range(count)]
    if min(lengths) > config.tasks.max_prompt_tokens:
        raise RecipeError(
            "tasks.max_prompt_tokens",
            config.tasks.max_prompt_tokens,
            f"the first {count} prompts have {min(lengths)} to {max(lengths)} tokens",
            f"raise it to {max(lengths)} or more",
        )


def _signals(loop: Loop, view: ConsoleView) -> AbstractContextManager[list[int]]:
    """Ctrl-C or SIGTERM once: finish the step, save, end. Twice: now."""

    def stop(name: str) -> None:
        loop.is_interrupted = True
        what = "finishing the step and saving" if loop.has_begun else "ending, while workers start"
        view.note(f"{name}: {what}; again to end now")

    return graceful(stop)


def _stopped(recipe: Path, run_dir: Path) -> str:
    """Of a run that was ended at once."""
    found = checkpoint.found(run_dir)
    if not found:
        return "stopped before anything was saved"
    return f"stopped; to go on from {found[-1]}: minirl train {recipe} --resume --run-dir {run_dir}"


def _try_next(recipe: Path, run_dir: Path, is_whole: bool) -> str:
    if not is_whole:
        return f"minirl train {recipe} --resume --run-dir {run_dir}"
    return f"minirl train {recipe} --set buffer.max_staleness=0  # the same, synchronous"
