"""A recipe's file: from TOML to a Config and back, and the rules between its fields.

Takes a TOML file, what it `extends`, and `--set section.key=value`. Gives a Config and where each
value came from, or a RecipeError: one line with key, value, rule and remedy. What needs more than
the recipe is handed in (`check_devices`, `check_memory`, `check_model`): a dry run works anywhere.

Leaves out: what one field may be (config.py), torch, the network, and running a task's code.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from minirl.config import ALGORITHMS, KEYS, SECTIONS, TINY, Config, get
from minirl.errors import RecipeError, one_line

MAX_RECIPE_BYTES = 2**20
ANCHORED = ("tasks.kind", "tasks.data")
"""Keys that may name a file beside the recipe."""
OPTIONS = "tasks.options"
"""The one key that is a table of its own, whose names the task decides."""
LOGGERS = ("tensorboard", "wandb", "trackio")
BUILTIN_TASKS = ("arithmetic", "calculator", "code", "countdown", "gsm8k", "math")

FOREIGN_NAMES = {
    "learning_rate": "train.lr",
    "eta": "buffer.max_staleness",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "max_steps": "train.steps",
    "max_grad_norm": "train.grad_clip",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "loss_agg_mode": "train.loss_norm",
}
"""What other trainers call a key, where the nearest spelling would not find ours."""
FOREIGN_VALUES = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp32": "float32",
    "half": "bfloat16",
    "tb": "tensorboard",
}
"""The same for values: "gpu" is nearest to "cpu"."""
PLAIN_WORDS = {
    "Input should": "must",
    "String should": "must",
    "valid integer": "whole number",
    "valid tuple": "list",
    "valid dictionary": "table",
    "a valid ": "a ",
}
"""pydantic's words, and ours."""

_SHAPING = ("format", "format_weight", "length_weight", "reward_weight", "reward_clip")
REMOVED = {
    **{f"tasks.{name}": "write it into the task's reward (docs/tasks.md)" for name in _SHAPING},
    "guard.reward_range": "let the task's reward raise: a reward that raises has failed",
    "guard.on_logprob_gap": "leave it out: a gap above guard.max_logprob_gap warns",
    "guard.on_entropy": "leave it out: an entropy below guard.min_entropy warns",
    "guard.max_skipped": "leave it out: three steps in a row without an update stop the run",
    "train.behav_level": 'leave it out: "gspo" weighs whole sequences, the others tokens',
    "train.kl_kind": 'leave it out: k3 with train.kl_in = "loss", k1 with "reward"',
    "train.dual_clip": "leave it out: train.clip_low, clip_high and behav_cap bound a token",
    "train.gamma": "leave it out: rewards are not discounted",
    "sft.warmup_steps": "leave it out: the learning rate rises over ten steps",
    "sft.schedule": "leave it out: the learning rate falls to 0 in a line",
}
"""Keys of earlier versions, and what to do instead."""


@dataclass(frozen=True)
class Loaded:
    """A recipe and where each of its values was written: "default", "smoke.toml:12", "--set", or
    "algorithm gspo" where the recipe's train.algorithm stands for it."""

    config: Config
    origins: dict[str, str]


@dataclass(frozen=True)
class _Layer:
    """One source of values: a file of the chain, or one --set."""

    values: dict[str, Any]
    name: str
    lines: dict[str, int]
    folder: Path = Path()  # that files are looked for in first

    def origin(self, key: str) -> str:
        return f"{self.name}:{self.lines[key]}" if key in self.lines else self.name


def load(path: Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe, what it extends, and the overrides; check all that needs no machine.

    Without a path: the defaults and the overrides."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    for layer in [*(_read_chain(path) if path else ()), *map(_parse_override, overrides)]:
        for key, value in _flatten(layer):
            origins[key] = layer.origin(key)
            if isinstance(value, dict) and isinstance(values.get(key), dict):
                value = values[key] | value  # tasks.options is one table of all layers
            values[key] = _anchored(key, value, layer.folder) if key in ANCHORED else value
    algorithm = str(values.get("train.algorithm"))
    for key, value in ALGORITHMS.get(algorithm, {}).items():
        if key not in values:
            values[key], origins[key] = value, f"algorithm {algorithm}"
    try:
        config = build(values)
        validate(config)
    except RecipeError as error:
        key = OPTIONS if error.key.startswith(OPTIONS) else error.key
        raise error if origins[key] == "default" else error.at(origins[key]) from None
    return Loaded(config, origins)


def build(values: Mapping[str, Any]) -> Config:
    """The Config of dotted keys."""
    made = {key: value for key, value in values.items() if "." not in key}
    for section, cls in SECTIONS.items():
        keys = [key for key in _keys_in(section) if key in values]
        made[section] = _made(f"{section}.", cls, {key.split(".")[1]: values[key] for key in keys})
    return _made("", Config, made)


def _made(prefix: str, cls: Any, values: dict[str, Any]) -> Any:
    try:
        return cls(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    raise _wrong(prefix + name, values[name], first)


def _wrong(key: str, value: Any, error: Mapping[str, Any]) -> RecipeError:
    """pydantic's error, in the form of all others."""
    kind, loc, given = error["type"], error["loc"], error["input"]
    default = _toml_value(get(Config(), key))
    rule, remedy = error["msg"], f"{default} is the default"
    for theirs, ours in PLAIN_WORDS.items():
        rule = rule.replace(theirs, ours)
    if key == OPTIONS and len(loc) > 1:
        key, value = f"{OPTIONS}.{loc[1]}", value[loc[1]]
        if loc[-1] == "[key]":
            return RecipeError(key, value, "is no name for an option", "use letters, digits and _")
        rule = "must be text, a finite number, true, false or a list of these"
        return RecipeError(key, value, rule, "write it like 3 or [0.5, 0.5]")
    if kind == "string_pattern_mismatch":
        rule = "must be one line of text" if given.strip() else "must not be empty"
    elif kind == "literal_error":
        choices = re.findall(r"'(.+?)'", error["ctx"]["expected"])
        remedy = _near(str(given), choices, remedy)
    elif isinstance(value, str) and isinstance(_parse_value(value), (int, float)):
        remedy = "take the quotes away"
    elif kind.endswith("_type"):
        examples = KEYS[key].examples
        remedy = f"write it like {_toml_value(examples[0]) if examples else default}"
    if isinstance(value, (list, tuple)) and len(loc) > 1:
        rule = f"each item {rule}"
    return RecipeError(key, value, rule, remedy)


def _near(given: str, known: Sequence[str], otherwise: str) -> str:
    """The remedy for a value that is near a known one."""
    near = difflib.get_close_matches(FOREIGN_VALUES.get(given, given), known, n=1)
    return f'did you mean "{near[0]}"?' if near else otherwise


# Reading ----------------------------------------------------------------------------------------


def _anchored(key: str, value: Any, folder: Path) -> Any:
    """The file that a value names, beside its recipe or else in the working folder, by its whole
    path: the run can then be resumed from anywhere. A value that names no file stays as it is."""
    if not isinstance(value, str):
        return value
    place, colon, name = value.rpartition(":") if key == "tasks.kind" else (value, "", "")
    if not place or (colon and not place.endswith(".py")):
        return value
    for base in (folder, Path()):
        with suppress(OSError, ValueError):  # a name that no file system allows
            if (base / place).exists():
                return os.path.abspath(base / place) + colon + name
    return value


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
        with path.open("rb") as file:
            text = file.read(MAX_RECIPE_BYTES).decode("utf-8-sig")
        table = tomllib.loads(text)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        rule = "no such file" if is_missing else f"cannot be read ({error.strerror})"
        raise wrong(rule, _suggest_file(path)) from None
    except (ValueError, RecursionError) as error:
        rule = f"is not valid TOML: {one_line(str(error).partition(';')[0])}"
        raise wrong(rule, "mend it there (strings take quotes, numbers none)") from None
    return _Layer(table, path.name, _line_numbers(text), path.parent)


def _suggest_file(path: Path) -> str:
    """The nearest-named recipe beside the missing one or in recipes/."""
    near = {p.stem: p for p in [*path.parent.glob("*.toml"), *Path("recipes").glob("*.toml")]}
    for match in difflib.get_close_matches(path.stem, near, n=1, cutoff=0.5):
        return f"did you mean {one_line(str(near[match]))}?"
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
    value = _parse_value(raw)
    for part in reversed(key.split(".")):
        value = {part: value}
    return _Layer(value, "--set", {})


def _parse_value(raw: str) -> Any:
    try:
        table = tomllib.loads(f"value = {raw.strip()}")
    except (ValueError, RecursionError):
        return raw.strip()
    return table["value"] if len(table) == 1 else raw.strip()


def _flatten(layer: _Layer) -> Iterator[tuple[str, Any]]:
    """The layer's values by dotted key; a key that no recipe has is an error."""
    for top, value in layer.values.items():
        if top in SECTIONS and isinstance(value, dict):
            inner = {f"{top}.{name}": given for name, given in value.items()}
        else:
            inner = {top: value}
        for key, given in inner.items():
            if key not in KEYS:
                raise RecipeError(key, given, *_unknown(key, given), layer.origin(key))
            yield key, given


def _unknown(key: str, value: Any) -> tuple[str, str]:
    """Rule and remedy for a key that no recipe has."""
    section, _, name = key.rpartition(".")
    if key in REMOVED:
        return "is no longer a key", REMOVED[key]
    if key in SECTIONS:
        return "is a section, not a key", f"write {key}.<key>, such as {_keys_in(key)[0]}"
    if section not in SECTIONS and isinstance(value, dict):
        near = difflib.get_close_matches(key, SECTIONS, n=1)
        remedy = f"did you mean [{near[0]}]?" if near else f"sections are {', '.join(SECTIONS)}"
        return "no such section", remedy
    names = {foreign: [ours] for foreign, ours in FOREIGN_NAMES.items()}
    for known in KEYS:
        names.setdefault(known.rpartition(".")[2], []).append(known)
    for match in difflib.get_close_matches(name, names, n=1):
        return "no such key", f"did you mean {' or '.join(names[match])}?"
    there = _keys_in(section) if section in SECTIONS else ["seed", *SECTIONS]
    return "no such key", f"there are {', '.join(there)}"


def _keys_in(section: str) -> list[str]:
    return [key for key in KEYS if key.startswith(f"{section}.")]


# Rules between fields ---------------------------------------------------------------------------


def validate(config: Config) -> None:
    """The rules that need neither the model nor the machine."""
    tasks, rollout, train, devices = config.tasks, config.rollout, config.train, config.devices

    def need(key: str, is_kept: bool, rule: str, remedy: str) -> None:
        if not is_kept:
            raise RecipeError(key, get(config, key), rule, remedy)

    parts, parallel = train.num_minibatches, devices.tensor_parallel
    share = train.batch_size // parts * rollout.group_size
    longest = config.max_tokens_per_trajectory
    need(
        "train.batch_size",
        train.batch_size % parts == 0,
        f"must be a multiple of train.num_minibatches = {parts}",
        _multiples(train.batch_size, parts),
    )
    need(
        "devices.train",
        share >= devices.train,
        f"a minibatch has only {share} trajectories, and each device needs one",
        f"raise train.batch_size, or lower devices.train to {share}",
    )
    need(
        "train.max_tokens",
        train.max_tokens >= longest,
        f"must hold one trajectory (tasks.max_prompt_tokens + rollout.max_new_tokens = {longest})",
        f"raise it to {longest} or more, or shorten prompt or answer",
    )
    need(
        "train.proximal",
        train.proximal == "forward" or train.objective != "naive",
        'has no effect with train.objective = "naive", which knows no π_prox',
        'set train.objective = "decoupled", or leave it out',
    )
    need(
        "train.shard_optimizer",
        not train.shard_optimizer or devices.train > 1,
        "there is one training device, and nothing to share",
        "set it to false",
    )
    need(
        "devices.rollout",
        devices.rollout % parallel == 0,
        f"must be a multiple of devices.tensor_parallel = {parallel}",
        _multiples(devices.rollout, parallel),
    )
    need("rollout.top_k", rollout.top_k != 1, "all answers are alike at 1", "0 is off")
    need(
        "tasks.max_failures",
        tasks.max_failures <= rollout.group_size - 2,
        f"must leave two of rollout.group_size = {rollout.group_size} to compare",
        f"at most {rollout.group_size - 2}",
    )
    need(
        "tasks.overlong_tokens",
        tasks.overlong_tokens <= rollout.max_new_tokens,
        f"must be at most rollout.max_new_tokens = {rollout.max_new_tokens}",
        f"a fifth of it is usual: {max(1, rollout.max_new_tokens // 5)}",
    )
    target = config.buffer.target_staleness
    remedy = "-1 is as few as keep the trainer fed; 0 waits for every batch"
    need("buffer.target_staleness", target == -1 or target >= 0, "must be -1 or at least 0", remedy)
    need(
        "log.stall_s",
        config.log.stall_s > tasks.timeout_s,
        f"must be above tasks.timeout_s = {tasks.timeout_s}",
        "raise it, or a slow reward looks like a stall",
    )
    strange = next((name for name in config.log.to if name not in LOGGERS), "")
    need(
        "log.to",
        not strange and len(set(config.log.to)) == len(config.log.to),
        f"must name some of {', '.join(LOGGERS)}, each once",
        _near(strange, LOGGERS, "[] is metrics.jsonl alone"),
    )


def _multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return f"make it {below} or {above}" if below else f"make it {above}"


# Rules that need the machine, the model or the task ---------------------------------------------


def check_devices(
    config: Config, kind: str, available: int, num_rollout: int | None = None
) -> None:
    """`kind` is what the run would use, "cuda" or "cpu"; `available` counts GPUs or CPU cores.
    `num_rollout` is given where it is not devices.rollout."""
    devices = config.devices
    if devices.kind == "cuda" and kind != "cuda":
        remedy = "run it where there is one, or --set devices.kind=cpu"
        raise RecipeError("devices.kind", "cuda", "there is no CUDA device here", remedy)
    wanted = devices.train + (devices.rollout if num_rollout is None else num_rollout)
    limit = available if kind == "cuda" else max(4, 2 * available)
    if wanted > limit:
        what = "GPUs" if kind == "cuda" else "cores"
        rule = f"with devices.train = {devices.train} that is {wanted} {what}, of {available} here"
        remedy = f"the two together may be at most {limit}"
        if limit == 1:
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
    wanted = 'write "my_task.py:MyTask" or "package.module:MyTask"'
    if not colon and kind not in BUILTIN_TASKS:
        remedy = _near(kind, BUILTIN_TASKS, 'your own is "my_task.py:MyTask"')
        raise RecipeError("tasks.kind", kind, f"is none of {', '.join(BUILTIN_TASKS)}", remedy)
    if colon and not name.isidentifier():
        raise RecipeError("tasks.kind", kind, "has no class name", wanted)
    if place.endswith(".py"):
        if not _is(Path.is_file, place):
            remedy = "it is looked for beside the recipe, then in the working folder"
            raise RecipeError("tasks.kind", kind, f"there is no file {one_line(place)}", remedy)
    elif colon and not all(part.isidentifier() for part in place.split(".")):
        raise RecipeError("tasks.kind", kind, "names neither a .py file nor a module", wanted)


def check_loggers(config: Config) -> None:
    """The packages behind log.to are here. Imports none of them."""
    for name in config.log.to:
        if find_spec(name) is None:
            remedy = f'pip install "minirl[{name}]", or take it out'
            raise RecipeError("log.to", config.log.to, f"{name} is not installed", remedy)


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
    """What `check_model` takes: the folder's config.json."""
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


# Writing ----------------------------------------------------------------------------------------


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Every value, defaults too: `load` gives the same config back. With where each came from, if
    that is given."""
    lines = []
    section = ""
    for key in KEYS:
        here, _, name = key.rpartition(".")
        if here != section:
            lines += ["", f"[{here}]"]
            section = here
        line = f"{name} = {_toml_value(get(config, key))}"
        lines.append(f"{line:<36}  # {one_line(origins[key])}" if origins else line)
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml_value(v)}' for name, v in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):  # a TOML string is a JSON string, save for one control character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
