"""Does a run that was killed and resumed end as if nothing had happened? Takes a recipe, gives one
finding for each thing that is compared.

The recipe is run twice, on CPU and at η = 0, where one seed gives one run: once whole, and once
with its controller killed (SIGKILL) at a step after a checkpoint, so that a step is done twice, and
then started again in its run directory. Compared, bit for bit: every metric of every step but those
of a clock, and all that the last checkpoint holds: weights, optimizer, generators, prompts.

Leaves out: how it is shown (cli/verify_resume.py).
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.config import Config
from minirl.errors import MinirlError, RecipeError
from minirl.metrics import is_timed
from minirl.run_dir import read_lines

FORCED = ("buffer.max_staleness=0", "devices.kind=cpu", "checkpoint.every_s=0")
POLL_S = 0.02
STATE_KEYS = ("step", "history", "consumed_below", "consumed_above", "in_flight")


@dataclass(frozen=True)
class Finding:
    what: str
    is_equal: bool
    detail: str


def plan(config: Config) -> tuple[int, int]:
    """Steps between checkpoints, and the step after which the run is killed: one past the last
    checkpoint, with steps left to do."""
    steps = config.train.steps
    if steps < 3:
        rule = "a run of fewer than 3 steps cannot be broken after a checkpoint"
        raise RecipeError("train.steps", steps, rule, "pass --set train.steps=6")
    every = max(1, steps // 3)
    return every, every + 1


def verify(
    recipe: Path, overrides: Sequence[str], config: Config, folder: Path, say: Callable[[str], None]
) -> list[Finding]:
    every, killed_at = plan(config)
    settings = [*overrides, *FORCED, f"checkpoint.every={every}", "checkpoint.keep=2"]
    whole, resumed = folder / "whole", folder / "resumed"
    say(f"a whole run of {config.train.steps} steps, then one that is killed after {killed_at}")
    _end(_start(recipe, settings, whole), "the whole run")
    _kill_after(_start(recipe, settings, resumed), resumed / "metrics.jsonl", killed_at)
    say(f"killed after step {len(read_lines(resumed / 'metrics.jsonl'))}, starting it again")
    _end(_start(recipe, settings, resumed), "the resumed run")
    return [*compare(whole, resumed)]


def _start(recipe: Path, settings: Sequence[str], run_dir: Path) -> subprocess.Popen[str]:
    changes = [part for setting in settings for part in ("--set", setting)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "minirl.cli", "train", str(recipe)),
            *("--run-dir", str(run_dir), *changes),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _end(process: subprocess.Popen[str], what: str) -> None:
    try:
        out, _ = process.communicate()
    finally:
        process.kill()
    if process.returncode != 0:
        last = out.strip().splitlines()[-1] if out.strip() else "no word"
        raise MinirlError(f"{what} ended with exit code {process.returncode}: {last}")


def _kill_after(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """Its workers die with it."""
    try:
        while len(read_lines(metrics)) < step:
            if process.poll() is not None:
                _end(process, "the run to be killed")
                raise MinirlError("the run was over before it could be killed")
            time.sleep(POLL_S)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


# Comparing -------------------------------------------------------------------------------------


def compare(whole: Path, other: Path) -> Iterator[Finding]:
    for name in ("metrics", "evals"):
        lines = [read_lines(run / f"{name}.jsonl") for run in (whole, other)]
        yield _compare_lines(name, *lines)
    ends = [sorted((run / "checkpoints").glob("step-*"))[-1:] for run in (whole, other)]
    if not all(ends) or ends[0][0].name != ends[1][0].name:
        yield Finding("last checkpoint", False, f"{ends[0]} against {ends[1]}")
        return
    one, two = ends[0][0], ends[1][0]
    names = {str(p.relative_to(f)) for f in (one, two) for p in f.rglob("*.safetensors")}
    for name in sorted(names):
        yield _compare_tensors(name, one / name, two / name)
    states = [json.loads((folder / "trainer/state.json").read_text()) for folder in (one, two)]
    differing = [key for key in STATE_KEYS if states[0].get(key) != states[1].get(key)]
    detail = f"differ in {', '.join(differing)}" if differing else ", ".join(STATE_KEYS)
    yield Finding("prompts and counts", not differing, detail)


def _compare_lines(what: str, one: list[dict[str, Any]], two: list[dict[str, Any]]) -> Finding:
    steps = [[line["step"] for line in lines] for lines in (one, two)]
    if steps[0] != steps[1]:
        return Finding(what, False, f"steps {steps[0]} against {steps[1]}")
    num_values = 0
    for a, b in zip(one, two, strict=True):
        names = sorted(name for name in a.keys() | b.keys() if not is_timed(name))
        for name in names:
            if a.get(name) != b.get(name):
                detail = f"step {a['step']}: {name} is {a.get(name)} against {b.get(name)}"
                return Finding(what, False, detail)
        num_values += len(names)
    return Finding(what, True, f"{len(one)} steps, {num_values} values, clocks left out")


def _compare_tensors(name: str, one: Path, two: Path) -> Finding:
    from safetensors.torch import load_file

    if not (one.is_file() and two.is_file()):
        return Finding(name, False, "only one run has it")
    ours, theirs = load_file(one), load_file(two)
    if ours.keys() != theirs.keys():
        return Finding(name, False, f"other tensors: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    for tensor, values in ours.items():
        if values.dtype != theirs[tensor].dtype or not values.equal(theirs[tensor]):
            return Finding(name, False, f"{tensor} differs")
    return Finding(
        name, True, f"{len(ours)} tensors, {sum(t.numel() for t in ours.values())} values"
    )
