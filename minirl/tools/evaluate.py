"""`minirl eval`: how good a model is, how sure that is, and what changed between two.

Takes a target. Gives a folder with results.jsonl (one line per problem), summary.json and
recipe.toml (docs/evaluation.md). A reward that failed is null with its reason: it is left out of
all figures, and counted. Leaves out: targets and how their answers are collected (collect.py), how
figures are computed (statistics.py).
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from minirl import devices, recipe
from minirl.config import BYTES_PER_TOKEN, Config
from minirl.errors import RecipeError
from minirl.records import Prompt
from minirl.run_dir import read_lines, write_text
from minirl.statistics import bootstrap, interval_of, mcnemar, pass_at, usual_ks
from minirl.tasks.check import checking
from minirl.tasks.prompts import short_prompts
from minirl.tasks.registry import make_task
from minirl.tools.collect import Attempt, Collector, Target, resolve, run_of
from minirl.view.console import Bar

RESULTS, SUMMARY = "results.jsonl", "summary.json"
EVALS = Path("evals")
RING_BYTES = 2**30  # what answers in flight may take before problems are asked in turns
TEST = "McNemar, exact"  # where a problem has several answers: of its mean reward, a sign test


@dataclass(frozen=True)
class Result:
    """One problem and its answers."""

    problem: int  # its place among the task's held-out examples
    prompt: Any  # text, or chat messages
    reference: str
    answers: tuple[Attempt, ...]

    @property
    def rewards(self) -> list[float]:
        return [a.reward for a in self.answers if a.reward is not None]

    def pass_at(self, k: int) -> float | None:
        """None: fewer than k of its answers could be graded."""
        num_right = sum(reward >= 1.0 for reward in self.rewards)
        return pass_at(k, len(self.rewards), num_right) if len(self.rewards) >= k else None

    @property
    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    answers = [answer for result in results for answer in result.answers]
    failed = [answer for answer in answers if answer.reward is None]
    found = interval_of([result.rewards for result in results])
    most = max((len(result.answers) for result in results), default=0)
    return {
        "problems": len(results),
        "answers_each": most,
        "answers_failed": len(failed),
        "failures": sorted({answer.error for answer in failed})[:5],
        "accuracy": found.mean if found else None,
        "interval_95": [found.low, found.high] if found else None,
        "pass_at": {str(k): _mean([r.pass_at(k) for r in results]) for k in usual_ks(most)},
        "length_mean": _mean([a.length for a in answers]),
        "truncated_frac": _mean([float(a.stop == "length") for a in answers]),
    }


def read(path: Path) -> list[Result]:
    """A results.jsonl, or the folder that holds one."""
    rows = read_lines(path / RESULTS if path.is_dir() else path, key="problem")
    with suppress(TypeError):
        if found := [_result(**row) for row in rows]:
            return found
    remedy = f"name a {RESULTS} as `minirl eval` wrote it"
    raise RecipeError("results", str(path), "is no results of an eval", remedy)


def _result(answers: Sequence[dict[str, Any]], **others: Any) -> Result:
    return Result(answers=tuple(Attempt(**answer) for answer in answers), **others)


def summary_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """As `minirl eval` prints it."""
    accuracy = "unknown: not one answer could be graded"
    if found["accuracy"] is not None:
        low, high = found["interval_95"]
        accuracy = f"{found['accuracy']:.1%}   95 % interval {low:.1%} to {high:.1%}"
    passed = {f"pass@{k}": share for k, share in found["pass_at"].items() if share is not None}
    dropped = ("answers_failed", "failures", "prompts_too_long")
    return [
        ("problems", f"{found['problems']} × {found['answers_each']} answers"),
        ("accuracy", accuracy),
        *((name, f"{share:.1%}") for name, share in passed.items()),
        ("tokens", f"{found['length_mean']:.1f}, {found['truncated_frac']:.1%} truncated"),
        *((name.replace("_", " "), str(found[name])) for name in dropped if found[name]),
        ("speed", f"{found['tokens_per_s']:,.0f} tokens/s, {found['seconds']:.0f} s"),
        ("results", found["folder"]),
    ]


def evaluate(target: Target, out: Path | None) -> tuple[list[Result], dict[str, Any]]:
    """The results and their summary. Ctrl-C leaves the problems that were done in results.jsonl."""
    config, bar = target.config, Bar("problems")
    with checking(config, recipe.find_model(config)) as check:
        check()
    task, folder = make_task(config), choose_folder(target, out)
    bar.note(f"{config.model.path} on {config.tasks.kind}; results in {folder}")
    there = Collector(config, folder / "logs", bar.note, task)
    recipe.check_model(config, there.folder, devices.find_devices(config.devices.kind)[0])
    (folder / "recipe.toml").write_text(recipe.to_toml(config))
    problems = task.heldout(config.eval.num_prompts)
    prompts = short_prompts(config, problems, there.tokenizer)
    results, seconds = _ask(there, prompts, target.k, folder / RESULTS, bar)
    num_tokens = sum(answer.length for result in results for answer in result.answers)
    summary = {
        "target": target.name,
        "model": str(there.folder),
        "folder": str(folder),
        **summarise(results),
        "prompts_too_long": len(problems) - len(prompts),
        "seconds": round(seconds, 3),
        "tokens_per_s": num_tokens / max(seconds, 1e-9),
    }
    write_text(folder / RESULTS, "".join(result.line for result in results))  # now in order
    write_text(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return results, summary


def _ask(
    there: Collector, prompts: Sequence[Prompt], k: int, path: Path, bar: Bar
) -> tuple[list[Result], float]:
    """All problems, each k times: the results in order, and the seconds that they took."""
    results: list[Result] = []
    done: dict[int, Attempt] = {}  # by place: k for each prompt
    num_cells = k * num_at_once(there.config, len(prompts), k)
    with path.open("w", buffering=1, encoding="utf-8") as file, there.running(num_cells):
        began = time.monotonic()
        for place, attempt, _ in there.answers([p for p in prompts for _ in range(k)]):
            done[place] = attempt
            own = range(place // k * k, place // k * k + k)
            if all(i in done for i in own):
                prompt, answers = prompts[place // k], tuple(done.pop(i) for i in own)
                example = prompt.example
                results.append(Result(prompt.index, example.prompt, example.reference, answers))
                file.write(results[-1].line)
                so_far = _mean([reward for result in results for reward in result.rewards])
                bar.at(len(results), len(prompts), f"mean reward so far {so_far or 0:.1%}")
        seconds = time.monotonic() - began
    return sorted(results, key=lambda result: result.problem), seconds


def num_at_once(config: Config, num_problems: int, k: int) -> int:
    """All problems where their answers take little memory; else enough to keep engines full."""
    engines = config.devices.rollout // config.devices.tensor_parallel
    seats = 2 * engines * config.rollout.max_num_seqs // k + 1
    cell_bytes = BYTES_PER_TOKEN * config.max_tokens_per_trajectory
    return min(num_problems, max(seats, RING_BYTES // (k * cell_bytes)))


def choose_folder(target: Target, out: Path | None) -> Path:
    if out is None:
        parent = target.run_dir / "evals" if target.run_dir else EVALS
        name = Path(target.config.model.path).name
        out = parent / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise RecipeError("--out", str(out), "is not empty", "name a new directory")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    return out


def is_results(name: str) -> bool:
    return Path(name).is_file() or (Path(name) / RESULTS).is_file()


def compare(a: Sequence[Result], b: Sequence[Result]) -> dict[str, Any]:
    """Problems are matched by prompt and reference. The test asks whether among the problems whose
    mean reward changed more were gained than lost; the difference's interval is a bootstrap."""
    left, right = _by_key(a), _by_key(b)
    pairs = [(left[key], right[key]) for key in left if key in right]
    if not pairs:
        remedy = "compare results of the same task, data, seed and number of problems"
        raise RecipeError("--compare", "A B", "have no problem in common", remedy)
    by = np.array([fmean(b.rewards) - fmean(a.rewards) for a, b in pairs])
    order = np.argsort(by, kind="stable").tolist()  # the largest change first, in both
    gained, lost = [i for i in order[::-1] if by[i] > 0], [i for i in order if by[i] < 0]
    change = bootstrap(by)
    return {
        "problems": len(pairs),
        "accuracies": [interval_of([r.rewards for r in side]) for side in zip(*pairs, strict=True)],
        "unmatched": len(left.keys() | right.keys()) - len(pairs),
        "difference": change.mean,
        "interval_95": [change.low, change.high],
        "p": mcnemar(len(gained), len(lost)),
        "test": TEST,
        "gained": [pairs[i][0].problem for i in gained],
        "lost": [pairs[i][0].problem for i in lost],
        "shown": [_shown(*pairs[i]) for i in gained[:2] + lost[:2]],
    }


def _by_key(results: Sequence[Result]) -> dict[tuple[str, str], Result]:
    return {(json.dumps(r.prompt), r.reference): r for r in results if r.rewards}


def _shown(left: Result, right: Result) -> dict[str, Any]:
    """The first answer of each that was graded."""
    a, b = (next(x for x in r.answers if x.reward is not None) for r in (left, right))
    question = left.prompt if isinstance(left.prompt, str) else left.prompt[-1]["content"]
    return {
        **{"problem": left.problem, "question": question, "reference": left.reference},
        **{"a": a.text, "a_reward": a.reward, "b": b.text, "b_reward": b.reward},
    }


def compare_named(
    names: tuple[str, str], path: Path | None, overrides: Sequence[str], k: int, out: Path | None
) -> list[tuple[str, str]]:
    """Evaluates what is no results yet, gives what is printed."""
    runs = [run for name in names if (run := run_of(name)) and not is_results(name)]
    if runs and path is None:
        path = runs[0] / "recipe.toml"  # the same problems for both
    sides = []
    for name, letter in zip(names, "ab", strict=True):
        if is_results(name):
            sides.append(read(Path(name)))
        else:
            target = resolve(name, path, overrides, k)
            sides.append(evaluate(target, out / letter if out else None)[0])
    found = compare(*sides)
    if out is not None:
        write_text(out / "compare.json", json.dumps(found, indent=2) + "\n")
    return _comparison_rows(names, found)


def _comparison_rows(names: tuple[str, str], found: dict[str, Any]) -> list[tuple[str, str]]:
    low, high = (f"{100 * bound:+.1f}" for bound in found["interval_95"])
    changed = [f"{len(found[side])} {side} {found[side][:9]}" for side in ("gained", "lost")]
    means = [f"{mean:.1%} ({a:.1%} to {b:.1%})" for mean, a, b in found["accuracies"]]
    return [
        (f"A, {names[0]}", means[0]),
        (f"B, {names[1]}", means[1]),
        ("B - A", f"{100 * found['difference']:+.1f} points   95 % interval {low} to {high}"),
        ("p", f"{found['p']:.2g}   {found['test']}"),
        ("problems", f"{found['problems']}: {', '.join(changed)}; {found['unmatched']} left out"),
    ]
