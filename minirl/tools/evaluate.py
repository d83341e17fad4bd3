"""`minirl eval` and `minirl sample`: answers without a trainer, and how good they are.

Takes what a person typed: a run, one of its checkpoints, or a model under a recipe. An evaluation
gives a folder with results.jsonl (one line per problem), summary.json and recipe.toml
(docs/evaluation.md); `compare` takes two such folders.

The engines, verifiers, `Groups` and `Supervisor` are those of training, on all devices of the
machine: vLLM loads the folder's own weights, and all prompts are one evaluation. An engine that
dies is restarted and its prompts are requeued. A reward that hangs or takes its verifier down costs
that one answer, and so does a reply that fails: such an answer has no reward, and an error that
says why (rule 7). It is left out of all figures, and counted. However it ends, nothing is left but
logs and results. Leaves out how figures are computed (statistics.py).
"""

import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypedDict

import numpy as np

from minirl import devices, model, recipe
from minirl.buffer import Buffer
from minirl.config import BYTES_PER_TOKEN, Config
from minirl.errors import MinirlError, RecipeError, toml_value
from minirl.evaluation import Ended, Evaluation
from minirl.groups import Groups, Sends
from minirl.launch import spawn_engines, spawn_verifiers
from minirl.messages import Role
from minirl.records import Example, Prompt
from minirl.rollout.worker import RolloutSetup
from minirl.run_dir import JsonLines, holds_run, make_results_dir, read_lines, write_text
from minirl.shm.ring import TrajectoryRing, TrajectoryView
from minirl.statistics import bootstrap, interval_of, mcnemar, pass_at, usual_ks
from minirl.supervisor import Supervisor
from minirl.tasks import Task
from minirl.tasks.check import checking
from minirl.tasks.prompts import encode, has_template, short_prompts
from minirl.tasks.registry import make_task
from minirl.tasks.turns import dialogue_of, readable, texts_of
from minirl.tasks.verifier import VerifierSetup
from minirl.train import checkpoint
from minirl.view.console import Bar
from minirl.workers import Workers, signals

RESULTS = "results.jsonl"
RING_BYTES = 2**30  # what answers in flight may take before problems are asked in turns


class Target(NamedTuple):
    config: Config  # its model.path is that of the weights
    k: int = 1  # answers to each problem
    run_dir: Path | None = None


def resolve(name: str, path: Path | None, overrides: Sequence[str], k: int = 1) -> Target:
    """`path` is of a recipe; default: the run's own. Raises RecipeError with what is missing."""
    folder = Path(name).parent
    here = folder.parent if folder.name == "checkpoints" else Path(name)
    run = here if holds_run(here) else None
    weights = str(last_checkpoint(here)) if run == Path(name) else name
    path = path or (run and run / "recipe.toml")
    own = (f"model.path={toml_value(weights)}", *overrides, "train.max_tokens=100000000")
    loaded = recipe.load(path, own)  # without a limit: nothing is trained
    recipe.find_model(loaded.config)  # raises where the path leads nowhere
    if path is None and loaded.origins["tasks.kind"] == "default":
        remedy = "name a recipe with --recipe, or set tasks.kind"
        raise RecipeError("MODEL_OR_RUN", name, "is a model, which comes with no task", remedy)
    config = with_engines(loaded)
    if k > 1 and config.eval.temperature == 0:  # else all answers would be alike
        config = replace(config, eval=replace(config.eval, temperature=config.rollout.temperature))
    return Target(config, k, run)


def last_checkpoint(run_dir: Path) -> Path:
    there = (run_dir / "model", *checkpoint.found(run_dir))
    folders = [path for path in there if (path / "config.json").is_file()]
    if not folders:  # model/ is of `minirl sft`
        remedy = "wait for its first checkpoint, or name a model folder"
        raise RecipeError("run", str(run_dir), "has no checkpoint yet", remedy)
    return folders[-1]


def with_engines(loaded: recipe.Loaded) -> Config:
    """On devices.rollout of --set; else on CUDA all GPUs, on CPU one engine with all cores."""
    own = replace(loaded.config.devices, share=False)  # nothing is trained beside it
    kind, available = devices.find_devices(own.kind)
    if loaded.origins["devices.rollout"] != "--set":
        whole = available // own.tensor_parallel if kind == "cuda" else 1
        own = replace(own, rollout=max(1, whole) * own.tensor_parallel)
    config = replace(loaded.config, devices=own)
    recipe.check_devices(config, kind, available, own.rollout - own.train)
    return config


class Attempt(TypedDict):
    """An answer to one prompt, as results.jsonl has it."""

    text: str
    reward: float | None  # None: it failed, as `error` says
    length: int  # written tokens
    stop: str  # "refused": the engine did not take the prompt
    error: str


Answer = tuple[Attempt, TrajectoryView | None]


@dataclass
class Collector:
    """The controller of an evaluation, as `Loop` is that of training, and its log."""

    config: Config
    note: Callable[[str], None]
    logs: Path | None = None  # None: they are kept only where an error names them
    task: Task | None = None  # None: answers are not graded, and there are no verifiers
    workers_replaced: float = 0.0

    def __post_init__(self) -> None:
        self.folder = model.local_folder(self.config)
        kind, self.tokenizer = self.config.tasks.kind, model.tokenizer_of(self.config, self.folder)
        self.dialogue = dialogue_of(self.task, kind, self.tokenizer) if self.task else None

    @contextmanager
    def running(self, num_cells: int) -> Iterator[None]:
        """With engines that are ready; `num_cells` answers may be in flight at once."""
        config, source, seed = self.config, str(self.folder), self.config.seed * 1000 + 1
        kind, available = devices.find_devices(config.devices.kind)
        recipe.check_model(config, self.folder, kind)
        places = devices.place(config, kind, available, ranks=False)[0]
        num_verifiers = config.tasks.verifiers if self.task else 0
        self.ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
        temp = Path(tempfile.mkdtemp(prefix="minirl-"))
        self.run_dir = self.logs or Path(tempfile.mkdtemp(prefix="minirl-logs-"))
        is_kept = self.logs is not None
        self.workers = Workers(self.run_dir, len(places) + num_verifiers)
        self.groups = Groups(config, None, Buffer(1, 0), len(places), num_verifiers, self.note)
        self.stall_facts = self.groups.stall_facts
        self.supervisor = Supervisor(config, self.workers, self.groups, self, self)
        first = RolloutSetup(config, source, kind, seed, self.ring, None, self.dialogue)
        with signals():
            try:
                spawn_engines(self.workers, first, places, temp)
                if num_verifiers:
                    verifier = VerifierSetup(config, source, self.ring, self.dialogue)
                    spawn_verifiers(self.workers, verifier)
                self.note(f"starting {len(places)} engine{'s'[: len(places) != 1]}")
                while not all(worker.is_ready for worker in self.workers.of(Role.ROLLOUT)):
                    self.collect()
                yield
            except MinirlError as error:
                is_kept |= not isinstance(error, RecipeError)
                raise
            finally:
                with signals(signal.SIG_IGN):
                    self.workers.kill()
                    devices.sweep_temp(temp)
                    if not is_kept:
                        shutil.rmtree(self.run_dir, ignore_errors=True)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """By place, in the order in which they end, with their tokens. A prompt that stands there k
        times has k answers. Where all prompts fit into the ring, one engine and one seed give the
        same answers (not where a task has several turns: replies come when they come)."""
        evaluation = Evaluation(prompts, range(self.ring.num_cells))
        while not evaluation.is_done:
            self.workers.deliver(self.groups.evaluate(evaluation))
            self.collect()
            for place, ended in evaluation.take_ended():
                yield place, self._attempt(ended)

    def _attempt(self, ended: Ended) -> Answer:
        attempt = Attempt(text="", reward=ended.reward, length=0, stop="refused", error=ended.error)
        if (answer := ended.trajectory) is None:
            return attempt, None
        view = self.ring.read(answer.cell, ended.group_id)
        attempt["text"] = readable(texts_of(view, self.tokenizer, self.dialogue))
        attempt["length"], attempt["stop"] = answer.num_written, answer.stop.name.lower()
        return attempt, view

    def collect(self) -> None:
        self.supervisor.collect(lambda worker, m: self.groups.handle(worker.rank, m, 0.0))

    def keep_batch(self, why: str) -> str:
        return f"; its log is in {self.run_dir}"

    def roll_back(self, step: int, version: int) -> Sends:
        raise AssertionError("there are no ranks")


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
    make_results_dir(folder, "--out", recipe.to_toml(config))
    bar.note(f"{config.model.path} on {config.tasks.kind}; results in {folder}")
    there = Collector(config, bar.note, folder / "logs", task)
    problems = task.heldout(config.eval.num_prompts)
    prompts = short_prompts(config, problems, there.tokenizer)
    results = _ask(there, prompts, target.k, folder / RESULTS, bar)
    summary = {
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
    most = RING_BYTES // (BYTES_PER_TOKEN * there.config.max_tokens_per_trajectory)
    num_cells = min(k * len(prompts), most)
    with closing(JsonLines(path, bar.note)) as file, there.running(num_cells):
        for place, (attempt, _) in there.answers([p for p in prompts for _ in range(k)]):
            own, prompt = done[place // k], prompts[place // k]
            own[place % k] = attempt
            if len(own) == k:
                example, answers = prompt.example, [own[i] for i in range(k)]
                results.append(Result(prompt.index, example.prompt, example.reference, answers))
                file.write(results[-1]._asdict())
                rewards = [reward for result in results for reward in result.rewards] or [0.0]
                bar.at(len(results), len(prompts), f"mean reward so far {fmean(rewards):.1%}")
    if file.problem:
        raise MinirlError(f"not all could be written: {file.problem}")
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


def sample(target: Target, text: str, count: int, is_raw: bool, in_full: bool) -> Iterator[str]:
    """Answers as `minirl sample` prints them. Logprobs are of the distribution that was sampled
    from, and at temperature 0 the model's own."""
    bar, own = Bar("answers"), target.config.devices
    config = replace(target.config, devices=replace(own, rollout=own.tensor_parallel))  # one engine
    there = Collector(config, bar.note)
    is_chat = not is_raw and has_template(there.tokenizer)
    example = Example(({"role": "user", "content": text},) if is_chat else text, "")
    prompt = Prompt(0, example, encode(example, there.tokenizer))
    if not prompt.tokens:
        raise RecipeError("PROMPT", "", "has no token", "write something")
    tasks = replace(config.tasks, max_prompt_tokens=len(prompt.tokens))
    there.config = replace(config, tasks=tasks)
    with there.running(count):
        for number, (_, (answer, view)) in enumerate(there.answers([prompt] * count), start=1):
            if view is None:
                rule = f"vLLM refuses it ({answer['error']})"
                raise RecipeError("PROMPT", "…", rule, "shorten it")
            written = view.mask == 1
            tokens, logprobs = view.tokens[written].tolist(), view.logprobs[written].tolist()
            stop, mean = answer["stop"], sum(logprobs) / max(1, len(tokens))
            yield f"--- {number}: {len(tokens)} tokens, {stop}, mean logprob {mean:.3f}"
            for token, value in zip(tokens, logprobs, strict=True) if in_full else ():
                yield f"{value:9.4f}  {there.tokenizer.decode([token])!r}"
            if not in_full:
                yield answer["text"]
