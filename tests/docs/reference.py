"""docs/recipe.md, printed from the config classes: every key, its values, default and help.

python -m tests.docs.reference > docs/recipe.md
"""

from dataclasses import astuple
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from minirl.config import KEYS, SECTIONS, Config, get
from minirl.errors import toml_value

HEAD = """# Recipe

A recipe is a TOML file. `extends = "base.toml"` fills in what it leaves out, then the defaults do.
`--set section.key=value` changes a value; `minirl config RECIPE` prints all with their origin.
A wrong key or value ends with exit code 2 and one line: key, value, rule, remedy. Each key below
has its default and, in brackets, its range or other choices. [Algorithms](algorithms.md) has
presets and formulas. `python -m tests.docs.reference` prints this page.

"""


def document() -> str:
    return HEAD + "\n".join(section(name) for name in ["", *SECTIONS])


def section(name: str) -> str:
    rows = [row(key, info) for key, info in KEYS.items() if key.rpartition(".")[0] == name]
    return "\n".join([f"## `[{name}]`" if name else "## Top level", "", *rows, ""])


def row(key: str, info: FieldInfo) -> str:
    meaning, default = (info.description or "").split(), toml_value(get(Config(), key))
    values = other_values(info, default)
    shown = f"`{default}`" + (f" ({values})" if values else "")
    return f"- **`{key}`** {shown}: {' '.join(meaning)}"


def other_values(field: FieldInfo, default: str) -> str:
    """What else a field may be, where its default does not say it: other choices, or a range."""
    kind, args = get_origin(field.annotation), get_args(field.annotation)
    if kind is Literal:
        return ", ".join(f"`{x}`" for x in map(toml_value, args) if x != default)
    if kind is tuple:
        return "integers" if int in get_args(args[0]) else "strings"
    signs = {Ge: "", Gt: ">", Le: "", Lt: "<"}  # of an end that is excluded
    limits = [f"{signs[type(x)]}{astuple(x)[0]:,.10g}" for x in field.metadata if type(x) in signs]
    return "…".join(limits)


if __name__ == "__main__":
    print(document(), end="")
