"""A recipe's file: from TOML to a Config and back, and the rules between its fields.

Takes a TOML file, what it `extends`, and `--set section.key=value`. Gives a Config and where each
value came from, or a RecipeError: one line with key, value, rule and remedy. Leaves out: what one
field may be (config.py), torch, the network, and running a user's code.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from minirl.config import ALGORITHMS, KEYS, SECTIONS, TINY, TINY_FOLDER, Config, get
from minirl.errors import RecipeError, one_line, removed, toml_value

TASKS = {
    "arithmetic": "minirl.tasks.arithmetic:Arithmetic",
    "calculator": "minirl.tasks.arithmetic:Calculator",
    "code": "minirl.tasks.code:Code",
    "countdown": "minirl.tasks.countdown:Countdown",
    "gsm8k": "minirl.tasks.gsm8k:Gsm8k",
    "math": "minirl.tasks.math:Mathematics",
}
BUILT_IN = {
    "tasks.kind": (*TASKS,),
    "train.estimator": ("grpo", "dr_grpo", "rloo", "reinforce++", "batch", "gae"),
    "train.objective": ("decoupled", "naive", "gspo", "cispo"),
}
"""Keys that name either one of these, or the user's own code: FILE.py:NAME."""


class Loaded(NamedTuple):
    """A recipe and where each value was written: "default", "smoke.toml", "algorithm gspo", …"""

    config: Config
    origins: dict[str, str]


class _Layer(NamedTuple):  # a file of the chain, or one --set
    values: dict[str, Any]
    name: str
    folder: Path = Path()  # that files are looked for in first


def load(path: Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """The recipe (None: the defaults) under its overrides, with all checks that need no machine."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    for layer in [*(_read_chain(path) if path else ()), *map(_parse_override, overrides)]:
        for key, value in _flatten(layer):
            origins[key] = layer.name
            if isinstance(value, dict) and isinstance(values.get(key), dict):
                value = values[key] | value  # tasks.options is one table of all layers
            values[key] = _anchored(key, value, layer.folder)
    algorithm = str(values.get("train.algorithm"))
    for key, value in ALGORITHMS.get(algorithm, {}).items():
        if key not in values:
            values[key], origins[key] = value, f"algorithm {algorithm}"
    try:
        config = build(values)
        validate(config)
    except RecipeError as e:
        origin = "" if origins[e.key] == "default" else origins[e.key]
        raise RecipeError(e.key, e.value, e.rule, e.remedy, origin) from None
    return Loaded(config, origins)


def build(values: Mapping[str, Any]) -> Config:
    """The Config of dotted keys."""
    made: dict[str, Any] = {}
    split = [(*key.rpartition("."), value) for key, value in values.items()]
    for section, cls in {**SECTIONS, "": Config}.items():
        given = dict(made) if cls is Config else {}
        given |= {name: value for here, _, name, value in split if here == section}
        try:
            made[section] = cls(**given)
        except ValidationError as error:
            raise _wrong(section, given, error.errors(include_url=False)[0]) from None
    return made[""]


def _wrong(section: str, given: Mapping[str, Any], error: Mapping[str, Any]) -> RecipeError:
    """pydantic's error, in the form of all others."""
    name = str(error["loc"][0])
    key = f"{section}.{name}".lstrip(".")
    rule = re.sub(r"^\w+ should", "must", error["msg"])
    rule = rule.replace("valid tuple", "list").replace("valid dictionary", "table")
    remedy = f"{toml_value(get(Config(), key))} is the default"
    if key in ("tasks.options", "tasks.template") and len(error["loc"]) > 1:
        rule = f"{error['loc'][1]!r} must be a name with text, a number, true, false or a list"
    elif error["type"] == "string_pattern_mismatch":
        rule = "must be one line of text"
    elif key == "devices.nodes":
        rule = 'must be a number from 1 to 1024, or "auto"'
    elif len(error["loc"]) > 1:
        rule = f"each item {rule}"
    return RecipeError(key, given[name], rule, remedy)


def _anchored(key: str, value: Any, folder: Path) -> Any:
    """A value that names a file beside its recipe, or else in the working folder, with the whole
    path: the run can then be resumed from anywhere."""
    if not isinstance(value, str) or key not in ("tasks.data", "model.path", *BUILT_IN):
        return value
    value = os.path.expanduser(value)
    file, colon, name = value.rpartition(":") if key in BUILT_IN else (value, "", "")
    is_file = file.endswith(".py") if key in BUILT_IN else (key, value) != ("model.path", TINY)
    for base in (folder, Path()):
        if is_file and file and os.path.exists(base / file):
            return os.path.abspath(base / file) + colon + name
    return value


def _read_chain(path: Path, origin: str = "", seen: tuple[Path, ...] = ()) -> list[_Layer]:
    """A recipe and before it what it extends; `origin` is the recipe that extends it."""

    def wrong(rule: str, remedy: str) -> RecipeError:
        return RecipeError("extends" if origin else "recipe", str(path), rule, remedy, origin)

    try:
        table = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        remedy = "name a TOML file, such as recipes/smoke.toml"
        raise wrong(f"cannot be read ({error.strerror})", remedy) from None
    except (ValueError, RecursionError) as error:
        rule = f"is not valid TOML: {one_line(str(error).partition(';')[0])}"
        raise wrong(rule, "mend it there (strings take quotes, numbers none)") from None
    if path.resolve() in seen:
        raise wrong("recipes extend each other in a circle", "take one of these lines out")
    own = _Layer(table, path.name, path.parent)
    if (base := table.pop("extends", None)) is None:
        return [own]
    return [*_read_chain(path.parent / str(base), path.name, (*seen, path.resolve())), own]


def _parse_override(text: str) -> _Layer:
    """`section.key=value`; the value is TOML, and what is not TOML is a string."""
    key, equals, value = text.partition("=")
    for written in (value, toml_value(value.strip())):
        with suppress(ValueError, RecursionError):
            table = tomllib.loads(f"{key} = {written}")
            if equals and len(table) == 1 and "extends" not in table:
                return _Layer(table, "--set")
    remedy = "write section.key=value, such as --set train.lr=1e-5"
    raise RecipeError("--set", text, "sets no key of a recipe", remedy)


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
    old = removed("keys")
    if (use := old.get(key) or old.get(section or key)) is not None:
        return "is no longer a key", use
    there = [known for known in KEYS if known.startswith(f"{section or key}.")]
    if key in SECTIONS:
        return "is a section, not a key", f"write {there[0]}, …"
    names = {known.rpartition(".")[2]: known for known in reversed(KEYS)} | {k: k for k in KEYS}
    whole = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    for near in whole or difflib.get_close_matches(name, names, n=1):
        return "no such key", f"did you mean {names[near]}?"
    return "no such key", f"there are {', '.join(there or ['seed', *SECTIONS])}"


def need(config: Config, key: str, is_kept: bool, rule: str, remedy: str) -> None:
    if not is_kept:
        raise RecipeError(key, get(config, key), rule, remedy)


def validate(config: Config) -> None:
    """The rules that need neither the model nor the machine."""
    train, devices, group_size = config.train, config.devices, config.rollout.group_size
    multiples = {"train.batch_size": "train.num_minibatches"}
    for key, divisor in {**multiples, "devices.rollout": "devices.tensor_parallel"}.items():
        value, of = get(config, key), get(config, divisor)
        rule, remedy = f"must be a multiple of {divisor} = {of}", f"{-(-value // of) * of} is one"
        need(config, key, value % of == 0, rule, remedy)
    share = train.batch_size // train.num_minibatches * group_size
    rule, remedy = f"a minibatch has only {share} trajectories", "raise train.batch_size"
    need(config, "devices.train", share >= devices.train, rule, remedy)
    longest = config.max_tokens_per_trajectory
    rule = f"must hold tasks.max_prompt_tokens + rollout.max_new_tokens = {longest}"
    need(config, "train.max_tokens", train.max_tokens >= longest, rule, f"raise it to {longest}")
    slow = config.tasks.timeout_s
    rule, remedy = f"must be above tasks.timeout_s = {slow}", "a slow reward is no stall: raise it"
    need(config, "log.stall_s", config.log.stall_s > slow, rule, remedy)
    can_shard = train.shard == "none" or devices.train > 1
    need(config, "train.shard", can_shard, "there is one training device", '"none" works')
    rule, remedy = "devices.share is for one engine and one rank", "1, or devices.share = false"
    for key in ("devices.rollout", "devices.train"):
        need(config, key, not devices.share or get(config, key) == 1, rule, remedy)
    for key, built_in in BUILT_IN.items():
        value = get(config, key)
        is_known = value in built_in or re.fullmatch(r".+:[^\W\d]\w*", value) is not None
        rule = f'must be one of {", ".join(built_in)}, or your own "FILE.py:NAME"'
        need(config, key, is_known, rule, f"{built_in[0]} is usual")


def check_task(config: Config, *others: str) -> None:
    """The file of tasks.kind is here, and that of other keys of BUILT_IN. Runs none of it."""
    for key in ("tasks.kind", *others):
        file = get(config, key).rpartition(":")[0]
        is_here = not file.endswith(".py") or os.path.isfile(file)
        remedy = "put it beside the recipe or into the working folder"
        need(config, key, is_here, "there is no such file", remedy)


def check_devices(config: Config, kind: str, available: int, rollout: int | None = None) -> Config:
    """`kind` is what the run would use, "cuda" or "cpu"; `available` counts GPUs or CPU cores;
    `rollout` is given where it is not devices.rollout. Gives the recipe; the only GPU is shared."""
    from minirl.devices import why_unfit

    devices = config.devices
    is_here = kind == "cuda" or devices.kind != "cuda"
    need(config, "devices.kind", is_here, "there is no CUDA device here", '"cpu" works')
    why, remedy = why_unfit() if kind == "cuda" else ("", "")
    need(config, "devices.kind", not why, why, remedy)
    if kind == "cuda" and available == devices.rollout == devices.train == 1:
        devices = replace(devices, share=True)
    wanted = devices.train + (devices.rollout if rollout is None else rollout) - devices.share
    limit, what = (available, "GPUs") if kind == "cuda" else (max(4, 2 * available), "cores")
    rule = f"with devices.train = {devices.train} that is {wanted} {what}, of {available} here"
    remedy = f"the two together may be {limit}" if limit > 1 else "1 each would share it"
    need(config, "devices.rollout", wanted <= limit, rule, remedy)
    config = replace(config, devices=devices)
    rule, remedy = "devices.share at η = 0 is for one box", "raise buffer.max_staleness, or 1"
    need(config, "devices.nodes", devices.nodes == 1 or not config.takes_turns, rule, remedy)
    return config


def check_memory(config: Config, available_bytes: int) -> None:
    """The trajectory ring is allocated at start, whole."""
    needed, free = (f"{n / 2**30:.1f} GiB" for n in (config.ring_bytes, available_bytes))
    rule = f"the trajectory ring would take {needed} of the {free} that are free"
    remedy = "lower it, rollout.group_size, buffer.max_staleness or rollout.max_new_tokens"
    need(config, "train.batch_size", config.ring_bytes <= available_bytes, rule, remedy)


def check_packages(config: Config) -> None:
    """The packages behind log.to and other keys are here. Imports none of them."""
    needed: list[tuple[str, str, str]] = [("log.to", name, name) for name in config.log.to]
    if config.train.optimizer == "adamw8bit":
        needed.append(("train.optimizer", "bitsandbytes", "adamw8bit"))
    if config.train.lora_rank:
        needed.append(("train.lora_rank", "peft", "lora"))
    if config.devices.nodes != 1:
        needed.append(("devices.nodes", "ray", "ray"))
    for key, package, extra in needed:
        remedy = f'pip install "minirl[{extra}]", or take it out'
        need(config, key, find_spec(package) is not None, f"{package} is not installed", remedy)


def is_path(name: str) -> bool:
    """A name that may be one of the hub, but can only be a path here."""
    return name[:1] in "./~" or ("/" in name and os.path.isdir(os.path.dirname(name)))


def find_model(config: Config) -> Path | None:
    """The model's folder, or that of the hub's local cache; None where it is not here (yet)."""
    path = config.model.path
    if path == TINY or os.path.isdir(path):
        return TINY_FOLDER if path == TINY else Path(path)
    from huggingface_hub import try_to_load_from_cache

    try:
        if is_path(path):
            raise ValueError
        found = try_to_load_from_cache(path, "config.json")
    except ValueError:
        remedy = f'name an existing folder, a hub name such as "Qwen/Qwen3-0.6B", or "{TINY}"'
        raise RecipeError("model.path", path, "no such folder, nor a hub name", remedy) from None
    return Path(found).parent if isinstance(found, str) else None


def read_model_config(config: Config, folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    with suppress(OSError, ValueError, RecursionError):
        model_config = json.loads((folder / "config.json").read_bytes())
        if isinstance(model_config, dict):
            return model_config
    rule, remedy = "its config.json cannot be read", "name a Hugging Face model folder"
    raise RecipeError("model.path", config.model.path, rule, remedy)


def check_model(config: Config, folder: Path, kind: str = "") -> None:
    """What only the model's config.json can tell; `kind` is that of the devices of engines."""
    model_config = read_model_config(config, folder)
    sizes = model_config.get("text_config") or model_config
    longest, heads = config.max_tokens_per_trajectory, sizes.get("num_attention_heads") or 0
    limit = sizes.get("max_position_embeddings") or longest
    rule = f"with tasks.max_prompt_tokens that is {longest}, past the model's {limit} positions"
    remedy = f"shorten one: together at most {limit}"
    need(config, "rollout.max_new_tokens", longest <= limit, rule, remedy)
    is_divisor = heads % config.devices.tensor_parallel == 0
    rule = f"must divide the model's {heads} attention heads"
    need(config, "devices.tensor_parallel", is_divisor, rule, "1 does")
    known, last = sizes.get("vocab_size"), max(config.rollout.stop_tokens, default=-1)
    rule, remedy = f"the model has only the tokens below {known}", "take the others out"
    need(config, "rollout.stop_tokens", not known or last < known, rule, remedy)
    needed = kv_bytes_per_token(config, sizes) * -(-longest // 32) * 32 / 2**30  # in whole blocks
    is_sized = config.devices.share or (kind == "cpu" and config.devices.kind != "cuda")
    is_enough = not is_sized or needed <= config.rollout.kv_cache_gib
    rule = f"one sequence of {longest} tokens needs {needed:.3g}"
    need(config, "rollout.kv_cache_gib", is_enough, rule, "raise it")


def kv_bytes_per_token(config: Config, sizes: Mapping[str, Any]) -> int:
    """On one device, at least: layers that do not keep all tokens are not counted."""
    num_layers = sizes.get("num_hidden_layers", 0)
    is_full = sizes.get("layer_types") or ["full_attention"] * num_layers
    if sizes.get("kv_lora_rank") or (sizes.get("sliding_window") and "layer_types" not in sizes):
        return 0
    heads = sizes.get("num_attention_heads", 1)
    head_dim = sizes.get("head_dim") or sizes.get("hidden_size", 0) // heads
    kv_heads = max(1, sizes.get("num_key_value_heads", heads) // config.devices.tensor_parallel)
    num_bytes = 4 if config.model.dtype == "float32" else 2
    return 2 * is_full.count("full_attention") * kv_heads * head_dim * num_bytes


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Every value, defaults too, so that `load` gives the same config back."""
    lines, section = [], ""
    for key in KEYS:
        here, _, name = key.rpartition(".")
        if here != section:
            lines += ["", f"[{here}]"]
            section = here
        line = f"{name} = {toml_value(get(config, key))}"
        lines.append(f"{line:<36}  # {one_line(origins[key])}" if origins else line)
    return "\n".join(lines) + "\n"
