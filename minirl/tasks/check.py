"""The self-check of a task (rule 7) in a verifier process: user code that hangs, exits, crashes or
eats memory is one line with file, line and method, not the end of the controller.

    controller   checking(config) spawns the process; the function that it gives waits for Checked
    process      imports the task, calls each method, encodes prompts as a run would

A crash, os._exit and a call that takes longer than tasks.timeout_s end the process; faulthandler's
dump in the log says where it was.
Leaves out: minirl's own tasks and methods, which may download and have no limit. What passed runs
in the controller afterwards, where each call for a prompt is bounded by tasks.timeout_s.
"""

import faulthandler
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from minirl import model
from minirl.config import Config
from minirl.devices import one_thread
from minirl.errors import RecipeError, WorkerDied
from minirl.messages import Checked, Died, Role
from minirl.recipe import TASKS, check_task
from minirl.shm.board import BoardWriter
from minirl.tasks import Task, registry
from minirl.tasks.prompts import SHUFFLED_UP_TO, short_prompts, trained_on
from minirl.tasks.registry import dumped, where
from minirl.tasks.turns import dialogue_of
from minirl.tasks.verifier import limit_memory
from minirl.workers import LISTEN_S, Workers, signals

METHODS = ("load", "example", "reply", "train", "heldout", "reward", "solution")
MOST_LOOKED_AT = 10_000  # training examples
KEPT = {"HF_TOKEN"}  # for data of one's own on the hub; what passes runs with all secrets anyway


@contextmanager
def checking(config: Config, folder: Path | None) -> Iterator[Callable[[], Checked]]:
    """Starts at once; the function waits, and raises RecipeError for a task that fails. `folder` is
    the tokenizer's; where there is none (yet), prompts are not encoded."""
    check_task(config)
    if config.tasks.kind in TASKS:  # not a user's code: no process, a quicker start
        yield lambda: _check(config, folder)
        return
    place = one_thread(**{name: value for name, value in os.environ.items() if name in KEPT})
    with TemporaryDirectory(prefix="minirl-check-") as logs, signals():
        workers = Workers(Path(logs), 1)
        try:
            workers.spawn(Role.VERIFY, 0, "minirl.tasks.check:run", (config, folder), place)
            yield partial(_result, config, workers)
        finally:
            workers.kill()


def _result(config: Config, workers: Workers) -> Checked:
    while True:
        for _, message in workers.receive(LISTEN_S):
            match message:
                case Checked():
                    return message
                case RecipeError():
                    raise message
                case Died():
                    raise _refusal(config, workers, message.how)


def _refusal(config: Config, workers: Workers, how: str) -> Exception:
    kind, limit_s, worker = config.tasks.kind, config.tasks.timeout_s, workers.all[0]
    log = (workers.log_dir / f"{worker.name}.log").read_text(errors="replace")
    if not (found := where(dumped(log), kind)):
        return WorkerDied(f"the self-check of {kind}: {how}\n{workers.log_tail(worker)}")
    what = f"ended its process ({how})"
    if "Timeout (" in log:  # faulthandler's word
        what = f"took longer than tasks.timeout_s = {limit_s:g}"
    remedy = "mend it, or raise tasks.timeout_s or tasks.memory_gib"
    return RecipeError("tasks.kind", kind, f"its code {what}{found}", remedy)


def run(setup: tuple[Config, Path | None], board: BoardWriter, pipe: Connection) -> None:
    """The body of the process."""
    leave = os._exit

    def dump_and_leave(status: int) -> NoReturn:
        faulthandler.dump_traceback(2, all_threads=False)
        leave(status)

    limit_memory(setup[0])
    os._exit = dump_and_leave
    try:
        pipe.send(_check(*setup, _Watch(setup[0].tasks.timeout_s).make_task))
    except RecipeError as error:
        pipe.send(error)


def _check(
    config: Config, folder: Path | None, make_task: Callable[[Config], Task] = registry.make_task
) -> Checked:
    task, kind = make_task(config), config.tasks.kind
    shown = registry.self_check(task, kind)
    registry.check_functions(config)
    test = task.heldout(config.eval.num_prompts)
    if folder is not None and (folder / "tokenizer.json").is_file():
        tokenizer = model.tokenizer_of(config, folder)
        dialogue_of(task, kind, tokenizer)
        short_prompts(config, [task.train(i) for i in range(min(64, task.num_train))], tokenizer)
        short_prompts(config, test, tokenizer)
    both = list[str]()
    if task.num_train <= SHUFFLED_UP_TO:  # a generated task keeps them apart itself
        both = trained_on(test, map(task.train, range(min(task.num_train, MOST_LOOKED_AT))))
    warning = f"{len(both)} of {len(test)} held-out prompts are trained on" if both else ""
    return Checked(shown, warning)


class _Watch:
    """Bounds the calls of the user's code. One that takes too long ends the process with a dump of
    its stack, even in C. A call inside another counts as that one."""

    def __init__(self, limit_s: float):
        self.limit_s, self.is_inside = limit_s, False

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.is_inside:
            return function(*args, **options)
        self.is_inside = True
        faulthandler.dump_traceback_later(self.limit_s, exit=True, file=2)
        try:
            result = function(*args, **options)
            return list(result) if isinstance(result, Iterator) else result  # a generator runs here
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.is_inside = False

    def make_task(self, config: Config) -> Task:
        """Bounded are its own methods, also where they call each other: through `self`."""
        task = self.call(registry.make_task, config)
        for name in METHODS:
            method = getattr(task, name)
            if callable(method) and not method.__module__.startswith("minirl."):
                vars(task)[name] = partial(self.call, method)
        if type(task).num_train is not Task.num_train:  # perhaps a property
            self.call(getattr, task, "num_train")
        return task
