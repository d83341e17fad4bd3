"""What there is to see of a run at one moment: one record, Status, and the file it is saved in.

Takes a loop that runs, gives a Status; the live dashboard and `minirl watch` draw it. status.json
is replaced once a second, so that a reader finds a whole one; fields that a reader does not know
are ignored, and a file that cannot be read is None. Reads only: the loop takes no lock for it.

Leaves out: how it looks (dashboard.py).
"""

import math
import os
import socket
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from minirl.balance import balance
from minirl.devices import free_memory_bytes, gpu_memory_bytes
from minirl.shm.board import State, Total

if TYPE_CHECKING:
    from minirl.loop import Loop
    from minirl.workers import Worker

Point = tuple[float, float]

FILE = "status.json"
STRIP_S = 60.0  # what a lane's strip covers
LETTER_S = 0.5
NUM_LETTERS = int(STRIP_S / LETTER_S)
RARE = "rpc"  # reloads, publications, checkpoints: most are too short to be seen by a look
LETTERS = dict(zip(State, "s.gr.tpc.k", strict=True))
WORDS = {State.WAITING_FOR_BATCH: "waiting for a batch", State.SAVING: "saving a checkpoint"}
CURVES = (
    "reward/mean",
    "rollout/tokens_per_s",
    "train/tokens_per_s",
    "rollout/length_mean",
    "rollout/truncated_frac",
    "train/logprob_gap",
)
MAX_POINTS = 240  # of a curve
MAX_PROMPT, MAX_ANSWER = 1000, 2000  # characters
RECENT_STEPS = 20  # for the ETA, the verdict and the histogram of staleness
SPEED_LETTERS = 20  # "tokens per second now" covers the last 10 s
STEP_TEXT = (
    "reward {reward/mean:.3f}  "
    "staleness {buffer/staleness_mean:.2f} (max {buffer/staleness_max:.0f})  "
    "gen {rollout/tokens_per_s:,.0f} tok/s  train {train/tokens_per_s:,.0f} tok/s"
)


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self not in (Phase.STARTING, Phase.RUNNING)


@dataclass(frozen=True)
class Lane:
    """One engine or rank."""

    name: str = ""
    state: str = ""  # "generating", "waiting for a batch", …
    since_s: float = 0.0
    beat_s: float = 0.0  # since its last heartbeat
    version: int = -1
    running: int = 0  # sequences
    idle: float = 0.0  # share of the strip's time
    strip: str = ""  # one of LETTERS per half second, oldest first
    memory_bytes: int = 0


@dataclass(frozen=True)
class Sample:
    step: int = 0
    prompt: str = ""
    answer: str = ""
    reference: str = ""
    reward: float = 0.0
    versions: list[int] = field(default_factory=list)  # of the first and the last token
    stop: str = ""


@dataclass(frozen=True)
class Status:
    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")

    name: str = ""
    host: str = ""
    pid: int = 0
    time: float = 0.0  # when it was made, Unix seconds
    state: Phase = Phase.STARTING
    reason: str = ""  # of the end
    doing: str = ""  # what the controller is at or waits for
    step: int = 0
    steps: int = 0
    version: int = 0
    seconds: float = 0.0  # since training began
    eta_s: float | None = None
    verdict: str = ""  # what limits throughput
    lanes: list[Lane] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    batch_size: int = 0
    staleness: list[int] = field(default_factory=list)  # trained tokens by staleness, recent steps
    max_staleness: int = 0
    max_new_tokens: int = 0
    tokens_per_s: float = 0.0  # generated in the last seconds
    curves: dict[str, list[Point]] = field(default_factory=dict)  # by step; accuracy by version
    last: dict[str, float] = field(default_factory=dict)  # the last step's metrics
    free_bytes: int = 0
    samples: list[Sample] = field(default_factory=list)  # newest last
    notes: list[tuple[float, str]] = field(default_factory=list)  # seconds, text; newest last
    cost: float = 0.0  # CPU seconds per second that the reporter takes

    def save(self, run_dir: Path) -> None:
        """Atomic, but without fsync: during a checkpoint that could take seconds."""
        aside = run_dir / f".{FILE}.tmp"
        aside.write_bytes(JSON.dump_json(self))
        os.replace(aside, run_dir / FILE)

    @staticmethod
    def read(run_dir: Path) -> "Status | None":
        try:
            return JSON.validate_json((run_dir / FILE).read_bytes())
        except (OSError, ValidationError):
            return None


JSON = TypeAdapter(Status)


def step_text(line: dict[str, Any]) -> str:
    """A step in one plain line."""
    return STEP_TEXT.format_map(defaultdict(lambda: math.nan, line))


def sample_of(line: dict[str, Any]) -> Sample:
    """From a line of samples.jsonl. A long answer keeps its two ends: the result is at the end."""
    prompt, answer = line["prompt"], line["answer"]
    if not isinstance(prompt, str):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt)
    if len(answer) > MAX_ANSWER:
        answer = f"{answer[: MAX_ANSWER // 2]} […] {answer[-MAX_ANSWER // 2 :]}"
    known = {name: line[name] for name in ("step", "reward", "versions", "stop")}
    reference = str(line["reference"])[:200]
    return Sample(prompt=prompt[-MAX_PROMPT:], answer=answer, reference=reference, **known)


@dataclass(frozen=True)
class Look:
    """What all workers did at one moment."""

    time: float
    tokens: float  # generated so far
    letters: dict[str, str]
    idle_s: dict[str, float]  # so far
    events: dict[str, float]  # reloads and publications so far: most are too short to be seen


class Observer:
    """Turns a loop into statuses. `sample` is called several times a second, `status` once, both on
    the reporter's thread: they copy in one call what the loop could change meanwhile."""

    def __init__(self, loop: "Loop", name: str, notes: deque[tuple[float, str]]):
        self.loop, self.name, self._notes = loop, name, notes
        self._board = loop.fleet.board
        self._workers = loop.engines + loop.ranks
        self._looks: deque[Look] = deque(maxlen=NUM_LETTERS)
        self._next_look = self._last_step = time.monotonic()
        self._lines: list[dict[str, Any]] = []
        self._curves: dict[str, list[Point]] = {}
        self._verdict = ""

    def sample(self) -> None:
        now = time.monotonic()
        while now >= self._next_look:  # more than once if it is late
            self._next_look += LETTER_S
            self._looks.append(self._look(now))

    def _look(self, now: float) -> Look:
        board, engines, rank0 = self._board, self.loop.engines, self.loop.ranks[0].name
        events = {w.name: board.total(w.row, Total.RELOADS) for w in engines}
        events[rank0] = self.loop.buffer.version
        letters = {w.name: LETTERS[board.row(w.row).state] for w in self._workers}
        last = self._looks[-1] if self._looks else None
        for name, count in events.items():
            # Two rare letters in a row would hide what lies between.
            if last and count > last.events[name] and last.letters[name] not in RARE:
                letters[name] = "p" if name == rank0 else "r"
        idle_s = {w.name: board.total(w.row, Total.IDLE_S) for w in self._workers}
        tokens = sum(board.total(w.row, Total.TOKENS) for w in engines)
        return Look(now, tokens, letters, idle_s, events)

    def status(self, cost: float) -> Status:
        loop, buffer, config = self.loop, self.loop.buffer, self.loop.config
        is_up = len(loop.up) == len(self._workers)
        self._look_at_lines()
        looks, ages = list(self._looks), list(loop.log.recent_ages)
        return Status(
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            time=time.time(),
            state=Phase.RUNNING if is_up else Phase.STARTING,
            doing=self._doing(is_up),
            step=loop.step,
            steps=config.train.steps,
            version=buffer.version,
            seconds=loop.log.seconds if is_up else 0.0,
            eta_s=self._eta_s(),
            verdict=self._verdict,
            lanes=[self._lane(worker, looks) for worker in self._workers],
            slots=self._slots(),
            batch_size=buffer.batch_size,
            staleness=[sum(counts) for counts in zip_longest(*ages, fillvalue=0)],
            max_staleness=config.buffer.max_staleness,
            max_new_tokens=config.rollout.max_new_tokens,
            tokens_per_s=_slope([(look.time, look.tokens) for look in looks[-SPEED_LETTERS:]]),
            curves={**self._curves, "eval/accuracy": list(loop.log.accuracies)},
            last=self._lines[-1] if self._lines else {},
            free_bytes=free_memory_bytes() or 0,
            samples=[sample_of(line) for line in list(loop.log.recent_samples)],
            notes=list(self._notes),
            cost=cost,
        )

    def _look_at_lines(self) -> None:
        """Curves and verdict, anew only after a step (or a rollback)."""
        lines = self.loop.log.metrics[:]
        if len(lines) == len(self._lines):
            return
        self._lines, self._last_step = lines, time.monotonic()
        every = -(-len(lines) // MAX_POINTS)
        shown = lines[:: -every or -1][::-1]  # the last one always
        for name in CURVES:
            self._curves[name] = [(line["step"], line[name]) for line in shown if name in line]
        config = self.loop.config
        found = balance(lines[-RECENT_STEPS:], config.devices.rollout, config.devices.train)
        word = "GPU" if self.loop.engines[0].placement.kind == "cuda" else "process"
        self._verdict = found.sentence(word, config.is_synchronous) if found else ""

    def _eta_s(self) -> float | None:
        recent, left = self._lines[-RECENT_STEPS:], self.loop.config.train.steps - self.loop.step
        if len(recent) < 2 or left <= 0:
            return None
        step_s = (recent[-1]["seconds"] - recent[0]["seconds"]) / (len(recent) - 1)
        return max(0.0, left * step_s - (time.monotonic() - self._last_step))

    def _doing(self, is_up: bool) -> str:
        loop = self.loop
        if not is_up:
            missing = [w.name for w in self._workers if w.name not in loop.up]
            return f"starting {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}"
        if loop.is_interrupted:
            at = "saving a checkpoint" if loop.is_saving else "finishing the step, then saving"
            return f"{at}; Ctrl-C ends it now"
        if loop.is_saving:
            return "saving a checkpoint"
        if (evaluation := loop.evaluation) is not None:
            done = len(evaluation.rewards) + evaluation.num_failed
            return f"evaluating {done}/{len(evaluation.prompts)}"
        return ""

    def _lane(self, worker: "Worker", looks: list[Look]) -> Lane:
        row, name = self._board.row(worker.row), worker.name
        idle = _slope([(look.time, look.idle_s[name]) for look in looks])
        return Lane(
            name=name,
            state=WORDS.get(row.state, row.state.words),
            since_s=round(row.since_s, 1),
            beat_s=round(row.beat_s, 1),
            version=row.version,
            running=row.running,
            idle=round(min(1.0, max(0.0, idle)), 3),
            strip="".join(look.letters[name] for look in looks),
            memory_bytes=_memory_bytes(worker),
        )

    def _slots(self) -> dict[str, int]:
        buffer, sampling = self.loop.buffer, len(self.loop.sampling)
        running, ready, in_flight = buffer.num_running, buffer.num_ready, buffer.num_in_flight
        return {
            "sampling": min(sampling, running),
            "grading": max(0, running - sampling),
            "ready": ready,
            "training": max(0, in_flight - running - ready),
            "free": buffer.num_free,
        }


def _slope(points: list[Point]) -> float:
    """Growth per second between the oldest and the newest point."""
    if len(points) < 2:
        return 0.0
    (start, before), (end, after) = points[0], points[-1]
    return (after - before) / max(1e-9, end - start)


def _memory_bytes(worker: "Worker") -> int:
    """Of its GPUs, else what is resident: shared memory counts for each process that touched it."""
    if worker.placement.gpus:
        return sum(gpu_memory_bytes(gpu) for gpu in worker.placement.gpus)
    try:
        pages = Path(f"/proc/{worker.pid}/statm").read_text().split()[1]
    except (OSError, AttributeError, IndexError):  # it is being replaced
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
