"""What tests with processes share: real workers with an inbox for what they say, a disk that is as
full as one gets it without mounting one, and whole runs, which must leave nothing behind."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from minirl.devices import Placement, vllm_environment
from minirl.messages import Died
from minirl.run_dir import read_lines
from minirl.shm.weights import WeightStore, canary_tokens
from minirl.workers import Worker, Workers
from tests.soak.controller_process import living, orphaned_memory

VOCAB = 384  # of tiny_models.py, which loads torch
LIMIT_S = 600.0  # a hang is a failure, however slow the machine
ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TRAINER_PLACE = Placement("cpu", env=ONE_THREAD)
ENGINE_PLACE = Placement("cpu", env={**ONE_THREAD, **vllm_environment("cpu")})
ON_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
CUDA_TRAINER_PLACE = Placement("cuda", env=ON_GPU)
CUDA_ENGINE_PLACE = Placement("cuda", env={**ON_GPU, **vllm_environment("cuda")})

Message = TypeVar("Message")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)


def publish(store: WeightStore, version: int, weights: Iterable[Any], canary: Any = 0.0) -> None:
    """As a trainer does it; `weights` in the order of the store's table."""
    with store.publishing(version) as slot:
        slot.fill(weights)
        slot.canary["tokens"] = canary_tokens(VOCAB)
        slot.canary["logprobs"] = canary


class Inbox:
    """Messages of workers that are not taken yet."""

    def __init__(self, workers: Workers):
        self.workers = workers
        self.messages: list[tuple[Worker, object]] = []

    def take(self, worker: Worker, kind: type[Message]) -> Message:
        """The worker's next message of this kind; a death that was not asked for is a failure."""

        def found() -> list[object]:
            own = [message for sender, message in self.messages if sender is worker]
            return [message for message in own if isinstance(message, (kind, Died))]

        self.wait_until(lambda: bool(found()))
        message = found()[0]
        self.messages.remove((worker, message))
        assert isinstance(message, kind), f"{message}\n{self.workers.log_tail(worker)}"
        return message

    def wait_until(self, is_there: Callable[[], bool], listen_s: float = 0.2) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_there():
            assert time.monotonic() < deadline, f"waited in vain; received {self.messages}"
            self.messages += self.workers.receive(listen_s)


@contextmanager
def crew(log_dir: Path, num_workers: int) -> Iterator[Inbox]:
    log_dir.mkdir(parents=True, exist_ok=True)
    workers = Workers(log_dir, num_workers)
    try:
        yield Inbox(workers)
    finally:
        workers.kill()


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Writes past this size fail half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Whole runs ---------------------------------------------------------------------------------------

RECIPES = Path(__file__).parent.parent / "recipes"
SMALL = {"train.steps": 4, "train.batch_size": 4, "rollout.group_size": 4, "eval.every": 0}
SMALL |= {"rollout.max_new_tokens": 48, "rollout.kv_cache_gib": 0.1, "eval.num_prompts": 8}


class Run:
    """`minirl train` on the smoke recipe, made small, in a process of its own; `boxes`: on the head
    of these (boxes.py)."""

    def __init__(self, run_dir: Path, small: bool = True, boxes: Any = None, **changes: Any):
        self.dir, here = run_dir, Path(__file__).parent
        settings = dict(SMALL) if small else {}
        options = changes.pop("options", ())
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        train = [sys.executable, "-m", "minirl.cli", "train", str(RECIPES / "smoke.toml"), *options]
        train += [f"--run-dir={run_dir}", *(f"--set={key}={v}" for key, v in settings.items())]
        paths = (str(here), str(here.parent), os.environ.get("PYTHONPATH", ""))
        env = dict(boxes.env if boxes else os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
        self.before = set(os.listdir("/dev/shm"))
        command = boxes.inside(0, ["nice", *train]) if boxes else train
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)

    def workers(self) -> dict[str, int]:
        """Process ids by worker name."""
        found = {p.name(): p.pid for p in psutil.Process(self.process.pid).children()}
        return {name[3:]: pid for name, pid in found.items() if name.startswith("rl-")}

    def kill(self, name: str) -> None:
        os.kill(self.workers()[name], signal.SIGKILL)

    def wait_until(self, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()  # a test that fails leaves no run behind
                out, err = self.process.communicate()
                raise AssertionError(f"it never came to that:\n{out}\n{err}")
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self.metrics()) >= step)

    def end(self, limit_s: float = LIMIT_S, code: int | None = None) -> "Ended":
        """Waits for the end, perhaps with this exit code, and sees that nothing is left of it: no
        process, and no shared memory that no process holds."""
        try:
            out, err = self.process.communicate(timeout=limit_s)
        finally:
            self.process.kill()
        # Others' memory is orphaned for an instant too, as it comes and goes.
        wait_until(lambda: not living(self.process.pid) and not orphaned_memory() - self.before)
        assert list(self.dir.rglob("*.tmp")) == [], "a half-written file is left"
        ended = Ended(self.process.returncode, out, err)
        assert code in (None, ended.code), ended
        return ended

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.dir / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        return json.loads((self.dir / "summary.json").read_text())


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    def __repr__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


def assert_accounted(lines: list[dict[str, Any]], max_staleness: int) -> None:
    """Rules 1 and 2, at every step."""
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        done = line["buffer/groups_trained"] + line["buffer/groups_dropped"]
        assert line["buffer/groups_submitted"] == done + line["buffer/groups_in_flight"]
        assert line["buffer/staleness_max"] <= max_staleness


def listening_addresses(session: int) -> set[str]:
    """At which processes of a run take connections."""
    pids, found = living(session), psutil.net_connections("tcp")
    return {c.laddr.ip for c in found if c.pid in pids and c.status == psutil.CONN_LISTEN}
