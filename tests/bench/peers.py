"""The peers bench: one training by minirl and by TRL's GRPOTrainer, in turns, on all cores. Every
other round TRL goes first.

    …_over_trl           seconds of TRL's steps / of minirl's
    …_accuracy_gap       minirl's held-out accuracy less TRL's, over all rounds; …_high, the upper
                         end of its 95 % interval, is not below 0
    …_minirl, …_trl      seconds per step, trained tokens/s, seconds until the mean reward of a step
                         is at the target, held-out accuracy at the end (`minirl eval` of both)

`python -m tests.bench peers --trl PYTHON`, where PYTHON is of a venv with TRL (docs/benchmarks.md).
"smoke" with `--model tiny` is recipes/smoke.toml with 256 seats; "smollm2" with `--model 135m` is
recipes/smollm2.toml without its filter.
Both start from the same folder and train the same prompts in the same order, with the same rewards,
batch, learning rate and number of steps. minirl is asynchronous, at its recipe's η.
Start-up does not count: TRL's clock starts with `train`, minirl's with the first prompt.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from minirl.config import TINY_FOLDER
from minirl.errors import MinirlError, RecipeError
from minirl.recipe import load
from minirl.run_dir import read_lines
from minirl.statistics import wilson
from minirl.tasks.registry import make_task
from minirl.tools.sweep import train
from minirl.train.checkpoint import found as checkpoints
from tests.bench import Figure, Options, at_least, median

ROOT = Path(__file__).parents[2]
NUM_PROBLEMS = 256  # held out


@dataclass(frozen=True)
class Case:
    name: str
    recipe: Path
    model: Path
    goal: float  # of over_trl
    steps: int
    rounds: int
    target: float  # a mean reward
    train_batch: int  # answers that TRL trains at once: more was slower, or did not fit
    settings: tuple[str, ...] = ()


SMOKE = Case(
    "smoke",
    ROOT / "recipes/smoke.toml",
    TINY_FOLDER,
    goal=8.0,
    steps=30,
    rounds=2,
    target=0.8,
    train_batch=256,
    settings=("rollout.max_num_seqs=256",),  # as many as TRL generates at once
)
SMOLLM2 = Case(
    "smollm2",
    ROOT / "recipes/smollm2.toml",
    ROOT / "models/smollm2",
    goal=5.0,
    steps=4,
    rounds=1,
    target=0.5,
    train_batch=32,
    settings=("buffer.drop_equal_rewards=false",),
)


@dataclass(frozen=True)
class Result:
    seconds: Sequence[float]  # at the end of each step
    rewards: Sequence[float]
    tokens: float
    accuracy: float

    def figures(self, name: str, target: float) -> list[Figure]:
        at = [s for s, reward in zip(self.seconds, self.rewards, strict=True) if reward >= target]
        found = [
            Figure(f"{name}_step_s", self.seconds[-1] / len(self.seconds)),
            Figure(f"{name}_tokens_per_s", self.tokens / self.seconds[-1], note="trained"),
            Figure(f"{name}_accuracy", self.accuracy, note="held out, at the end"),
        ]
        if at:
            found.append(Figure(f"{name}_seconds_to_{target:g}", min(at), note="reward"))
        return found


def measure(options: Options) -> list[Figure]:
    if not options.trl:
        raise RecipeError("--trl", "", "no Python with TRL", "make a venv: docs/benchmarks.md")
    case = SMOKE if options.model == "tiny" else SMOLLM2
    if not case.model.is_dir():
        raise RecipeError("--model", options.model, f"no {case.model}", f"see {case.recipe}")
    return of_case(case, options)


def of_case(case: Case, options: Options) -> list[Figure]:
    pairs = []
    with TemporaryDirectory(prefix="minirl-peers-") as name:
        for seed in range(1 if options.is_quick else case.rounds):
            folder = Path(name) / str(seed)
            folder.mkdir()
            sides = [by_minirl, by_trl] if seed % 2 == 0 else [by_trl, by_minirl]
            done = {side: side(case, folder, seed, options.trl) for side in sides}
            pairs.append((done[by_minirl], done[by_trl]))
    gains = [trl.seconds[-1] / ours.seconds[-1] for ours, trl in pairs]
    found = [at_least(f"{case.name}_over_trl", median(gains), case.goal, "seconds: TRL / minirl")]
    for (ours, trl), seed in zip(pairs, range(len(pairs)), strict=True):
        found += ours.figures(f"{case.name}_{seed}_minirl", case.target)
        found += trl.figures(f"{case.name}_{seed}_trl", case.target)
    return found + accuracy_gap(case.name, pairs)


def accuracy_gap(name: str, pairs: Sequence[tuple[Result, Result]]) -> list[Figure]:
    """Over all rounds, with Newcombe's interval. That each round asks the same problems is not
    counted in: the true interval is somewhat wider."""
    num = NUM_PROBLEMS * len(pairs)
    sides = zip(*pairs, strict=True)
    ours, trl = (wilson(fmean(one.accuracy for one in side), num) for side in sides)
    gap = ours.mean - trl.mean
    low = gap - hypot(ours.mean - ours.low, trl.high - trl.mean)
    high = gap + hypot(ours.high - ours.mean, trl.mean - trl.low)
    note = f"{num} answers each; 95 %: {low:+.3f} to {high:+.3f}"
    return [
        Figure(f"{name}_accuracy_gap", gap, note=f"minirl - TRL, {note}"),
        at_least(f"{name}_accuracy_gap_high", high, 0.0, "the interval's upper end"),
    ]


def settings_of(case: Case, seed: int) -> list[str]:
    fixed = ("eval.every=0", "eval.num_prompts=1", "checkpoint.every_s=0", "checkpoint.every=0")
    own = (f'model.path="{case.model}"', f"train.steps={case.steps}", f"seed={seed}")
    return [*case.settings, *fixed, *own]


def by_minirl(case: Case, folder: Path, seed: int, _python: str) -> Result:
    run_dir = folder / "minirl"
    train(case.recipe, run_dir, settings_of(case, seed))
    lines = read_lines(run_dir / "metrics.jsonl")
    return Result(
        [line["seconds"] for line in lines],
        [line["reward/mean"] for line in lines],
        sum(line["train/tokens"] for line in lines),
        accuracy_of(case, checkpoints(run_dir)[-1], folder / "minirl-eval"),
    )


def by_trl(case: Case, folder: Path, seed: int, python: str) -> Result:
    job = folder / "job.json"
    job.write_text(json.dumps(job_of(case, folder, seed)))
    # -P: a module of this folder has the name of one of Python's own.
    command = [python, "-P", str(Path(__file__).with_name("trl_run.py")), str(job)]
    with (folder / "trl.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    if code:
        last = (folder / "trl.log").read_text().strip().splitlines()[-1:]
        raise MinirlError(f"TRL ended with exit code {code}: {' '.join(last)}")
    done = json.loads((folder / "done.json").read_text())
    return Result(**done, accuracy=accuracy_of(case, folder / "model", folder / "trl-eval"))


def job_of(case: Case, folder: Path, seed: int) -> dict[str, Any]:
    config = load(case.recipe, settings_of(case, seed)).config
    task = make_task(config)
    asked = [task.train(i) for i in range(case.steps * config.train.batch_size)]
    return {
        "folder": str(folder),
        "model": str(case.model),
        "rows": [{"prompt": e.prompt, "reference": e.reference} for e in asked],
        "seed": seed,
        "steps": case.steps,
        "train_batch": case.train_batch,
        "batch_size": config.train.batch_size,
        "group_size": config.rollout.group_size,
        "max_new_tokens": config.rollout.max_new_tokens,
        "max_length": config.max_tokens_per_trajectory,
        "temperature": config.rollout.temperature,
        "lr": config.train.lr,
        "warmup_steps": config.train.warmup_steps,
    }


def accuracy_of(case: Case, model: Path, out: Path) -> float:
    command = [sys.executable, "-m", "minirl.cli", "eval", str(model), "--out", str(out)]
    command += ["--recipe", str(case.recipe), "--set", f"eval.num_prompts={NUM_PROBLEMS}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "summary.json").read_text())["accuracy"]
