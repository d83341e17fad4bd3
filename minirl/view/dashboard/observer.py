"""From a loop that runs to snapshots. Reads only: counts, the board, the metrics of past steps.

    sample   five times a second: what each worker does, into the strips
    look     once a second: the whole Snapshot

Both run beside the loop, on the reporter's thread. They copy what could change under them in one
call each, so the loop takes no lock for them.
"""

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from minirl.devices import gpu_memory_bytes
from minirl.loop import Loop
from minirl.shm.board import State, Total
from minirl.tools.doctor import free_memory_bytes
from minirl.view.dashboard.lines import RECENT_STEPS, curves_of, mean_step_s, sample_of, verdict
from minirl.view.dashboard.snapshot import (
    BUCKET_S,
    NUM_BUCKETS,
    RARE,
    RUNNING,
    STARTING,
    Curve,
    Lane,
    Note,
    Snapshot,
)
from minirl.workers import Worker

LETTERS = {
    State.STARTING: "s",
    State.WAITING_FOR_PROMPTS: ".",
    State.GENERATING: "g",
    State.RELOADING: "r",
    State.WAITING_FOR_BATCH: ".",
    State.TRAINING: "t",
    State.PUBLISHING: "p",
    State.SAVING: "c",
    State.WAITING_FOR_ANSWERS: ".",
    State.GRADING: "k",
}
WORDS = {
    State.WAITING_FOR_BATCH: "waiting for a batch",
    State.SAVING: "saving a checkpoint",
}
SPEED_S = 10.0  # what "tokens a second now" covers
MAX_NOTE = 400


class Notes(Protocol):
    """What a person was told, newest last."""

    @property
    def recent(self) -> Iterable[tuple[float, str]]: ...


class Strip:
    """What one worker did, a letter a bucket."""

    def __init__(self) -> None:
        self.letters: deque[str] = deque(maxlen=NUM_BUCKETS)
        self.idle: deque[tuple[float, float]] = deque(maxlen=NUM_BUCKETS)  # (when, idle so far)
        self._seen: Counter[str] = Counter()
        self._event = ""

    def saw(self, letter: str, event: str) -> None:
        self._seen[letter] += 1
        self._event = event or self._event

    def close_buckets(self, num: int, now: float, idle_s: float) -> None:
        was_rare = bool(self.letters) and self.letters[-1] in RARE
        letter = self._seen.most_common(1)[0][0] if self._seen else " "
        if self._event and not was_rare:  # two in a row would hide what lies between
            letter = self._event
        self.letters.extend(letter * min(num, NUM_BUCKETS))
        self.idle.append((now, idle_s))
        self._seen.clear()
        self._event = ""

    def idle_share(self) -> float:
        if len(self.idle) < 2:
            return 0.0
        (start, before), (end, after) = self.idle[0], self.idle[-1]
        return min(1.0, max(0.0, (after - before) / max(1e-9, end - start)))


class Observer:
    def __init__(self, loop: Loop, notes: Notes, name: str):
        self.loop, self.notes, self.name = loop, notes, name
        self.board = loop.fleet.board
        self.workers = loop.engines + loop.ranks
        self._strips = {worker.name: Strip() for worker in self.workers}
        self._bucket_ends = time.monotonic() + BUCKET_S
        self._reloads = [self.board.total(w.row, Total.RELOADS) for w in loop.engines]
        self._version = loop.buffer.version
        self._tokens: deque[tuple[float, float]] = deque()
        self._num_lines = -1
        self._of_lines: dict[str, Any] = {}  # what only a new step changes
        self._host = socket.gethostname()
        self._last_step_at = time.monotonic()

    # -- five times a second

    def sample(self) -> None:
        now = time.monotonic()
        events = self._events()
        num_closed = 0
        if now >= self._bucket_ends:
            num_closed = 1 + int((now - self._bucket_ends) / BUCKET_S)
            self._bucket_ends += num_closed * BUCKET_S
        for worker in self.workers:
            strip = self._strips[worker.name]
            letter = LETTERS[self.board.row(worker.row).state]
            strip.saw(letter, events.get(worker.name, letter if letter in RARE else ""))
            if num_closed:
                idle_s = self.board.total(worker.row, Total.IDLE_S)
                strip.close_buckets(num_closed, now, idle_s)

    def _events(self) -> dict[str, str]:
        """Reloads and publications since the last look: most are over before one sees them."""
        events = {}
        for i, worker in enumerate(self.loop.engines):
            reloads = self.board.total(worker.row, Total.RELOADS)
            if reloads > self._reloads[i]:
                events[worker.name] = LETTERS[State.RELOADING]
                self._reloads[i] = reloads
        if self.loop.buffer.version > self._version:
            self._version = self.loop.buffer.version
            events[self.loop.ranks[0].name] = LETTERS[State.PUBLISHING]
        return events

    # -- once a second

    def look(self, cost: float = 0.0) -> Snapshot:
        loop, buffer, config = self.loop, self.loop.buffer, self.loop.config
        of_lines = self._look_at_lines()
        is_up = len(loop.up) == len(self.workers)
        accuracies = list(loop.log.accuracies)
        return Snapshot(
            name=self.name,
            host=self._host,
            pid=os.getpid(),
            time=time.time(),
            state=RUNNING if is_up else STARTING,
            doing=self._doing(is_up),
            step=loop.step,
            steps=config.train.steps,
            version=buffer.version,
            seconds=loop.log.seconds if is_up else 0.0,
            eta_s=self._eta_s(of_lines["step_s"]),
            verdict=of_lines["verdict"],
            lanes=[self._lane(worker) for worker in self.workers],
            slots=self._slots(),
            batch_size=buffer.batch_size,
            staleness=self._staleness(),
            max_staleness=config.buffer.max_staleness,
            max_new_tokens=config.rollout.max_new_tokens,
            tokens_per_s=self._tokens_per_s(),
            curves=of_lines["curves"],
            last=of_lines["last"],
            accuracies=Curve([float(v) for v, _ in accuracies], [a for _, a in accuracies]),
            free_bytes=free_memory_bytes() or 0,
            samples=[sample_of(line) for line in list(loop.log.recent_samples)],
            notes=[Note(s, text[:MAX_NOTE]) for s, text in self.notes.recent],
            cost=cost,
        )

    def _look_at_lines(self) -> dict[str, Any]:
        lines = self.loop.log.metrics
        num = len(lines)
        if num != self._num_lines:
            self._num_lines, self._last_step_at = num, time.monotonic()
            devices, recent = self.loop.config.devices, lines[max(0, num - RECENT_STEPS) : num]
            self._of_lines = {
                "curves": curves_of(lines[:num]),
                "last": dict(lines[num - 1]) if num else {},
                "step_s": mean_step_s(recent),
                "verdict": verdict(
                    recent, devices.rollout, devices.train, self._word, self._is_synchronous
                ),
            }
        return self._of_lines

    @property
    def _word(self) -> str:
        return "GPU" if self.loop.engines[0].placement.kind == "cuda" else "process"

    @property
    def _is_synchronous(self) -> bool:
        return self.loop.config.is_synchronous

    def _doing(self, is_up: bool) -> str:
        loop = self.loop
        if not is_up:
            missing = [w.name for w in self.workers if w.name not in loop.up]
            return f"starting {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}"
        if loop.is_interrupted:  # one line of notes may not be enough to keep this in sight
            at = "saving a checkpoint" if loop.is_saving else "finishing the step, then saving"
            return f"{at}; Ctrl-C ends it now"
        if loop.is_saving:
            return "saving a checkpoint"
        evaluation = loop.evaluation
        if evaluation is not None:
            done = len(evaluation.rewards) + evaluation.num_failed
            return f"evaluating {done}/{len(evaluation.prompts)}"
        return ""

    def _eta_s(self, step_s: float | None) -> float | None:
        left = self.loop.config.train.steps - self.loop.step
        if step_s is None or left <= 0:
            return None
        return max(0.0, left * step_s - (time.monotonic() - self._last_step_at))

    def _lane(self, worker: Worker) -> Lane:
        row, strip = self.board.row(worker.row), self._strips[worker.name]
        words = WORDS.get(row.state, row.state.name.lower().replace("_", " "))
        return Lane(
            name=worker.name,
            state=words,
            since_s=round(row.since_s, 1),
            beat_s=round(row.beat_s, 1),
            version=row.version,
            running=row.running,
            idle=round(strip.idle_share(), 3),
            strip="".join(strip.letters),
            memory_bytes=_memory_bytes(worker),
        )

    def _slots(self) -> dict[str, int]:
        buffer, sampling = self.loop.buffer, len(self.loop.sampling)
        running, ready, free = buffer.num_running, buffer.num_ready, buffer.num_free
        training = buffer.num_in_flight - buffer.num_running - buffer.num_ready
        return {
            "sampling": min(sampling, running),
            "grading": max(0, running - sampling),
            "ready": ready,
            "training": max(0, training),
            "free": free,
        }

    def _staleness(self) -> list[int]:
        total: Counter[int] = Counter()
        for counts in list(self.loop.log.recent_ages):
            total.update(dict(enumerate(counts)))
        return [total[age] for age in range(max(total, default=-1) + 1)]

    def _tokens_per_s(self) -> float:
        now = time.monotonic()
        rows = [worker.row for worker in self.loop.engines]
        self._tokens.append((now, sum(self.board.total(row, Total.TOKENS) for row in rows)))
        while len(self._tokens) > 2 and self._tokens[0][0] < now - SPEED_S:
            self._tokens.popleft()
        (start, before), (end, after) = self._tokens[0], self._tokens[-1]
        return (after - before) / (end - start) if end > start else 0.0


def _memory_bytes(worker: Worker) -> int:
    """Of its GPUs, else what is resident: shared memory counts for each that touched it."""
    if worker.placement.gpus:
        return sum(gpu_memory_bytes(gpu) for gpu in worker.placement.gpus)
    try:
        pages = Path(f"/proc/{worker.pid}/statm").read_text().split()[1]
    except (OSError, AttributeError, IndexError):  # it is being replaced
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
