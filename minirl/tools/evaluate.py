"""`minirl eval`: how good a model is, how sure that is, and what changed between two results.

Takes a target. Gives a folder with results.jsonl (one line per problem), summary.json and
recipe.toml (docs/evaluation.md); or takes two such folders and compares them. A reward that failed
is null with its reason: it is left out of all figures, and counted. Leaves out: targets and how
their answers are collected (collect.py), how figures are computed (statistics.py).
"""

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from minirl import recipe
from minirl.config import BYTES_PER_TOKEN
from minirl.errors import RecipeError
from minirl.records import Prompt
from minirl.run_dir import JsonLines, make_results_dir, read_lines, write_text
from minirl.statistics import bootstrap, interval_of, mcnemar, pass_at, usual_ks
from minirl.tasks.check import checking
from minirl.tasks.prompts import short_prompts
from minirl.tasks.registry import make_task
from minirl.tools.collect import Attempt, Collector, Target
from minirl.view.console import Bar

RESULTS = "results.jsonl"
RING_BYTES = 2**30  # what answers in flight may take before problems are asked in turns


class Result(NamedTuple):
    """A line of results.jsonl: one problem and its answers."""

    problem: int  # its place among the task's held-out examples
    prompt: Any  # text, or chat messages
    reference: str
    answers: list[Attempt]

    @property
    def rewards(self) -> list[float]:
        return [a["reward"] for a in self.answers if a["reward"] is not None]


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    answers = [answer for result in results for answer in result.answers]
    failed = [answer["error"] for answer in answers if answer["reward"] is None]
    rewards = [result.rewards for result in results]
    found, most = interval_of(rewards), len(results[0].answers)
    counts = [(len(own), sum(reward >= 1.0 for reward in own)) for own in rewards]
    # Over problems with at least k graded answers.
    passed = {k: [pass_at(k, *own) for own in counts if own[0] >= k] for k in usual_ks(most)}
    return {
        "problems": len(results),
        "answers_each": most,
        "answers_failed": len(failed),
        "failures": sorted(set(failed))[:5],
        "accuracy": found.mean if found else None,
        "interval_95": [found.low, found.high] if found else None,
        "pass_at": {str(k): fmean(own) if own else None for k, own in passed.items()},
        "length_mean": fmean(a["length"] for a in answers),
        "truncated_frac": fmean(a["stop"] == "length" for a in answers),
    }


def summary_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """As `minirl eval` prints it."""
    accuracy = "unknown: not one answer could be graded"
    if found["accuracy"] is not None:
        low, high = found["interval_95"]
        accuracy = f"{found['accuracy']:.1%}   95 % interval {low:.1%} to {high:.1%}"
    dropped = ("answers_failed", "failures", "prompts_too_long")
    return [
        ("problems", f"{found['problems']} × {found['answers_each']} answers"),
        ("accuracy", accuracy),
        *((f"pass@{k}", f"{x:.1%}") for k, x in found["pass_at"].items() if x is not None),
        ("tokens", f"{found['length_mean']:.1f}, {found['truncated_frac']:.1%} truncated"),
        *((name.replace("_", " "), str(found[name])) for name in dropped if found[name]),
        ("results", found["folder"]),
    ]


def evaluate(target: Target, out: Path | None) -> dict[str, Any]:
    """Gives the summary. Ctrl-C leaves the problems that were done in results.jsonl."""
    config, bar = target.config, Bar("problems")
    with checking(config, recipe.find_model(config)) as check:
        check()
    name = f"{Path(config.model.path).name}-{datetime.now():%Y%m%d-%H%M%S}"
    task, folder = make_task(config), out or (target.run_dir or Path()) / "evals" / name
    make_results_dir(folder, "--out")
    bar.note(f"{config.model.path} on {config.tasks.kind}; results in {folder}")
    there = Collector(config, bar.note, folder / "logs", task)
    (folder / "recipe.toml").write_text(recipe.to_toml(config))
    problems = task.heldout(config.eval.num_prompts)
    prompts = short_prompts(config, problems, there.tokenizer)
    results = _ask(there, prompts, target.k, folder / RESULTS, bar)
    summary = {
        "target": target.name,
        "model": str(there.folder),
        "folder": str(folder),
        **summarise(results),
        "prompts_too_long": len(problems) - len(prompts),
    }
    write_text(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


def _ask(there: Collector, prompts: Sequence[Prompt], k: int, path: Path, bar: Bar) -> list[Result]:
    """All problems, each k times; the results as they come."""
    results: list[Result] = []
    done = [dict[int, Attempt]() for _ in prompts]
    file = JsonLines(path, bar.note)
    most = RING_BYTES // (BYTES_PER_TOKEN * there.config.max_tokens_per_trajectory)
    num_cells = min(k * len(prompts), most)
    with closing(file), there.running(num_cells):
        for place, (attempt, _) in there.answers([p for p in prompts for _ in range(k)]):
            own, prompt = done[place // k], prompts[place // k]
            own[place % k] = attempt
            if len(own) == k:
                example, answers = prompt.example, [own[i] for i in range(k)]
                results.append(Result(prompt.index, example.prompt, example.reference, answers))
                file.write(results[-1]._asdict())
                rewards = [reward for result in results for reward in result.rewards] or [0.0]
                bar.at(len(results), len(prompts), f"mean reward so far {fmean(rewards):.1%}")
    return results


def read(path: Path) -> dict[tuple[str, str], list[float]]:
    """The rewards of a results.jsonl, or of the folder that holds one, by prompt and reference."""
    rows = read_lines(path / RESULTS if path.is_dir() else path, key="problem")
    with suppress(TypeError, LookupError):
        results = [Result(**row) for row in rows]
        if found := {(json.dumps(r.prompt), r.reference): r.rewards for r in results if r.rewards}:
            return found
    remedy = f"name a {RESULTS} as `minirl eval` wrote it"
    raise RecipeError("results", str(path), "is no results of an eval", remedy)


def compare(paths: tuple[Path, Path]) -> list[tuple[str, str]]:
    """Two results, as `minirl eval --compare` prints it: problems that were graded in both. Of
    those whose mean reward changed McNemar's test asks whether more were gained than lost."""
    a, b = map(read, paths)
    pairs = [(a[key], b[key]) for key in a if key in b]
    if not pairs:
        remedy = "compare results of the same task, data, seed and number of problems"
        raise RecipeError("--compare", "A B", "have no problem in common", remedy)
    changes = np.array([fmean(after) - fmean(before) for before, after in pairs])
    num_gained, num_lost = int((changes > 0).sum()), int((changes < 0).sum())
    found = map(interval_of, zip(*pairs, strict=True))
    shares = [f"{x.mean:.1%} ({x.low:.1%} to {x.high:.1%})" for x in found if x]
    difference, low, high = (f"{100 * points:+.1f}" for points in bootstrap(changes))
    changed = f"{num_gained} gained, {num_lost} lost; {len(a | b) - len(pairs)} left out"
    return [
        (f"A, {paths[0]}", shares[0]),
        (f"B, {paths[1]}", shares[1]),
        ("B - A", f"{difference} points   95 % interval {low} to {high}"),
        ("p", f"{mcnemar(num_gained, num_lost):.2g}   McNemar, exact"),
        ("problems", f"{len(pairs)}: {changed}"),
    ]
