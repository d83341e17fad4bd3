"""Engines and verifiers without a trainer. Takes a folder of weights, gives processes to ask.

The same rollout workers and verifiers as in training, on all devices of the machine: vLLM loads the
folder's own weights. However a session ends, nothing of it is left but its logs.
"""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from minirl import devices
from minirl.config import Config
from minirl.devices import free_memory_bytes
from minirl.errors import Interrupted, MinirlError, RecipeError, Stalled, WorkerDied
from minirl.launch import BODIES
from minirl.rollout.worker import RolloutSetup, Started
from minirl.shm.board import State
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.turns import Dialogue
from minirl.tasks.verifier import VerifierSetup
from minirl.workers import Died, Fleet, Role, Worker

LISTEN_S = 0.2
START_LIMIT_S = 1800.0  # loading a large model and capturing graphs takes its time
MAX_STARTS = 3


class View(Protocol):
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Session:
    fleet: Fleet
    ring: TrajectoryRing
    engines: list[Worker]
    verifiers: dict[str, Worker]
    dialogue: Dialogue | None = None  # of a task with several turns

    def wait_for_engines(self, view: View) -> None:
        """Raises with the engine's last words where it does not come up."""
        view.note(f"starting {len(self.engines)} engine{'s'[: len(self.engines) != 1]}")
        up: set[str] = set()
        began = time.monotonic()
        while len(up) < len(self.engines):
            for worker, message in self.fleet.hear(LISTEN_S):
                if isinstance(message, Started):
                    up.add(worker.name)
                elif isinstance(message, Died):
                    raise self.no_use(worker, message)
            if time.monotonic() - began > START_LIMIT_S:
                raise Stalled(f"no engine after {START_LIMIT_S:.0f} s; logs: {self.fleet.log_dir}")

    def no_use(self, worker: Worker, death: Died) -> MinirlError:
        words = self.fleet.last_words(worker)
        how = f"{worker.name}: {death.how}; its log is in {self.fleet.log_dir}"
        return MinirlError(how) if death.is_final else WorkerDied(f"{how}\n{words}")

    def check_beats(self, limit_s: float) -> None:
        """Rule 8: an engine that hangs ends the session."""
        for worker in self.engines:
            row = self.fleet.board.row(worker.row)
            limit = START_LIMIT_S if row.state is State.STARTING else limit_s
            if row.beat_s > limit and row.state is not State.WAITING_FOR_PROMPTS:
                raise Stalled(
                    f"{worker.name} gave no sign of life for {row.beat_s:.0f} s; "
                    f"stacks:\n{self.fleet.stacks()}"
                )


@contextmanager
def session(
    config: Config,
    folder: Path,
    kind: str,
    available: int,
    log_dir: Path,
    num_cells: int,
    dialogue: Dialogue | None = None,
    is_graded: bool = True,
) -> Iterator[Session]:
    """`tasks.verifiers` of them grade, unless nothing is to be graded."""
    num_verifiers = config.tasks.verifiers if is_graded else 0
    check_room(config, num_cells)
    places = devices.place_engines(config, kind, available)
    with (
        _signals(),
        _processes(config, folder, places, log_dir, num_cells, dialogue, num_verifiers) as there,
    ):
        yield there


@contextmanager
def _processes(
    config: Config,
    folder: Path,
    places: list[devices.Placement],
    log_dir: Path,
    num_cells: int,
    dialogue: Dialogue | None,
    num_verifiers: int,
) -> Iterator[Session]:
    log_dir.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix="minirl-"))
    fleet = Fleet(log_dir, len(places) + num_verifiers)
    try:
        ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
        for rank, place in enumerate(places):
            seed = config.seed * 1000 + rank + 1  # engines must not sample alike
            setup = RolloutSetup(config, str(folder), place.kind, seed, ring, None, dialogue)
            own = devices.with_own_temp(place, temp)
            fleet.spawn(Role.ROLLOUT, rank, BODIES[Role.ROLLOUT], setup, own)
        for rank in range(num_verifiers):
            quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            grader = VerifierSetup(config, str(folder), ring, dialogue)
            own = devices.Placement("cpu", env=quiet)
            fleet.spawn(Role.VERIFY, rank, BODIES[Role.VERIFY], grader, own)
        verifiers = {worker.name: worker for worker in fleet.of(Role.VERIFY)}
        yield Session(fleet, ring, fleet.of(Role.ROLLOUT), verifiers, dialogue)
    finally:
        fleet.kill()
        devices.sweep_temp(temp)
        shutil.rmtree(temp, ignore_errors=True)


def check_room(config: Config, num_cells: int) -> None:
    needed = TrajectoryRing.bytes_needed(num_cells, config.max_tokens_per_trajectory)
    free = free_memory_bytes()
    if free is not None and needed > free:
        gib = [f"{n / 2**30:.1f} GiB" for n in (needed, free)]
        rule = f"{num_cells} answers in flight would take {gib[0]} of the {gib[1]} that are free"
        raise RecipeError(
            "rollout.max_new_tokens",
            config.rollout.max_new_tokens,
            rule,
            "lower it, rollout.max_num_seqs or --k",
        )


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, and both also where a shell has had them ignored."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
