"""`minirl runs` and `minirl inspect`: rows of text from the files of run directories.

Takes a folder of runs, or one run and a step; gives rows for a table. Leaves out: how they are
printed (cli), and everything that needs a model or the processes of a run.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minirl.errors import RecipeError
from minirl.run_dir import RunDir, is_run

Line = dict[str, Any]
Rows = list[tuple[str, ...]]
DEPTH = 3  # of run directories: sweeps/<recipe>/<values>/seed-0
RUN_COLUMNS = ("RUN", "STATE", "STEP", "REWARD", "ACCURACY", "AGE")
TRAJECTORY_COLUMNS = ("GROUP", "PLACE", "REWARD", "VERSIONS", "TOKENS", "STOP")


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


def short_names(runs: Sequence[RunDir]) -> list[str]:
    """As much of each path as distinguishes it from the others."""
    paths = [run.path.resolve() for run in runs]
    for num in range(1, max((len(path.parts) for path in paths), default=1)):
        names = [str(Path(*path.parts[-num:])) for path in paths]
        if len({*names}) == len({*paths}):
            return names
    return [str(path) for path in paths]


def run_rows(runs: Sequence[RunDir], now: float | None = None) -> Rows:
    now = time.time() if now is None else now
    rows = [
        (name, str(run.state), *_result(run), age(now - run.changed))
        for run, name in zip(runs, short_names(runs), strict=True)
    ]
    return [RUN_COLUMNS, *rows]


def _result(run: RunDir) -> tuple[str, str, str]:
    """Step, reward, accuracy."""
    steps = run.recipe.get("train.steps")
    done = f"{len(run.metrics)}/{steps}" if steps else f"{len(run.metrics)}"
    reward, accuracy = last(run.metrics, "reward/mean"), last(run.evals, "accuracy")
    return done, formatted(reward, ".3f"), formatted(accuracy, ".1%")


def last(lines: Sequence[Line], name: str) -> Any:
    return next((line[name] for line in reversed(lines) if name in line), None)


def formatted(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "—"


def age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# -- inspect


def find_step(run: RunDir, step: int | None) -> Line:
    """What a step trained, by default the last one. Without batches.jsonl: only its number."""
    batches = {line["step"]: line for line in run.batches}
    steps = sorted(batches or {line["step"] for line in run.samples})
    if not steps:
        rule = "has no batches.jsonl or samples.jsonl with a whole line"
        raise RecipeError("RUN", str(run.path), rule, "let it train a step")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        remedy = f"it has {steps[0]} to {steps[-1]}"
        raise RecipeError("--step", wanted, f"{run.name} has no such step", remedy)
    return batches.get(wanted, {"step": wanted})


def trajectory_rows(line: Line, group: int | None = None) -> Rows:
    known = [entry.get("id") for entry in line.get("groups", [])]
    if group is not None and group not in known:
        more = ", …" if len(known) > 12 else ""
        remedy = f"it trained {', '.join(map(str, known[:12]))}{more}"
        raise RecipeError("--group", group, f"step {line['step']} has no such group", remedy)
    wanted = [e for e in line.get("groups", []) if group is None or e.get("id") == group]
    return [TRAJECTORY_COLUMNS, *(row for entry in wanted for row in _group_rows(entry))]


def _group_rows(entry: Line) -> Iterator[tuple[str, ...]]:
    columns = [entry.get(name, []) for name in ("rewards", "versions", "lengths", "stops")]
    for place, values in enumerate(zip(*columns, strict=False)):
        reward, versions, length, stop = values
        shown = (f"{reward:g}", version_range(versions), str(length), str(stop))
        yield (str(entry.get("id")), str(place), *shown)


def version_range(versions: Sequence[int]) -> str:
    return "–".join(map(str, dict.fromkeys(versions)))


def sample_texts(run: RunDir, step: int, group: int | None = None) -> Iterator[str]:
    """The readable answers that were kept of a step."""
    for sample in run.samples:
        if sample["step"] != step or (group is not None and sample.get("group") != group):
            continue
        reward, versions = formatted(sample.get("reward"), "g"), sample.get("versions", [])
        yield (
            f"group {sample.get('group')}, reward {reward}, "
            f"versions {version_range(versions)}, {sample.get('stop')}\n"
            f"  prompt: {prompt_text(sample.get('prompt'))}\n"
            f"  answer: {sample.get('answer')}\n  reference: {sample.get('reference')}"
        )


def prompt_text(prompt: object) -> str:
    """A prompt is text, or chat messages."""
    if isinstance(prompt, list):
        messages = [m for m in prompt if isinstance(m, dict)]
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in messages)
    return str(prompt)
