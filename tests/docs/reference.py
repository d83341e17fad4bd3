"""docs/recipe.md, printed from the config classes: every key, its values, default and help.

python -m tests.docs.reference > docs/recipe.md
"""

from dataclasses import astuple
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from minirl.config import ALGORITHMS, KEYS, SECTIONS, Config, get
from minirl.errors import toml_value

HEAD = """# Recipe

A recipe is a TOML file; `minirl config RECIPE` prints all its values and where each came from, and
`--set section.key=value` changes one. A recipe may say `extends = "base.toml"`: what it leaves out
comes from there, then from the defaults below. This page is printed from the config classes by
`python -m tests.docs.reference`; a test keeps it true. A wrong key or value is one line
that names the key, the value, the rule and the remedy, and exit code 2. How staleness is bounded:
[staleness](staleness.md); the formulas of training: [algorithms](algorithms.md).

"""
PRESETS = """## Algorithms

What `train.algorithm` sets otherwise than by default, where a recipe does not write the
key itself.

| algorithm | sets |
|---|---|
"""


def document() -> str:
    return HEAD + "\n".join(_section(name) for name in ["", *SECTIONS]) + "\n" + _presets()


def _section(section: str) -> str:
    rows = []
    for key, info in KEYS.items():
        if key.rpartition(".")[0] == section:
            meaning, default = (info.description or "").split(), toml_value(get(Config(), key))
            rows.append(f"| `{key}` | {_values(info)} | `{default}` | {' '.join(meaning)} |")
    head = [f"## `[{section}]`" if section else "## Top level", ""]
    head += ["| key | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _values(field: FieldInfo) -> str:
    """What a field may be: its choices, or its type with its range."""
    kind, args = get_origin(field.annotation), get_args(field.annotation)
    if kind is Literal:
        return ", ".join(f"`{toml_value(choice)}`" for choice in args)
    if kind is tuple:
        return "list of " + ("whole numbers" if int in get_args(args[0]) else "strings")
    if kind is dict:
        return "table"
    names = {int: "whole number", float: "number", str: "string", bool: "true or false"}
    signs = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
    limits = [limit for limit in field.metadata if type(limit) in signs]
    shown = [f"{signs[type(limit)]} {astuple(limit)[0]:,.10g}" for limit in limits]
    return ", ".join([names[field.annotation or str], *shown])


def _presets() -> str:
    rows = []
    for name, values in ALGORITHMS.items():
        shown = ", ".join(f"`{key} = {toml_value(value)}`" for key, value in values.items())
        rows.append(f"| `{name}` | {shown or 'the defaults'} |")
    return PRESETS + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(document(), end="")
