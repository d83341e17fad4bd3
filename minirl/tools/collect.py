"""Answers without a trainer, for `minirl eval` and `minirl sample`.

Takes what a person typed (a run, one of its checkpoints, or a model under a recipe) and prompts;
gives graded answers. The engines, verifiers, `Groups` and `Supervisor` are those of training, on
all devices of the machine: vLLM loads the folder's own weights, and all prompts are one evaluation.
An engine that dies is restarted and its prompts are requeued. A reward that hangs or takes its
verifier down costs that one answer, and so does a reply that fails: such an answer has no reward,
and an error that says why (rule 7). However it ends, nothing is left but logs.
"""

import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from minirl import devices, model, recipe
from minirl.buffer import Buffer
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.evaluation import Ended, Evaluation
from minirl.groups import Groups, Sends
from minirl.launch import spawn_engines, spawn_verifiers
from minirl.messages import Role
from minirl.records import Example, Prompt
from minirl.rollout.worker import RolloutSetup
from minirl.run_dir import holds_run
from minirl.shm.ring import TrajectoryRing, TrajectoryView
from minirl.supervisor import Supervisor
from minirl.tasks import Task
from minirl.tasks.prompts import encode, has_template
from minirl.tasks.turns import dialogue_of, readable, texts_of
from minirl.tasks.verifier import VerifierSetup
from minirl.train import checkpoint
from minirl.view.console import Bar
from minirl.workers import Workers, signals

NO_LIMIT = "train.max_tokens=100000000"  # nothing is trained


@dataclass(frozen=True)
class Target:
    name: str  # as typed
    config: Config  # its model.path is that of the weights
    k: int = 1  # answers to each problem
    run_dir: Path | None = None


def as_overrides(values: Mapping[str, object]) -> tuple[str, ...]:
    """As of --set; None is not given."""
    return tuple(f"{key}={json.dumps(v)}" for key, v in values.items() if v is not None)


def resolve(
    name: str, path: Path | None = None, overrides: Sequence[str] = (), k: int = 1
) -> Target:
    """`path` is of a recipe; default: the run's own. Raises RecipeError with what is missing."""
    folder = Path(name).parent
    here = folder.parent if folder.name == "checkpoints" else Path(name)
    run = here if holds_run(here) else None
    weights = str(last_checkpoint(here)) if run == Path(name) else name
    path = path or (run and run / "recipe.toml")
    loaded = recipe.load(path, [*as_overrides({"model.path": weights}), *overrides, NO_LIMIT])
    recipe.find_model(loaded.config)  # raises where the path leads nowhere
    if path is None and loaded.origins["tasks.kind"] == "default":
        remedy = "name a recipe with --recipe, or set tasks.kind"
        raise RecipeError("MODEL_OR_RUN", name, "is a model, which comes with no task", remedy)
    config = with_engines(loaded)
    if k > 1 and config.eval.temperature == 0:  # else all answers would be alike
        config = replace(config, eval=replace(config.eval, temperature=config.rollout.temperature))
    return Target(name, config, k, run)


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


@dataclass
class Collector:
    """The controller of an evaluation, as `Loop` is that of training, and its log."""

    config: Config
    note: Callable[[str], None]
    logs: Path | None = None  # None: they are deleted with the engines
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
        self.run_dir = self.logs or temp
        self.workers = Workers(self.run_dir, len(places) + num_verifiers)
        self.groups = Groups(config, None, Buffer(1, 0), len(places), num_verifiers, self.note)
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
            finally:
                with signals(signal.SIG_IGN):
                    self.workers.kill()
                    devices.sweep_temp(temp)

    def answers(
        self, prompts: Sequence[Prompt]
    ) -> Iterator[tuple[int, Attempt, TrajectoryView | None]]:
        """By place, in the order in which they end, with their tokens. A prompt that stands there k
        times has k answers. Where all prompts fit into the ring, one engine and one seed give the
        same answers (not where a task has several turns: replies come when they come)."""
        evaluation = Evaluation(prompts, range(self.ring.num_cells))
        while not evaluation.is_done:
            self.workers.deliver(self.groups.evaluate(evaluation))
            self.collect()
            for place, ended in evaluation.take_ended():
                yield place, *self._attempt(ended)

    def _attempt(self, ended: Ended) -> tuple[Attempt, TrajectoryView | None]:
        attempt = Attempt(text="", reward=ended.reward, length=0, stop="refused", error=ended.error)
        if (answer := ended.trajectory) is None:
            return attempt, None
        view = self.ring.read(answer.cell, ended.group_id)
        attempt["text"] = readable(texts_of(view, self.tokenizer, self.dialogue))
        attempt["length"], attempt["stop"] = answer.num_written, answer.stop.name.lower()
        return attempt, view

    def collect(self) -> None:
        self.supervisor.collect(lambda worker, m: self.groups.handle(worker.rank, m, 0.0))

    def stall_facts(self) -> dict[str, object]:
        return self.groups.stall_facts()

    def keep_batch(self, why: str) -> str:
        return f"; its log is in {self.run_dir}"

    def roll_back(self, step: int, version: int) -> Sends:
        raise AssertionError("there are no ranks")


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
        for number, (_, answer, view) in enumerate(there.answers([prompt] * count), start=1):
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
