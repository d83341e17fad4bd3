"""docs/recipe.md, printed from the config classes: every key, its type, default and explanation.

python -m tests.docs.reference > docs/recipe.md
"""

import json
from dataclasses import Field
from typing import Any, get_args, get_origin

from minirl.algorithms import ALGORITHMS
from minirl.config import KEYS, SECTIONS, Config, explain, get

HEAD = """# Recipe

A recipe is a TOML file; `minirl config RECIPE` prints all its values and where each came from, and
`--set section.key=value` changes one. A recipe may say `extends = "base.toml"`: what it leaves out
comes from there, then from the defaults below. This page is printed from the config classes by
`python -m tests.docs.reference`; a test keeps it true. A wrong key or value is one line
that names the key, the value, the rule and the remedy, and exit code 2.

"""
ABOUT = {
    "": "At the top of the file",
    "model": "What is trained",
    "tasks": "What is asked, and what is right",
    "devices": "Who runs where",
    "rollout": "How answers are sampled",
    "buffer": "What may be trained: staleness and filters ([how](staleness.md))",
    "train": "How it is trained ([the formulas](algorithms.md))",
    "eval": "Held-out accuracy",
    "sft": "Supervised learning on worked answers (`minirl sft`)",
    "checkpoint": "What is saved",
    "log": "What is told",
    "guard": "When a run warns, and when it stops",
}


def document() -> str:
    return HEAD + "\n".join(_section(name) for name in ["", *SECTIONS]) + "\n" + _presets()


def _section(section: str) -> str:
    keys = [key for key in KEYS if key.rpartition(".")[0] == section]
    title = f"`[{section}]`" if section else "Top level"
    about = ABOUT.get(section, "")
    rows = [
        f"| `{key}` | {_type(KEYS[key])} | `{_value(get(Config(), key))}` | "
        f"{_cell(explain(section, key.rpartition('.')[2]))} |"
        for key in keys
    ]
    table = ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([f"## {title}", "", *([f"{about}.", ""] if about else []), *table, ""])


def _type(field: Field[Any]) -> str:
    names: dict[Any, str] = {
        int: "whole number",
        float: "number",
        str: "string",
        bool: "true or false",
        dict: "table",
    }
    kind = get_origin(field.type)
    if kind is tuple:
        return f"list of {names[get_args(field.type)[0]]}s"
    return names[kind or field.type]


def _presets() -> str:
    rows = []
    for name, values in ALGORITHMS.items():
        own = {key: value for key, value in values.items() if value != get(Config(), key)}
        shown = ", ".join(f"`{key} = {_value(value)}`" for key, value in own.items())
        rows.append(f"| `{name}` | {_cell(shown) or 'the defaults'} |")
    about = (
        "What `train.algorithm` sets otherwise than by default, where a recipe does not write the\n"
        "key itself."
    )
    table = ["| algorithm | sets |", "|---|---|", *rows]
    return "\n".join(["## Algorithms", "", about, "", *table]) + "\n"


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(document(), end="")
