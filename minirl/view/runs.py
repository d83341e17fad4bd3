"""`minirl runs`, `minirl inspect` and the summary of a run: rows of text from run directories.

Takes a folder of runs, one run and a step, or a summary; gives rows for a table. Leaves out: how
they are printed (cli, console, report), and everything that needs a model or a run's processes.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minirl.errors import RecipeError
from minirl.run_dir import Line, RunDir

Rows = list[tuple[str, ...]]
SUMMARY = {  # rows at the end of a run; one whose value is not known is left out
    "held-out accuracy": "{measured}",
    "steps": "{steps} in {seconds:.0f} s",
    "trained tokens": "{trained_tokens:,}",
    "max staleness": "{staleness_max:.0f} (allowed: {max_staleness_allowed})",
    "trajectories over several versions": "{multi_version_trajectories:,}",
    "largest logprob gap, vLLM to trainer": "{logprob_gap_max:.1e}",
    "versions with a measured gap": "{versions_measured}",
    "groups dropped": "{dropped}",
    "balance": "{balance}",
    "run directory": "{run_dir}",
    "try next": "{try_next}",
}


def list_runs(folder: Path) -> list[RunDir]:
    """The newest first, those of sweeps (RECIPE/VALUES/seed-0) too."""
    paths = {p.parent for n in (1, 2, 3) for p in folder.glob("*/" * n + "recipe.toml")}
    found = [RunDir(path) for path in paths if not paths & {*path.parents}]  # else a run's evals
    return sorted(found, key=lambda run: run.changed, reverse=True)


def short_names(runs: Sequence[RunDir]) -> list[str]:
    """Without the folders that all of them are in."""
    paths = [run.path.resolve() for run in runs]
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    return [str(path.relative_to(folder)) for path in paths]


def run_rows(runs: Sequence[RunDir]) -> Rows:
    rows: Rows = [("RUN", "STATE", "STEP", "REWARD", "ACCURACY", "CHANGED")]
    for name, run in zip(short_names(runs), runs, strict=True):
        done = f"{len(run.metrics)}/{run.recipe.get('train.steps', '?')}"
        reward = formatted(newest(run.metrics, "reward/mean"), ".3f")
        right = formatted(newest(run.evals, "accuracy"), ".1%")
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
        rows.append((name, run.state, done, reward, right, changed))
    return rows


def newest(lines: Sequence[Line], name: str) -> Any:
    return next((line[name] for line in reversed(lines) if line.get(name) is not None), None)


def formatted(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "—"


def summary_rows(summary: Line) -> dict[str, str]:
    texts = {"measured": measured(summary), "dropped": drops_text(summary.get("drops") or {})}
    known = {name: v for name, v in {**texts, **summary}.items() if v not in (None, "")}
    rows = {}
    for name, form in SUMMARY.items():
        with suppress(KeyError, ValueError):
            rows[name] = form.format_map(known)
    return rows


def so_far(run: RunDir) -> Line:
    """In place of the summary of a run that is under way, or failed."""
    last, start = run.metrics[-1] if run.metrics else {}, "buffer/dropped_"
    drops = {k.removeprefix(start): n for k, n in last.items() if k.startswith(start)}
    return {"steps": len(run.metrics), "seconds": last.get("seconds", 0.0), "drops": drops}


def measured(summary: Line) -> str:
    """The first and the last accuracy, each with its version. Empty: nothing was evaluated."""
    known = summary.get("accuracies") or []
    text = ", ".join(f"{y:.1%} at version {version}" for version, y in known[:1] + known[1:][-1:])
    is_old = known and known[-1][0] < summary.get("version", summary.get("steps", 0))
    return f"{text}; not evaluated since" if is_old else text


def drops_text(drops: Mapping[str, int]) -> str:
    """The commonest reason first."""
    known = ((reason, n) for reason, n in Counter(drops).most_common() if n)
    return ", ".join(f"{n:,.0f} {reason.replace('_', ' ')}" for reason, n in known)


def find_step(run: RunDir, step: int | None) -> Line:
    batches = {line["step"]: line for line in run.batches}
    wanted = max(batches, default=0) if step is None else step
    if wanted not in batches:
        remedy = f"it has {min(batches)} to {max(batches)}" if batches else "let it train a step"
        raise RecipeError("--step", wanted, f"{run.path} has no such step", remedy)
    return batches[wanted]


def trajectory_rows(line: Line) -> Rows:
    rows: Rows = [("GROUP", "PLACE", "REWARD", "VERSIONS", "TOKENS", "STOP")]
    for group in line.get("groups", []):
        columns = (group.get(name, []) for name in ("rewards", "versions", "lengths", "stops"))
        for place, (reward, versions, length, stop) in enumerate(zip(*columns, strict=False)):
            values = (group["id"], place, f"{reward:g}", version_range(versions), length, stop)
            rows.append(tuple(map(str, values)))
    return rows


def version_range(versions: Sequence[int]) -> str:
    return "–".join(map(str, dict.fromkeys(versions)))


def sample_texts(run: RunDir, step: int) -> Iterator[str]:
    """The readable answers that were kept of a step."""
    for sample in run.samples:
        if sample["step"] == step:
            yield (
                f"group {sample.get('group')}, reward {formatted(sample.get('reward'), 'g')}, "
                f"versions {version_range(sample.get('versions', []))}, {sample.get('stop')}\n"
                f"  prompt: {prompt_text(sample.get('prompt'))}\n"
                f"  answer: {sample.get('answer')}\n  reference: {sample.get('reference')}"
            )


def prompt_text(prompt: object) -> str:
    """A prompt is text, or chat messages."""
    if isinstance(prompt, (list, tuple)):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in prompt)
    return str(prompt)
