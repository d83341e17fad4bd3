"""The recipe: a frozen dataclass tree read from TOML, validated before any process is spawned.

Takes a TOML file, what it `extends`, and `--set section.key=value`. Gives a Config and where each
value came from, or a RecipeError: one line with key, value, rule and remedy. Section names are
stage names; each field's explanation is the string under it, and the docs read it from here.

Leaves out: torch, the network, and running a task's code. What needs the machine or the model is
asked for (`check_devices`, `check_memory`, `check_model`), so that a dry run works anywhere.
"""

import ast
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unicodedata import category

from minirl.errors import RecipeError, one_line

BUILTIN_TASKS = ("arithmetic", "gsm8k")
TINY = "tiny"
BYTES_PER_TOKEN = 13
"""In the trajectory ring: token 4, mask 1, logprob 4, version 4."""
MAX_RECIPE_BYTES = 2**20


@dataclass(frozen=True)
class ModelConfig:
    path: str = "tiny"
    """A Hugging Face folder or hub name; "tiny" is the model minirl builds and warms up itself."""
    dtype: str = "float32"
    """What vLLM computes in and what is published: "float32" or "bfloat16"."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""


@dataclass(frozen=True)
class TasksConfig:
    kind: str = "arithmetic"
    """Which task: "arithmetic", "gsm8k", or one's own as "my_task.py:MyTask"."""
    data: str = ""
    """Where the task's data is: a hub name or a local folder. Empty: the task's own default."""
    max_prompt_tokens: int = 256
    """Prompts longer than this are dropped, with a count."""
    verifiers: int = 1
    """Processes that compute rewards."""
    timeout_s: float = 10.0
    """A reward that takes longer is a failure: its group is dropped, its verifier replaced."""


@dataclass(frozen=True)
class DevicesConfig:
    kind: str = "auto"
    """"cuda", "cpu", or "auto": cuda where there is one."""
    rollout: int = 1
    """Devices that run vLLM (on CPU: processes)."""
    train: int = 1
    """Devices that train, one DDP rank each (on CPU: processes)."""
    tensor_parallel: int = 1
    """Rollout devices to one vLLM engine."""


@dataclass(frozen=True)
class RolloutConfig:
    group_size: int = 8
    """Trajectories to a prompt."""
    max_new_tokens: int = 128
    """An answer is cut here."""
    temperature: float = 1.0
    """Of the sampling distribution; the trainer applies the same."""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    on_update: str = "recompute"
    """At new weights, the KV of running sequences is rebuilt ("recompute") or kept ("keep")."""
    max_num_seqs: int = 256
    """Sequences that one engine decodes at once."""
    memory_fraction: float = 0.85
    """Share of a GPU's memory that vLLM takes. On CPU see kv_cache_gib."""
    kv_cache_gib: float = 0.5
    """KV cache of one engine on CPU."""


@dataclass(frozen=True)
class BufferConfig:
    max_staleness: int = 2
    """η: no token older than this many versions is trained. 0 is exactly synchronous."""
    on_stale: str = "mask"
    """Tokens too old when their group is done: "mask" them out, "drop" the group, or "wait"."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 40
    """Training steps; each publishes one version."""
    batch_size: int = 32
    """Groups (prompts) to a step."""
    num_minibatches: int = 1
    """Optimizer steps to a batch."""
    lr: float = 1e-6
    """Learning rate of AdamW."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Of AdamW; norms and biases are left out."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    max_tokens: int = 16384
    """Tokens to a micro-batch on one device: lower it when memory runs out."""
    objective: str = "decoupled"
    """"decoupled" PPO (the paper's eq. 5) or "naive" PPO (ratio to the sampling policy)."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    behav_cap: float = 5.0
    """Tokens whose weight w = prox / behaviour is above this are masked out of the loss."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""


@dataclass(frozen=True)
class EvalConfig:
    every: int = 10
    """Steps between evaluations on held-out prompts; 0: only before and after."""
    num_prompts: int = 256
    """Held-out prompts to an evaluation."""
    temperature: float = 0.0
    """0 is greedy."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """How many of the last checkpoints stay."""


@dataclass(frozen=True)
class LogConfig:
    samples: int = 2
    """Readable trajectories to a step, in samples.jsonl."""
    stall_s: float = 300.0
    """When nothing moves for this long, stacks are written and the run ends with exit code 3."""


@dataclass(frozen=True)
class Config:
    seed: int = 0
    """Of prompts, sampling and initialisation."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def num_slots(self) -> int:
        """Groups that may be running, ready or in training at once (DESIGN: slots)."""
        return (self.buffer.max_staleness + 1) * self.train.batch_size

    @property
    def max_tokens_per_trajectory(self) -> int:
        return self.tasks.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def is_synchronous(self) -> bool:
        return self.buffer.max_staleness == 0

    @property
    def ring_bytes(self) -> int:
        """Shared memory that the trajectory ring needs: a cell for every trajectory in a slot."""
        cells = self.num_slots * self.rollout.group_size
        return cells * self.max_tokens_per_trajectory * BYTES_PER_TOKEN


@dataclass(frozen=True)
class Loaded:
    """A recipe and where each of its values was written: "default", "smoke.toml:12", "--set"."""

    config: Config
    origins: dict[str, str]


SECTIONS: dict[str, type] = {f.name: cast(type, f.type) for f in fields(Config) if f.name != "seed"}

KEYS: dict[str, Field[Any]] = {f.name: f for f in fields(Config) if f.name not in SECTIONS} | {
    f"{section}.{f.name}": f for section, cls in SECTIONS.items() for f in fields(cls)
}
"""Every key of a recipe, dotted: "seed", "train.lr"."""

FOREIGN_NAMES = {
    "learning_rate": "train.lr",
    "eta": "buffer.max_staleness",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "max_steps": "train.steps",
    "max_grad_norm": "train.grad_clip",
    "gpu_memory_utilization": "rollout.memory_fraction",
}
"""What other trainers call it: an unknown key by one of these names is told ours."""
FOREIGN_VALUES = {"gpu": "cuda", "bf16": "bfloat16", "fp32": "float32", "half": "bfloat16"}
"""The same for values, where the nearest spelling would mislead: "gpu" is nearest to "cpu"."""


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


@cache
def _explanations() -> dict[tuple[str, str], str]:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    found = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for statement, below in pairwise(cls.body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[cls.name, name] = " ".join(text.split())
    return found


def explain(section: str, name: str) -> str:
    """The explanation under a field; the section of `seed` is ""."""
    return _explanations()[SECTIONS[section].__name__ if section else "Config", name]


# Reading: layers of TOML, then --set, then the tree --------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """One source of values: a file of the chain, or one --set."""

    values: dict[str, Any]
    name: str
    lines: dict[str, int]

    def origin(self, key: str) -> str:
        return f"{self.name}:{self.lines[key]}" if key in self.lines else self.name


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe, what it extends, and the overrides; validate all that needs no machine."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    for layer in [*_read_chain(path), *map(_parse_override, overrides)]:
        for key, value in _flatten(layer):
            values[key] = _typed(key, value, layer.origin(key))
            origins[key] = layer.origin(key)
    config = _build(values)
    try:
        validate(config)
    except RecipeError as error:
        origin = origins.get(error.key, "default")
        raise error if origin == "default" else error.at(origin) from None
    return Loaded(config, origins)


def _read_chain(path: Path) -> list[_Layer]:
    """The recipe and what it extends, the base first."""
    chain = [_read_layer(path, "recipe", str(path))]
    seen = [path.resolve()]
    while (base := chain[0].values.pop("extends", None)) is not None:
        origin = chain[0].origin("extends")
        if not isinstance(base, str):
            remedy = 'name one other recipe, such as extends = "base.toml"'
            raise RecipeError("extends", base, "must be a string", remedy, origin)
        path = path.parent / base
        chain.insert(0, _read_layer(path, "extends", base, origin))
        if path.resolve() in seen:
            names = " -> ".join(p.name for p in [*seen, path.resolve()])
            rule = f"recipes extend each other in a circle ({one_line(names)})"
            raise RecipeError("extends", base, rule, "take one of these lines out", origin)
        seen.append(path.resolve())
    return chain


def _read_layer(path: Path, key: str, value: str, origin: str = "") -> _Layer:
    """One file; key, value and origin are how an error names it."""

    def wrong(rule: str, remedy: str) -> RecipeError:
        return RecipeError(key, value, rule, remedy, origin)

    try:
        if path.is_dir():
            raise wrong("is a folder, not a file", _suggest_file(path / "recipe.toml"))
        if not path.is_file():
            raise wrong("no such file", _suggest_file(path))
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise wrong("is too large for a recipe", "name a TOML file of some 30 lines")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise wrong("is not UTF-8 text", "name a TOML file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or "not a file name"
        raise wrong(f"cannot be read ({reason})", "check the name and its permissions") from None
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        known = isinstance(error, tomllib.TOMLDecodeError)
        reason = str(error) if known else "a number too long or brackets too deep"
        rule = f"is not valid TOML: {one_line(reason)}"
        raise wrong(rule, "mend it there (strings take quotes, numbers none)") from None
    return _Layer(table, path.name, _line_numbers(text))


def _suggest_file(path: Path) -> str:
    """The nearest-named recipe beside the missing one or in recipes/."""
    near = sorted({*path.parent.glob("*.toml"), *Path("recipes").glob("*.toml")})
    by_stem = {p.stem: p for p in near}
    stem = path.name.removesuffix(".toml")
    for match in difflib.get_close_matches(stem, by_stem, n=1, cutoff=0.5):
        return f"did you mean {one_line(str(by_stem[match]))}?"
    if near:
        return f"there are {one_line(', '.join(map(str, near)))}"
    return "name a TOML file, such as recipes/smoke.toml"


def _line_numbers(text: str) -> dict[str, int]:
    """Where each key stands, which tomllib does not say. Inside an inline table none is found."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            section = header[1] + "."
            lines.setdefault(header[1], number)
        elif entry := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(section + entry[1], number)
    return lines


def _parse_override(text: str) -> _Layer:
    """`section.key=value`; the value is TOML, and what is not TOML is a string."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        remedy = "write section.key=value, such as --set train.lr=1e-5"
        raise RecipeError("--set", text, "has no key and value", remedy)
    if key == "extends":
        raise RecipeError(key, raw, "cannot be set from outside", "write it in a recipe", "--set")
    section, dot, name = key.partition(".")
    value = _parse_value(raw)
    return _Layer({section: {name: value}} if dot else {key: value}, "--set", {})


def _parse_value(raw: str) -> Any:
    try:
        table = tomllib.loads(f"value = {raw.strip()}")
    except (ValueError, RecursionError):
        return raw.strip()
    return table["value"] if len(table) == 1 else raw.strip()


def _flatten(layer: _Layer) -> Iterator[tuple[str, Any]]:
    """The layer's values by dotted key; a key that no recipe has is an error."""
    for key, value in layer.values.items():
        if key in KEYS:
            yield key, value
        elif key not in SECTIONS and isinstance(value, dict):
            raise _unknown_section(key, value, layer.origin(key))
        elif key not in SECTIONS:
            raise _unknown_key("", key, value, layer.origin(key))
        elif not isinstance(value, dict):
            remedy = f"write {key}.<key>, such as {key}.{fields(SECTIONS[key])[0].name}"
            raise RecipeError(key, value, "is a section, not a key", remedy, layer.origin(key))
        else:
            for name, inner in value.items():
                dotted = f"{key}.{name}"
                if dotted not in KEYS:
                    raise _unknown_key(key, name, inner, layer.origin(dotted))
                yield dotted, inner


def _unknown_section(name: str, value: Any, origin: str) -> RecipeError:
    near = difflib.get_close_matches(name, SECTIONS, n=1)
    remedy = f"did you mean [{near[0]}]?" if near else f"sections are {', '.join(SECTIONS)}"
    return RecipeError(name, value, "no such section", remedy, origin)


def _unknown_key(section: str, name: str, value: Any, origin: str) -> RecipeError:
    if nearest := _nearest(section, name):
        remedy = f"did you mean {' or '.join(nearest)}?"
    elif section:
        remedy = f"[{section}] has {', '.join(f.name for f in fields(SECTIONS[section]))}"
    else:
        remedy = f"at the top stands only seed; sections are {', '.join(SECTIONS)}"
    key = f"{section}.{name}" if section else name
    return RecipeError(key, value, "no such key", remedy, origin)


def _nearest(section: str, name: str) -> list[str]:
    """Known keys most like it: the same name elsewhere, a like one here, a like one elsewhere."""
    if name in (names := _names()):
        return names[name]
    here = [f.name for f in fields(SECTIONS[section])] if section else []
    for match in difflib.get_close_matches(name, here, n=1):
        return [f"{section}.{match}"]
    for match in difflib.get_close_matches(name, names, n=1):
        return names[match]
    return []


def _names() -> dict[str, list[str]]:
    """Keys by their last part."""
    names = {name: [key] for name, key in FOREIGN_NAMES.items()}
    for key in KEYS:
        names.setdefault(key.rpartition(".")[2], []).append(key)
    return names


def _typed(key: str, value: Any, origin: str) -> Any:
    """The value as its field's type: an int may stand for a float, a bool never for an int."""
    wanted, default = KEYS[key].type, KEYS[key].default
    if wanted is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            remedy = f"write it like {default}"
            raise RecipeError(key, value, "must be a finite number", remedy, origin) from None
    if type(value) is wanted:
        return value
    if isinstance(value, str) and type(_parse_value(value)) in (wanted, int, float):
        remedy = "take the quotes away"
    elif wanted is int and isinstance(value, float) and abs(value) < 1e15 and value % 1 == 0:
        remedy = f"write {int(value)}"
    else:
        remedy = {
            int: f"write it like {default}",
            float: f"write it like {default}",
            bool: "write true or false",
            str: f'write it in quotes, like "{default}"',
        }[cast(type, wanted)]
    kind = {int: "a whole number", float: "a number", bool: "a boolean", str: "a string"}
    raise RecipeError(key, value, f"must be {kind[cast(type, wanted)]}", remedy, origin)


def _build(values: dict[str, Any]) -> Config:
    sections = {
        section: cls(
            **{f.name: values[k] for f in fields(cls) if (k := f"{section}.{f.name}") in values}
        )
        for section, cls in SECTIONS.items()
    }
    top = {key: value for key, value in values.items() if "." not in key}
    return Config(**top, **sections)


# Writing --------------------------------------------------------------------------------------


def to_toml(config: Config) -> str:
    """Every value, defaults too: `load` gives the same config back."""
    return _write(config, lambda key, line: line)


def to_toml_with_origins(loaded: Loaded) -> str:
    """The same, each value with where it came from."""
    return _write(loaded.config, lambda key, line: f"{line:<36}  # {one_line(loaded.origins[key])}")


def _write(config: Config, mark: Callable[[str, str], str]) -> str:
    lines = []
    section = ""
    for key in KEYS:
        here, _, name = key.rpartition(".")
        if here != section:
            lines += ["", f"[{here}]"]
            section = here
        lines.append(mark(key, f"{name} = {_toml_value(get(config, key))}"))
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # A TOML basic string is a JSON string, save for control characters, which validate refuses.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


# Rules ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """What a number may be. An open end is not itself allowed."""

    low: float
    high: float
    remedy: str
    is_low_open: bool = False
    is_high_open: bool = False

    def broken(self, value: float) -> str:
        """The rule that the value breaks, or ""."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if value < self.low or (self.is_low_open and value == self.low):
            return f"must be {'above' if self.is_low_open else 'at least'} {self.low:,}"
        if value > self.high or (self.is_high_open and value == self.high):
            return f"must be {'below' if self.is_high_open else 'at most'} {self.high:,}"
        return ""


CHOICES = {
    "model.dtype": ("float32", "bfloat16"),
    "devices.kind": ("auto", "cuda", "cpu"),
    "rollout.on_update": ("recompute", "keep"),
    "buffer.on_stale": ("mask", "drop", "wait"),
    "train.objective": ("decoupled", "naive"),
}

RANGES = {
    "seed": Range(0, 2**32 - 1, "0 is as good as any"),
    "tasks.max_prompt_tokens": Range(1, 10**6, "256 suits short questions"),
    "tasks.verifiers": Range(1, 1024, "one for every few cores is enough"),
    "tasks.timeout_s": Range(0, 86_400, "10 seconds suit most rewards", is_low_open=True),
    "devices.rollout": Range(1, 1024, "one box has 1 to 16 devices"),
    "devices.train": Range(1, 1024, "one box has 1 to 16 devices"),
    "devices.tensor_parallel": Range(1, 1024, "1 unless the model is too large for one GPU"),
    "rollout.group_size": Range(2, 4096, "an advantage compares answers to one prompt; 8 is usual"),
    "rollout.max_new_tokens": Range(1, 10**6, "128 to 8192 are usual"),
    "rollout.temperature": Range(
        0, 10, "1 is usual, and all answers are alike at 0", is_low_open=True
    ),
    "rollout.top_p": Range(0, 1, "1 is off", is_low_open=True),
    "rollout.top_k": Range(0, 10**6, "0 is off"),
    "rollout.max_num_seqs": Range(1, 65_536, "256 is usual"),
    "rollout.memory_fraction": Range(
        0, 1, "0.85 is usual; less if memory runs out", is_low_open=True, is_high_open=True
    ),
    "rollout.kv_cache_gib": Range(0, 4096, "0.5 serves a tiny model", is_low_open=True),
    "buffer.max_staleness": Range(0, 1000, "0 is synchronous, 2 to 8 are usual"),
    "train.steps": Range(1, 10**7, "a run has 20 to 10,000"),
    "train.batch_size": Range(1, 10**6, "32 to 512 are usual"),
    "train.num_minibatches": Range(1, 10**6, "1 to 4 are usual"),
    "train.lr": Range(0, 1, "1e-6 to 2e-5 are usual", is_low_open=True),
    "train.warmup_steps": Range(0, 10**7, "0 is off"),
    "train.weight_decay": Range(0, 1, "0 is off"),
    "train.grad_clip": Range(0, 10**6, "1 is usual", is_low_open=True),
    "train.max_tokens": Range(1, 10**8, "16384 is usual; less if memory runs out"),
    "train.clip_low": Range(0, 1, "0.2 is usual", is_low_open=True),
    "train.clip_high": Range(0, 100, "0.2 is usual", is_low_open=True),
    "train.behav_cap": Range(
        1, 10**6, "5 is usual; at 1 fresh tokens are masked too", is_low_open=True
    ),
    "eval.every": Range(0, 10**7, "0 is only before and after"),
    "eval.num_prompts": Range(1, 10**6, "256 gives an accuracy to about 3 points"),
    "eval.temperature": Range(0, 10, "0 is greedy"),
    "checkpoint.every": Range(0, 10**7, "0 is only at the end"),
    "checkpoint.keep": Range(1, 1000, "the last good one always stays; 2 is usual"),
    "log.samples": Range(0, 1000, "2 is usual, 0 is none"),
    "log.stall_s": Range(1, 604_800, "300 is usual"),
}


def validate(config: Config) -> None:
    """The rules that need neither the model nor the machine."""
    for key, choices in CHOICES.items():
        if (value := get(config, key)) not in choices:
            foreign = FOREIGN_VALUES.get(value)
            near = [foreign] if foreign else difflib.get_close_matches(value, choices, n=1)
            remedy = f'did you mean "{near[0]}"?' if near else f'"{choices[0]}" is usual'
            raise RecipeError(key, value, f"must be one of {', '.join(choices)}", remedy)
    for key, limits in RANGES.items():
        if rule := limits.broken(get(config, key)):
            raise RecipeError(key, get(config, key), rule, limits.remedy)
    for key in ("model.path", "tasks.kind", "tasks.data"):
        value = get(config, key)
        if not value.strip() and key != "tasks.data":
            raise RecipeError(key, value, "must not be empty", f'"{KEYS[key].default}" is built in')
        if any(category(c) in ("Cc", "Cs") for c in value):
            raise RecipeError(key, value, "has a control character", "take it out")
    _validate_batch(config)
    _validate_rest(config)


def _validate_batch(config: Config) -> None:
    train, devices = config.train, config.devices
    if train.batch_size % train.num_minibatches:
        rule = f"must be a multiple of train.num_minibatches = {train.num_minibatches}"
        remedy = _multiples(train.batch_size, train.num_minibatches)
        raise RecipeError("train.batch_size", train.batch_size, rule, remedy)
    share = train.batch_size // train.num_minibatches * config.rollout.group_size
    if share < devices.train:
        rule = f"a minibatch has only {share} trajectories, and each device needs one"
        remedy = f"raise train.batch_size, or lower devices.train to {share}"
        raise RecipeError("devices.train", devices.train, rule, remedy)
    if config.max_tokens_per_trajectory > train.max_tokens:
        longest = config.max_tokens_per_trajectory
        rule = (
            f"must hold one trajectory of {longest} tokens "
            "(tasks.max_prompt_tokens + rollout.max_new_tokens)"
        )
        remedy = f"raise it to {longest} or more, or shorten prompt or answer"
        raise RecipeError("train.max_tokens", train.max_tokens, rule, remedy)


def _validate_rest(config: Config) -> None:
    devices, rollout = config.devices, config.rollout
    if devices.rollout % devices.tensor_parallel:
        rule = f"must be a multiple of devices.tensor_parallel = {devices.tensor_parallel}"
        remedy = _multiples(devices.rollout, devices.tensor_parallel)
        raise RecipeError("devices.rollout", devices.rollout, rule, remedy)
    if devices.kind == "cpu":
        _check_cpu_tensor_parallel(config)
    if rollout.top_k == 1:
        remedy = "0 is off; otherwise 2 or more"
        raise RecipeError("rollout.top_k", 1, "all answers are alike at 1", remedy)
    if config.log.stall_s <= config.tasks.timeout_s:
        rule = f"must be above tasks.timeout_s = {config.tasks.timeout_s}"
        remedy = "raise it, or a slow reward looks like a stall"
        raise RecipeError("log.stall_s", config.log.stall_s, rule, remedy)


def _multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return f"make it {below} or {above}" if below else f"make it {above}"


def _check_cpu_tensor_parallel(config: Config) -> None:
    if config.devices.tensor_parallel > 1:
        rule = "must be 1 on CPU, where all processes share the same cores"
        value = config.devices.tensor_parallel
        raise RecipeError("devices.tensor_parallel", value, rule, "set it to 1, or use CUDA")


# Rules that need the machine, the model or the task --------------------------------------------


def check_devices(config: Config, kind: str, available: int) -> None:
    """`kind` is what the run would use, "cuda" or "cpu"; `available` counts GPUs or CPU cores."""
    devices = config.devices
    if devices.kind == "cuda" and kind != "cuda":
        remedy = "run it where there is one, or --set devices.kind=cpu"
        raise RecipeError("devices.kind", "cuda", "there is no CUDA device here", remedy)
    if kind == "cpu":
        _check_cpu_tensor_parallel(config)
    wanted = devices.rollout + devices.train
    limit = available if kind == "cuda" else max(4, 2 * available)
    if wanted > limit:
        there = "CUDA device" if kind == "cuda" else "core"
        there = f"1 {there} allows" if available == 1 else f"{available} {there}s allow"
        rule = f"with devices.train = {devices.train} that is {wanted}, more than {there}"
        remedy = f"the two together may be at most {limit}"
        if kind == "cuda" and available == 1:
            remedy = "one GPU is not enough for both pools; two are"
        raise RecipeError("devices.rollout", devices.rollout, rule, remedy)


def check_memory(config: Config, available_bytes: int) -> None:
    """The trajectory ring is allocated at start, whole."""
    if config.ring_bytes > available_bytes:
        gib = [f"{n / 2**30:.1f} GiB" for n in (config.ring_bytes, available_bytes)]
        rule = f"the trajectory ring would take {gib[0]} of the {gib[1]} that are free"
        remedy = "lower it, rollout.group_size, buffer.max_staleness or rollout.max_new_tokens"
        raise RecipeError("train.batch_size", config.train.batch_size, rule, remedy)


def check_task(config: Config) -> None:
    """tasks.kind names a builtin task, or a class in a file that exists. Runs none of its code."""
    kind = config.tasks.kind
    place, colon, name = kind.rpartition(":")
    if not colon:
        if kind not in BUILTIN_TASKS:
            near = difflib.get_close_matches(kind, BUILTIN_TASKS, n=1)
            remedy = f'did you mean "{near[0]}"?' if near else 'your own is "my_task.py:MyTask"'
            rule = f"is none of {', '.join(BUILTIN_TASKS)}"
            raise RecipeError("tasks.kind", kind, rule, remedy)
        return
    if not name.isidentifier():
        raise RecipeError("tasks.kind", kind, "has no class name", 'write "my_task.py:MyTask"')
    if place.endswith(".py"):
        if not _is(Path.is_file, place):
            remedy = "it is looked for from the folder that minirl runs in"
            raise RecipeError("tasks.kind", kind, f"there is no file {one_line(place)}", remedy)
    elif not all(part.isidentifier() for part in place.split(".")):
        remedy = 'write "my_task.py:MyTask" or "package.module:MyTask"'
        raise RecipeError("tasks.kind", kind, "names neither a .py file nor a module", remedy)


def find_model(config: Config) -> Path | None:
    """The model's folder: a local one, or the hub's local cache. None: not on this machine (yet).

    Never goes to the network.
    """
    path = config.model.path
    if path == TINY:
        return None
    if _is(Path.is_dir, path):
        if not _is(Path.is_file, f"{path}/config.json"):
            remedy = "name a Hugging Face model folder"
            raise RecipeError("model.path", path, "the folder has no config.json", remedy)
        return Path(path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path, re.ASCII):
        remedy = f'name an existing folder, a hub name such as "Qwen/Qwen3-0.6B", or "{TINY}"'
        raise RecipeError("model.path", path, "no such folder, and not a hub name", remedy)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a valid hub name after all
        found = None
    return Path(found).parent if isinstance(found, str) else None


def read_model_config(config: Config, folder: Path) -> dict[str, Any]:
    """What `check_model` wants: the folder's config.json."""
    try:
        model_config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        model_config = None
    if not isinstance(model_config, dict):
        rule = "its config.json cannot be read"
        raise RecipeError("model.path", config.model.path, rule, "fetch the model again")
    return model_config


def check_model(config: Config, model_config: dict[str, Any]) -> None:
    """What only the model's config.json can tell."""
    text_config = model_config.get("text_config", model_config)
    sizes = text_config if isinstance(text_config, dict) else {}
    limit = sizes.get("max_position_embeddings")
    longest = config.max_tokens_per_trajectory
    if isinstance(limit, int) and longest > limit:
        rule = f"with tasks.max_prompt_tokens that is {longest}, past the model's {limit} positions"
        remedy = f"shorten one: together at most {limit}"
        raise RecipeError("rollout.max_new_tokens", config.rollout.max_new_tokens, rule, remedy)
    parallel = config.devices.tensor_parallel
    heads = sizes.get("num_attention_heads")
    if isinstance(heads, int) and heads % parallel:
        divisors = ", ".join(str(n) for n in range(1, min(heads, 16) + 1) if heads % n == 0)
        rule = f"must divide the model's {heads} attention heads"
        raise RecipeError("devices.tensor_parallel", parallel, rule, f"one of {divisors}")


def _is(test: Callable[[Path], bool], path: str) -> bool:
    """A test of a path that someone typed: a name that no file system allows is just not there."""
    try:
        return test(Path(path))
    except (OSError, ValueError):
        return False
