"""`minirl runs`, `inspect` and `diff`: rows of text from run directories' files alone."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from minirl.errors import RecipeError
from minirl.run_dir import Line, RunDir, is_run
from minirl.view.report.answers import plain
from minirl.view.report.families import differing, shown
from minirl.view.report.page import machine_rows, result_rows

Rows = list[tuple[str, ...]]
DEPTH = 3  # of run directories: sweeps/<recipe>/<values>/seed-0
RUN_COLUMNS = ("RUN", "STATE", "STEP", "REWARD", "ACCURACY", "AGE")
TRAJECTORY_COLUMNS = ("GROUP", "PLACE", "REWARD", "VERSIONS", "TOKENS", "")


# -- runs


def list_runs(folder: Path) -> list[RunDir]:
    """The newest last, those of sweeps too. A run directory itself is a list of one."""
    if not folder.is_dir():
        rule = "is a file" if folder.exists() else "no such directory"
        raise RecipeError("DIR", str(folder), rule, "name the folder that holds run directories")
    if is_run(folder):
        return [RunDir(folder)]
    return sorted(map(RunDir, _runs_below(folder, DEPTH)), key=lambda run: run.changed)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if not path.is_dir() or path.is_symlink():
            continue
        if is_run(path):
            yield path
        elif depth > 1:
            yield from _runs_below(path, depth - 1)


def told_apart(runs: Sequence[RunDir]) -> list[str]:
    """Names: as much of each path as tells one run from another."""
    paths = [run.path.resolve() for run in runs]
    for num in range(1, max((len(path.parts) for path in paths), default=1)):
        names = [str(Path(*path.parts[-num:])) for path in paths]
        if len({*names}) == len({*paths}):
            return names
    return [str(path) for path in paths]


def run_rows(runs: Sequence[RunDir], now: float | None = None) -> Rows:
    now = time.time() if now is None else now
    named = zip(runs, told_apart(runs), strict=True)
    return [RUN_COLUMNS, *(_run_row(run, name, now) for run, name in named)]


def _run_row(run: RunDir, name: str, now: float) -> tuple[str, ...]:
    steps = run.recipe.get("train.steps")
    step = f"{len(run.metrics)}/{steps}" if steps else f"{len(run.metrics)}"
    reward, accuracy = run.last("reward/mean"), run.accuracy
    return (
        name,
        str(run.state),
        step,
        "—" if reward is None else f"{reward:.3f}",
        "—" if accuracy is None else f"{accuracy:.1%}",
        age(now - run.changed),
    )


def age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# -- inspect


def find_step(run: RunDir, step: int | None) -> Line:
    """The last, if none is asked for."""
    steps = sorted({line["step"] for line in run.batches or run.samples})
    if not steps:
        rule = "has no batches.jsonl or samples.jsonl with a whole line"
        raise RecipeError("RUN", str(run.path), rule, "let it train a step")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        remedy = f"it has {steps[0]} to {steps[-1]}"
        raise RecipeError("--step", wanted, f"{run.name} has no such step", remedy)
    return next((x for x in run.batches if x["step"] == wanted), {"step": wanted})


def trajectory_rows(line: Line, group: int | None = None) -> Rows:
    rows: Rows = [TRAJECTORY_COLUMNS]
    for entry in line.get("groups", []):
        if group is None or entry.get("id") == group:
            rows += _group_rows(entry)
    if group is not None and len(rows) == 1:
        known = [str(entry.get("id")) for entry in line.get("groups", [])]
        remedy = f"it trained {', '.join(known[:12])}{', …' if len(known) > 12 else ''}"
        raise RecipeError("--group", group, f"step {line['step']} has no such group", remedy)
    return rows


def _group_rows(entry: Line) -> Iterator[tuple[str, ...]]:
    columns = [entry.get(name, []) for name in ("rewards", "versions", "lengths", "stops")]
    for place, (reward, (head, tail), length, stop) in enumerate(zip(*columns, strict=False)):
        versions = f"{head}" if head == tail else f"{head}–{tail}"
        yield (
            str(entry.get("id")),
            str(place),
            f"{reward:g}",
            versions,
            str(length),
            "" if stop == "stop" else stop,
        )


def sample_texts(run: RunDir, step: int, group: int | None = None) -> Iterator[str]:
    """The readable answers that were kept of a step."""
    for sample in run.samples:
        if sample["step"] != step or (group is not None and sample.get("group") != group):
            continue
        versions = sample.get("versions", [])
        facts = f"group {sample.get('group')}, reward {shown(sample.get('reward'))}, "
        facts += f"versions {'–'.join(map(str, dict.fromkeys(versions)))}, {sample.get('stop')}"
        yield (
            f"{facts}\n  prompt: {plain(sample.get('prompt'))}\n"
            f"  answer: {sample.get('answer')}\n  reference: {sample.get('reference')}"
        )


# -- diff


def diff_rows(a: RunDir, b: RunDir) -> tuple[Rows, Rows, Rows]:
    """Recipe, result, machine: what differs in each."""
    recipe: Rows = [
        (key, shown(a.recipe.get(key)), shown(b.recipe.get(key)))
        for key in differing([a.recipe, b.recipe])
    ]
    pairs = zip(result_rows(a), result_rows(b), strict=True)
    result: Rows = [(name, mine, theirs) for (name, mine), (_, theirs) in pairs if mine != theirs]
    ours, other = machine_rows(a), machine_rows(b)
    keys = dict.fromkeys([*ours, *other])
    machine: Rows = [
        (key, ours.get(key, "—"), other.get(key, "—"))
        for key in keys
        if key != "started" and ours.get(key) != other.get(key)
    ]
    of_recipe = ("seed", "allowed staleness")
    return recipe, [row for row in result if row[0] not in of_recipe], machine
