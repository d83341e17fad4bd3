"""What is to be examined. Takes what a person typed, gives a recipe and a folder of weights.

a run        its recipe, and its last checkpoint (or another: --checkpoint)
a checkpoint of a run: that run's recipe, and this folder
a model      a Hugging Face folder, a hub name or "tiny", under --recipe or --task
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from minirl.config import TINY, Config
from minirl.errors import RecipeError
from minirl.recipe import load
from minirl.rules import check_task, find_model, read_model_config
from minirl.run_dir import read_lines
from minirl.tools.evaluate.results import RESULTS

PLAIN_PROMPT, PLAIN_ANSWER = 1024, 1024  # without a recipe, where the model has the positions
NO_LIMIT = 10**8  # nothing is trained: train.max_tokens does not matter


class Kind(Enum):
    RESULTS = auto()
    RUN = auto()
    MODEL = auto()


@dataclass(frozen=True)
class Options:
    """What may be given beside the target; None and "" are: not given."""

    recipe: Path | None = None
    task: str = ""
    data: str = ""
    checkpoint: str = ""
    num_problems: int | None = None
    seed: int | None = None
    k: int = 1
    temperature: float | None = None
    max_new_tokens: int | None = None
    num_devices: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def as_overrides(self) -> list[str]:
        """In the recipe's own words, after --set."""
        given = {
            "tasks.kind": self.task or None,
            "tasks.data": self.data or None,
            "eval.num_prompts": self.num_problems,
            "seed": self.seed,
            "eval.temperature": self.temperature,
            "rollout.max_new_tokens": self.max_new_tokens,
            "devices.rollout": self.num_devices,
        }
        said = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
        return [*self.overrides, *said, f"train.max_tokens={NO_LIMIT}"]


@dataclass(frozen=True)
class Target:
    name: str  # as typed
    config: Config
    folder: Path | None  # of the weights; None: wherever model.path leads
    run_dir: Path | None = None


def kind_of(name: str) -> Kind:
    path = Path(name)
    if path.is_file() or (path / RESULTS).is_file():
        return Kind.RESULTS
    if (path / "recipe.toml").is_file() or run_of(path) is not None:
        return Kind.RUN
    return Kind.MODEL


def run_of(folder: Path) -> Path | None:
    """The run that a checkpoint belongs to."""
    if folder.parent.name != "checkpoints" or not (folder / "config.json").is_file():
        return None
    run = folder.parent.parent
    return run if (run / "recipe.toml").is_file() else None


def resolve(name: str, options: Options) -> Target:
    """Checks all that needs no machine. Raises RecipeError with what is missing."""
    if options.k < 1 or options.k > 1024:
        raise RecipeError("--k", options.k, "must be 1 to 1024", "8 is usual")
    path, is_run = Path(name), kind_of(name) is Kind.RUN
    run_dir = (run_of(path) or path) if is_run else None
    if run_dir is not None:
        folder = path if run_dir != path else find_checkpoint(run_dir, options.checkpoint)
        recipe = options.recipe or run_dir / "recipe.toml"
        config = load(recipe, options.as_overrides).config
    else:
        folder, config = None, _of_model(name, options)
    check_task(config)
    return Target(name, _sampling(config, options), folder, run_dir)


def _of_model(name: str, options: Options) -> Config:
    if options.checkpoint:
        remedy = "leave it out, or name a run directory"
        raise RecipeError("--checkpoint", options.checkpoint, f"{name} is no run", remedy)
    named = f"model.path={json.dumps(name)}"
    if options.recipe is not None:
        return load(options.recipe, [named, *options.as_overrides]).config
    if not options.task:
        remedy = "say which with --task, such as --task gsm8k, or with --recipe"
        raise RecipeError("--task", "", f"{name} is a model, which comes with no task", remedy)
    plain = replace(Config(), model=replace(Config().model, path=name))
    folder = find_model(plain)
    found = read_model_config(plain, folder) if folder else {}
    found = found.get("text_config", found)
    limit = 512 if name == TINY else int(found.get("max_position_embeddings") or 2**20)
    prompt = min(PLAIN_PROMPT, limit // 2)
    defaults = [
        named,
        f"tasks.max_prompt_tokens={prompt}",
        f"rollout.max_new_tokens={min(PLAIN_ANSWER, limit - prompt)}",
    ]
    if (found.get("dtype") or found.get("torch_dtype")) in ("bfloat16", "float16"):
        defaults.append("model.dtype=bfloat16")
    return load(None, [*defaults, *options.as_overrides]).config


def _sampling(config: Config, options: Options) -> Config:
    """eval.temperature; for several answers, where that is greedy, rollout.temperature."""
    if options.k == 1 or config.eval.temperature > 0:
        return config
    if options.temperature is not None:
        remedy = "raise it, or leave --k out"
        raise RecipeError("--temperature", 0, f"all {options.k} answers would be alike", remedy)
    warm = replace(config.eval, temperature=config.rollout.temperature)
    return replace(config, eval=warm)


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """ "last" (or ""), "best" by the run's own evaluations, or a step."""
    whole = sorted(p.parent.parent for p in run_dir.glob("checkpoints/step-*/trainer/state.json"))
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
    lines = read_lines(run_dir / "evals.jsonl")
    scores = {x["version"]: x["accuracy"] for x in lines if x.get("accuracy") is not None}
    states = [json.loads((path / "trainer" / "state.json").read_text()) for path in whole]
    by_version = {s["history"]["version"]: path for s, path in zip(states, whole, strict=True)}
    known = [version for version in by_version if version in scores]
    if not known:
        rule = "no checkpoint of this run has a version that was evaluated"
        remedy = 'take "last", or train with checkpoint.every = eval.every'
        raise RecipeError("--checkpoint", "best", rule, remedy)
    return by_version[max(known, key=lambda version: (scores[version], version))]
