"""`minirl eval`: how good a model is, how sure that is, and what changed between two.

Takes what a person typed: a run (its recipe and a checkpoint), one of its checkpoints, or a model
under a recipe. Gives a folder:

    results.jsonl   one line per problem: prompt, reference, answers with reward, length, stop
    summary.json    accuracy with its interval, pass@k, lengths, truncation, failures
    recipe.toml     every value that was used

A reward that failed is null with its reason: it counts nowhere, and is counted. An answer is
*right* where its reward is 1 or more; accuracy is the mean reward, which is the same where rewards
are 0 or 1.

Leaves out: how answers are collected (collect.py), how figures are computed (statistics.py).
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from minirl import model
from minirl.config import TINY, Config
from minirl.devices import find_devices
from minirl.errors import RecipeError
from minirl.launch import heldout_prompts, model_folder
from minirl.recipe import (
    check_devices,
    check_model,
    check_task,
    find_model,
    load,
    read_model_config,
    to_toml,
)
from minirl.records import Prompt
from minirl.run_dir import read_lines, write_text
from minirl.shm.ring import TrajectoryRing
from minirl.statistics import bootstrap, interval_of, mcnemar, pass_at, sign_flips, usual_ks
from minirl.tasks import Task
from minirl.tasks.registry import make_task, self_check
from minirl.tasks.turns import dialogue_of
from minirl.tools.collect import Collected, collecting
from minirl.train import checkpoint
from minirl.view.console import Bar

RESULTS, SUMMARY = "results.jsonl", "summary.json"
EVALS = Path("evals")
PLAIN_PROMPT, PLAIN_ANSWER = 1024, 1024  # without a recipe, where the model has the positions
NO_LIMIT = "train.max_tokens=100000000"  # nothing is trained
RING_BYTES = 2**30  # what answers in flight may take before problems are asked in turns


# What is evaluated --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What may be given beside the target."""

    recipe: Path | None = None
    checkpoint: str = ""  # of a run: "last" (or ""), "best" by its own evaluations, or a step
    k: int = 1
    overrides: tuple[str, ...] = ()  # as of --set

    def names(self, key: str) -> bool:
        return any(text.startswith(f"{key}=") for text in self.overrides)


@dataclass(frozen=True)
class Target:
    name: str  # as typed
    config: Config
    folder: Path | None  # of the weights; None: where model.path leads
    run_dir: Path | None = None


def as_overrides(values: Mapping[str, object]) -> tuple[str, ...]:
    """In the recipe's own words; None is not given."""
    return tuple(f"{key}={json.dumps(v)}" for key, v in values.items() if v is not None)


def is_results(name: str) -> bool:
    return Path(name).is_file() or (Path(name) / RESULTS).is_file()


def run_of(name: str) -> Path | None:
    """The run that is named, by its directory or by one of its checkpoints."""
    path = Path(name)
    if path.parent.name == "checkpoints" and (path / "config.json").is_file():
        path = path.parent.parent
    return path if (path / "recipe.toml").is_file() else None


def resolve(name: str, options: Options) -> Target:
    """Checks all that needs no machine. Raises RecipeError with what is missing."""
    if not 1 <= options.k <= 1024:
        raise RecipeError("--k", options.k, "must be 1 to 1024", "8 is usual")
    if is_results(name):
        remedy = "name a model or a run; --compare puts two results side by side"
        raise RecipeError("MODEL_OR_RUN", name, "is a file of results already", remedy)
    run, folder = run_of(name), None
    if run is not None:
        folder = find_checkpoint(run, options.checkpoint) if run == Path(name) else Path(name)
        recipe = options.recipe or run / "recipe.toml"
        config = load(recipe, [*options.overrides, NO_LIMIT]).config
    else:
        config = _of_model(name, options)
    check_task(config)
    return Target(name, _sampling(config, options), folder, run)


def _of_model(name: str, options: Options) -> Config:
    if options.checkpoint:
        remedy = "leave it out, or name a run directory"
        raise RecipeError("--checkpoint", options.checkpoint, f"{name} is no run", remedy)
    defaults = as_overrides({"model.path": name})
    if options.recipe is None:
        if not options.names("tasks.kind"):
            remedy = "say which with --task, such as --task gsm8k, or with --recipe"
            raise RecipeError("--task", "", f"{name} is a model, which comes with no task", remedy)
        defaults += _plain_limits(name)
    return load(options.recipe, [*defaults, *options.overrides, NO_LIMIT]).config


def _plain_limits(name: str) -> tuple[str, ...]:
    """Without a recipe: what the model's own config.json allows."""
    plain = replace(Config(), model=replace(Config().model, path=name))
    folder = find_model(plain)
    found = read_model_config(plain, folder) if folder else {}
    found = found.get("text_config", found)
    limit = 512 if name == TINY else int(found.get("max_position_embeddings") or 2**20)
    prompt = min(PLAIN_PROMPT, limit // 2)
    is_half = (found.get("dtype") or found.get("torch_dtype")) in ("bfloat16", "float16")
    return as_overrides(
        {
            "tasks.max_prompt_tokens": prompt,
            "rollout.max_new_tokens": min(PLAIN_ANSWER, limit - prompt),
            "model.dtype": "bfloat16" if is_half else None,
        }
    )


def _sampling(config: Config, options: Options) -> Config:
    """eval.temperature; for several answers, where that is greedy, rollout.temperature."""
    if options.k == 1 or config.eval.temperature > 0:
        return config
    if options.names("eval.temperature"):
        remedy = "raise it, or leave --k out"
        raise RecipeError("--temperature", 0, f"all {options.k} answers would be alike", remedy)
    return replace(config, eval=replace(config.eval, temperature=config.rollout.temperature))


def find_checkpoint(run_dir: Path, which: str) -> Path:
    whole = [p for p in checkpoint.found(run_dir) if (p / "trainer" / "state.json").is_file()]
    if not whole and not which and (run_dir / "model" / "config.json").is_file():
        return run_dir / "model"  # of `minirl sft`
    if not whole:
        remedy = "wait for its first checkpoint, or name a model folder"
        raise RecipeError("run", str(run_dir), "has no checkpoint yet", remedy)
    if which in ("", "last"):
        return whole[-1]
    if which == "best":
        return _best(run_dir, whole)
    steps = {int(path.name.removeprefix("step-")): path for path in whole}
    number = which.removeprefix("step-")
    if not number.isdecimal() or int(number) not in steps:
        rule = f"is none of this run's steps {', '.join(map(str, steps))}"
        raise RecipeError("--checkpoint", which, rule, 'name one of these, "last" or "best"')
    return steps[int(number)]


def _best(run_dir: Path, whole: Sequence[Path]) -> Path:
    lines = [line for line in read_lines(run_dir / "evals.jsonl") if "accuracy" in line]
    scores = {line["version"]: line["accuracy"] for line in lines}
    versions = {checkpoint.read_state(path)["history"]["version"]: path for path in whole}
    known = [version for version in versions if scores.get(version) is not None]
    if not known:
        rule = "no checkpoint of this run has a version that was evaluated"
        remedy = 'take "last", or train with checkpoint.every = eval.every'
        raise RecipeError("--checkpoint", "best", rule, remedy)
    return versions[max(known, key=lambda version: (scores[version], version))]


def with_devices(config: Config, num_devices: int | None) -> Config:
    """As asked; else on CUDA all GPUs, on CPU one engine with all cores."""
    kind, available = find_devices(config.devices.kind)
    width = config.devices.tensor_parallel
    everything = available // width * width if kind == "cuda" else width
    own = replace(config.devices, rollout=num_devices or everything)
    config = replace(config, devices=own)
    check_devices(config, kind, available, own.rollout - own.train)  # nothing is trained
    return config


# Results ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    text: str
    reward: float | None  # None: it failed, as `error` says
    length: int  # written tokens
    stop: str
    error: str = ""


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

    @property
    def mean(self) -> float | None:
        return _mean(self.rewards)

    def pass_at(self, k: int) -> float | None:
        """None: fewer than k of its answers could be graded."""
        num_right = sum(reward >= 1.0 for reward in self.rewards)
        return pass_at(k, len(self.rewards), num_right) if len(self.rewards) >= k else None

    @property
    def question(self) -> str:
        """The prompt as a person reads it: of a chat, what was said last."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """The same whatever order the problems were done in: draws and sums depend on it."""
    results = sorted(results, key=lambda result: result.problem)
    answers = [answer for result in results for answer in result.answers]
    failed = [answer for answer in answers if answer.reward is None]
    found = interval_of([result.rewards for result in results])
    most = max((len(result.answers) for result in results), default=0)
    return {
        "problems": len(results),
        "answers_each": most,
        "answers_graded": len(answers) - len(failed),
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
    try:
        answers = [tuple(Attempt(**answer) for answer in row["answers"]) for row in rows]
        found = [Result(**{**row, "answers": a}) for row, a in zip(rows, answers, strict=True)]
    except (ValueError, KeyError, TypeError):
        found = []
    if not found:
        remedy = f"name a {RESULTS} as `minirl eval` wrote it"
        raise RecipeError("results", str(path), "is no results of an eval", remedy)
    return found


# One evaluation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluated:
    folder: Path
    results: list[Result]
    summary: dict[str, Any]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """As `minirl eval` prints it."""
        found = self.summary
        accuracy = "unknown: not one answer could be graded"
        if found["accuracy"] is not None:
            low, high = found["interval_95"]
            accuracy = f"{found['accuracy']:.1%}   95 % interval {low:.1%} to {high:.1%}"
        passed = {f"pass@{k}": share for k, share in found["pass_at"].items() if share is not None}
        dropped = ("answers_failed", "failures", "prompts_too_long")
        return [
            ("problems", f"{found['problems']} × {found['k']} answers"),
            ("accuracy", accuracy),
            *((name, f"{share:.1%}") for name, share in passed.items()),
            ("tokens", f"{found['length_mean']:.1f}, {found['truncated_frac']:.1%} cut"),
            *((name.replace("_", " "), str(found[name])) for name in dropped if found[name]),
            ("speed", f"{found['tokens_per_s']:,.0f} tokens/s, {found['seconds']:.0f} s"),
            ("results", str(self.folder)),
        ]


def evaluate(target: Target, options: Options, out: Path | None) -> Evaluated:
    """Ctrl-C leaves the problems that were done in results.jsonl, and no process."""
    asked = target.config.devices.rollout if options.names("devices.rollout") else None
    config = with_devices(target.config, asked)
    task = make_task(config)
    self_check(task, config.tasks.kind)
    folder = choose_folder(target, out)
    bar = Bar("problems")
    try:
        bar.note(f"{target.folder or target.name} on {config.tasks.kind}")
        source = target.folder or model_folder(config, folder / "logs", bar)
        check_model(config, read_model_config(config, source))
        (folder / "recipe.toml").write_text(to_toml(config))
        kept, figures = _ask(config, task, source, folder, options.k, bar)
    except KeyboardInterrupt:
        bar.note(f"interrupted: what was done is in {folder}")
        raise
    finally:
        bar.close()
    setting = {
        "target": target.name,
        "model": str(source),
        "task": config.tasks.kind,
        "data": config.tasks.data,
        "seed": config.seed,
        "k": options.k,
        "temperature": config.eval.temperature,
        "max_new_tokens": config.rollout.max_new_tokens,
        "dtype": config.model.dtype,
        "engines": config.devices.rollout // config.devices.tensor_parallel,
    }
    summary = {**setting, **summarise(kept), **figures}
    write_text(folder / RESULTS, "".join(result.line for result in kept))  # now in order
    write_text(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return Evaluated(folder, kept, summary)


def _ask(
    config: Config, task: Task, source: Path, folder: Path, k: int, bar: Bar
) -> tuple[list[Result], dict[str, Any]]:
    """All problems, each k times: the results in order, and how it went."""
    tokenizer = model.load_tokenizer(source, config.model.trust_remote_code)
    prompts = heldout_prompts(config, task, tokenizer)
    dialogue = dialogue_of(task, config.tasks.kind, tokenizer)
    num_cells, logs = k * num_at_once(config, len(prompts), k), folder / "logs"
    kept: list[Result] = []
    done: dict[int, list[Collected]] = defaultdict(list)  # by place among the prompts
    started = time.monotonic()
    with (
        (folder / RESULTS).open("w", buffering=1, encoding="utf-8") as file,
        collecting(config, source, tokenizer, num_cells, logs, bar.note, dialogue) as there,
    ):
        bar.total(len(prompts))
        began = time.monotonic()
        for answer in there.answers([prompt for prompt in prompts for _ in range(k)]):
            place = answer.place // k
            done[place].append(answer)
            if len(done[place]) == k and answer.trajectory is None:
                bar.note(f"the engine refused problem {place}: {answer.error}")
            elif len(done[place]) == k:
                kept.append(_result(prompts[place], done[place]))
                file.write(kept[-1].line)
                bar.at(len(kept), f"accuracy so far {_mean([r.mean for r in kept]) or 0:.1%}")
    seconds = time.monotonic() - began
    return sorted(kept, key=lambda result: result.problem), {
        "prompts_too_long": len(task.heldout(config.eval.num_prompts)) - len(prompts),
        "prompts_refused": len(prompts) - len(kept),
        "seconds": round(seconds, 3),
        "start_seconds": round(began - started, 3),
        "tokens_per_s": sum(a.length for r in kept for a in r.answers) / max(seconds, 1e-9),
    }


def _result(prompt: Prompt, answers: list[Collected]) -> Result:
    attempts = []
    for answer in sorted(answers, key=lambda answer: answer.place):
        assert answer.trajectory is not None
        length, stop = answer.trajectory.num_written, answer.trajectory.stop.name.lower()
        attempts.append(Attempt(answer.text, answer.reward, length, stop, answer.error))
    example = prompt.example
    return Result(prompt.index, example.prompt, example.reference, tuple(attempts))


def num_at_once(config: Config, num_problems: int, k: int) -> int:
    """All problems where their answers take little memory; else enough to keep engines full."""
    engines = config.devices.rollout // config.devices.tensor_parallel
    seats = 2 * engines * config.rollout.max_num_seqs // k + 1
    cell_bytes = TrajectoryRing.bytes_needed(1, config.max_tokens_per_trajectory)
    return min(num_problems, max(seats, RING_BYTES // (k * cell_bytes)))


def choose_folder(target: Target, out: Path | None) -> Path:
    if out is None:
        parent = target.run_dir / "evals" if target.run_dir else EVALS
        name = (target.folder or Path(target.name)).name
        out = parent / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise RecipeError("--out", str(out), "is not empty", "name a new directory")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    return out


# Two of them --------------------------------------------------------------------------------------


def compare(a: Sequence[Result], b: Sequence[Result], num_shown: int = 2) -> dict[str, Any]:
    """Problems are matched by prompt and reference. One answer to each, each right or wrong:
    McNemar's exact test on the problems that changed. Otherwise: a paired permutation test on each
    problem's mean reward. The difference's interval is a bootstrap over problems in both cases."""
    left, right = _by_key(a), _by_key(b)
    pairs = [(left[key], right[key]) for key in left if key in right]
    pairs = [pair for pair in pairs if pair[0].rewards and pair[1].rewards]
    if not pairs:
        remedy = "compare results of the same task, data, seed and number of problems"
        raise RecipeError("--compare", "A B", "have no problem in common", remedy)
    by = np.array([fmean(b.rewards) - fmean(a.rewards) for a, b in pairs])
    is_single = all(len(result.answers) == 1 for pair in pairs for result in pair)
    if is_single and {result.mean for pair in pairs for result in pair} <= {0.0, 1.0}:
        p, test = mcnemar(int((by > 0).sum()), int((by < 0).sum())), "McNemar, exact"
    else:
        p, test = sign_flips(by.tolist()), "paired permutation of means by problem"
    order = np.argsort(by, kind="stable").tolist()  # the largest change first, in both
    gained, lost = [i for i in order[::-1] if by[i] > 0], [i for i in order if by[i] < 0]
    sides = [interval_of([result.rewards for result in side]) for side in zip(*pairs, strict=True)]
    change = bootstrap(by)
    return {
        "problems": len(pairs),
        "accuracies": [[i.mean, i.low, i.high] if i else None for i in sides],
        "unmatched": len(left.keys() | right.keys()) - len(pairs),
        "difference": change.mean,
        "interval_95": [change.low, change.high],
        "p": p,
        "test": test,
        "gained": [pairs[i][0].problem for i in gained],
        "lost": [pairs[i][0].problem for i in lost],
        "shown": [_shown(pairs[i], by[i] > 0) for i in gained[:num_shown] + lost[:num_shown]],
    }


def _by_key(results: Sequence[Result]) -> dict[tuple[str, str], Result]:
    return {(json.dumps(result.prompt), result.reference): result for result in results}


def _shown(pair: tuple[Result, Result], is_gained: bool) -> dict[str, Any]:
    """Of several answers those that show the change: A's worst where B is better, and so on."""
    picks = (min, max) if is_gained else (max, min)
    graded = [[a for a in result.answers if a.reward is not None] for result in pair]
    a, b = (
        pick(answers, key=lambda answer: answer.reward or 0.0)
        for pick, answers in zip(picks, graded, strict=True)
    )
    asked = pair[0]
    return {
        **{"problem": asked.problem, "question": asked.question, "reference": asked.reference},
        **{"a": a.text, "a_reward": a.reward, "b": b.text, "b_reward": b.reward},
    }


def compare_named(
    names: tuple[str, str], options: Options, out: Path | None
) -> list[tuple[str, str]]:
    """`minirl eval --compare`: evaluates what is no results yet, gives what is printed."""
    runs = [run for name in names if (run := run_of(name)) and not is_results(name)]
    if runs and not options.names("tasks.kind") and options.recipe is None:
        options = replace(options, recipe=runs[0] / "recipe.toml")  # the same problems for both
    sides = []
    for name, letter in zip(names, "ab", strict=True):
        if is_results(name):
            sides.append(read(Path(name)))
            continue
        own = options if run_of(name) else replace(options, checkpoint="")
        sides.append(evaluate(resolve(name, own), own, out / letter if out else None).results)
    found = compare(sides[0], sides[1])
    if out is not None:
        write_text(out / "compare.json", json.dumps(found, indent=2) + "\n")
    return _comparison_rows(names, found)


def _comparison_rows(names: tuple[str, str], found: dict[str, Any]) -> list[tuple[str, str]]:
    low, high = (f"{100 * bound:+.1f}" for bound in found["interval_95"])
    changed = f"{len(found['gained'])} gained, {len(found['lost'])} lost"
    means = [f"{mean:.1%} ({a:.1%} to {b:.1%})" for mean, a, b in found["accuracies"]]
    rows = [
        (f"A, {names[0]}", means[0]),
        (f"B, {names[1]}", means[1]),
        ("B - A", f"{100 * found['difference']:+.1f} points   95 % interval {low} to {high}"),
        ("p", f"{found['p']:.2g}   {found['test']}"),
        ("problems", f"{found['problems']}: {changed}; {found['unmatched']} left out"),
    ]
    for pair in found["shown"]:
        rows += [(f"problem {pair['problem']}", pair["question"])]
        rows += [(f"{side} ({pair[f'{side}_reward']:g})", pair[side].strip()) for side in "ab"]
    return rows
