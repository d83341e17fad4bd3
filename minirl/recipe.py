"""A recipe's file: from TOML to a Config and back.

Takes a TOML file, what it `extends`, and `--set section.key=value`. Gives a Config and where each
value came from, or a RecipeError: one line with key, value, rule and remedy.
"""

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast, get_args, get_origin

from minirl.algorithms import ALGORITHMS
from minirl.config import KEYS, SECTIONS, TABLE, Config, get
from minirl.errors import RecipeError, one_line
from minirl.rules import validate

MAX_RECIPE_BYTES = 2**20
ANCHORED = ("tasks.kind", "tasks.data")

FOREIGN_NAMES = {
    "learning_rate": "train.lr",
    "eta": "buffer.max_staleness",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "max_steps": "train.steps",
    "max_grad_norm": "train.grad_clip",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "adv_estimator": "train.estimator",
    "advantage_estimator": "train.estimator",
    "kl_loss_coef": "train.kl_coef",
    "loss_agg_mode": "train.loss_norm",
    "lr_scheduler_type": "train.schedule",
}
"""What other trainers call it: an unknown key by one of these names is told ours."""


LIST_EXAMPLES = {"log.to": '["tensorboard"]'}


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
    """Read a recipe, what it extends, and the overrides; validate all that needs no machine.

    Without a path: the defaults and the overrides."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    for layer in [*(_read_chain(path) if path else ()), *map(_parse_override, overrides)]:
        for key, value in _flatten(layer):
            typed = _typed(key, value, layer.origin(key))
            values[key] = _anchored(key, typed, layer.folder) if key in ANCHORED else typed
            origins[key] = layer.origin(key)
            if key.startswith(f"{TABLE}."):
                origins[TABLE] = layer.name
    algorithm = values.get("train.algorithm", "")
    for key, value in ALGORITHMS.get(algorithm, {}).items():  # an unknown one: validate says so
        if key not in values:
            values[key], origins[key] = value, f"algorithm {algorithm}"
    config = _build(values)
    try:
        validate(config)
    except RecipeError as error:
        origin = origins.get(error.key, "default")
        raise error if origin == "default" else error.at(origin) from None
    return Loaded(config, origins)


def _anchored(key: str, value: str, folder: Path) -> str:
    """The file that a value names, beside its recipe or else in the working folder, by its whole
    path: the run then goes on from anywhere. A value that names no file stays as it is."""
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
    return _Layer(table, path.name, _line_numbers(text), path.parent)


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
                if dotted == TABLE and isinstance(inner, dict):
                    yield from ((f"{dotted}.{option}", given) for option, given in inner.items())
                    continue
                if dotted not in KEYS and not dotted.startswith(f"{TABLE}."):
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
    if key.startswith(TABLE):
        return _typed_option(key, value, origin)
    wanted, default = KEYS[key].type, KEYS[key].default
    if wanted is float and type(value) is int:
        return _typed_float(key, value, origin, str(default))
    if type(value) is wanted:
        return value
    if get_origin(wanted) is tuple:
        return _typed_list(key, value, get_args(wanted)[0], origin)
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


def _typed_option(key: str, value: Any, origin: str) -> Any:
    """Plain values and lists of them: what can be written back and compared on resume."""
    if key == TABLE:
        remedy = "write [tasks.options] and under it name = value"
        raise RecipeError(key, value, "is a table, not a value", remedy, origin)
    name = key.removeprefix(f"{TABLE}.")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        remedy = "letters, digits and _, the first a letter"
        raise RecipeError(key, value, "is no name for an option", remedy, origin)
    for item in value if isinstance(value, list) else [value]:
        is_plain = type(item) in (str, int, float, bool)
        if type(item) is float:
            is_plain = math.isfinite(item)
        elif type(item) is str:
            is_plain = all(c != "\x7f" and not "\ud800" <= c <= "\udfff" for c in item)
        if not is_plain:
            rule = "must be text, a finite number, true, false or a list of these"
            raise RecipeError(key, value, rule, "write it like 3 or [0.5, 0.5]", origin)
    return value


def _typed_float(key: str, value: float, origin: str, example: str) -> float:
    try:
        return float(value)
    except OverflowError:
        remedy = f"write it like {example}"
        raise RecipeError(key, value, "must be a finite number", remedy, origin) from None


def _typed_list(key: str, value: Any, item: type, origin: str) -> tuple[Any, ...]:
    if isinstance(value, list) and all(type(v) is item for v in value):
        return tuple(value)
    if item is float and isinstance(value, list) and all(type(v) in (int, float) for v in value):
        return tuple(_typed_float(key, v, origin, "[0.0, 1.0]") for v in value)
    rule, example = {
        str: ("strings", '["####"]'),
        int: ("whole numbers", "[151645]"),
        float: ("numbers", "[0.0, 1.0]"),
    }[item]
    example = LIST_EXAMPLES.get(key, example)
    raise RecipeError(key, value, f"must be a list of {rule}", f"write it like {example}", origin)


def _build(values: dict[str, Any]) -> Config:
    options = {k.removeprefix(f"{TABLE}."): v for k, v in values.items() if k.startswith(TABLE)}
    values = {key: value for key, value in values.items() if not key.startswith(TABLE)}
    values[TABLE] = options
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
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml_value(v)}' for name, v in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml_value, value))}]"
    # A TOML basic string is a JSON string, save for control characters, which validate refuses.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
