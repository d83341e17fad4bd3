"""What there is to see of a run at one moment: one record, Status, and the file it is saved in.

Takes a loop that runs, gives a Status; the live dashboard and `minirl watch` draw it. status.json
is replaced once a second; a reader ignores fields that it does not know. Reads only: the loop takes
no lock for it. Leaves out: how it looks (dashboard.py).
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from minirl.balance import measured
from minirl.run_dir import replacing
from minirl.shm.board import Row, State
from minirl.view.runs import prompt_text
from minirl.workers import Worker

if TYPE_CHECKING:
    from minirl.loop import Loop

Point = tuple[float, float]
Phase = Literal["starting", "running", "finished", "stopped", "failed"]

FILE = "status.json"
NUM_LETTERS = 60  # of a strip, one per second
LETTERS = dict(zip(State, "·░█▓░█▓▒░█", strict=True))  # starts, waits, works, weights, saves
SPEED = (  # metric, name, form of a value
    ("rollout/tokens_per_s", "generation", "{:,.0f} tok/s"),
    ("train/tokens_per_s", "training", "{:,.0f} tok/s"),
    ("rollout/length_mean", "length", "{:,.0f} tokens"),
    ("rollout/truncated_frac", "truncated", "{:.0%}"),
    ("train/logprob_gap", "logprob gap", "{:.1e}"),
)


@dataclass(frozen=True)
class Lane:
    name: str = ""  # of an engine or a rank
    state: str = ""  # "generating 31 at v40", "waiting for batch", …
    strip: str = ""  # one of LETTERS per second, newest last


@dataclass(frozen=True)
class Sample:
    title: str = ""
    prompt: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Status:
    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")

    name: str = ""
    time: float = 0.0  # when it was made, Unix seconds
    state: Phase = "starting"
    doing: str = ""  # what the controller waits for
    reason: str = ""  # of the end
    step: int = 0
    steps: int = 0
    seconds: float = 0.0  # since training began
    verdict: str = ""  # what limits throughput
    lanes: list[Lane] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)  # trained tokens by staleness, recent steps
    max_staleness: int = 0
    curves: dict[str, list[Point]] = field(default_factory=dict)  # by step; accuracy by version
    last: dict[str, float] = field(default_factory=dict)  # the last step's metrics
    samples: list[Sample] = field(default_factory=list)  # newest last
    notes: list[tuple[float, str]] = field(default_factory=list)  # seconds, text; newest last
    cost: float = 0.0  # CPU seconds per second that the reporter takes

    @property
    def is_over(self) -> bool:
        return self.state not in ("starting", "running")

    def save(self, run_dir: Path) -> None:
        with replacing(run_dir / FILE, sync=False) as aside:  # a sync could take seconds
            aside.write_bytes(JSON.dump_json(self))

    @staticmethod
    def read(run_dir: Path) -> "Status":
        try:
            return JSON.validate_json((run_dir / FILE).read_bytes())
        except (OSError, ValidationError):
            return Status(run_dir.name, time.time(), doing=f"no status.json in {run_dir}")


JSON = TypeAdapter(Status)


def clock(seconds: float) -> str:
    if not 0 <= seconds < 1e9:
        return "?"
    return str(timedelta(seconds=int(seconds))).removeprefix("0:").removeprefix("0")


def eta(line: dict[str, float], steps: int) -> str:
    """After the step of this metrics line, if all take as long as those before."""
    step = line.get("step") or math.nan
    return clock(line.get("seconds", 0.0) / step * (steps - step))


class Observer:
    """Turns a loop into a status, on the reporter's thread: it copies in one call what the loop
    could change meanwhile."""

    def __init__(self, loop: "Loop", name: str, notes: deque[tuple[float, str]]):
        self.loop, self.name, self._notes = loop, name, notes
        self._workers = loop.engines + loop.ranks
        self._strips = {w.name: deque[str](maxlen=NUM_LETTERS) for w in self._workers}

    def status(self, cost: float) -> Status:
        loop, log, config = self.loop, self.loop.log, self.loop.config
        lines, is_up = log.metrics[:], loop.is_ready
        word = "GPU" if loop.engines[0].placement.kind == "cuda" else "process"
        return Status(
            name=self.name,
            time=time.time(),
            state="running" if is_up else "starting",
            doing=self._doing(),
            step=loop.step,
            steps=config.train.steps,
            seconds=log.seconds if is_up else 0.0,
            verdict=measured(config, lines[-20:], word),
            lanes=[self._lane(worker) for worker in self._workers],
            slots=self._slots(),
            staleness=[sum(n) for n in zip_longest(*list(log.recent_staleness), fillvalue=0)],
            max_staleness=config.buffer.max_staleness,
            curves={**curves(lines), "eval/accuracy": list(log.accuracies)},
            last=lines[-1] if lines else {},
            samples=[_sample(line) for line in list(log.recent_samples)],
            notes=list(self._notes),
            cost=cost,
        )

    def _doing(self) -> str:
        loop, evaluation = self.loop, self.loop.groups.evaluation
        if missing := [worker.name for worker in self._workers if not worker.is_ready]:
            return f"starting {', '.join(missing)}"
        if loop.is_interrupted:
            return "finishing the step, then saving; Ctrl-C ends it now"
        return f"evaluating version {evaluation.version}" if evaluation else ""

    def _lane(self, worker: Worker) -> Lane:
        row, strip = self.loop.workers.board.row(worker.row), self._strips[worker.name]
        strip.append(LETTERS[row.state])
        return Lane(worker.name, lane_state(row), "".join(strip).rjust(NUM_LETTERS))

    def _slots(self) -> dict[str, int]:
        buffer, sampling = self.loop.buffer, self.loop.groups.num_sampling
        running, ready = buffer.num_running, buffer.num_ready
        return {
            "sampling": sampling,
            "grading": max(0, running - sampling),
            "ready": ready,
            "training": max(0, buffer.num_in_flight - running - ready),
            "free": buffer.num_free,
        }


def curves(lines: list[dict[str, float]]) -> dict[str, list[Point]]:
    """Thinned out to 240 points, always with the last step."""
    shown = lines[:: -max(1, math.ceil(len(lines) / 240))][::-1]
    names = ("reward/mean", *(metric for metric, _, _ in SPEED))
    return {name: [(line["step"], line[name]) for line in shown if name in line] for name in names}


def lane_state(row: Row) -> str:
    if row.beat_s > 30 and row.state is not State.STARTING:
        return f"{row.state.words}, silent {clock(row.beat_s)}"
    if row.state is State.GENERATING:
        return f"{row.state.words} {row.running} at v{row.version}"
    return row.state.words


def _sample(line: dict[str, Any]) -> Sample:
    """From a line of samples.jsonl; of long texts a part."""
    title = f"of step {line['step']}: reward {line['reward']:g}, wanted {line['reference']!s:.16}"
    title += f", by versions {line['versions'][0]} to {line['versions'][1]}"
    title += ", truncated" if line["stop"] == "length" else ""
    return Sample(title, prompt_text(line["prompt"])[-2000:], line["answer"][:2000])
