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
ANCHORED = ("tasks.kind", "tasks.data", "train.objective", "train.estimator")
"""Keys that may name a file beside the recipe."""
LOGGERS = ("tensorboard", "wandb", "trackio")
BUILTIN_TASKS = ("arithmetic", "calculator", "code", "countdown", "gsm8k", "math")

FOREIGN = {
    "learning_rate": "train.lr",
    "eta": "buffer.max_staleness",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "max_steps": "train.steps",
    "max_grad_norm": "train.grad_clip",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "gpu": "cuda",
    "bf16": "bfloat16",
}
"""Keys and values of other trainers, where the nearest spelling would not find ours."""

_SHAPING = ("format", "format_weight", "length_weight", "reward_weight", "reward_clip")
REMOVED = {
    **{f"tasks.{name}": "write it into the task's reward (docs/tasks.md)" for name in _SHAPING},
    "guard": "leave it out: its limits are fixed (docs/faults.md)",
    "train.behav_level": 'leave it out: "gspo" weighs whole sequences, the others tokens',
    "train.kl_kind": 'leave it out: k3 with train.kl_in = "loss", k1 with "reward"',
    "train.dual_clip": "leave it out: train.clip_low, clip_high and behav_cap bound a token",
    "train.gamma": "leave it out: rewards are not discounted",
    "sft.warmup_steps": "leave it out: the learning rate rises over ten steps",
    "sft.schedule": "leave it out: the learning rate falls to 0 in a line",
}
"""Keys and sections of earlier versions, and what to do instead."""


@dataclass(frozen=True)
class Loaded:
    """A recipe and where each of its values was written: "default", "smoke.toml", "--set", or
    "algorithm gspo" where the recipe's train.algorithm stands for it."""

    config: Config
    origins: dict[str, str]


@dataclass(frozen=True)
class _Layer:
    """One source of values: a file of the chain, or one --set."""

    values: dict[str, Any]
    name: str
    folder: Path = Path()  # that files are looked for in first


def load(path: Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe, what it extends, and the overrides; check all that needs no machine.

    Without a path: the defaults and the overrides."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    for layer in [*(_read_chain(path) if path else ()), *map(_parse_override, overrides)]:
        for key, value in _flatten(layer):
            origins[key] = layer.name
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
        raise error if origins[error.key] == "default" else error.at(origins[error.key]) from None
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
    rule = re.sub(r"^\w+ should", "must", error["msg"])
    rule = rule.replace("valid tuple", "list").replace("valid dictionary", "table")
    remedy = f"{_toml_value(get(Config(), key))} is the default"
    if key == "tasks.options" and len(error["loc"]) > 1:
        name = one_line(str(error["loc"][1]))
        rule = f"{name} must be text, a finite number, true, false or a list of these"
        remedy = "write it like steps = 3, its name with letters, digits and _"
    elif error["type"] == "string_pattern_mismatch":
        rule = "must be one line of text" if error["input"].strip() else "must not be empty"
    elif error["type"] == "literal_error":
        choices = re.findall(r"'(.+?)'", error["ctx"]["expected"])
        remedy = _near(str(error["input"]), choices, remedy)
    elif isinstance(value, str) and isinstance(_parse_value(value), (int, float)):
        remedy = "take the quotes away"
    elif len(error["loc"]) > 1:
        rule = f"each item {rule}"
    return RecipeError(key, value, rule, remedy)


def _near(given: str, known: Sequence[str], otherwise: str) -> str:
    """The remedy for a value that is near a known one."""
    near = difflib.get_close_matches(FOREIGN.get(given, given), known, n=1)
    return f'did you mean "{near[0]}"?' if near else otherwise


def _anchored(key: str, value: Any, folder: Path) -> Any:
    """The file that a value names, beside its recipe or else in the working folder, by its whole
    path: the run can then be resumed from anywhere. A value that names no file stays as it is."""
    if not isinstance(value, str):
        return value
    place, colon, name = value.rpartition(":") if key != "tasks.data" else (value, "", "")
    if not place or (colon and not place.endswith(".py")):
        return value
    for base in (folder, Path()):
        if _is(Path.exists, base / place):
            return os.path.abspath(base / place) + colon + name
    return value


def _read_chain(path: Path) -> list[_Layer]:
    """The recipe and what it extends, the base first."""
    chain = [_read_layer(path, "recipe", str(path))]
    seen = {path.resolve()}
    while (base := chain[0].values.pop("extends", None)) is not None:
        name = chain[0].name
        if not isinstance(base, str):
            remedy = 'name one other recipe, such as extends = "base.toml"'
            raise RecipeError("extends", base, "must be a string", remedy, name)
        path = path.parent / base
        chain.insert(0, _read_layer(path, "extends", base, name))
        if path.resolve() in seen:
            rule = "recipes extend each other in a circle"
            raise RecipeError("extends", base, rule, "take one of these lines out", name)
        seen.add(path.resolve())
    return chain


def _read_layer(path: Path, key: str, value: str, origin: str = "") -> _Layer:
    """One file; key, value and origin are how an error names it."""
    remedy = "name a TOML file, such as recipes/smoke.toml"
    try:
        with path.open("rb") as file:
            table = tomllib.loads(file.read(MAX_RECIPE_BYTES).decode("utf-8-sig"))
        return _Layer(table, path.name, path.parent)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        rule = f"is not valid TOML: {one_line(str(error).partition(';')[0])}"
        remedy = "mend it there (strings take quotes, numbers none)"
    raise RecipeError(key, value, rule, remedy, origin)


def _parse_override(text: str) -> _Layer:
    """`section.key=value`; the value is TOML, and what is not TOML is a string."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key or key == "extends":
        remedy = "write section.key=value, such as --set train.lr=1e-5"
        raise RecipeError("--set", text, "sets no key of a recipe", remedy)
    value = _parse_value(raw)
    for part in reversed(key.split(".")):
        value = {part: value}
    return _Layer(value, "--set")


def _parse_value(raw: str) -> Any:
    with suppress(ValueError, RecursionError):
        table = tomllib.loads(f"value = {raw.strip()}")
        if len(table) == 1:
            return table["value"]
    return raw.strip()


def _flatten(layer: _Layer) -> Iterator[tuple[str, Any]]:
    """The layer's values by dotted key; a key that no recipe has is an error."""
    for top, value in layer.values.items():
        inner = {top: value}
        if isinstance(value, dict) and (value or top in SECTIONS):
            inner = {f"{top}.{name}": given for name, given in value.items()}
        for key, given in inner.items():
            if key not in KEYS:
                raise RecipeError(key, given, *_unknown(key), layer.name)
            yield key, given


def _unknown(key: str) -> tuple[str, str]:
    """Rule and remedy for a key that no recipe has."""
    section, _, name = key.rpartition(".")
    if (removed := REMOVED.get(key) or REMOVED.get(section or key)) is not None:
        return "is no longer a key", removed
    if key in SECTIONS:
        return "is a section, not a key", f"write {key}.<key>, such as {_keys_in(key)[0]}"
    names = {known.rpartition(".")[2]: known for known in reversed(KEYS)}
    names |= FOREIGN | {known: known for known in KEYS}
    whole = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    for near in whole or difflib.get_close_matches(name, names, n=1):
        return "no such key", f"did you mean {names[near]}?"
    there = _keys_in(section) if section in SECTIONS else ["seed", *SECTIONS]
    return "no such key", f"there are {', '.join(there)}"


def _keys_in(section: str) -> list[str]:
    return [key for key in KEYS if key.startswith(f"{section}.")]


def validate(config: Config) -> None:
    """The rules that need neither the model nor the machine."""
    train, devices, group_size = config.train, config.devices, config.rollout.group_size

    def need(key: str, is_kept: bool, rule: str, remedy: str) -> None:
        if not is_kept:
            raise RecipeError(key, get(config, key), rule, remedy)

    for key, divisor in (
        ("train.batch_size", "train.num_minibatches"),
        ("devices.rollout", "devices.tensor_parallel"),
    ):
        value, of = get(config, key), get(config, divisor)
        rule, remedy = f"must be a multiple of {divisor} = {of}", f"{-(-value // of) * of} is one"
        need(key, value % of == 0, rule, remedy)
    share = train.batch_size // train.num_minibatches * group_size
    rule, remedy = f"a minibatch has only {share} trajectories", "raise train.batch_size"
    need("devices.train", share >= devices.train, rule, remedy)
    longest = config.max_tokens_per_trajectory
    rule = f"must hold tasks.max_prompt_tokens + rollout.max_new_tokens = {longest}"
    need("train.max_tokens", train.max_tokens >= longest, rule, f"raise it to {longest}")
    most = group_size - 2
    rule = f"must leave two of rollout.group_size = {group_size} to compare"
    need("tasks.max_failures", config.tasks.max_failures <= most, rule, f"at most {most}")
    slow = config.tasks.timeout_s
    rule, remedy = f"must be above tasks.timeout_s = {slow}", "a slow reward is no stall: raise it"
    need("log.stall_s", config.log.stall_s > slow, rule, remedy)
    can_shard = not train.shard_optimizer or devices.train > 1
    need("train.shard_optimizer", can_shard, "there is one training device", "set it to false")
    for name in config.log.to:
        rule, remedy = f"must name some of {', '.join(LOGGERS)}", "[] is metrics.jsonl alone"
        need("log.to", name in LOGGERS, rule, _near(name, LOGGERS, remedy))


def check_devices(
    config: Config, kind: str, available: int, num_rollout: int | None = None
) -> None:
    """`kind` is what the run would use, "cuda" or "cpu"; `available` counts GPUs or CPU cores.
    `num_rollout` is given where it is not devices.rollout."""
    devices = config.devices
    if devices.kind == "cuda" and kind != "cuda":
        raise RecipeError("devices.kind", "cuda", "there is no CUDA device here", '"cpu" works')
    wanted = devices.train + (devices.rollout if num_rollout is None else num_rollout)
    limit = available if kind == "cuda" else max(4, 2 * available)
    if wanted > limit:
        what = "GPUs" if kind == "cuda" else "cores"
        rule = f"with devices.train = {devices.train} that is {wanted} {what}, of {available} here"
        remedy = f"the two together may be {limit}" if limit > 1 else "two GPUs are the least"
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
    place, _, name = kind.rpartition(":")
    is_there = not place.endswith(".py") or _is(Path.is_file, Path(place))
    if kind not in BUILTIN_TASKS and not (place and name.isidentifier() and is_there):
        rule = f"is none of {', '.join(BUILTIN_TASKS)}, and no class in a file that is here"
        remedy = 'your own is "my_task.py:MyTask", beside the recipe or in the working folder'
        raise RecipeError("tasks.kind", kind, rule, _near(kind, BUILTIN_TASKS, remedy))


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
    if _is(Path.is_dir, Path(path)):
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
    with suppress(OSError, ValueError, RecursionError):
        model_config = json.loads((folder / "config.json").read_bytes())
        if isinstance(model_config, dict):
            return model_config
    rule, remedy = "its config.json cannot be read", "name a Hugging Face model folder"
    raise RecipeError("model.path", config.model.path, rule, remedy)


def check_model(config: Config, model_config: dict[str, Any]) -> None:
    """What only the model's config.json can tell."""
    text_config = model_config.get("text_config", model_config)
    sizes = text_config if isinstance(text_config, dict) else {}
    limit, longest = sizes.get("max_position_embeddings"), config.max_tokens_per_trajectory
    if isinstance(limit, int) and longest > limit:
        rule = f"with tasks.max_prompt_tokens that is {longest}, past the model's {limit} positions"
        remedy = f"shorten one: together at most {limit}"
        raise RecipeError("rollout.max_new_tokens", config.rollout.max_new_tokens, rule, remedy)
    parallel, heads = config.devices.tensor_parallel, sizes.get("num_attention_heads")
    if isinstance(heads, int) and heads % parallel:
        divisors = ", ".join(str(n) for n in range(1, min(heads, 16) + 1) if heads % n == 0)
        rule = f"must divide the model's {heads} attention heads"
        raise RecipeError("devices.tensor_parallel", parallel, rule, f"one of {divisors}")


def _is(test: Callable[[Path], bool], path: Path) -> bool:
    """A test of a path that someone typed: a name that no file system allows is just not there."""
    try:
        return test(path)
    except (OSError, ValueError):
        return False


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Every value, defaults too, with where each came from if that is given: `load` gives the same
    config back."""
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
